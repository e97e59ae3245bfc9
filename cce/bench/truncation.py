"""python -m cce.bench.truncation: how the tensor cores round the logits, and what of it stays in the loss.

Errors of z_y, lse_rest and the per-token loss against float64 logits of the same bfloat16 inputs, in units of u = 2^-24 max|z|, by D.
Needs a GPU. The tolerance of tests/test_real_sizes.py and the shape of cce.kernels.target_logit rest on
figures/data/truncation.json.
"""

import torch
import torch.nn.functional as F

from cce.bench.inputs import INPUTS
from cce.bench.program import Parser, save
from cce.kernels.lse_forward import lse_forward
from cce.kernels.target_logit import target_logit


def measure(name: str, N: int, D: int, V: int) -> dict:
    """One input. `relative_z` is the median of (z_y - exact) / |exact|, in units of 2^-24: negative is towards zero."""
    e, c, targets = INPUTS[name](N, D, V)
    z = torch.cat([rows.double() @ c.double().T for rows in e.split(512)])
    u = 2**-24 * z.abs().amax()
    z_y = z.gather(1, targets[:, None])[:, 0]
    lse = z.scatter_(1, targets[:, None], -torch.inf).logsumexp(1)
    ours = target_logit(e, c, targets, None, None).double(), lse_forward(e, c, targets, None, None).double()
    plain = (e.float() * c[targets].float()).sum(1).double()  # z_y summed in IEEE float32 instead
    loss, got, mixed = (F.softplus(b - a) for a, b in ((z_y, lse), ours, (plain, ours[1])))
    units = lambda error: (error / u).abs().max().item()  # noqa: E731
    beyond = lambda x: (((x - loss).abs() - 1e-5 * loss).amax() / u).item()  # noqa: E731
    return {
        "input": name, "N": N, "D": D, "V": V, "max_z": z[z.isfinite()].abs().max().item(),
        "relative_z": ((ours[0] - z_y) / z_y.abs() / 2**-24).median().item(),
        "z_y": units(ours[0] - z_y), "lse_rest": units(ours[1] - lse),
        "loss_beyond_1e-5": beyond(got), "loss_beyond_1e-5_with_plain_z_y": beyond(mixed),
    }  # fmt: skip


def main() -> None:
    options = Parser("cce.bench.truncation", __doc__).parse(needs_gpu=True)
    runs = [measure(name, 8192, D, 32000) for D in (1024, 2304, 4096, 5120, 8192) for name in INPUTS]
    for run in runs:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in run.items()})
    save(options.save, runs=runs)


if __name__ == "__main__":
    main()
