"""What the README says is what the repository does."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(code, names)
    assert names["loss"].item() > 0 and names["e"].grad.shape == (2, 128, 64) and names["c"].grad.shape == (1000, 64)


def test_measured_numbers_are_the_stored_ones():
    pytest.importorskip("matplotlib")
    from cce.bench.figures import with_table

    assert with_table(README) == README, "run `make figures`"


def test_implementations_are_all_listed():
    from cce.checks import IMPLEMENTATIONS

    own = [name for name in IMPLEMENTATIONS if not name.startswith("cce_kahan")]
    assert all(f"| `{name}` |" in README for name in own)


def test_files_named_exist():
    for path in re.findall(r"`((?:cce|tests|figures|notebooks)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
