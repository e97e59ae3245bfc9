"""One slab of the backward: logits again, tile by tile, then their gradient, then its shares of de and dc (notebooks 06, 07).

    S[n, v] = d_zy[n] if v is n's target, else exp(z[n, v] - lse_rest[n]) d_rest[n]      (times the softcap's slope)
    de += S @ c        dc += S.T @ e        dbias += S summed over n

A tile without a target whose logits are all below their row's `cutoff` = lse + log(eps), that is, whose softmax is everywhere
below eps, stops after the first product: the paper's filter, where it applies to both gradients. With 16-bit operands S is
rounded, and `residual[n]` collects what rounding took from each row's sum.

Many programs add to the same rows of de and dc: under locks, or by the L2's float32 reductions (`blocks.under_locks`).

Traffic of a live tile: BLOCK_N + BLOCK_V rows of D floats, mostly in L2; under locks they are read as well as written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels.blocks import blocks_for, cdiv, under_locks
from cce.kernels.common import LOG2E, accumulate, capped, capped_slope, dot, grouped_tile, round_to
from cce.kernels.descriptors import descriptor

GROUP = 8  # token blocks that share a block of c in L2


@triton.jit(do_not_specialize=["M", "V", "first_class"])
def backward_kernel(
    e_desc, c_desc, bias_ptr, targets_ptr, lse_ptr, cutoff_ptr, d_zy_ptr, d_rest_ptr,
    de_ptr, dc_ptr, dbias_ptr, residual_ptr, de_locks, dc_locks, first_class,
    M, V, D, stride_de, stride_dc, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FILTER_E: tl.constexpr, FILTER_C: tl.constexpr,
    WANT_E: tl.constexpr, WANT_C: tl.constexpr, WANT_BIAS: tl.constexpr, ROUNDS: tl.constexpr, LOCKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_n, num_v, num_d = tl.cdiv(M, BLOCK_N), tl.cdiv(V, BLOCK_V), tl.cdiv(D, BLOCK_D)
    block_n, block_v = grouped_tile(tl.program_id(0), num_n, num_v, GROUP)
    n, v = (block_n * BLOCK_N + tl.arange(0, BLOCK_N), block_v * BLOCK_V + tl.arange(0, BLOCK_V))
    z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, D, BLOCK_D):
        z = dot(e_desc.load([block_n * BLOCK_N, start]), c_desc.load([block_v * BLOCK_V, start]).T, z)
    if HAS_BIAS:
        z += tl.load(bias_ptr + v, mask=v < V, other=0.0)[None, :]
    if HAS_SOFTCAP:
        z = capped(z, softcap)
    targets = tl.load(targets_ptr + n, mask=n < M, other=-1) - first_class
    targets = tl.where(targets < V, targets, -1)  # the next slab's first target is not this slab's padding
    live_n, live_v, live = n < M, v < V, True
    if FILTER_E or FILTER_C:
        cutoff = tl.load(cutoff_ptr + n, mask=n < M, other=float("inf"))
        large = (v < V)[None, :] & ((z < cutoff[:, None]) == 0)  # NaN is not below anything
        owns_target = (targets >= block_v * BLOCK_V) & (targets < (block_v + 1) * BLOCK_V)
        live = tl.max(large.to(tl.int32)) + tl.max(owns_target.to(tl.int32)) != 0
        live_n = live_n & live if FILTER_E else live_n
        live_v = live_v & live if FILTER_C else live_v
    if live or not (FILTER_E and FILTER_C):
        lse = tl.load(lse_ptr + n, mask=n < M, other=float("inf"))
        lse = tl.where(lse == float("-inf"), 0.0, lse)  # no other class can be: their logits are all -inf
        s = tl.where((v < V)[None, :], tl.exp2((z - lse[:, None]) * LOG2E), 0.0)
        s *= tl.load(d_rest_ptr + n, mask=n < M, other=0.0)[:, None]
        d_zy = tl.load(d_zy_ptr + n, mask=n < M, other=0.0)
        s = tl.where(targets[:, None] == v[None, :], d_zy[:, None], s)
        if HAS_SOFTCAP:
            s *= capped_slope(z, softcap)
        if WANT_BIAS:
            tl.atomic_add(dbias_ptr + v, tl.sum(s, 0), mask=live_v)
        rounded = round_to(s, e_desc.dtype)
        if ROUNDS:
            tl.atomic_add(residual_ptr + n, tl.sum(s - rounded.to(tl.float32), 1), mask=live_n)
        for i in range(num_d):
            block_d = (i + block_n + block_v) % num_d  # neighbours start apart, so they seldom want the same lock
            d = block_d * BLOCK_D + tl.arange(0, BLOCK_D)
            if WANT_E:
                de = dot(
                    rounded,
                    c_desc.load([block_v * BLOCK_V, block_d * BLOCK_D]),
                    tl.zeros((BLOCK_N, BLOCK_D), tl.float32),
                )
                accumulate(
                    de_ptr + n.to(tl.int64)[:, None] * stride_de + d[None, :], de,
                    live_n[:, None] & (d < D)[None, :], de_locks + block_n * num_d + block_d, LOCKED,
                )  # fmt: skip
            if WANT_C:
                dc = dot(
                    rounded.T,
                    e_desc.load([block_n * BLOCK_N, block_d * BLOCK_D]),
                    tl.zeros((BLOCK_V, BLOCK_D), tl.float32),
                )
                accumulate(
                    dc_ptr + v.to(tl.int64)[:, None] * stride_dc + d[None, :], dc,
                    live_v[:, None] & (d < D)[None, :], dc_locks + block_v * num_d + block_d, LOCKED,
                )  # fmt: skip


def new_de_locks(e: Tensor) -> Tensor:
    """One open lock (0) for each block of de, whatever slab is added to it."""
    shape = blocks_for("backward", e)
    blocks = cdiv(e.shape[0], shape.BLOCK_N) * cdiv(e.shape[1], shape.BLOCK_D)
    return torch.zeros(blocks, dtype=torch.int32, device=e.device)


def backward_slab(
    e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, lse_rest: Tensor, cutoff: Tensor | None,
    d_zy: Tensor, d_rest: Tensor, first_class: int, softcap: float | None, filter_e: bool, filter_c: bool,
    de: Tensor | None, dc: Tensor | None, dbias: Tensor | None, residual: Tensor | None, de_locks: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds one vocabulary slab's share to de [M, D], dc [V, D], dbias [V], residual [M], all float32; None: not wanted.

    e [M, D] and c [V, D] (the slab's rows) must suit descriptors; bias [V] float32; targets [M] are positions in the whole,
    possibly sorted vocabulary, of which the slab's first is first_class. cutoff [M] is the filter's, or None; filter_e and
    filter_c say whether it applies to de and to dc. Where only one is filtered, both products are made and one is masked away.
    de_locks comes from new_de_locks and belongs to de: slabs that run at the same time must share it; None: new ones, for a
    slab that runs alone.
    """
    (M, D), V = e.shape, c.shape[0]
    shape = blocks_for("backward", e)
    num_n, num_v, num_d = (cdiv(M, shape.BLOCK_N), cdiv(V, shape.BLOCK_V), cdiv(D, shape.BLOCK_D))
    de_locks = new_de_locks(e) if de_locks is None else de_locks
    dc_locks = torch.zeros(num_v * num_d, dtype=torch.int32, device=e.device)
    backward_kernel[(num_n * num_v,)](
        descriptor(e, shape.BLOCK_N, shape.BLOCK_D), descriptor(c, shape.BLOCK_V, shape.BLOCK_D),
        bias, targets, lse_rest, cutoff, d_zy, d_rest, de, dc, dbias, residual, de_locks, dc_locks, first_class, M, V, D,
        0 if de is None else de.stride(0), 0 if dc is None else dc.stride(0), softcap,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None,
        FILTER_E=cutoff is not None and (filter_e or de is None),
        FILTER_C=cutoff is not None and (filter_c or (dc is None and dbias is None)),
        WANT_E=de is not None, WANT_C=dc is not None, WANT_BIAS=dbias is not None, ROUNDS=residual is not None,
        LOCKED=under_locks(e.device), GROUP=GROUP, **shape._asdict(),
    )  # fmt: skip
