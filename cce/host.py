"""Numbers on their way from the device to the host."""

import functools

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """A copy of x that starts at once, behind what the current stream was given before; what it is given afterwards runs on meanwhile.

    (`x.tolist()` waits at the place where it is written, and leaves the device without work until the host has found some.)
    """

    def __init__(self, x: Tensor):
        self._x, self._event = x, None
        if x.is_cuda:
            self._x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._x.numpy()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: the allocator keeps memory per stream, and a new stream would ask the driver for its own."""
    return torch.cuda.Stream(device)
