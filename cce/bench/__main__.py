"""python -m cce.bench: time, memory and gradient error of the loss against its peers, as a table and as JSON.

    python -m cce.bench --shape 8192,2304,256000 --inputs trained_like --contenders cce cut-cross-entropy --save cut

The yardstick is the logits GEMM, `torch.mm(e, c.T)` into a buffer of e's dtype, timed between the contenders. A time is the public call,
or the call and `.backward()` with gradients None before it, launched while the device is still busy (see cce.bench.timing; --idle
starts on an idle one); nothing is kept between calls.
"""

import time

import torch
from tqdm import tqdm

from cce.bench import exact
from cce.bench.contenders import FACTORIES, load
from cce.bench.inputs import INPUTS, SHAPES
from cce.bench.memory import peak_memory
from cce.bench.program import Parser, save
from cce.bench.timing import interleaved


def measure(
    input_name: str, shape: tuple[int, int, int], names: list[str], repeats: int, seed: int, idle: bool = False
) -> dict:
    """One process's measurement of all contenders on one input."""
    N, D, V = shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    e, c, targets = INPUTS[input_name](N, D, V, device=device, dtype=dtype, seed=seed)
    exact_de, exact_dc = exact.gradients(e, c, targets)
    e.requires_grad_(), c.requires_grad_()
    losses, missing = load(names)

    def forward(loss):
        with torch.no_grad():
            return loss(e, c, targets)

    def both(loss):
        e.grad = c.grad = None
        value = loss(e, c, targets)
        value.backward()
        return value

    rows = {}
    for name, loss in list(losses.items()):
        try:
            began = time.perf_counter()
            both(loss), forward(loss)  # compiles
            seconds = time.perf_counter() - began
            rows[name] = {"loss": both(loss).item(), "first_call_s": round(seconds, 2)}
            rows[name] |= {"de_error": exact.relative_error(e.grad, exact_de)}
            rows[name] |= {"dc_error": exact.relative_error(c.grad, exact_dc)}
            e.grad = c.grad = None
            rows[name]["forward_bytes"] = peak_memory(lambda: forward(loss))  # noqa: B023
            rows[name]["forward_backward_bytes"] = peak_memory(lambda: both(loss))  # noqa: B023
        except Exception as error:  # whatever keeps a peer from running
            rows.pop(name, None)
            missing[name] = f"{type(error).__name__}: {error}"[:200]
            losses.pop(name)
    del exact_de, exact_dc
    e.grad = c.grad = None
    buffer = torch.empty(N, V, device=device, dtype=dtype)
    gemm = lambda: torch.mm(e.detach(), c.detach().T, out=buffer)  # noqa: E731
    contenders = {name: (lambda loss=loss: both(loss)) for name, loss in losses.items()}
    with tqdm(total=2 * repeats * (len(losses) + 1), desc=f"{input_name} N={N} D={D} V={V}", leave=False) as bar:
        times = interleaved({"GEMM": gemm, **contenders}, repeats, bar, idle)
        e.grad = c.grad = None
        forwards = {name: (lambda loss=loss: forward(loss)) for name, loss in losses.items()}
        forward_times = interleaved({"GEMM": gemm, **forwards}, repeats, bar, idle)
    for name, row in rows.items():
        if name in losses:
            row |= {"forward_ms": forward_times[name], "forward_backward_ms": times[name]}
    return {
        "input": input_name, "N": N, "D": D, "V": V, "dtype": str(dtype).removeprefix("torch."), "seed": seed, "repeats": repeats,
        "idle": idle,
        "gemm_ms": times["GEMM"], "gemm_ms_beside_forward": forward_times["GEMM"],
        "gradient_bytes": e.numel() * e.element_size() + c.numel() * c.element_size(),
        "contenders": rows, "not_run": missing,
    }  # fmt: skip


def table(run: dict) -> str:
    """The measurement as text; memory beyond the inputs, for forward + backward also beyond the gradients."""
    lines = [
        f"{run['input']}  N={run['N']} D={run['D']} V={run['V']} {run['dtype']}; "
        f"one logits GEMM {run['gemm_ms']:.2f} ms; gradients {run['gradient_bytes'] / 1e6:,.0f} MB",
        f"{'':28}{'fwd ms':>8}{'f+b ms':>9}{'GEMMs':>7}{'fwd MB':>9}{'f+b MB':>9}{'over':>7}{'de error':>10}{'dc error':>10}",
    ]
    for name, r in run["contenders"].items():
        beyond = r["forward_backward_bytes"] - run["gradient_bytes"]
        lines.append(
            f"{name:28}{r['forward_ms']:8.2f}{r['forward_backward_ms']:9.2f}{r['forward_backward_ms'] / run['gemm_ms']:7.2f}"
            f"{r['forward_bytes'] / 1e6:9.1f}{r['forward_backward_bytes'] / 1e6:9.0f}{beyond / run['gradient_bytes']:7.0%}"
            f"{r['de_error']:10.1e}{r['dc_error']:10.1e}"
        )
    lines += [f"{name:28}not run: {why}" for name, why in run["not_run"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = Parser("cce.bench", __doc__)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="N,D,V")
    parser.add_argument("--inputs", nargs="+", default=list(INPUTS), choices=list(INPUTS))
    parser.add_argument("--contenders", nargs="+", default=list(FACTORIES), choices=list(FACTORIES))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--idle", action="store_true", help="time from an idle device")
    options = parser.parse(needs_gpu=False)
    runs = []
    for shape in options.shape:
        N, D, V = map(int, shape.split(","))
        for name in options.inputs:
            runs.append(measure(name, (N, D, V), options.contenders, options.repeats, options.seed, options.idle))
            print(table(runs[-1]), end="\n\n", flush=True)
    save(options.save, runs=runs)


if __name__ == "__main__":
    main()
