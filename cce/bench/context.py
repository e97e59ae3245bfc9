"""python -m cce.bench.context: how time and memory of a step grow with the number of tokens, up to long contexts. Needs a GPU.

Trained-like inputs of Gemma 2's head. Writes figures/data/NAME.json.
"""

from cce import linear_cross_entropy
from cce.bench.inputs import trained_like
from cce.bench.memory import peak_memory
from cce.bench.program import Parser, save
from cce.bench.timing import interleaved


def measure(tokens: list[int], D: int, V: int, repeats: int) -> list[dict]:
    runs = []
    for N in tokens:
        e, c, targets = trained_like(N, D, V)
        e.requires_grad_(), c.requires_grad_()

        def step(e=e, c=c, targets=targets):
            e.grad = c.grad = None
            linear_cross_entropy(e, c, targets, impl="gather").backward()

        step()
        e.grad = c.grad = None
        memory = peak_memory(step)
        gradients = 2 * (e.numel() + c.numel())
        ms = interleaved({"step": step}, repeats)["step"]
        runs.append(
            {
                "N": N,
                "D": D,
                "V": V,
                "ms": ms,
                "us_per_token": 1e3 * ms / N,
                "bytes": memory,
                "gradient_bytes": gradients,
            }
        )
        print(
            f"N={N:7} {ms:8.2f} ms  {1e3 * ms / N:.3f} us a token  {memory / gradients - 1:.1%} beyond the gradients",
            flush=True,
        )
        e.grad = c.grad = None
        del e, c, targets
    return runs


def main() -> None:
    parser = Parser("cce.bench.context", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072, 262144])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse(needs_gpu=True)
    runs = measure(options.tokens, 2304, 256000, options.repeats)
    save(options.save, runs=runs)


if __name__ == "__main__":
    main()
