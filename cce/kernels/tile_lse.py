"""The forward of the row-gathered algorithm: one product that leaves a map (notebook 09).

    tile_lse[t, n] = log Σ_{v in tile t, v ≠ y_n} exp(e[n] · c[v] + bias[v])

exp(tile_lse - lse_rest) is the share of token n's probability (its target aside) that lies in tile t: the backward reads there which
logits are worth recomputing. With softcap a second map has the tile's gain, the chain rule's factor 1 - (z / cap)² as its softmax sees it.
It is put together of two classes, the tile's largest logit and the log-mean-exp of its others: a sum over all of them would need a second
number per logit, which the registers do not hold.

One program owns BLOCK_N tokens and a strip of the vocabulary, as in lse_forward. But it merges with nobody: a strip's log-sum-exp
goes to a row of its own, and the few rows are summed afterwards in a fixed order. No lock, and the same bits every time.

Memory: 4 bytes per token and tile for a map, PARTIAL_BYTES for the strips' rows. Traffic as lse_forward's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce.kernels import INTERPRETED
from cce.kernels.blocks import blocks_for, cdiv
from cce.kernels.common import LN2, LOG2E, capped, capped_slope, dot, grouped_tile, logaddexp
from cce.kernels.descriptors import aligned, descriptor, descriptors_supported

TILE = 32 if INTERPRETED else 128  # classes a tile: the width of what the backward gathers
STRIP = 4  # blocks of classes a program walks, at least
GROUP = 8  # token blocks that share a strip of c in L2
MERGE_N = 32  # tokens a program merges the strips of
PARTIAL_BYTES = 1_900_000  # for the strips' rows: longer strips where there are many tokens


@triton.jit(do_not_specialize=["M", "strip_blocks"])
def tile_lse_kernel(
    e_desc, c_desc, bias_ptr, targets_ptr, rank_ptr, count_ptr, partial_ptr, tile_lse_ptr, gain_ptr,
    M, V, D, stride_cv, stride_cd, softcap, strip_blocks,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_RANK: tl.constexpr, HAS_COUNT: tl.constexpr,
    C_IS_DESCRIPTOR: tl.constexpr, MAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block_n, strip = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_N), tl.cdiv(V, BLOCK_V * strip_blocks), GROUP)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    targets = tl.load(targets_ptr + n, mask=n < M, other=-1)
    if HAS_RANK:
        targets = tl.load(rank_ptr + targets, mask=(targets >= 0) & (targets < V), other=-1)
    targets = targets.to(tl.int32)
    high = tl.full((BLOCK_N,), float("-inf"), tl.float32)  # running maximum
    total = tl.zeros((BLOCK_N,), tl.float32)  # running sum of exp(z - high)
    end_v = min((strip + 1) * strip_blocks * BLOCK_V, V)
    if HAS_COUNT:  # another number of tokens than was hoped: there is nothing to do
        end_v = tl.where(tl.load(count_ptr) == M, end_v, 0)
    for start_v in range(strip * strip_blocks * BLOCK_V, end_v, BLOCK_V):
        v = start_v + tl.arange(0, BLOCK_V)
        if HAS_BIAS:  # here, and not where it is needed: the loop hides the wait
            bias = tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32)
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
            z += bias[None, :]
        if HAS_SOFTCAP:
            z = capped(z, softcap)
        has_target = tl.max(((targets >= start_v) & (targets < start_v + BLOCK_V)).to(tl.int32)) != 0
        if has_target or start_v + BLOCK_V > V:  # after bias and softcap: masked before, tanh(-inf) would count
            z = tl.where((v >= V)[None, :] | (v[None, :] == targets[:, None]), float("-inf"), z)
        z = tl.reshape(z, (BLOCK_N, BLOCK_V // TILE, TILE))
        tile_high = tl.max(z, 2)
        shift = tl.where(tile_high == float("-inf"), 0.0, tile_high) * LOG2E  # a tile may have nothing but -inf
        p = tl.exp2(z * LOG2E - shift[:, :, None])
        tile_total = tl.sum(p, 2)
        if MAP:
            t = start_v // TILE + tl.arange(0, BLOCK_V // TILE)
            places = t.to(tl.int64)[None, :] * M + n[:, None]
            inside = (n < M)[:, None] & (t * TILE < V)[None, :]
            nothing = tile_total == 0
            filled = tl.where(nothing, 1.0, tile_total)
            tl.store(
                tile_lse_ptr + places, tl.where(nothing, float("-inf"), LN2 * (shift + tl.log2(filled))), mask=inside
            )
            if HAS_SOFTCAP:
                others = tl.maximum(filled - 1, 0.0)  # the largest logit's own term is 1
                classes = tl.minimum(V - t * TILE, TILE)[None, :] - 1
                mean_of_others = tl.where(
                    others > 0, LN2 * (shift + tl.log2(others / tl.maximum(classes, 1))), tile_high
                )
                of_others = others * capped_slope(mean_of_others, softcap)
                gain = (
                    capped_slope(tl.where(nothing, 0.0, tile_high), softcap) + tl.where(others > 0, of_others, 0.0)
                ) / filled
                tl.store(gain_ptr + places, gain, mask=inside)
        new_high = tl.maximum(high, tl.max(tile_high, 1))
        shift_all = tl.where(new_high == float("-inf"), 0.0, new_high) * LOG2E
        of_tiles = tile_total * tl.exp2(
            tile_high * LOG2E - shift_all[:, None]
        )  # not shift, which is 0 where a tile is empty
        total = total * tl.exp2(high * LOG2E - shift_all) + tl.sum(of_tiles, 1)
        high = new_high
    nothing = total == 0
    lse = tl.where(nothing, float("-inf"), high + LN2 * tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(partial_ptr + strip.to(tl.int64) * M + n, lse, mask=n < M)


@triton.jit(do_not_specialize=["M", "strips"])
def merge_strips_kernel(partial_ptr, lse_ptr, M, strips, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """lse[n] = the log-sum-exp of partial[:, n], always in the same order."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lse = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for start in range(0, strips, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        places = partial_ptr + s.to(tl.int64)[:, None] * M + n[None, :]
        part = tl.load(places, mask=(s < strips)[:, None] & (n < M)[None, :], other=float("-inf"))
        high = tl.max(part, 0)
        shift = tl.where(high == float("-inf"), 0.0, high)
        total = tl.sum(tl.exp2((part - shift[None, :]) * LOG2E), 0)
        nothing = total == 0
        part_lse = tl.where(nothing, float("-inf"), shift + LN2 * tl.log2(tl.where(nothing, 1.0, total)))
        lse = logaddexp(lse, part_lse)
    tl.store(lse_ptr + n, lse, mask=n < M)


def tile_lse(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    with_map: bool,
    rank: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(lse_rest [M] float32, tile_lse [T, M] float32, gain [T, M] float16 with softcap); no maps unless with_map.

    e [M, D], c [V, D] (any strides), targets [M] int64, bias [V]. With a rank [V], c's rows and bias are classes in another order, and
    a target's row is rank[target]. T = ceil(V / TILE). -inf where a tile is empty. With a count, an integer on the device, everything is
    undefined and costs nothing unless count[0] is M: so a launch need not wait for the host to know.
    """
    (M, D), V = e.shape, c.shape[0]
    shape = blocks_for("tile_lse", e)
    blocks = cdiv(V, shape.BLOCK_V)
    strip_blocks = max(STRIP, cdiv(blocks, max(1, PARTIAL_BYTES // (4 * M))))
    partial = torch.empty(cdiv(blocks, strip_blocks), M, device=e.device)
    maps = cdiv(V, TILE), M
    tiles = torch.empty(maps, device=e.device) if with_map else None
    gain = torch.empty(maps, device=e.device, dtype=torch.float16) if with_map and softcap is not None else None
    by_descriptor = descriptors_supported(c)
    tile_lse_kernel[(cdiv(M, shape.BLOCK_N) * len(partial),)](
        descriptor(aligned(e), shape.BLOCK_N, shape.BLOCK_D),
        descriptor(c, shape.BLOCK_V, shape.BLOCK_D) if by_descriptor else c,
        bias, targets, rank, count, partial, tiles, gain, M, V, D, *c.stride(), softcap, strip_blocks,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None, HAS_RANK=rank is not None,
        HAS_COUNT=count is not None,        C_IS_DESCRIPTOR=by_descriptor, MAP=with_map,
        TILE=TILE, GROUP=GROUP, **shape._asdict(),
    )  # fmt: skip
    lse = torch.empty(M, device=e.device)
    merge_strips_kernel[(cdiv(M, MERGE_N),)](partial, lse, M, len(partial), BLOCK_S=64, BLOCK_N=MERGE_N)
    return lse, tiles, gain
