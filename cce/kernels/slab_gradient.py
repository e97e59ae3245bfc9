"""dc of a slab of classes from its logit gradient: Sᵀ e over all tokens, summed in registers, written once to the rows' homes.

What a plain product would leave to do afterwards happens in its epilogue: label smoothing's rank-one part, the factor that S is stored
without, the one rounding, and the way from the slab's order to the classifier's.
"""

import triton
import triton.language as tl
from torch import Tensor

from cce.kernels.blocks import blocks_for, cdiv
from cce.kernels.common import dot, grouped_tile, store_gradient
from cce.kernels.descriptors import descriptor

GROUP = 8  # blocks of classes that share a block of e in L2


@triton.jit(do_not_specialize=["M", "V", "first_class"])
def slab_gradient_kernel(
    s_desc, e_desc, order_ptr, weight_ptr, mean_e_ptr, scale_ptr, dc_ptr, first_class, M, V, D, stride_dc,
    HAS_ORDER: tl.constexpr, HAS_MEAN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block_v, block_d = grouped_tile(tl.program_id(0), tl.cdiv(V, BLOCK_V), tl.cdiv(D, BLOCK_D), GROUP)
    dc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    for start in range(0, M, BLOCK_N):
        s = s_desc.load([start, block_v * BLOCK_V])
        dc = dot(s.T, e_desc.load([start, block_d * BLOCK_D]), dc)
    v, d = block_v * BLOCK_V + tl.arange(0, BLOCK_V), block_d * BLOCK_D + tl.arange(0, BLOCK_D)
    row = (first_class + v).to(tl.int64)
    if HAS_ORDER:
        row = tl.load(order_ptr + v, mask=v < V, other=0)
    store_gradient(dc, dc_ptr, stride_dc, row, v < V, d, d < D, weight_ptr, mean_e_ptr, scale_ptr, HAS_MEAN)


def slab_gradient(
    s: Tensor, e: Tensor, order: Tensor | None, first_class: int, weight: Tensor | None, mean_e: Tensor | None,
    scale: Tensor, dc: Tensor,
) -> None:  # fmt: skip
    """dc[order[i]] = (S[:, i]ᵀ e + weight[order[i]] mean_e) * scale, or dc[first_class + i] without an order; in dc's dtype.

    s [M, K] and e [M, D] must suit descriptors; order [K] int64; weight [V], mean_e [D] float32, or None; scale a float32 scalar.
    """
    (M, K), D = s.shape, e.shape[1]
    shape = blocks_for("slab_gradient", e)
    slab_gradient_kernel[(cdiv(K, shape.BLOCK_V) * cdiv(D, shape.BLOCK_D),)](
        descriptor(s, shape.BLOCK_N, shape.BLOCK_V), descriptor(e, shape.BLOCK_N, shape.BLOCK_D),
        order, weight, mean_e, scale, dc, first_class, M, K, D, dc.stride(0),
        HAS_ORDER=order is not None, HAS_MEAN=mean_e is not None, GROUP=GROUP, **shape._asdict(),
    )  # fmt: skip
