"""Which (token, vocabulary tile) pairs of the softmax gradient are worth computing, from the forward's map (notebook 09).

A pair's gradient mass is |d_rest[n]| exp(log_share[t, n]). Pairs above a threshold are kept, and the pair that holds the token's target
always. Three small kernels read the map, one what the first has counted; none of them needs the host:

    count_pairs    how many pairs each of several thresholds would keep, and how much mass it would drop
    plan_tiles     which threshold it is to be, where the crowded tiles end, and where the other tiles' kept pairs are listed
    tail_mass      the mass of every dropped pair, signed: what the tail conserves
    list_pairs     the kept tokens of each tile, in ascending order, and the chunks they are cut into
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels import INTERPRETED
from cce.kernels.blocks import cdiv, power_of_2
from cce.kernels.common import LOG2E, round_to
from cce.kernels.tile_lse import TILE

BLOCK_M = 64 if INTERPRETED else 1024  # tokens a program reads at a time
COUNT_BLOCK_M = 64 if INTERPRETED else 256  # where it keeps a number per token and threshold
BLOCK_T = 4 if INTERPRETED else 1024  # tiles a program reads at a time


@triton.jit
def pair_mass(log_share_ptr, stride, d_rest_ptr, position_ptr, tile, n, M, TILE: tl.constexpr):
    """(gradient mass, the same with d_rest's sign, whether the tile holds the target) of tokens n in a tile."""
    inside = n < M
    share = tl.exp2(
        tl.load(log_share_ptr + tile.to(tl.int64) * stride + n, mask=inside, other=float("-inf")).to(tl.float32) * LOG2E
    )
    d_rest = tl.load(d_rest_ptr + n, mask=inside, other=0.0)
    position = tl.load(position_ptr + n, mask=inside, other=-1)
    owns = (position >= tile * TILE) & (position < (tile + 1) * TILE)
    return share * tl.abs(d_rest), share * d_rest, owns


@triton.jit(do_not_specialize=["M"])
def count_pairs_kernel(
    log_share_ptr, stride, d_rest_ptr, position_ptr, threshold_ptr, count_ptr, dropped_ptr, M, K,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    threshold = tl.load(threshold_ptr + k, mask=k < K, other=0.0)
    count = tl.zeros((BLOCK_K, BLOCK_M), tl.int32)
    dropped = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    for start in range(0, M, BLOCK_M):
        n = start + tl.arange(0, BLOCK_M)
        mass, _, owns = pair_mass(log_share_ptr, stride, d_rest_ptr, position_ptr, tile, n, M, TILE)
        drop = ((mass[None, :] <= threshold[:, None]) & (owns == 0)[None, :]) | (n >= M)[
            None, :
        ]  # NaN is not under anything
        count += (drop == 0).to(tl.int32)
        dropped += tl.where(drop, mass[None, :], 0.0)
    tl.store(count_ptr + k * tl.num_programs(0) + tile, tl.sum(count, 1), mask=k < K)
    tl.store(dropped_ptr + k * tl.num_programs(0) + tile, tl.sum(dropped, 1), mask=k < K)


@triton.jit(do_not_specialize=["M", "T", "most", "crowd", "dense"])
def plan_tiles_kernel(
    count_ptr, dropped_ptr, threshold_ptr, total_ptr, chosen_ptr, plan_ptr, M, T, K, most, crowd, dense,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    dropped = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        inside = (k < K)[:, None] & (t < T)[None, :]
        dropped += tl.sum(tl.load(dropped_ptr + k[:, None] * T + t[None, :], mask=inside, other=0.0), 1)
    too_much = (dropped > most * tl.load(total_ptr)) | (k >= K)
    chosen = tl.min(tl.where(too_much, BLOCK_K, k), 0)
    everything = chosen == BLOCK_K  # even the last one drops too much: nothing is under -1
    count_ptr += tl.where(everything, 0, chosen) * T
    tl.store(chosen_ptr, tl.where(everything, -1.0, tl.load(threshold_ptr + tl.where(everything, 0, chosen))))

    first = tl.full((), 0, tl.int32)  # the boundary: where Σ (count - crowd) over the tiles before it is largest
    saved = tl.full((), 0, tl.int64)
    best = tl.full((), 0, tl.int64)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        count = tl.load(count_ptr + t, mask=t < T, other=0)
        count = tl.where(everything, M, count).to(tl.int64)
        sums = saved + tl.cumsum(tl.where(t < T, count - crowd, 0), 0)
        saved += tl.sum(tl.where(t < T, count - crowd, 0), 0)
        high = tl.max(sums, 0)  # behind T the sum stays what it was at T
        first = tl.where(high > best, tl.min(tl.where(sums == high, t, T), 0) + 1, first)
        best = tl.maximum(high, best)
    kept = (saved + crowd * T.to(tl.int64)) - (best + crowd * first.to(tl.int64))
    first = tl.where(kept + M * first.to(tl.int64) > dense, T, first)
    tl.store(plan_ptr + 2 * T + 2, first)

    pairs = tl.full((), 0, tl.int32)
    chunks = tl.full((), 0, tl.int32)
    tl.store(plan_ptr, pairs)
    tl.store(plan_ptr + T + 1, chunks)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        count = tl.load(count_ptr + t, mask=t < T, other=0)
        count = tl.where((t >= first) & (t < T), tl.where(everything, M, count), 0)
        of_chunks = (count + CHUNK - 1) // CHUNK
        tl.store(plan_ptr + t + 1, pairs + tl.cumsum(count, 0), mask=t < T)
        tl.store(plan_ptr + T + 2 + t, chunks + tl.cumsum(of_chunks, 0), mask=t < T)
        pairs += tl.sum(count, 0)
        chunks += tl.sum(of_chunks, 0)


@triton.jit(do_not_specialize=["M"])
def tail_mass_kernel(
    log_share_ptr, gain_ptr, stride, d_rest_ptr, position_ptr, threshold_ptr, first_tile_ptr, tail_ptr, M, unit,
    HAS_GAIN: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mass, signed, owns = pair_mass(log_share_ptr, stride, d_rest_ptr, position_ptr, tile, n, M, TILE)
    drop = (mass <= tl.load(threshold_ptr)) & (owns == 0) & (tile >= tl.load(first_tile_ptr))
    place = tile.to(tl.int64) * M + n
    if HAS_GAIN:
        signed *= tl.load(gain_ptr + tile.to(tl.int64) * stride + n, mask=n < M, other=0.0).to(tl.float32)
    tl.store(tail_ptr + place, round_to(tl.where(drop, signed * unit, 0.0), tail_ptr.dtype.element_ty), mask=n < M)


@triton.jit(do_not_specialize=["M", "first_tile", "capacity"])
def list_pairs_kernel(
    log_share_ptr, stride, d_rest_ptr, position_ptr, threshold_ptr, pair_start_ptr, chunk_start_ptr, rows_ptr, chunk_tile_ptr,
    M, first_tile, capacity, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    tile = first_tile + tl.program_id(0)
    base = tl.load(pair_start_ptr + first_tile)  # of this slab's lists
    first_chunk = tl.load(chunk_start_ptr + first_tile)
    start, end = tl.load(pair_start_ptr + tile), tl.load(pair_start_ptr + tile + 1)
    if (end > start) & (end - base <= capacity):
        threshold = tl.load(threshold_ptr)
        place = start - base
        for start_n in range(0, M, BLOCK_M):
            n = start_n + tl.arange(0, BLOCK_M)
            mass, _, owns = pair_mass(log_share_ptr, stride, d_rest_ptr, position_ptr, tile, n, M, TILE)
            keep = (((mass <= threshold) & (owns == 0)) == 0) & (n < M)
            rank = tl.cumsum(keep.to(tl.int32), 0)
            tl.store(rows_ptr + place + rank - 1, n, mask=keep)
            place += tl.sum(keep.to(tl.int32))
        chunk = tl.load(chunk_start_ptr + tile) - first_chunk
        for i in range(0, (end - start + CHUNK - 1) // CHUNK):
            tl.store(chunk_tile_ptr + chunk + i, tile)


def count_pairs(log_share: Tensor, d_rest: Tensor, position: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """(count [K, T] int32, dropped mass [K, T] float32) for K thresholds (float32, on the device).

    log_share [T, M] float16 (columns contiguous), d_rest [M] float32, position [M] int64: where each token's target is in the map's order.
    """
    (T, M), K = log_share.shape, len(thresholds)
    count = torch.empty(K, T, dtype=torch.int32, device=log_share.device)
    dropped = torch.empty(K, T, device=log_share.device)
    count_pairs_kernel[(T,)](
        log_share, log_share.stride(0), d_rest, position, thresholds, count, dropped, M, K,
        TILE=TILE, BLOCK_K=power_of_2(K), BLOCK_M=COUNT_BLOCK_M,
    )  # fmt: skip
    return count, dropped


def plan_tiles(
    count: Tensor,
    dropped: Tensor,
    thresholds: Tensor,
    total: Tensor,
    most: float | None,
    M: int,
    crowd: int,
    dense: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(threshold [1] float32, plan [2 T + 3] int32), from count_pairs of M tokens.

    threshold is the first of the thresholds that drops at most this share of total, a float32 scalar on the device (None: the first), or -1
    if none does. The crowded tiles are those before `first`, where the sum of (count - crowd) over the tiles before it is largest: all
    tiles, if more than `dense` pairs were to be computed otherwise. plan is the running totals [T + 1] of the other tiles' pairs, those
    [T + 1] of their chunks, and `first`.
    """
    K, T = count.shape
    threshold, plan = dropped.new_empty(1), count.new_empty(2 * T + 3)
    plan_tiles_kernel[(1,)](
        count, dropped, thresholds, total, threshold, plan, M, T, K, math.inf if most is None else float(most), crowd, dense,
        CHUNK=chunk, BLOCK_K=power_of_2(K), BLOCK_T=BLOCK_T,
    )  # fmt: skip
    return threshold, plan


def tail_mass(
    log_share: Tensor, gain: Tensor | None, d_rest: Tensor, position: Tensor, threshold: Tensor, first_tile: Tensor,
    unit: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[T, M] in dtype: d_rest · share (· gain) · unit of the pairs under the threshold, 0 for the others and before first_tile."""
    T, M = log_share.shape
    tail = torch.empty(T, M, dtype=dtype, device=log_share.device)
    tail_mass_kernel[(T, cdiv(M, BLOCK_M))](
        log_share, gain, log_share.stride(0), d_rest, position, threshold, first_tile, tail, M, unit,
        HAS_GAIN=gain is not None, TILE=TILE, BLOCK_M=BLOCK_M,
    )  # fmt: skip
    return tail


def list_pairs(
    log_share: Tensor, d_rest: Tensor, position: Tensor, threshold: Tensor, pair_start: Tensor, chunk_start: Tensor,
    tiles: range, capacity: int, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(token of each pair int32, tile of each chunk int32), for as many of the tiles, from the first on, as have capacity pairs.

    pair_start, chunk_start [T + 1] int32 on the device: running totals over all tiles. What is behind the last pair and chunk is undefined.
    """
    rows = torch.empty(capacity, dtype=torch.int32, device=log_share.device)
    chunk_tile = torch.empty(capacity // chunk + len(tiles), dtype=torch.int32, device=log_share.device)
    list_pairs_kernel[(len(tiles),)](
        log_share, log_share.stride(0), d_rest, position, threshold, pair_start, chunk_start, rows, chunk_tile,
        log_share.shape[1], tiles.start, capacity, CHUNK=chunk, TILE=TILE, BLOCK_M=BLOCK_M,
    )  # fmt: skip
    return rows, chunk_tile
