"""lse_rest[n] = log Σ_{v ≠ y_n} exp(e[n] · c[v] + bias[v]), no logit ever leaving the chip (notebook 05).

One program owns BLOCK_N tokens and a strip of the vocabulary, STRIP tiles of BLOCK_V classes. It keeps a running maximum and a
running sum per token while it walks the strip (notebook 03), and merges its result into lse_rest under the lock of its token
block. The tile that holds a token's target leaves that column out.

Memory: M floats and one lock per token block. Traffic: c once per group of token blocks, from HBM; e from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels.blocks import blocks_for, cdiv
from cce.kernels.common import LN2, LOG2E, capped, dot, grouped_tile, lock, logaddexp, unlock
from cce.kernels.descriptors import aligned, descriptor, descriptors_supported

STRIP = 4  # tiles a program walks before it merges: more mean fewer merges, and a less even last wave of programs
GROUP = 8  # token blocks that share a strip of c in L2


@triton.jit(do_not_specialize=["M"])
def lse_forward_kernel(
    e_desc, c_desc, bias_ptr, targets_ptr, lse_ptr, locks_ptr,
    M, V, D, stride_cv, stride_cd, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, C_IS_DESCRIPTOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block_n, strip = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_N), tl.cdiv(V, BLOCK_V * STRIP), GROUP)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    targets = tl.load(targets_ptr + n, mask=n < M, other=-1).to(tl.int32)
    high = tl.full((BLOCK_N,), float("-inf"), tl.float32)  # running maximum
    total = tl.zeros((BLOCK_N,), tl.float32)  # running sum of exp(z - high)
    for start_v in range(strip * STRIP * BLOCK_V, min((strip + 1) * STRIP * BLOCK_V, V), BLOCK_V):
        v = start_v + tl.arange(0, BLOCK_V)
        z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for start_d in range(0, D, BLOCK_D):
            e = e_desc.load([block_n * BLOCK_N, start_d])
            if C_IS_DESCRIPTOR:
                c = c_desc.load([start_v, start_d])
            else:
                d = start_d + tl.arange(0, BLOCK_D)
                c_ptrs = c_desc + v.to(tl.int64)[:, None] * stride_cv + d.to(tl.int64)[None, :] * stride_cd
                c = tl.load(c_ptrs, mask=(v < V)[:, None] & (d < D)[None, :], other=0.0)
            z = dot(e, c.T, z)
        if HAS_BIAS:
            z += tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            z = capped(z, softcap)
        has_target = tl.max(((targets >= start_v) & (targets < start_v + BLOCK_V)).to(tl.int32)) != 0
        if has_target or start_v + BLOCK_V > V:  # after bias and softcap: masked before, tanh(-inf) would count
            z = tl.where((v >= V)[None, :] | (v[None, :] == targets[:, None]), float("-inf"), z)
        new_high = tl.maximum(high, tl.max(z, 1))
        shift = tl.where(new_high == float("-inf"), 0.0, new_high) * LOG2E  # a row may have nothing but -inf so far
        total = total * tl.exp2(high * LOG2E - shift) + tl.sum(tl.exp2(z * LOG2E - shift[:, None]), 1)
        high = new_high
    nothing = total == 0
    lse = tl.where(nothing, float("-inf"), high + LN2 * tl.log2(tl.where(nothing, 1.0, total)))
    lock(locks_ptr + block_n)
    others = tl.load(lse_ptr + n, mask=n < M, other=float("-inf"), cache_modifier=".cg")
    tl.store(lse_ptr + n, logaddexp(others, lse), mask=n < M, cache_modifier=".cg")
    unlock(locks_ptr + block_n)


def lse_forward(e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """lse_rest [M] float32 from e [M, D], c [V, D] (any strides), targets [M] int64 and bias [V]; -inf if V = 1."""
    (M, D), V = e.shape, c.shape[0]
    shape = blocks_for("lse_forward", e)
    blocks = shape._asdict()
    lse = torch.full((M,), -torch.inf, device=e.device)
    locks = torch.zeros(cdiv(M, shape.BLOCK_N), dtype=torch.int32, device=e.device)
    by_descriptor = descriptors_supported(c)
    grid = (len(locks) * cdiv(V, shape.BLOCK_V * STRIP),)
    lse_forward_kernel[grid](
        descriptor(aligned(e), shape.BLOCK_N, shape.BLOCK_D),
        descriptor(c, shape.BLOCK_V, shape.BLOCK_D) if by_descriptor else c,
        bias, targets, lse, locks, M, V, D, *c.stride(), softcap,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None, C_IS_DESCRIPTOR=by_descriptor,
        STRIP=STRIP, GROUP=GROUP, **blocks,
    )  # fmt: skip
    return lse
