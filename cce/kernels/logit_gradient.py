"""The logit gradient of a slab of classes for every token, written out: where nothing can be skipped (notebook 09).

    S[n, v] = d_zy[n] if v is n's target, else exp(z[n, v] - lse_rest[n]) d_rest[n]

With softcap everything is multiplied by its slope, 1 - (z / cap)²; d_zy comes with it, so that no logit is needed twice.

One product; de and dc are two more. The caller keeps a slab small: S has itemsize bytes per token and class.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels.blocks import blocks_for, cdiv
from cce.kernels.common import LOG2E, capped, capped_slope, dot, grouped_tile, round_to
from cce.kernels.descriptors import descriptor

GROUP = 8  # token blocks that share a block of c in L2


@triton.jit(do_not_specialize=["M", "V"])
def logit_gradient_kernel(
    e_desc, c_desc, bias_ptr, targets_ptr, lse_ptr, d_zy_ptr, d_rest_ptr, s_desc, lost_ptr, dbias_ptr, M, V, D, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROUNDS: tl.constexpr, WANT_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block_n, block_v = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_N), tl.cdiv(V, BLOCK_V), GROUP)
    n, v = block_n * BLOCK_N + tl.arange(0, BLOCK_N), block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    # Loaded here, and not where it is needed: the loop hides the wait.
    lse = tl.load(lse_ptr + n, mask=n < M, other=float("inf"))
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # no other class can be: their logits are all -inf
    d_rest = tl.load(d_rest_ptr + n, mask=n < M, other=0.0)
    targets = tl.load(targets_ptr + n, mask=n < M, other=-1)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32)
    z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, D, BLOCK_D):
        z = dot(e_desc.load([block_n * BLOCK_N, start]), c_desc.load([block_v * BLOCK_V, start]).T, z)
    if HAS_BIAS:
        z += bias[None, :]
    if HAS_SOFTCAP:
        z = capped(z, softcap)
    s = tl.exp2((z - lse[:, None]) * LOG2E) * d_rest[:, None]
    if HAS_SOFTCAP:
        s *= capped_slope(z, softcap)
    has_target = tl.max(((targets >= block_v * BLOCK_V) & (targets < (block_v + 1) * BLOCK_V)).to(tl.int32)) != 0
    if has_target or (block_v + 1) * BLOCK_V > V:
        d_zy = tl.load(d_zy_ptr + n, mask=n < M, other=0.0)
        s = tl.where(targets.to(tl.int32)[:, None] == v[None, :], d_zy[:, None], s)
        s = tl.where((v < V)[None, :], s, 0.0)
    rounded = round_to(s, s_desc.dtype)
    s_desc.store([block_n * BLOCK_N, block_v * BLOCK_V], rounded)
    if WANT_BIAS:
        tl.store(dbias_ptr + block_n.to(tl.int64) * V + v, tl.sum(s, 0), mask=v < V)
    if ROUNDS:
        tl.store(lost_ptr + block_v.to(tl.int64) * M + n, tl.sum(s - rounded.to(tl.float32), 1), mask=n < M)


def logit_gradient(
    e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, softcap: float | None, lse_rest: Tensor,
    d_zy: Tensor, d_rest: Tensor, with_lost: bool, with_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(S [M, V] in e's dtype, what rounding took from its rows' sums [M] float32, its sum over tokens [V] float32).

    e [M, D] and c [V, D], the slab's rows, must suit descriptors; targets [M] int64 are rows of this c, any other number if elsewhere.
    """
    (M, D), V = e.shape, c.shape[0]
    shape = blocks_for("tile_lse", e)
    per_16_bytes = 16 // e.element_size()
    s = torch.empty(M, cdiv(V, per_16_bytes) * per_16_bytes, dtype=e.dtype, device=e.device)[:, :V]
    num_n, num_v = cdiv(M, shape.BLOCK_N), cdiv(V, shape.BLOCK_V)
    lost = torch.empty(num_v, M, device=e.device) if with_lost else None
    dbias = torch.empty(num_n, V, device=e.device) if with_bias else None
    logit_gradient_kernel[(num_n * num_v,)](
        descriptor(e, shape.BLOCK_N, shape.BLOCK_D), descriptor(c, shape.BLOCK_V, shape.BLOCK_D),
        bias, targets, lse_rest, d_zy, d_rest, descriptor(s, shape.BLOCK_N, shape.BLOCK_V), lost, dbias, M, V, D, softcap,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None, ROUNDS=with_lost, WANT_BIAS=with_bias,
        GROUP=GROUP, **shape._asdict(),
    )  # fmt: skip
    return s, None if lost is None else lost.sum(0), None if dbias is None else dbias.sum(0)
