"""python -m cce.bench.options: what the loss's options cost the row-gathered algorithm, beside the plain step. Needs a GPU.

Trained-like inputs of the two standard shapes. A softcap of 30 flattens their softmax, so that part of its time is that of another input:
`crowded` and `gathered` say how much is computed. Writes figures/data/NAME.json.
"""

import torch

from cce import gather, linear_cross_entropy
from cce.bench.inputs import SHAPES, trained_like
from cce.bench.program import Parser, save
from cce.bench.timing import interleaved


def measure(shape: tuple[int, int, int], repeats: int) -> dict:
    e, c, targets = trained_like(*shape)
    e.requires_grad_(), c.requires_grad_()
    bias = torch.zeros(len(c), dtype=c.dtype, device=c.device, requires_grad=True)
    options = {
        "plain": {},
        "softcap": {"softcap": 30.0},
        "bias": {"bias": bias},
        "z-loss": {"z_loss": 1e-4},
        "softcap, bias, z-loss": {"softcap": 30.0, "bias": bias, "z_loss": 1e-4},
        "label smoothing": {"label_smoothing": 0.1},
    }

    def step(**more) -> None:
        e.grad = c.grad = bias.grad = None
        linear_cross_entropy(e, c, targets, impl="gather", **more).backward()

    rows = {}
    for name, more in options.items():
        with gather.observed() as plans:
            step(**more)
        rows[name] = plans[0]
    times = interleaved({name: (lambda more=more: step(**more)) for name, more in options.items()}, repeats)
    for name, row in rows.items():
        row |= {"ms": times[name], "times_plain": times[name] / times["plain"]}
        print(f"{name:24}", {k: float(f"{v:.3g}") for k, v in row.items()}, flush=True)
    e.grad = c.grad = None
    return {"N": shape[0], "D": shape[1], "V": shape[2], "options": rows}


def main() -> None:
    parser = Parser("cce.bench.options", __doc__)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse(needs_gpu=True)
    runs = [measure(tuple(map(int, shape.split(","))), options.repeats) for shape in SHAPES]
    save(options.save, runs=runs)


if __name__ == "__main__":
    main()
