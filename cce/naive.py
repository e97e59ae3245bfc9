"""The loss as everybody writes it first: all N x V logits in memory (notebook 01).

`target_and_rest` is the specification of the primitive that every implementation provides. In float64 it is
the oracle of the tests; in bfloat16 it is the baseline that the fast ones must not be worse than.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ELSEWHERE, NOWHERE = (-1, -2)  # a target that another vocabulary shard owns (z_y = 0); one that nobody owns (z_y = NaN)


def target_and_rest(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    mean_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The two numbers per token that every loss here is made of, from stored logits.

    Args:
        e: hidden states [M, D], floating point.
        c: classifier [V, D], same dtype.
        targets: class ids [M], int64, or ELSEWHERE or NOWHERE.
        bias: [V] or None.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        mean_weight: [V], float32 or float64; asks for the third output.

    Returns:
        z_y [M], the target's logit (0 for ELSEWHERE, NaN for NOWHERE); lse_rest [M], the log-sum-exp of all other classes
        (-inf if there are none); z_bar [M], the logits' sum weighted by `mean_weight`, or None.
        float32, or float64 if the inputs are.
    """
    wide = torch.float64 if e.dtype == torch.float64 else torch.float32
    same = bias is None or bias.dtype == e.dtype
    z = F.linear(e, c, bias if same else None)
    if not same:
        z = z.to(wide) + bias.to(wide)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z.to(wide)
    here = targets >= 0
    column = targets.clamp(min=0)[:, None]
    z_y = torch.where(here, z.gather(1, column)[:, 0], torch.where(targets == ELSEWHERE, 0, torch.nan))
    is_target = torch.zeros_like(z, dtype=torch.bool).scatter_(1, column, here[:, None])
    lse_rest = _logsumexp(z.masked_fill(is_target, -torch.inf))
    z_bar = None if mean_weight is None else z @ mean_weight.to(z.dtype)
    return z_y, lse_rest, z_bar


def _logsumexp(z: Tensor) -> Tensor:
    """torch.logsumexp over rows whose gradient is 0, not NaN, for a row that is -inf everywhere (V = 1)."""
    empty = (z == -torch.inf).all(1)
    return torch.where(empty, -torch.inf, torch.where(empty[:, None], 0, z).logsumexp(1))


def checkpointed_target_and_rest(*args) -> tuple[Tensor, Tensor, Tensor | None]:
    """`target_and_rest` under gradient checkpointing: the logits are freed after the forward and made again in the
    backward. The peak of either pass stays that of the naive loss; what it saves is keeping them in between."""
    return checkpoint(target_and_rest, *args, use_reentrant=False)


@functools.cache
def compiled_target_and_rest():
    """`target_and_rest` through torch.compile (the drop-in's `impl="torch_compile"`); needs a C++ compiler on a CPU."""
    return torch.compile(target_and_rest, dynamic=True)
