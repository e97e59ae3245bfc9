"""The target's logit, z_y[n] = e[n] · c[y_n] (+ bias, softcap): the indexed dot product (notebook 04).

One program owns BLOCK_N tokens, gathers their targets' rows of c, and multiplies the two blocks on the tensor cores. Of the BLOCK_N x
BLOCK_N products only the diagonal is wanted; the rest costs nothing that shows, and buys that z_y is summed in the same order and with
the same rounding as the tiles of lse_forward. Tensor cores cut off what does not fit as they add, so that every logit comes out a little
too close to zero (by 128 units of 2^-24 |z| at D = 5120 on an H200); what both terms lose cancels in lse - z_y. With a float32 sum instead
the loss is off by several times as much (figures/data/truncation.json).

Reads 2 M D elements, writes M.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels.blocks import blocks_for, cdiv
from cce.kernels.common import capped, dot


@triton.jit(do_not_specialize=["M"])
def target_logit_kernel(
    e_ptr, c_ptr, bias_ptr, targets_ptr, z_ptr,
    M, V, D, stride_en, stride_ed, stride_cv, stride_cd, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.load(targets_ptr + n, mask=n < M, other=-1).to(tl.int64)
    here = (y >= 0) & (y < V)
    d = tl.arange(0, BLOCK_D)
    e_ptrs = e_ptr + n.to(tl.int64)[:, None] * stride_en + d.to(tl.int64)[None, :] * stride_ed
    c_ptrs = c_ptr + y[:, None] * stride_cv + d.to(tl.int64)[None, :] * stride_cd
    products = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_D):
        mask = here[:, None] & (start + d < D)[None, :]
        e, c = tl.load(e_ptrs, mask=mask, other=0.0), tl.load(c_ptrs, mask=mask, other=0.0)
        products = dot(e, c.T, products)
        e_ptrs += BLOCK_D * stride_ed
        c_ptrs += BLOCK_D * stride_cd
    i = tl.arange(0, BLOCK_N)
    z = tl.sum(tl.where(i[:, None] == i[None, :], products, 0.0), 1)
    if HAS_BIAS:
        z += tl.load(bias_ptr + y, mask=here, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        z = capped(z, softcap)
    z = tl.where(y == -1, 0.0, z)  # the target is in another vocabulary shard
    tl.store(z_ptr + n, z, mask=(n < M) & (here | (y == -1)))


def target_logit(e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """z_y [M] float32 from e [M, D], c [V, D] (any strides), targets [M] int64 and bias [V].

    A target of -1 gives 0; any other that is outside [0, V) is never used as an address and gives NaN.
    """
    (M, D), V = e.shape, c.shape[0]
    z = torch.full((M,), torch.nan, device=e.device)
    shape = blocks_for("target_logit", e)
    target_logit_kernel[(cdiv(M, shape.BLOCK_N),)](
        e, c, bias, targets, z, M, V, D, *e.stride(), *c.stride(), softcap,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None,
        BLOCK_N=shape.BLOCK_N, BLOCK_D=shape.BLOCK_D, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return z
