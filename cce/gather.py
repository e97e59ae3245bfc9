"""The row-gathered algorithm: less than three products where the softmax is sharp, and nothing lost where it is not (notebook 09).

forward    With gradients to come, the vocabulary is sorted by average logit, and one product leaves lse_rest and a map: the share of each
           token's probability in each vocabulary tile. Without, lse_rest only, in O(M) memory.
backward   The map says what is worth computing. A (token, tile) pair whose gradient mass |d_rest| · share is at most
           eps · R, R = rms(|d_zy| + |d_rest| + |d_zbar| W), is dropped before anything is recomputed, and its mass goes to the tile's
           mean row: every row of the logit gradient keeps its sum. What is kept is computed
             - for every token, in the crowded tiles at the front of the sorted vocabulary: a slab of S, and two products;
             - for the kept tokens of the other tiles only: gathered, chunk by chunk (`kernels.gather_backward`).
           Without a filter, or where most is kept, everything is of the first kind, and exact.

Same inputs, same bits: nothing here depends on the order in which programs run.

Memory beyond the gradients: the map, 2 M T bytes (4 M T in the forward), as much again for the tail's masses, a float32 de of at most a
quarter of the gradients (beyond that, de is made a block of tokens at a time, after dc), and SLAB_SHARE or SLAB_BYTES for slabs.
"""

import contextlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cce.cut import check_device, dense, mean_logit, rows_of, vocabulary_order
from cce.host import HostCopy
from cce.kernels.blocks import blocks_for
from cce.kernels.descriptors import aligned
from cce.kernels.gather_backward import Outputs, Pairs, pair_gradient, tile_gradient
from cce.kernels.logit_gradient import logit_gradient
from cce.kernels.pair_plan import count_pairs, list_pairs, plan_tiles, tail_mass
from cce.kernels.slab_gradient import slab_gradient
from cce.kernels.sort_rows import sort_rows
from cce.kernels.target_logit import target_logit
from cce.kernels.tile_lse import TILE, tile_lse
from cce.kernels.upstream import upstream
from cce.precision import add_product, ieee_float32, weighted_row_sum

DENSE = 0.25  # where tiles keep more of their tokens than this, all tokens together cost less than those
MOSTLY_DENSE = 0.6  # where more than this of all pairs would be computed, all are
UNIT = 1024.0  # tail masses are stored times this, out of float16's subnormal numbers
CANDIDATES = 8  # thresholds tried, each the last one over sqrt(2), until little enough is dropped
SLAB_SHARE = 0.1  # of the gradients' bytes: room for a slab's S and copy of c's rows, or
SLAB_BYTES = 112 << 20  # this much, if it is more
SLAB_CLASSES = 8192  # at most: tensor cores truncate as they add, and between slabs de is added in float32
PAIR_SHARE = 0.6  # of that room where the tail's masses are there as well
DE_SHARE = 0.25  # of the gradients' bytes: a float32 de beyond this is made in blocks of tokens
LONG_BYTES = 56 << 20  # the room then
BLOCK_SHARE = 0.035  # of the gradients' bytes, for what such a block's tokens have in float32 and in the map of masses;
TOKENS = 1024  # it has a multiple of these


class State(NamedTuple):
    """What the forward leaves for the backward, in the sorted vocabulary's order; all empty without a filter."""

    log_share: Tensor  # [T, M] float16: tile_lse - lse_rest
    gain: Tensor  # [T, M] float16 with softcap: the softmax-weighted mean of the chain rule's factor
    order: Tensor  # [V] int64: the classes by falling average logit
    position: Tensor  # [M] int64: where the targets are in that order
    mean_rows: Tensor  # [T, D]: the mean of each tile's rows of c
    largest: Tensor  # [D] float32: the largest |c| of each feature


def empty_state(e: Tensor, c: Tensor, softcap: float | None) -> State:
    """State's shapes and dtypes, for torch.compile's abstract run."""
    M, (V, D) = len(e), c.shape
    T = -(-V // TILE)
    new = lambda dtype, *shape: e.new_empty(shape, dtype=dtype)  # noqa: E731
    gain = new(torch.float16, *((0,) if softcap is None else (T, M)))
    return State(
        new(torch.float16, T, M),
        gain,
        new(torch.int64, V),
        new(torch.int64, M),
        new(c.dtype, T, D),
        new(torch.float32, D),
    )


class Begun:
    """A forward on its way: the vocabulary sorted, if there is to be a map, and the product, whose numbers are None until it is made."""

    def __init__(self, e: Tensor, c: Tensor, bias: Tensor | None, softcap: float | None, with_map: bool):
        (self.bias,), self.c, self.softcap, self.with_map, self.numbers = dense(bias), c, softcap, with_map, None
        self.order = vocabulary_order(e, c, bias) if with_map else None
        self.sorted = sort_rows(c, self.order) if with_map else None

    def product(self, e: Tensor, targets: Tensor, count: Tensor | None = None) -> None:
        """See tile_lse."""
        rows, bias, rank = self.c, self.bias, None
        if self.with_map:
            rows, bias, rank = self.sorted.rows, rows_of(bias, self.order), self.sorted.rank
        self.numbers = tile_lse(e, rows, targets, bias, self.softcap, self.with_map, rank, count)


def begin(e: Tensor, c: Tensor, targets: Tensor, bias, softcap, block_filter, wanted, count: Tensor | None) -> Begun:
    """All of the forward that takes long, launched for the case that all tokens count before the host knows whether they do. e may have
    tokens that do not; then the sorted vocabulary is as good as any, and the product finds count[0] other than M and does nothing."""
    check_device(e, c)
    begun = Begun(e, c, bias, softcap, block_filter.eps is not None and any(wanted))
    begun.product(e, *dense(targets), count)
    return begun


def forward(e, c, targets, bias, softcap, mean_weight, block_filter, wanted, begun=None):
    """The primitive's numbers, and the State, () without a filter or without gradients to come."""
    (targets, bias), state = dense(targets, bias), ()
    if begun is None:
        begun = begin(e, c, targets, bias, softcap, block_filter, wanted, None)
    elif begun.numbers is None:
        begun.product(e, targets)
    (lse_rest, tiles, gain), begun.numbers = begun.numbers, None
    if begun.with_map:
        order, (rank, mean_rows, largest) = begun.order, begun.sorted[1:]
        begun.sorted = None  # its rows go before the map is there twice
        log_share = torch.sub(tiles, lse_rest, out=torch.empty(tiles.shape, dtype=torch.float16, device=e.device))
        position = torch.where(targets >= 0, rank[targets.clamp(min=0)], targets)
        gain = log_share.new_empty(0) if gain is None else gain
        state = State(log_share, gain, order, position, mean_rows, largest)
    z_y = target_logit(e, c, targets, bias, softcap)
    return (z_y, lse_rest, mean_logit(e, c, bias, mean_weight)), state


def backward(
    e, c, targets, bias, softcap, mean_weight, z_y, lse_rest, state, block_filter, wanted, d_zy, d_rest, d_zbar
):
    """Its gradients, exact where `block_filter.eps` is None."""
    with ieee_float32():
        targets, bias, d_zy, d_rest, d_zbar = dense(targets, bias, d_zy, d_rest, d_zbar)
        if softcap is not None:  # the chain rule's factor of the target's logit; 0 stays 0, where z_y is NaN
            d_zy = torch.where(d_zy == 0, 0, d_zy * (1 - (z_y / softcap).square()))
        mean_weight = None if mean_weight is None else mean_weight.float().contiguous()
        total_weight = None if d_zbar is None else mean_weight.sum()
        candidates = 1 if block_filter.most is None else CANDIDATES
        d = upstream(d_zy, d_rest, d_zbar, total_weight, block_filter.eps or 0.0, candidates)
        captured = e.is_cuda and torch.cuda.is_current_stream_capturing()  # then the host cannot read a plan
        state = State(*state) if state and not captured else None
        p = Problem(e, c, targets, bias, softcap, mean_weight, lse_rest, *d[:4], *sizes(e, c), state)
        plan = None if state is None else Plan(p, d.thresholds, block_filter.most, d.total)
        want_e, want_c, want_bias = wanted
        if not want_e or p.block >= len(e):
            return one_pass(p, plan, wanted)
        _, dc, dbias = one_pass(p, plan, (False, want_c, want_bias)) if want_c or want_bias else (None, None, None)
        de = torch.empty(e.shape, dtype=e.dtype, device=e.device)
        for rows in p.blocks():
            q = p.tokens(rows)
            of_block = None if plan is None else Plan(q, plan.threshold, None, d.total)
            de[rows] = one_pass(q, of_block, (True, False, False))[0]
        return de, dc, dbias


def sizes(e: Tensor, c: Tensor) -> tuple[int, int]:
    """(tokens that may have a float32 de and their tail's masses at a time, bytes for a slab)."""
    (M, D), T, size = e.shape, -(-len(c) // TILE), e.element_size()
    gradients = size * (e.numel() + c.numel())
    if 4 * M * D <= DE_SHARE * gradients:
        return M, max(int(SLAB_SHARE * gradients), SLAB_BYTES)
    return max(int(BLOCK_SHARE * gradients) // (4 * D + size * T) // TOKENS, 1) * TOKENS, LONG_BYTES


class Problem(NamedTuple):
    """What every part of the backward reads, for all tokens or a block of them. Upstream gradients are divided by scale."""

    e: Tensor
    c: Tensor
    targets: Tensor
    bias: Tensor | None
    softcap: float | None
    mean_weight: Tensor | None
    lse_rest: Tensor
    d_zy: Tensor
    d_rest: Tensor
    d_zbar: Tensor | None
    scale: Tensor
    block: int  # tokens at a time where something has a number per token and tile, or a float32 row per token
    room: int  # bytes for a slab
    state: State | None

    def blocks(self) -> list[slice]:
        return [slice(first, first + self.block) for first in range(0, len(self.e), self.block)]

    def tokens(self, rows: slice) -> "Problem":
        """The problem of these tokens only."""
        vectors = {name: getattr(self, name) for name in ("e", "targets", "lse_rest", "d_zy", "d_rest", "d_zbar")}
        state = self.state
        if state is not None:
            gain = state.gain[:, rows] if state.gain.numel() else state.gain
            state = state._replace(log_share=state.log_share[:, rows], gain=gain, position=state.position[rows])
        return self._replace(state=state, **{name: None if x is None else x[rows] for name, x in vectors.items()})


class Plan:
    """Where the crowded tiles end, and where the kept pairs of the others are: on the device, and here once slabs() is through.

    The vocabulary is sorted, so the crowded tiles come first: those before `first_tile` are computed for all tokens. It is where the
    sum of (kept pairs - DENSE · M) over the tiles before it is largest, and behind the last tile where MOSTLY_DENSE is passed. The
    threshold is the first of the given ones that drops at most the share `most` of the total gradient mass.
    """

    def __init__(self, p: Problem, thresholds: Tensor, most: float | None, total: Tensor):
        self.p, (T, M) = p, p.state.log_share.shape
        self.chunk = blocks_for("pair_gradient", p.e).BLOCK_N
        self.capacity = min(max(int(PAIR_SHARE * p.room) // (TILE * p.e.element_size()), M), T * M)
        counted = count_pairs(p.state.log_share, p.d_rest, p.state.position, thresholds)
        self.threshold, plan = plan_tiles(
            *counted, thresholds, total, most, M, round(DENSE * M), round(MOSTLY_DENSE * T * M), self.chunk
        )
        self.pair_start, self.chunk_start, self.first_tile = plan.split((T + 1, T + 1, 1))
        self._copy = HostCopy(plan)

    def slabs(self):
        """The kept pairs, as many tiles at a time as have `capacity` of them. The first one hopes that this is all of them, and is launched
        before the host knows; if it is not, the kernels find it, do nothing, and the slabs come one by one."""
        T = len(self.p.state.log_share)
        yield self._pairs(range(T), self.capacity)
        totals = self._copy.wait()  # the one moment at which the host waits for the device
        self.before, first = totals[: T + 1], int(totals[-1])
        self.tiles = range(first, T)
        while self.before[-1] > self.capacity and first < T:
            last = int(np.searchsorted(self.before, self.before[first] + self.capacity, "right")) - 1
            yield self._pairs(range(first, last), int(self.before[last] - self.before[first]))
            first = last

    def _pairs(self, tiles: range, capacity: int) -> Pairs:
        p, starts = self.p, (self.pair_start, self.chunk_start)
        listed = list_pairs(
            p.state.log_share, p.d_rest, p.state.position, self.threshold, *starts, tiles, capacity, self.chunk
        )
        return Pairs(tiles, *listed, *starts, self.first_tile)


@contextlib.contextmanager
def observed():
    """A list that the backwards inside leave a dict in each: the shares of pairs that are computed for all tokens of a crowded tile
    (`crowded`) and pair by pair (`gathered`), and of the gradient's mass that the tail puts back (`dropped`). Costs a few launches."""
    plans: list[dict] = []
    _observers.append(plans)
    try:
        yield plans
    finally:
        _observers[:] = [x for x in _observers if x is not plans]  # remove() would take an equal list


_observers: list[list[dict]] = []


def observe(p: Problem, plan: Plan, tail: "Tail") -> None:
    T, M = p.state.log_share.shape
    gathered, total = int(plan.before[-1]) / (T * M), p.d_rest.abs().sum().item()
    dropped = float(tail.dropped) / total if total else 0.0
    shares = {"crowded": plan.tiles.start / T, "gathered": gathered, "dropped": dropped}
    for plans in _observers:
        plans.append(shares)


def one_pass(p: Problem, plan: Plan | None, wanted) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The wanted gradients with a float32 de for all tokens of p."""
    (M, D), V = p.e.shape, len(p.c)
    want_e, want_c, want_bias = wanted
    sums = Sums(
        torch.zeros(M, D, device=p.e.device) if want_e else None,
        torch.empty(V, D, dtype=p.c.dtype, device=p.c.device) if want_c else None,
        torch.zeros(V, device=p.c.device) if want_bias else None,
        weighted_row_sum(p.e, p.d_zbar) if want_c and p.d_zbar is not None else None,
    )
    if plan is None:
        add_all(p, sums)
    else:
        tail = Tail(p, plan, sums)
        add_kept(p, plan, tail, sums)
        if _observers:
            observe(p, plan, tail)
        if not plan.tiles:
            del tail
            add_all(p, sums)
        else:
            add_crowded(p, plan, tail, sums)
            if want_e:  # only now: while pairs are added, its sums must be free of rounding
                add_product(sums.de, tail.mass.T, p.state.mean_rows, 1 / UNIT)
            del tail
    return sums.finish(p)


class Sums(NamedTuple):
    """The gradients in the making; None where not wanted."""

    de: Tensor | None  # [M, D] float32, over scale
    dc: Tensor | None  # [V, D] in c's dtype, finished tile by tile
    dbias: Tensor | None  # [V] float32, over scale
    mean_e: Tensor | None  # [D] float32, over scale: with label smoothing dc[v] += mean_weight[v] * mean_e

    def finish(self, p: Problem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        de, dbias = self.de, self.dbias
        if p.d_zbar is not None:
            if de is not None:
                de.addr_(p.d_zbar, weighted_row_sum(p.c, p.mean_weight))
            if dbias is not None:
                dbias += p.mean_weight * p.d_zbar.sum()

        def scaled(x: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.mul(x, p.scale, out=x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype))

        de = None if de is None else scaled(de, p.e.dtype)
        return de, self.dc, None if dbias is None else scaled(dbias, p.bias.dtype)


class Tail:
    """The mass of the dropped pairs, put back at the tile's mean: [T, M] times UNIT, and its parts of dc and dbias.

    A kept pair's place in `mass` is 0, until pair_gradient writes there what rounding took from the pair's row of S; what it took in the
    crowded tiles is all in the first one's.
    """

    def __init__(self, p: Problem, plan: Plan, sums: Sums):
        T = len(p.state.log_share)
        self.dc = torch.zeros(T, p.e.shape[1], device=p.e.device) if sums.dc is not None else None
        dbias = torch.zeros(T, device=p.e.device) if sums.dbias is not None else None
        self.dropped = 0  # their whole mass, where somebody asks
        for rows in p.blocks():
            q = p.tokens(rows)
            gain = q.state.gain if q.state.gain.numel() else None
            self.mass = tail_mass(
                q.state.log_share, gain, q.d_rest, q.state.position, plan.threshold, plan.first_tile, UNIT, p.e.dtype
            )
            if _observers:
                self.dropped += self.mass.abs().sum(dtype=torch.float32) / UNIT
            if self.dc is not None:
                add_product(self.dc, self.mass, q.e, 1 / UNIT)
            if dbias is not None:
                dbias += self.mass.sum(1, dtype=torch.float32) / UNIT
        if sums.de is None:
            self.mass = None
        if dbias is not None:
            sizes = torch.full_like(dbias, TILE)
            sizes[-1] = len(p.c) - TILE * (T - 1)
            self.dbias = (dbias / sizes).repeat_interleave(TILE)[: len(p.c)]


def add_kept(p: Problem, plan: Plan, tail: Tail, sums: Sums) -> None:
    """The kept pairs of the tiles that are not crowded, and the tail."""
    s = p.state
    out = Outputs(sums.de, sums.dc, sums.dbias, tail.mass, tail.dc, p.mean_weight, sums.mean_e, p.scale)
    for pairs in plan.slabs():
        logit_gradients = pair_gradient(
            p.e, p.c, p.bias, s.order, s.position, p.softcap, p.lse_rest, p.d_zy, p.d_rest, s.largest, pairs, UNIT, out
        )
        if sums.dc is not None or sums.dbias is not None:
            tile_gradient(p.e, logit_gradients, s.order, pairs, out)
    if sums.dbias is not None:
        sums.dbias[s.order] += tail.dbias


def add_crowded(p: Problem, plan: Plan, tail: Tail, sums: Sums) -> None:
    """The tiles that keep many tokens, for all of them."""
    end = min(plan.tiles.start * TILE, len(p.c))
    lost, most = residual(p, sums), slab_classes(p, int(PAIR_SHARE * p.room), copies=True)
    for first in range(0, end, most):
        add_slab(p, p.state.order[first : min(first + most, end)], p.state.position - first, sums, lost)
    if end and lost is not None:
        torch.mul(lost, UNIT, out=tail.mass[0])


def add_all(p: Problem, sums: Sums) -> None:
    """The whole vocabulary in its own order."""
    V, rows = len(p.c), p.c if p.state is None else p.state.mean_rows
    lost, most = residual(p, sums), slab_classes(p, p.room, copies=False)
    for first in range(0, V, most):
        add_slab(p, slice(first, min(first + most, V)), p.targets - first, sums, lost)
    if lost is not None:
        sums.de.addr_(lost, weighted_row_sum(rows) / len(rows))


def residual(p: Problem, sums: Sums) -> Tensor | None:
    """[M] float32, over scale, to hold what rounding S takes from slabs' rows of it. It goes back at a mean row of c."""
    return None if sums.de is None or p.e.dtype == torch.float32 else torch.zeros(len(p.e), device=p.e.device)


def slab_classes(p: Problem, room: int, copies: bool) -> int:
    """Classes per slab, a multiple of TILE: room bytes have S, and a copy of c's rows where they are not in place."""
    (M, D), size = p.e.shape, p.e.element_size()
    return max(min(room // (size * (M + D * copies)), SLAB_CLASSES) // TILE, 1) * TILE


def add_slab(p: Problem, here: slice | Tensor, targets: Tensor, sums: Sums, residual: Tensor | None) -> None:
    """One slab of classes for all tokens: S, then two products. targets are rows of the slab, others are elsewhere."""
    e, c = aligned(p.e), aligned(rows_of(p.c, here))
    s, lost, dbias = logit_gradient(
        e, c, rows_of(p.bias, here), targets, p.softcap, p.lse_rest, p.d_zy, p.d_rest,
        with_lost=residual is not None, with_bias=sums.dbias is not None,
    )  # fmt: skip
    if lost is not None:
        residual.add_(lost)
    if sums.de is not None:
        add_product(sums.de, s, c)
    if sums.dc is not None:
        order, first = (None, here.start) if isinstance(here, slice) else (here, 0)
        slab_gradient(s, e, order, first, p.mean_weight, sums.mean_e, p.scale, sums.dc)
    if sums.dbias is not None:
        sums.dbias[here] = dbias
