"""The backward over the kept (token, vocabulary tile) pairs only (notebook 09).

    pair_gradient   a chunk of one tile's tokens: their logits again, the logit gradient S, kept in a compact buffer [pairs, TILE],
                    and its share of de, S @ c
    tile_gradient   dc of one tile, Sᵀ e over its tokens, plus the tail's part; summed in registers, written once

With softcap S is multiplied by its slope, 1 - (z / cap)²; d_zy comes with it.

The shares of de meet in float32 atomics, which normally add in whatever order they arrive. Here the order does not matter, because no
addition rounds: every share of de[n, d] is first rounded to a multiple of one power of two, chosen so that all sums of such shares fit
float32's 24 bits (Demmel and Nguyen's reproducible summation, with one bin). With u = |d_zy| + |d_rest|, the mass of the token's row of
S, no partial sum is larger than P = u · max_v |c[v, d]| rounded up to a power of two, and the quantum is P · 2^-22.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels.blocks import blocks_for, cdiv
from cce.kernels.common import LOG2E, capped, capped_slope, dot, round_to, store_gradient
from cce.kernels.tile_lse import TILE


@triton.jit
def quantum(bound):
    """(1 / q, q): q = P * 2^-22, P the power of two above bound."""
    exponent = tl.maximum((bound.to(tl.int32, bitcast=True) >> 23) + 1, 23)
    return ((276 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 22) << 23).to(tl.float32, bitcast=True)


@triton.jit
def slab_of_pairs(pair_start_ptr, chunk_start_ptr, first_tile, last_tile, capacity):
    """(pairs before the slab, chunks before it, chunks in it: 0 if it has more pairs than capacity)."""
    pairs, chunks = tl.load(pair_start_ptr + first_tile), tl.load(chunk_start_ptr + first_tile)
    fits = tl.load(pair_start_ptr + last_tile) - pairs <= capacity
    return pairs, chunks, tl.where(fits, tl.load(chunk_start_ptr + last_tile) - chunks, 0)


@triton.jit(do_not_specialize=["first_tile", "last_tile", "capacity"])
def pair_gradient_kernel(
    e_ptr, c_ptr, bias_ptr, order_ptr, position_ptr, lse_ptr, d_zy_ptr, d_rest_ptr, largest_ptr,
    rows_ptr, chunk_tile_ptr, pair_start_ptr, chunk_start_ptr, s_ptr, tail_ptr, de_ptr,
    first_tile, last_tile, capacity, M, V, D, stride_en, stride_ed, stride_cv, stride_cd, stride_de, softcap, unit,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WANT_E: tl.constexpr, KEEP_S: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, OUT_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    base, base_chunk, chunks = slab_of_pairs(pair_start_ptr, chunk_start_ptr, first_tile, last_tile, capacity)
    if pid >= chunks:
        return
    tile = tl.load(chunk_tile_ptr + pid)
    within = pid + base_chunk - tl.load(chunk_start_ptr + tile)
    start_pair, end_pair = tl.load(pair_start_ptr + tile) - base, tl.load(pair_start_ptr + tile + 1) - base
    pair = start_pair + within * CHUNK + tl.arange(0, CHUNK)
    live = pair < end_pair
    n = tl.load(rows_ptr + pair, mask=live, other=0).to(tl.int64)
    v = tile * TILE + tl.arange(0, TILE)
    row = tl.load(order_ptr + v, mask=v < V, other=0)
    d = tl.arange(0, BLOCK_D)
    e_ptrs = e_ptr + n[:, None] * stride_en + d.to(tl.int64)[None, :] * stride_ed
    c_ptrs = c_ptr + row[:, None] * stride_cv + d.to(tl.int64)[None, :] * stride_cd
    # Loaded here, and not where they are needed: the loop hides the wait.
    lse = tl.load(lse_ptr + n, mask=live, other=float("inf"))
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # no other class can be: their logits are all -inf
    d_rest = tl.load(d_rest_ptr + n, mask=live, other=0.0)
    d_zy = tl.load(d_zy_ptr + n, mask=live, other=0.0)
    position = tl.load(position_ptr + n, mask=live, other=-1)
    z = tl.zeros((CHUNK, TILE), tl.float32)
    for start in range(0, D, BLOCK_D):
        e = tl.load(e_ptrs, mask=live[:, None] & (start + d < D)[None, :], other=0.0)
        c = tl.load(c_ptrs, mask=(v < V)[:, None] & (start + d < D)[None, :], other=0.0)
        z = dot(e, c.T, z)
        e_ptrs += BLOCK_D * stride_ed
        c_ptrs += BLOCK_D * stride_cd
    if HAS_BIAS:
        z += tl.load(bias_ptr + row, mask=v < V, other=0.0).to(tl.float32)[None, :]
    if HAS_SOFTCAP:
        z = capped(z, softcap)
    s = tl.exp2((z - lse[:, None]) * LOG2E) * d_rest[:, None]
    if HAS_SOFTCAP:
        s *= capped_slope(z, softcap)
    s = tl.where(position[:, None] == v[None, :], d_zy[:, None], s)
    s = tl.where(live[:, None] & (v < V)[None, :], s, 0.0)
    rounded = round_to(s, e_ptr.dtype.element_ty)
    if KEEP_S:
        tl.store(s_ptr + pair.to(tl.int64)[:, None] * TILE + tl.arange(0, TILE)[None, :], rounded, mask=live[:, None])
    if WANT_E:
        lost = tl.sum(s - rounded.to(tl.float32), 1) * unit  # what rounding took from the row: back at the tile's mean
        tl.store(tail_ptr + tile.to(tl.int64) * M + n, round_to(lost, tail_ptr.dtype.element_ty), mask=live)
        size = tl.abs(d_zy) + tl.abs(d_rest)
        blocks = tl.cdiv(D, OUT_D)
        for i in range(0, blocks):  # from the last feature on: these columns of c were read a moment ago
            out = (blocks - 1 - i) * OUT_D + tl.arange(0, OUT_D)
            out_ptrs = c_ptr + row[:, None] * stride_cv + out.to(tl.int64)[None, :] * stride_cd
            rows_of_c = tl.load(out_ptrs, mask=(v < V)[:, None] & (out < D)[None, :], other=0.0)
            largest = tl.load(largest_ptr + out, mask=out < D, other=0.0)
            share = dot(rounded, rows_of_c, tl.zeros((CHUNK, OUT_D), tl.float32))
            # Not by adding and subtracting a large number: Triton would let the product accumulate on it, and tensor cores truncate.
            per_quantum, q = quantum(size[:, None] * largest[None, :])
            share = tl.floor(share * per_quantum + 0.5) * q
            places = de_ptr + n[:, None] * stride_de + out[None, :]
            tl.atomic_add(places, share, mask=live[:, None] & (out < D)[None, :], sem="relaxed")


@triton.jit(do_not_specialize=["first_tile", "last_tile", "capacity"])
def tile_gradient_kernel(
    e_ptr, s_ptr, order_ptr, rows_ptr, pair_start_ptr, crowded_ptr,
    tail_dc_ptr, weight_ptr, mean_e_ptr, scale_ptr, dc_ptr, dbias_ptr,
    first_tile, last_tile, capacity, V, D, stride_en, stride_ed, stride_dc,
    HAS_MEAN: tl.constexpr, WANT_C: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    blocks_d = tl.cdiv(D, BLOCK_D) if WANT_C else 1
    tile, block_d = first_tile + tl.program_id(0) // blocks_d, tl.program_id(0) % blocks_d
    base = tl.load(pair_start_ptr + first_tile)
    if (tile < tl.load(crowded_ptr)) | (tl.load(pair_start_ptr + last_tile) - base > capacity):
        return
    start, end = tl.load(pair_start_ptr + tile) - base, tl.load(pair_start_ptr + tile + 1) - base
    d = block_d * BLOCK_D + tl.arange(0, BLOCK_D)
    v = tile * TILE + tl.arange(0, TILE)
    row = tl.load(order_ptr + v, mask=v < V, other=0)
    if WANT_C:  # here, and not where it is needed: the loop hides the wait
        tail = tl.load(tail_dc_ptr + tile.to(tl.int64) * D + d, mask=d < D, other=0.0) / min(TILE, V - tile * TILE)
        dc = tl.zeros((TILE, BLOCK_D), tl.float32)
    else:
        dbias = tl.zeros((TILE,), tl.float32)
    for first in range(start, end, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        live = pair < end
        s_ptrs = s_ptr + pair.to(tl.int64)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        s = tl.load(s_ptrs, mask=live[:, None], other=0.0)
        if WANT_C:
            n = tl.load(rows_ptr + pair, mask=live, other=0).to(tl.int64)
            e_ptrs = e_ptr + n[:, None] * stride_en + d.to(tl.int64)[None, :] * stride_ed
            e = tl.load(e_ptrs, mask=live[:, None] & (d < D)[None, :], other=0.0)
            dc = dot(s.T, e, dc)
        else:
            dbias += tl.sum(s.to(tl.float32), 0)
    if WANT_C:
        dc += tail[None, :]
        store_gradient(dc, dc_ptr, stride_dc, row, v < V, d, d < D, weight_ptr, mean_e_ptr, scale_ptr, HAS_MEAN)
    else:
        tl.store(dbias_ptr + row, dbias, mask=v < V)


class Outputs(NamedTuple):
    """What the kernels of this file add to or fill; None where not wanted."""

    de: Tensor | None  # [M, D] float32: must hold nothing but such shares
    dc: Tensor | None  # [V, D]
    dbias: Tensor | None  # [V] float32
    tail: Tensor | None  # [T, M]: for kept pairs, becomes what rounding S took from their rows, times unit
    tail_dc: Tensor | None  # [T, D] float32: the tail's part of dc, a tile's sum
    mean_weight: Tensor | None  # [V] float32; dc[v] += mean_weight[v] mean_e, with label smoothing
    mean_e: Tensor | None  # [D] float32
    scale: Tensor  # a float32 scalar: dc is multiplied by it before it is rounded


class Pairs(NamedTuple):
    """The kept pairs of a slab of tiles, listed by kernels.pair_plan. If they are more than the list has room for, nothing is done."""

    tiles: range
    rows: Tensor  # [capacity] int32: tokens, tile after tile
    chunk_tile: Tensor  # [at least the slab's chunks] int32
    pair_start: Tensor  # [T + 1] int32: running totals over all tiles
    chunk_start: Tensor  # [T + 1] int32
    crowded: Tensor  # [1] int32: the tiles before this one are somebody else's


def pair_gradient(
    e: Tensor, c: Tensor, bias: Tensor | None, order: Tensor, position: Tensor, softcap: float | None, lse_rest: Tensor,
    d_zy: Tensor, d_rest: Tensor, largest: Tensor, pairs: Pairs, unit: float, out: Outputs,
) -> Tensor:  # fmt: skip
    """Adds to out.de; returns S [capacity, TILE] in e's dtype, [0, TILE] if only de is wanted.

    e [M, D], c [V, D] any strides; order [V], position [M] int64; largest [D] float32: the largest |c| of each feature.
    """
    (M, D), V = e.shape, c.shape[0]
    shape = blocks_for("pair_gradient", e)
    keep_s = out.dc is not None or out.dbias is not None
    s = torch.empty(len(pairs.rows) if keep_s else 0, TILE, dtype=e.dtype, device=e.device)
    pair_gradient_kernel[(len(pairs.chunk_tile),)](
        e, c, bias, order, position, lse_rest, d_zy, d_rest, largest,
        pairs.rows, pairs.chunk_tile, pairs.pair_start, pairs.chunk_start, s, out.tail, out.de,
        pairs.tiles.start, pairs.tiles.stop, len(pairs.rows), M, V, D,
        *e.stride(), *c.stride(), 0 if out.de is None else out.de.stride(0), softcap, unit,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None, WANT_E=out.de is not None, KEEP_S=keep_s,
        TILE=TILE, CHUNK=shape.BLOCK_N, BLOCK_D=shape.BLOCK_D, OUT_D=shape.BLOCK_V,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return s


def tile_gradient(e: Tensor, s: Tensor, order: Tensor, pairs: Pairs, out: Outputs) -> None:
    """Fills out.dc and out.dbias for the slab's tiles, from pair_gradient's S."""
    V, D = len(order), e.shape[1]
    shape = blocks_for("tile_gradient", e)

    def launch(blocks_d: int, dc: Tensor | None, dbias: Tensor | None) -> None:
        tile_gradient_kernel[(blocks_d * len(pairs.tiles),)](
            e, s, order, pairs.rows, pairs.pair_start, pairs.crowded,
            out.tail_dc, out.mean_weight, out.mean_e, out.scale, dc, dbias,
            pairs.tiles.start, pairs.tiles.stop, len(pairs.rows), V, D, *e.stride(), 0 if dc is None else dc.stride(0),
            HAS_MEAN=out.mean_e is not None, WANT_C=dc is not None, TILE=TILE,
            CHUNK=shape.BLOCK_N, BLOCK_D=shape.BLOCK_D, num_warps=shape.num_warps, num_stages=shape.num_stages,
        )  # fmt: skip

    if out.dc is not None:
        launch(cdiv(D, shape.BLOCK_D), out.dc, None)
    if out.dbias is not None:  # apart: together, every block of features would read S for it
        launch(1, None, out.dbias)
