"""What every test file shares: the device, the skip of `gpu` tests, fixed seeds."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU of compute capability 8.0 or newer")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one: the same small tests then run compiled instead of interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
