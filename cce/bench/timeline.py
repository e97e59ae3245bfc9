"""python -m cce.bench.timeline: what the GPU does during one step, kernel by kernel, and when it waits. Needs a GPU.

One forward and backward on trained-like inputs of the two standard shapes, after warm-up, from an idle device and with L2 overwritten,
as `cce.bench` times it. Writes figures/data/NAME.json.
"""

from typing import NamedTuple

import torch

from cce import linear_cross_entropy
from cce.bench.inputs import SHAPES, trained_like
from cce.bench.program import Parser, save


class Span(NamedTuple):
    """A kernel or copy on the device, in microseconds from the first one on."""

    name: str
    start: float
    end: float


def spans_of(step) -> list[Span]:
    """What step() runs on the device, by start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((Span(e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda s: s.start)
    return [Span(s.name, s.start - spans[0].start, s.end - spans[0].start) for s in spans]


def gaps(spans: list[Span]) -> list[tuple[float, str, str]]:
    """(microseconds with nothing on any stream, the kernel that ended last before, the next one), longest first."""
    found, last = [], spans[0]
    for span in spans[1:]:
        if span.start > last.end:
            found.append((span.start - last.end, last.name, span.name))
        last = max(last, span, key=lambda s: s.end)
    return sorted(found, reverse=True)


def by_name(spans: list[Span]) -> list[tuple[float, int, str]]:
    """(microseconds, how many, kernel), longest first."""
    names = dict.fromkeys(s.name for s in spans)
    durations = {name: [s.end - s.start for s in spans if s.name == name] for name in names}
    return sorted(((sum(d), len(d), name) for name, d in durations.items()), reverse=True)


def measure(shape: tuple[int, int, int], impl: str, top: int) -> dict:
    e, c, targets = trained_like(*shape)
    e.requires_grad_(), c.requires_grad_()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def step() -> None:
        linear_cross_entropy(e, c, targets, impl=impl).backward()

    for _ in range(3):
        e.grad = c.grad = None
        flush.zero_()
        torch.cuda.synchronize()
        spans = spans_of(step)
    waits, kernels = gaps(spans), by_name(spans)
    total, idle = max(s.end for s in spans), sum(us for us, *_ in waits)
    print(f"N={shape[0]} D={shape[1]} V={shape[2]}: {total / 1e3:.2f} ms, {idle / 1e3:.2f} of them without work")
    for us, count, name in kernels[:top]:
        print(f"  {us / 1e3:8.3f} ms {count:4} x {name[:100]}")
    for us, before, after in waits[:top]:
        print(f"  {us / 1e3:8.3f} ms idle between {before[:50]} and {after[:50]}")
    return {
        "N": shape[0], "D": shape[1], "V": shape[2], "impl": impl, "us": total, "idle_us": idle,
        "spans": [[s.name[:100], round(s.start, 1), round(s.end - s.start, 1)] for s in spans],
    }  # fmt: skip


def main() -> None:
    parser = Parser("cce.bench.timeline", __doc__)
    parser.add_argument("--impl", default="gather")
    parser.add_argument("--top", type=int, default=15, help="lines of kernels and of gaps to print")
    options = parser.parse(needs_gpu=True)
    runs = [measure(tuple(map(int, shape.split(","))), options.impl, options.top) for shape in SHAPES]
    save(options.save, runs=runs)


if __name__ == "__main__":
    main()
