"""Times of several contenders in one process: interleaved, order shuffled, caches flushed, the median of many.

In training the host runs ahead of the device: while the loss is being launched, the device still has the model's forward to do. So a
call is timed behind work that takes the device about a millisecond, and what the host does meanwhile costs nothing; whoever waits for
the device in the middle of a call pays for what it launches afterwards. `idle=True` starts on an idle device instead, as the first call
of a program does.
"""

import random
import statistics
import time
from collections.abc import Callable

import torch

AHEAD = 16  # times that the buffer is overwritten before a call: 4 GB, about a millisecond


def interleaved(
    functions: dict[str, Callable[[], object]], repeats: int = 11, progress=None, idle: bool = False
) -> dict[str, float]:
    """Median milliseconds of each function, after one warm-up call of each.

    Every repeat has an order of its own (from a fixed seed), so that nobody always runs on a chip that the same other one heated. On CUDA
    by events, with L2 overwritten before every call; on a CPU by the wall clock.
    """
    cuda = torch.cuda.is_available()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda") if cuda else None
    names, times = list(functions), {name: [] for name in functions}
    for name in names:
        functions[name]()
    shuffle = random.Random(0).sample
    for _ in range(repeats):
        for name in shuffle(names, len(names)):
            times[name].append(_on_cuda(functions[name], flush, idle) if cuda else _on_cpu(functions[name]))
            if progress is not None:
                progress.update()
    return {name: statistics.median(t) for name, t in times.items()}


def _on_cuda(function, flush: torch.Tensor, idle: bool) -> float:
    for _ in range(AHEAD):
        flush.zero_()
    if idle:
        torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _on_cpu(function) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)
