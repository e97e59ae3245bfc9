"""python -m cce.bench.accumulation: the backward's sums under the paper's locks against the GPU's float32 reductions.

Needs a GPU: the interpreter always uses the locks. `cce.kernels.blocks.under_locks` rests on figures/data/accumulation.json.
"""

from cce import linear_cross_entropy
from cce.bench.inputs import INPUTS, SHAPES
from cce.bench.program import Parser, save
from cce.bench.timing import interleaved
from cce.kernels import backward


def measure(repeats: int = 5) -> list[dict]:
    runs = []
    for shape in SHAPES:
        N, D, V = map(int, shape.split(","))
        for name, make in INPUTS.items():
            e, c, targets = make(N, D, V)
            e.requires_grad_(), c.requires_grad_()

            def step(impl: str, locked: bool, e=e, c=c, targets=targets) -> None:
                backward.under_locks = lambda device: locked
                e.grad = c.grad = None
                linear_cross_entropy(e, c, targets, impl=impl).backward()

            cases = {
                f"{impl}, {'locks' if locked else 'reductions'}": (lambda i=impl, k=locked: step(i, k))  # noqa: B023
                for impl in ("cce", "cce_exact")
                for locked in (True, False)
            }
            times = interleaved(cases, repeats)
            print(f"{name:14}N={N} D={D} V={V}  " + "  ".join(f"{k} {v:.1f} ms" for k, v in times.items()), flush=True)
            runs.append({"input": name, "N": N, "D": D, "V": V, "forward_backward_ms": times})
            e.grad = c.grad = None
    return runs


def main() -> None:
    options = Parser("cce.bench.accumulation", __doc__).parse(needs_gpu=True)
    save(options.save, runs=measure())


if __name__ == "__main__":
    main()
