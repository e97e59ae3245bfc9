"""The classifier's rows in another order, and what the backward needs of them: each tile's mean row, and the largest entries (notebook 09).

Reads c once and writes it once: 4 V D bytes in 16 bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels.blocks import cdiv, power_of_2
from cce.kernels.common import round_to
from cce.kernels.tile_lse import TILE


@triton.jit
def sort_rows_kernel(
    c_ptr, order_ptr, rank_ptr, copy_ptr, mean_ptr, largest_ptr, V, D, stride_cv, stride_cd, stride_copy,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, block_d = tl.program_id(0), tl.program_id(1)
    v = tile * TILE + tl.arange(0, TILE)
    d = block_d * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(order_ptr + v, mask=v < V, other=0)
    tl.store(rank_ptr + row, v, mask=(v < V) & (block_d == 0))
    inside = (v < V)[:, None] & (d < D)[None, :]
    c = tl.load(c_ptr + row[:, None] * stride_cv + d.to(tl.int64)[None, :] * stride_cd, mask=inside, other=0.0)
    tl.store(copy_ptr + v.to(tl.int64)[:, None] * stride_copy + d[None, :], c, mask=inside)
    wide = c.to(tl.float32)
    mean = tl.sum(wide, 0) / min(TILE, V - tile * TILE)
    tl.store(mean_ptr + tile.to(tl.int64) * D + d, round_to(mean, mean_ptr.dtype.element_ty), mask=d < D)
    largest = tl.max(tl.abs(wide), 0).to(tl.int32, bitcast=True)  # of such numbers the bits have the same order
    tl.atomic_max(largest_ptr + d, largest, mask=d < D, sem="relaxed")  # in any order the same


class SortedRows(NamedTuple):
    """What sort_rows makes of c [V, D]; tile t has the TILE rows from t * TILE on, the last one fewer."""

    rows: Tensor  # [V, D]: c[order], for descriptors
    rank: Tensor  # [V] int64: where each class is in the order
    mean_rows: Tensor  # [T, D] in c's dtype: the mean of each tile's rows
    largest: Tensor  # [D] float32: the largest |c| of each feature


def sort_rows(c: Tensor, order: Tensor) -> SortedRows:
    """c [V, D], any strides, in the order [V] int64."""
    V, D = c.shape
    per_16_bytes = 16 // c.element_size()
    rows = c.new_empty(V, cdiv(D, per_16_bytes) * per_16_bytes)[:, :D]
    BLOCK_D = min(128, power_of_2(D))
    grid = (cdiv(V, TILE), cdiv(D, BLOCK_D))
    mean_rows, largest = c.new_empty(grid[0], D), torch.zeros(D, dtype=torch.int32, device=c.device)
    rank = torch.empty_like(order)
    sort_rows_kernel[grid](
        c, order, rank, rows, mean_rows, largest, V, D, *c.stride(), rows.stride(0), TILE=TILE, BLOCK_D=BLOCK_D
    )
    return SortedRows(rows, rank, mean_rows, largest.view(torch.float32))
