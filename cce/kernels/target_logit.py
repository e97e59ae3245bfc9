"""The target's logit, z_y[n] = e[n] · c[y_n] (+ bias, softcap): the indexed dot product (notebook 04).

Reads 2 M D elements, writes M. One program owns BLOCK_N tokens; c's rows are gathered.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels import INTERPRETED
from cce.kernels.common import capped


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
    z = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        mask = here[:, None] & (start + d < D)[None, :]
        e = tl.load(e_ptrs, mask=mask, other=0.0).to(tl.float32)
        z += e * tl.load(c_ptrs, mask=mask, other=0.0).to(tl.float32)
        e_ptrs += BLOCK_D * stride_ed
        c_ptrs += BLOCK_D * stride_cd
    z = tl.sum(z, 1)
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
    BLOCK_N, BLOCK_D = 16 if INTERPRETED else 4, min(512, triton.next_power_of_2(D))
    target_logit_kernel[(triton.cdiv(M, BLOCK_N),)](
        e, c, bias, targets, z, M, V, D, *e.stride(), *c.stride(), softcap,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return z
