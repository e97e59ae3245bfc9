"""A finished slab of dc goes home: float32 rows, rounded once, to the rows of dc they belong to. Leaves the slab zeroed.

Reads 4 D, writes (4 + itemsize) D bytes per class, in one pass instead of the three of a cast, an indexed copy and a fill.
"""

import triton
import triton.language as tl
from torch import Tensor

from cce.kernels import INTERPRETED
from cce.kernels.blocks import cdiv, power_of_2
from cce.kernels.common import round_to


@triton.jit(do_not_specialize=["first_class", "rows"])
def scatter_rows_kernel(
    slab_ptr, order_ptr, scale_ptr, dc_ptr, first_class, rows, D, stride_slab, stride_dc,
    HAS_ORDER: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (d < D)[None, :]
    home = (first_class + row).to(tl.int64)
    if HAS_ORDER:
        home = tl.load(order_ptr + home, mask=row < rows, other=0)
    slab_ptrs = slab_ptr + row.to(tl.int64)[:, None] * stride_slab + d[None, :]
    x = tl.load(slab_ptrs, mask=inside, other=0.0)
    tl.debug_barrier()  # the zeros below may come from another thread than the one that reads this element
    tl.store(slab_ptrs, tl.zeros((BLOCK_R, BLOCK_D), tl.float32), mask=inside)
    if HAS_SCALE:
        x *= tl.load(scale_ptr)
    tl.store(dc_ptr + home[:, None] * stride_dc + d[None, :], round_to(x, dc_ptr.dtype.element_ty), mask=inside)


def scatter_rows(slab: Tensor, order: Tensor | None, first_class: int, scale: Tensor | None, dc: Tensor) -> None:
    """dc[order[first_class + i]] = slab[i] * scale, rounded to dc's dtype; then slab = 0.

    slab [rows, D] float32; order [V] int64, or None for the identity; scale a float32 scalar on the device, or None; dc [V, D].
    """
    rows, D = slab.shape
    BLOCK_R = 64 if INTERPRETED else 1  # a program costs the interpreter milliseconds
    BLOCK_D = min(1024, power_of_2(D))
    scatter_rows_kernel[(cdiv(rows, BLOCK_R), cdiv(D, BLOCK_D))](
        slab, order, scale, dc, first_class, rows, D, slab.stride(0), dc.stride(0),
        HAS_ORDER=order is not None, HAS_SCALE=scale is not None, BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D,
    )  # fmt: skip
