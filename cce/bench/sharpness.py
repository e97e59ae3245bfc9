"""python -m cce.bench.sharpness: time and error of the row-gathered algorithm from a flat softmax to a sharp one.

The trained-like hidden states are scaled by factors from 0.05 (nearly uniform) to 1.5; targets are drawn from each softmax. Writes
figures/data/sharpness.json.
"""

import torch

from cce import gather, linear_cross_entropy
from cce.bench import exact
from cce.bench.contenders import load
from cce.bench.inputs import trained_like
from cce.bench.program import Parser, save
from cce.bench.timing import interleaved

FACTORS = [0.05, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5]


def drawn(e: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Targets [N] from the softmax of e @ c.T."""
    g = torch.Generator(e.device).manual_seed(0)
    rows = e.split(512)
    uniform = lambda n: torch.rand(n, len(c), device=e.device, generator=g).clamp(1e-20, 1 - 1e-7)  # noqa: E731
    return torch.cat([((x @ c.T).float() - torch.log(-torch.log(uniform(len(x))))).argmax(1) for x in rows])


def measure(shape: tuple[int, int, int], factors: list[float], names: list[str], repeats: int) -> list[dict]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states, c, _ = trained_like(*shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    losses, _ = load(names)
    points = []
    for factor in factors:
        e = (states.float() * factor).to(states.dtype)
        targets = drawn(e, c)
        wanted = exact.gradients(e, c, targets)
        e.requires_grad_(), c.requires_grad_()

        def step(loss, e=e, targets=targets):
            e.grad = c.grad = None
            loss(e, c, targets).backward()

        rows = {}
        for name, loss in losses.items():
            with gather.observed() as plans:
                step(loss)
            errors = [exact.relative_error(x.grad, want) for x, want in zip((e, c), wanted, strict=True)]
            rows[name] = {"de_error": errors[0], "dc_error": errors[1], **(plans[0] if plans else {})}
        del wanted
        buffer = torch.empty(len(e), len(c), dtype=e.dtype, device=e.device)
        steps = {name: (lambda loss=loss: step(loss)) for name, loss in losses.items()}  # noqa: B023
        times = interleaved(steps | {"GEMM": lambda: torch.mm(e.detach(), c.detach().T, out=buffer)}, repeats)  # noqa: B023
        e.grad = c.grad = None
        for name in rows:
            rows[name]["ms"] = times[name]
        loss = linear_cross_entropy(e, c, targets, impl="chunked").item()
        points.append({"factor": factor, "loss": loss, "gemm_ms": times["GEMM"], "contenders": rows})
        print(f"x {factor:4.2f}  loss {loss:6.3f}  " + "  ".join(
            f"{k} {r['ms']:.1f} ms {r['de_error']:.1e} {r['dc_error']:.1e}" for k, r in rows.items()), flush=True)  # fmt: skip
    return points


def main() -> None:
    parser = Parser("cce.bench.sharpness", __doc__)
    parser.add_argument("--shape", default="8192,2304,256000", metavar="N,D,V")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse(needs_gpu=False)
    shape = tuple(map(int, options.shape.split(",")))
    points = measure(shape, FACTORS, ["naive", "torch.compile", "gather"], options.repeats)
    save(options.save, N=shape[0], D=shape[1], V=shape[2], points=points)


if __name__ == "__main__":
    main()
