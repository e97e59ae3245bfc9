"""Every kernel, and every small piece that kernels share, against a few lines of float64 or NumPy.

On a machine with a GPU the same tests run there, compiled; shapes follow the block shapes, so they stay a few tiles either way.
"""

import itertools
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton's wheels exist for Linux only")
import triton
import triton.language as tl

from cce import cut
from cce.kernels import backward, blocks, gather_backward, lse_forward, pair_plan, tile_lse, upstream
from cce.kernels.common import capped, capped_slope, grouped_tile, logaddexp, round_to
from cce.kernels.descriptors import aligned, descriptors_supported
from cce.kernels.logit_gradient import logit_gradient
from cce.kernels.lse_forward import STRIP
from cce.kernels.scatter_rows import scatter_rows
from cce.kernels.slab_gradient import slab_gradient
from cce.kernels.sort_rows import sort_rows
from cce.kernels.target_facts import target_facts
from cce.kernels.target_logit import target_logit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan


def blocks_of(kernel, dtype=torch.float32):
    return blocks.blocks_for(kernel, torch.empty(1, dtype=dtype, device=DEVICE))


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def problem(M, D, V, dtype=torch.float32):
    """e [M, D], c [V, D] with logits of order one, bias [V], targets [M]."""
    targets = torch.randint(V, (M,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return (
        randn(M, D, seed=1, dtype=dtype),
        randn(V, D, seed=2, dtype=dtype) / 4,
        randn(V, seed=4, dtype=dtype),
        targets,
    )


def logits64(e, c, bias=None, softcap=None):
    z = e.double() @ c.double().T + (0 if bias is None else bias.double())
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def summation_error(e, c):
    """What float32 sums of e · c may be off by, per token: a few roundings of Σ_d |e_d c_d|. One TF32 product is off by 100 times that."""
    return 2**-18 * (e.double().abs() @ c.double().abs().T).amax(1) + 1e-6


def assert_within(actual, expected, tolerance):
    actual, expected = actual.double(), expected.double()
    good = (actual == expected) | ((actual - expected).abs() <= tolerance) | (actual.isnan() & expected.isnan())
    assert good.all(), f"{actual[~good][:8].tolist()} instead of {expected[~good][:8].tolist()}"


def assert_close(actual, expected, tolerance):
    """Relative in norm."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


def layouts(x):
    """x, equal in value, in the memory layouts that callers have: name -> tensor."""
    rows, columns = x.shape
    wide = x.new_full((rows, columns + 5), NAN)
    wide[:, 2 : columns + 2] = x
    padded = x.new_full((rows, columns + 16), NAN)
    padded[:, :columns] = x
    every_other = x.new_full((2 * rows, columns), NAN)
    every_other[::2] = x
    return {
        "contiguous": x,
        "columns of a wider matrix": wide[:, 2 : columns + 2],
        "rows padded": padded[:, :columns],
        "every other row": every_other[::2],
        "transposed": x.T.contiguous().T,
    }


LAYOUTS = list(layouts(torch.zeros(2, 2)))


# ---------------------------------------------------------------------------------------------- target_logit


def target_logit64(e, c, targets, bias=None, softcap=None):
    return logits64(e, c, bias, softcap)[torch.arange(len(e), device=e.device), targets]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "D", "V"), [(1, 1, 1), (17, 16, 5), (33, 300, 70)])
@pytest.mark.parametrize(("with_bias", "softcap"), [(False, None), (True, None), (True, 2.0)])
def test_target_logit(dtype, M, D, V, with_bias, softcap):
    e, c, bias, targets = problem(M, D, V, dtype)
    bias = bias if with_bias else None
    z = target_logit(e, c, targets, bias, softcap)
    assert z.dtype == torch.float32 and z.shape == (M,)
    assert_within(z, target_logit64(e, c, targets, bias, softcap), summation_error(e, c))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_target_logit_takes_any_strides(layout):
    e, c, bias, targets = problem(20, 33, 40)
    z = target_logit(layouts(e)[layout], layouts(c)[layout], targets, bias, None)
    assert_within(z, target_logit64(e, c, targets, bias), summation_error(e, c))


@pytest.mark.parametrize("with_bias", [False, True])
def test_target_logit_of_a_target_elsewhere_is_0_and_of_a_wrong_one_nan(with_bias):
    e, c, bias, targets = problem(20, 33, 40)
    # as addresses 2^62 and -2^40 would be an access violation
    targets[:8] = torch.tensor([-1, -2, 40, -100, 2**62, -(2**40), 2**31, -1])
    z = target_logit(e, c, targets, bias if with_bias else None, None)
    assert_within(z[:8], torch.tensor([0, NAN, NAN, NAN, NAN, NAN, NAN, 0], device=DEVICE), 0)
    expected = target_logit64(e, c, targets.clamp(0, 39), bias if with_bias else None)
    assert_within(z[8:], expected[8:], summation_error(e, c)[8:])


def test_target_logit_does_not_depend_on_other_classes():
    e, c, bias, targets = problem(20, 33, 40)
    others = torch.ones(40, dtype=torch.bool, device=DEVICE).index_fill(0, targets, False)
    expected = target_logit(e, c, targets, bias, None)
    c[others], bias[others] = NAN, NAN
    assert torch.equal(target_logit(e, c, targets, bias, None), expected)


# ---------------------------------------------------------------------------------------------- lse_forward


def lse_rest64(e, c, targets, bias=None, softcap=None):
    z = logits64(e, c, bias, softcap)
    z[torch.arange(len(e), device=e.device)[targets >= 0], targets[targets >= 0]] = -INF
    return z.logsumexp(1)


def check_lse(e, c, targets, bias=None, softcap=None):
    lse = lse_forward.lse_forward(e, c, targets, bias, softcap)
    assert lse.dtype == torch.float32 and lse.shape == (len(e),)
    expected = lse_rest64(e, c, targets, bias, softcap)
    assert_within(lse, expected, summation_error(e, c) + 2**-21 * expected.nan_to_num(0, 0, 0).abs())
    return lse


LSE = blocks_of("lse_forward")
TWO_STRIPS = LSE.BLOCK_V * STRIP + 9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("M", "D", "V"),
    [(1, 8, 2), (5, 16, 70), (LSE.BLOCK_N + 1, 72, LSE.BLOCK_V), (LSE.BLOCK_N - 1, 3, LSE.BLOCK_V + 1)],
)
def test_lse_forward(dtype, M, D, V):
    e, c, _, targets = problem(M, D, V, dtype)
    check_lse(e, c, targets)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_bias", "softcap"), [(True, None), (False, 1.5), (True, 1.5)])
def test_lse_forward_with_bias_and_softcap(dtype, with_bias, softcap):
    e, c, bias, targets = problem(5, 16, LSE.BLOCK_V + 6, dtype)
    check_lse(e, c, targets, bias if with_bias else None, softcap)


def test_lse_forward_merges_strips_and_blocks_of_tokens():
    e, c, bias, targets = problem(LSE.BLOCK_N + 3, 16, TWO_STRIPS)
    check_lse(e, c, targets, bias)


@pytest.mark.parametrize("D", [16, 35])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lse_forward_reads_c_by_descriptor_where_it_can_and_by_pointers_elsewhere(layout, D):
    e, c, _, targets = problem(5, D, 70)
    view = layouts(c)[layout]
    assert descriptors_supported(view) == (D == 16 and layout in ("contiguous", "rows padded", "every other row"))
    check_lse(e, view, targets)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lse_forward_takes_e_of_any_strides(layout):
    e, c, _, targets = problem(5, 35, 70, torch.bfloat16)
    check_lse(layouts(e)[layout], c, targets)


def test_lse_forward_leaves_out_the_target_and_nothing_else():
    e, c, _, targets = problem(7, 16, 70)
    c[torch.arange(70), 0] = 0
    c[60:67, 0] = torch.arange(7.0, device=DEVICE) * 10  # the target's logit outweighs all others
    e[:, 0], targets[:] = 10, torch.arange(60, 67)
    check_lse(e, c, targets)
    check_lse(e, c, torch.full_like(targets, -1))  # in another shard: every class counts
    check_lse(e, c, torch.full_like(targets, -2))


def test_lse_forward_of_one_class_is_minus_infinity():
    e, c, _, targets = problem(5, 16, 1)
    assert (lse_forward.lse_forward(e, c, targets, None, None) == -INF).all()
    check_lse(e, c, torch.full_like(targets, -1))


@pytest.mark.parametrize("dead_tile", [0, 1, STRIP])
def test_lse_forward_of_tiles_without_a_possible_class(dead_tile):
    e, c, bias, targets = problem(5, 16, TWO_STRIPS)
    bias[dead_tile * LSE.BLOCK_V : (dead_tile + 1) * LSE.BLOCK_V] = -INF
    targets[:2] = dead_tile * LSE.BLOCK_V
    check_lse(e, c, targets, bias)


@pytest.mark.parametrize("alive", [0, 1])
def test_lse_forward_of_at_most_one_possible_class(alive):
    e, c, bias, targets = problem(5, 16, 70)
    bias[:] = -INF
    bias[3 : 3 + alive], targets[:] = 0, torch.tensor([3, 3, 0, 69, -1])
    assert check_lse(e, c, targets, bias).isinf().tolist() == [True, True, *[alive == 0] * 3]


def test_lse_forward_softcap_makes_an_impossible_class_possible_but_no_padding():
    e, c, bias, targets = problem(5, 16, 70)
    bias[10:] = -INF  # 2 tanh(-inf / 2) = -2, as in PyTorch; the tile's padding beyond V = 70 must not count as -2 too
    check_lse(e, c, targets, bias, 2.0)


def test_lse_forward_of_equal_logits_is_the_log_of_their_number():
    e, c, _, targets = problem(5, 16, TWO_STRIPS)
    c[:] = c[0].clone()
    lse = check_lse(e, c, targets)
    assert_within(lse, logits64(e, c)[:, 0] + math.log(TWO_STRIPS - 1), summation_error(e, c) + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_lse_forward_of_logits_as_large_as_1e4(dtype, sign):
    e, c, _, targets = problem(5, 16, TWO_STRIPS, dtype)
    e[:, 0], c[:, 0] = 100, sign * 100  # every logit near 1e4 or -1e4
    check_lse(e, c, targets)
    c[: TWO_STRIPS // 2, 0] *= -1  # half of them near each
    check_lse(e, c, targets)


@pytest.mark.parametrize("where", ["one logit", "one strip", "all"])
def test_lse_forward_of_nan_is_nan(where):
    e, c, _, targets = problem(5, 16, TWO_STRIPS)
    targets[:] = 0
    c[{"one logit": slice(70, 71), "one strip": slice(STRIP * LSE.BLOCK_V, None), "all": slice(None)}[where]] = NAN
    assert check_lse(e, c, targets).isnan().all()


# ---------------------------------------------------------------------------------------------- backward_slab


def logit_gradient64(e, c, bias, targets, lse_rest, d_zy, d_rest, first_class=0, softcap=None):
    """S [M, V], and where the targets are."""
    z = logits64(e, c, bias, softcap)
    is_target = targets[:, None] == first_class + torch.arange(len(c), device=c.device)
    p = (z - lse_rest.double()[:, None]).exp()
    s = torch.where(is_target, d_zy.double()[:, None], p * d_rest.double()[:, None])
    return s if softcap is None else s * (1 - (z / softcap) ** 2), is_target


def tile_max(values, shape):
    """NumPy's tiles: every entry of [M, V] becomes the maximum of its tile (the last ones may be smaller)."""
    for axis, size in enumerate((shape.BLOCK_N, shape.BLOCK_V)):
        starts = np.arange(0, values.shape[axis], size)
        lengths = np.diff([*starts, values.shape[axis]])
        values = np.maximum.reduceat(values, starts, axis).repeat(lengths, axis)
    return values


def live_entries(softmax, is_target, eps, dtype):
    """The specification of the filter: a tile counts if it holds a target, or a softmax of eps or more."""
    shape = blocks_of("backward", dtype)
    largest = tile_max(softmax.cpu().numpy(), shape)
    assert (np.abs(np.log(largest / eps)) > 1e-4).all(), "float32 may decide this one otherwise: choose another eps"
    return torch.from_numpy((largest >= eps) | tile_max(is_target.cpu().numpy(), shape)).to(DEVICE)


class Backward:
    """A problem for backward_slab, and what it should add to each of its outputs."""

    def __init__(self, M, D, V, dtype=torch.float32, with_bias=False, softcap=None):
        self.e, self.c, bias, self.targets = problem(M, D, V, dtype)
        self.c[:, 0] = 1  # so that de[:, 0] is the sum of each row of the rounded S
        self.bias, self.softcap = bias.float() if with_bias else None, softcap
        self.d_zy, self.d_rest = randn(M, seed=5), randn(M, seed=6)
        self.forward()

    def forward(self):
        self.lse_rest = lse_rest64(self.e, self.c, self.targets, self.bias, self.softcap).float()
        self.lse = logits64(self.e, self.c, self.bias, self.softcap).logsumexp(1)

    def softmax64(self):
        return logits64(self.e, self.c, self.bias, self.softcap).softmax(1)

    def run(self, want="ecbr", eps=None, filter_e=True, filter_c=True, first_class=0, initial=0.0):
        (M, D), V = self.e.shape, len(self.c)
        new = lambda name, *shape: torch.full(shape, initial, device=DEVICE) if name in want else None
        out = new("e", M, D), new("c", V, D), new("b", V), new("r", M)
        cutoff = None
        if eps is not None:  # softmax < eps, in terms of logits
            cutoff = (self.lse + (math.log(eps) if eps else -INF)).float()
        backward.backward_slab(
            self.e, self.c, self.bias, self.targets, self.lse_rest, cutoff, self.d_zy, self.d_rest, first_class,
            self.softcap, filter_e, filter_c, *out,
        )  # fmt: skip
        return out

    def s64(self, first_class=0):
        return logit_gradient64(
            self.e, self.c, self.bias, self.targets, self.lse_rest, self.d_zy, self.d_rest, first_class, self.softcap
        )

    def expected(self, live_e=True, live_c=True, **options):
        """de and dc from S as the tensor cores get it, dbias from S before rounding; the sum of each row of S for residual."""
        s, _ = self.s64(**options)
        rounded = s.to(self.e.dtype).double()
        live_e, live_c = (torch.as_tensor(live, device=DEVICE).expand_as(s) for live in (live_e, live_c))
        de, dc = (rounded * live_e) @ self.c.double(), (rounded * live_c).T @ self.e.double()
        return de, dc, (s * live_c).sum(0), (s * live_e).sum(1)

    def check(self, out, expected, initial=0.0):
        # a 16-bit S: where the kernel's float32 S lies across a rounding boundary from the float64 one, it is an ulp apart
        tolerance = 1e-5 if self.e.dtype == torch.float32 else 5e-4
        for x, o in zip(out[:3], expected[:3]):
            if x is not None:
                assert x.dtype == torch.float32
                assert_close(x - initial, o, tolerance)
        if out[0] is not None and out[3] is not None:
            row_sums = (out[0][:, 0] - initial) + (out[3] - initial)
            assert_within(row_sums, expected[3], 2**-18 * self.s64()[0].abs().sum(1).max() + 2**-20 * abs(initial))


B16 = blocks_of("backward", torch.bfloat16)
B32 = blocks_of("backward", torch.float32)
RAGGED = [(1, 8, 2), (B16.BLOCK_N - 1, 16, B16.BLOCK_V), (B16.BLOCK_N + 1, B16.BLOCK_D + 8, B16.BLOCK_V + 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "D", "V"), RAGGED)
def test_backward(dtype, M, D, V):
    b = Backward(M, D, V, dtype)
    b.check(b.run(), b.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_bias", "softcap"), [(True, None), (False, 1.5), (True, 1.5)])
def test_backward_with_bias_and_softcap(dtype, with_bias, softcap):
    b = Backward(7, 16, B16.BLOCK_V + 6, dtype, with_bias, softcap)
    b.check(b.run(), b.expected())


@pytest.mark.parametrize("want", ["e", "c", "b", "er", "cb", "ecb"])
def test_backward_makes_only_what_is_wanted(want):
    b = Backward(7, 16, B16.BLOCK_V + 6, torch.bfloat16, with_bias=True)
    b.check(b.run(want), b.expected())


@pytest.mark.parametrize("locked", [True, False])
def test_backward_adds_to_what_is_there(monkeypatch, locked):
    monkeypatch.setattr("cce.kernels.backward.under_locks", lambda device: locked)
    b = Backward(B32.BLOCK_N + 1, 16, B32.BLOCK_V + 1)
    b.check(b.run(initial=1.0), b.expected(), initial=1.0)


def test_backward_collects_what_rounding_took_from_each_row():
    b = Backward(7, 16, 70, torch.bfloat16)
    s, _ = b.s64()
    de, _, _, residual = b.run()
    assert_within(residual, s.sum(1) - de[:, 0].double(), 2**-18 * s.abs().sum(1))  # c[:, 0] is 1
    assert residual.abs().max() > 1e-4


def test_backward_reads_rows_that_are_padded():
    b = Backward(7, 16, 70, torch.bfloat16)
    expected = b.expected()
    b.e, b.c = layouts(b.e)["rows padded"], layouts(b.c)["rows padded"]
    b.check(b.run(), expected)


@pytest.mark.parametrize("with_filter", [False, True])
def test_backward_of_slabs_is_that_of_the_whole(with_filter):
    b, eps = filtered(torch.float32)
    live = live_entries(b.softmax64(), b.s64()[1], eps, torch.float32) if with_filter else True
    de, dc, dbias, _ = b.expected(live, live)
    parts, whole = [], b.c
    for first in range(0, len(whole), B32.BLOCK_V):
        b.c = whole[first : first + B32.BLOCK_V]
        parts.append(b.run("ecb", eps if with_filter else None, first_class=first))
    assert_close(sum(part[0] for part in parts), de, 1e-5)
    assert_close(torch.cat([part[1] for part in parts]), dc, 1e-5)
    assert_close(torch.cat([part[2] for part in parts]), dbias, 1e-5)


def test_backward_of_a_target_elsewhere_ignores_d_zy():
    b = Backward(7, 16, 70)
    # 70 is the first class of the next slab, and a column of padding in this slab's last tile
    b.targets[:] = torch.tensor([-1, -2, 70, 1000, -1, 5, 6])
    inside = torch.tensor([0, 0, 0, 0, 0, 1, 1], dtype=torch.bool, device=DEVICE)
    b.lse_rest = lse_rest64(b.e, b.c, torch.where(inside, b.targets, -1)).float()
    b.d_zy[~inside] = NAN
    b.check(b.run(), b.expected())


def test_backward_of_one_class_is_d_zy_alone():
    b = Backward(5, 16, 1)
    assert (b.lse_rest == -INF).all()
    b.d_rest[:] = 0  # the loss does not depend on lse_rest: softplus(-inf) is flat
    de, dc, dbias, _ = b.run("ecb")
    assert_close(de, b.d_zy.double()[:, None] * b.c.double(), 1e-6)
    assert_close(dc, (b.d_zy.double()[:, None] * b.e.double()).sum(0, keepdim=True), 1e-5)
    assert_close(dbias, b.d_zy.double().sum(0, keepdim=True), 1e-5)


def test_backward_of_impossible_classes_is_0_there():
    b = Backward(5, 16, B32.BLOCK_V + 6, with_bias=True)
    b.bias[: B32.BLOCK_V] = -INF
    b.targets[:] = B32.BLOCK_V + 1
    b.forward()
    out = b.run()
    b.check(out, b.expected())
    assert (out[1][: B32.BLOCK_V] == 0).all() and (out[2][: B32.BLOCK_V] == 0).all()


def test_backward_of_logits_as_large_as_1e4():
    b = Backward(5, 16, 70)
    b.e[:, 1], b.c[:, 1] = 100, 100
    b.forward()
    for x, o in zip(b.run("ecb")[:3], b.expected()):
        assert_close(x, o, 2e-2)  # exp(z - lse) with a float32 z near 1e4: 1e4 * 2^-24 * a few
        assert x.isfinite().all()


# -- the filter


def filtered(dtype):
    """Three by three tiles; in two thirds of them the softmax is 30 times smaller than in the others."""
    shape = blocks_of("backward", dtype)
    M, V = 2 * shape.BLOCK_N + 5, 2 * shape.BLOCK_V + 7
    b = Backward(M, 16, V, dtype)
    row, column = torch.arange(M, device=DEVICE) // shape.BLOCK_N, torch.arange(V, device=DEVICE) // shape.BLOCK_V
    b.e *= 0.3
    b.e[:, 1:4] = torch.nn.functional.one_hot(row, 3).to(dtype)
    b.c[:, 1:4] = (-3.5 * ((torch.arange(3, device=DEVICE) + column[:, None]) % 3 != 0)).to(dtype)
    b.targets[:] = V - 1
    b.targets[shape.BLOCK_N] = 3  # unlikely, but the target is worth its tile
    b.forward()
    return b, 1.5 / V


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("filter_e", "filter_c"), [(True, True), (True, False), (False, True), (False, False)])
def test_filter_skips_exactly_the_tiles_of_its_specification(dtype, filter_e, filter_c):
    b, eps = filtered(dtype)
    _, is_target = b.s64()
    live = live_entries(b.softmax64(), is_target, eps, dtype)
    assert 0.1 < live.double().mean() < 0.9
    assert not torch.equal(live, live_entries(b.softmax64(), is_target & False, eps, dtype))
    for exact, skipped in zip(b.expected()[:2], b.expected(live, live)[:2]):
        assert (skipped - exact).norm() > 1.5e-3 * exact.norm()  # three times what `check` lets pass
    every = torch.ones_like(live)
    expected = b.expected(live if filter_e else every, live if filter_c else every)
    b.check(b.run(eps=eps, filter_e=filter_e, filter_c=filter_c), expected)


@pytest.mark.parametrize("want", ["e", "er", "c", "b", "cb"])
def test_filter_of_one_gradient_alone(want):
    b, eps = filtered(torch.bfloat16)
    live = live_entries(b.softmax64(), b.s64()[1], eps, torch.bfloat16)
    b.check(b.run(want, eps=eps), b.expected(live, live))
    b.check(b.run(want, eps=eps, filter_e=False, filter_c=False), b.expected())


@pytest.mark.parametrize("dtype", DTYPES)
def test_filter_skips_everything_where_nothing_matters(dtype):
    b, _ = filtered(dtype)
    b.targets[:] = -1
    for x in b.run(eps=2.0, initial=1.0):
        assert (x == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_filter_keeps_the_tile_of_a_lone_target(dtype):
    b, shape = filtered(dtype)[0], blocks_of("backward", dtype)
    b.targets[:] = -1
    b.targets[shape.BLOCK_N - 1] = 2 * shape.BLOCK_V - 1  # the last of the middle column's tile in the first row
    b.forward()
    live = torch.zeros_like(b.s64()[1])
    live[: shape.BLOCK_N, shape.BLOCK_V : 2 * shape.BLOCK_V] = True
    de, dc, dbias, residual = out = b.run(eps=2.0)
    b.check(out, b.expected(live, live))
    assert torch.equal((de != 0).any(1), live.any(1)) and torch.equal((dc != 0).any(1), live.any(0))
    assert torch.equal(dbias != 0, live.any(0)) and (residual[~live.any(1)] == 0).all()


def test_filter_skips_nothing_with_a_cutoff_of_0():
    b, _ = filtered(torch.float32)
    b.bias = torch.zeros(len(b.c), device=DEVICE)
    b.bias[: B32.BLOCK_V - 9] = -INF  # -inf is not below -inf
    b.targets[:] = len(b.c) - 1
    b.forward()
    b.check(b.run(eps=0.0), b.expected())


def test_filter_skips_no_nan():
    b = Backward(5, 16, 70)
    b.targets[:] = -1
    cutoff = torch.full((5,), INF, device=DEVICE)
    b.e[2] = NAN
    de = torch.zeros(5, 16, device=DEVICE)
    backward.backward_slab(
        b.e, b.c, None, b.targets, b.lse_rest, cutoff, b.d_zy, b.d_rest, 0, None, True, True, de, None, None, None
    )
    assert de[2].isnan().all()


# ---------------------------------------------------------------------------------------------- scatter_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_order", [False, True])
@pytest.mark.parametrize("scale", [None, 2.0**-7])
@pytest.mark.parametrize("D", [1, 40])
def test_scatter_rows(dtype, with_order, scale, D):
    V, first, rows = 12, 3, 4
    slab, dc = randn(rows, D), torch.full((V, D), NAN, dtype=dtype, device=DEVICE)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1)).to(DEVICE) if with_order else None
    home = (torch.arange(V, device=DEVICE) if order is None else order)[first : first + rows]
    expected = (slab * (scale or 1)).to(dtype)
    scatter_rows(slab, order, first, None if scale is None else torch.tensor(scale, device=DEVICE), dc)
    assert torch.equal(dc[home], expected)
    assert (slab == 0).all()
    others = torch.ones(V, dtype=torch.bool, device=DEVICE).index_fill(0, home, False)
    assert dc[others].isnan().all()


def test_scatter_rows_of_a_part_of_wider_buffers():
    D = 1030  # more than one program a row
    whole, dc = randn(3, D + 2), torch.zeros(5, D + 3, dtype=torch.bfloat16, device=DEVICE)
    expected, edge = whole[:2, :D].bfloat16(), whole[:, D:].clone()
    scatter_rows(whole[:2, :D], None, 1, None, dc[:, :D])
    assert torch.equal(dc[1:3, :D], expected)
    assert (dc[:, D:] == 0).all() and (dc[[0, 3, 4]] == 0).all()
    assert (whole[:2, :D] == 0).all() and torch.equal(whole[:, D:], edge) and (whole[2] != 0).all()


# ---------------------------------------------------------------------------------------------- tile_lse

TILE = tile_lse.TILE
RAGGED_V = blocks_of("tile_lse").BLOCK_V * tile_lse.STRIP + TILE + 9  # two strips; the last block has a ragged tile


def in_tiles(x, fill=0.0):
    """[M, V] -> [M, T, TILE], the last tile filled up."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % TILE), value=fill).unflatten(1, (-1, TILE))


def without_target(z, targets, value):
    here = targets >= 0
    z = z.clone()
    z[here.nonzero()[:, 0], targets[here]] = value
    return z


def check_tile_lse(e, c, targets, bias=None, softcap=None):
    """lse_rest, the map and the gain against torch; returns the map."""
    lse, tiles, gain = tile_lse.tile_lse(e, c, targets, bias, softcap, with_map=True)
    z = without_target(logits64(e, c, bias, softcap), targets, -INF)
    expected = in_tiles(z, -INF).logsumexp(2)
    error = summation_error(e, c)
    assert tiles.dtype == torch.float32 and lse.dtype == torch.float32
    assert_within(tiles.T, expected, error[:, None] + 2**-21 * expected.nan_to_num(0, 0, 0).abs())
    assert_within(lse, z.logsumexp(1), error + 2**-21 * z.logsumexp(1).nan_to_num(0, 0, 0).abs())
    if softcap is None:
        assert gain is None
    else:
        # of the largest logit, and of the others' log-mean-exp, by their shares of the tile
        z, classes = in_tiles(z, -INF), in_tiles(torch.ones_like(z)).sum(2)
        high = z.amax(2)
        others = (z - high[:, :, None]).exp().sum(2) - 1
        slope = lambda x: (1 - (x / softcap) ** 2).nan_to_num(0, 0, 0)
        mean = high + (others / (classes - 1)).log()
        two_classes = (slope(high) + others * slope(mean)).nan_to_num(0) / (1 + others.nan_to_num(0))
        assert_within(gain.T, two_classes, 2**-11 + 8 * error[:, None])  # float16's rounding below 1; slopes and shares
    return tiles


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_bias", "softcap"), [(False, None), (True, None), (False, 1.5), (True, 1.5)])
def test_tile_lse(dtype, with_bias, softcap):
    e, c, bias, targets = problem(blocks_of("tile_lse").BLOCK_N + 3, 16, 2 * TILE + 6, dtype)
    targets[:2] = torch.tensor([-1, -2])
    check_tile_lse(e, c, targets, bias if with_bias else None, softcap)


@pytest.mark.parametrize(
    ("M", "D", "V"), [(1, 1, 1), (5, 13, TILE - 1), (5, 16, TILE), (5, 8, TILE + 1), (3, 70, RAGGED_V)]
)
def test_tile_lse_of_ragged_sizes(M, D, V):
    e, c, bias, targets = problem(M, D, V)
    assert check_tile_lse(e, c, targets, bias).shape == (-(-V // TILE), M)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tile_lse_takes_c_of_any_strides(layout):
    e, c, _, targets = problem(5, 16, 2 * TILE + 6)
    check_tile_lse(layouts(e)[layout], layouts(c)[layout], targets)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dead", [0, 1, RAGGED_V // TILE])
def test_tile_lse_of_a_tile_without_a_possible_class(dead, softcap):
    """-inf, and not NaN; with softcap such a class is possible."""
    e, c, bias, targets = problem(5, 16, RAGGED_V)
    bias[dead * TILE : (dead + 1) * TILE] = -INF
    tiles = check_tile_lse(e, c, targets, bias, softcap)
    assert (tiles[dead] == -INF).all() == (softcap is None)


@pytest.mark.parametrize("high", [-1000.0, 1000.0])
@pytest.mark.parametrize("dead", [0, 1, RAGGED_V // TILE])
def test_tile_lse_of_a_tile_without_a_possible_class_among_extreme_logits(dead, high):
    """exp(-high) is no float32: neither what is empty nor the padding of the last block may meet it."""
    e, c, bias, targets = problem(5, 16, RAGGED_V)
    bias += high
    bias[dead * TILE : (dead + 1) * TILE] = -INF
    assert (check_tile_lse(e, c, targets, bias)[dead] == -INF).all()


def test_tile_lse_of_a_target_alone_in_its_tile():
    e, c, bias, targets = problem(5, 16, 2 * TILE + 1)
    targets[:] = 2 * TILE
    assert (check_tile_lse(e, c, targets, bias)[2] == -INF).all()
    _, _, gain = tile_lse.tile_lse(e, c, targets, bias, 2.0, with_map=True)
    assert gain.isfinite().all()  # times a mass of 0


def test_tile_lse_of_a_sorted_vocabulary():
    """Rows of c in another order: a target's row is its rank; nothing else changes."""
    e, c, bias, targets = problem(7, 16, 2 * TILE + 6)
    targets[:2] = torch.tensor([-1, -2])
    order = torch.randperm(len(c), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rank = order.argsort()
    rows = c[order], torch.where(targets >= 0, rank[targets.clamp(min=0)], targets), bias[order]
    want = tile_lse.tile_lse(e, *rows, None, with_map=True)
    got = tile_lse.tile_lse(e, rows[0], targets, rows[2], None, with_map=True, rank=rank)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_tile_lse_of_nan_is_nan_in_its_tile_only():
    e, c, _, targets = problem(5, 16, 3 * TILE)
    c[TILE + 3] = NAN
    targets[:] = 0
    lse, tiles, _ = tile_lse.tile_lse(e, c, targets, None, None, with_map=True)
    assert lse.isnan().all() and tiles[1].isnan().all() and tiles[[0, 2]].isfinite().all()


def test_tile_lse_of_another_number_of_tokens_does_nothing():
    e, c, bias, targets = problem(5, 16, RAGGED_V)
    count = lambda n: torch.tensor([n, -7, 7], device=DEVICE)
    want = tile_lse.tile_lse(e, c, targets, bias, None, with_map=True)
    got = tile_lse.tile_lse(e, c, targets, bias, None, with_map=True, count=count(5))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    lse, _, _ = tile_lse.tile_lse(e, c, targets, bias, None, with_map=True, count=count(4))
    assert (lse == -INF).all()


@pytest.mark.parametrize("budget", [0, 10**9], ids=["one strip", "many strips"])
def test_tile_lse_with_and_without_a_map_in_strips_of_any_length(monkeypatch, budget):
    """The map does not depend on the strips, and lse_rest without a map is the same bits."""
    monkeypatch.setattr(tile_lse, "PARTIAL_BYTES", budget)
    e, c, bias, targets = problem(3, 16, RAGGED_V)
    check_tile_lse(e, c, targets, bias)
    first, _, _ = tile_lse.tile_lse(e, c, targets, bias, None, with_map=True)
    second, tiles, gain = tile_lse.tile_lse(e, c, targets, bias, None, with_map=False)
    assert torch.equal(first, second) and tiles is None and gain is None


@pytest.mark.parametrize("strips", [1, 2, 64, 65, 200])
def test_merge_strips(strips):
    M = tile_lse.MERGE_N + 5
    partial = 20 * randn(strips, M)
    partial[:, 1], partial[strips // 2 :, 2], partial[-1, 3] = -INF, -INF, NAN
    lse = torch.empty(M, device=DEVICE)
    grid = (-(-M // tile_lse.MERGE_N),)
    tile_lse.merge_strips_kernel[grid](partial, lse, M, strips, BLOCK_S=64, BLOCK_N=tile_lse.MERGE_N)
    expected = partial.double().logsumexp(0)
    assert expected[1] == -INF and expected[3].isnan()
    assert_within(lse, expected, 2**-21 * expected.nan_to_num(0, 0, 0).abs() + 2**-20)


# ---------------------------------------------------------------------------------------------- sort_rows

ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "D"), [(1, 1), (TILE + 1, 13), (2 * TILE, 140)])
def test_sort_rows(dtype, V, D):
    c = randn(V, D, dtype=dtype)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows, rank, mean_rows, largest = sort_rows(c, order)
    assert torch.equal(rows, c[order]) and descriptors_supported(rows)
    assert torch.equal(rank[order], torch.arange(V, device=DEVICE))
    expected = torch.stack([tile.double().mean(0) for tile in c[order].split(TILE)])
    assert mean_rows.dtype == dtype
    assert_within(mean_rows, expected, ROUNDOFF[dtype] * expected.abs() + 1e-6)
    assert torch.equal(largest, c.float().abs().amax(0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sort_rows_takes_any_strides(layout):
    c = randn(TILE + 3, 20)
    order = torch.arange(len(c), device=DEVICE).flip(0)
    got, want = sort_rows(layouts(c)[layout], order), sort_rows(c, order)
    for name in ("rows", "rank", "largest"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    assert_within(
        got.mean_rows, want.mean_rows.double(), torch.full_like(want.mean_rows, 2**-20)
    )  # added in another order


def test_sort_rows_finds_the_largest_of_a_feature_in_any_tile():
    c = torch.zeros(3 * TILE, 5, device=DEVICE)
    c[1, 0], c[2 * TILE, 1], c[TILE + 3, 2], c[-1, 3] = -3.0, 4.0, 1e-40, -INF
    order = torch.arange(len(c), device=DEVICE).flip(0)
    assert torch.equal(sort_rows(c, order).largest, c.abs().amax(0))


# ---------------------------------------------------------------------------------------------- pair_plan


class Plan:
    """A random map, and in float64 what of it is kept and dropped. Token 1 has no gradient, (0, 2) is NaN, tile 2 is empty for some."""

    def __init__(self, T=5, M=2 * pair_plan.BLOCK_M + 5):
        self.log_share = (4 * randn(T, M) - 6).clamp(max=0).half()
        self.log_share[0, 2], self.log_share[2, ::3] = NAN, -INF
        self.d_rest = randn(M, seed=1)
        self.d_rest[1] = 0
        self.position = torch.randint(-2, T * TILE, (M,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
        self.signed = self.log_share.double().exp() * self.d_rest.double()
        self.owns = torch.arange(T, device=DEVICE)[:, None] == self.position.div(TILE, rounding_mode="floor")
        self.map = self.log_share, self.d_rest, self.position

    def dropped(self, threshold):
        mass = self.signed.abs()
        assert ((mass - threshold).abs() > 1e-5 * threshold)[mass > 0].all(), "float32 may decide this one otherwise"
        return (mass <= threshold) & ~self.owns


def test_count_pairs():
    p, thresholds = Plan(), [0.0, 1e-4, 3e-3, 0.1, 1e9]
    count, mass = pair_plan.count_pairs(*p.map, torch.tensor(thresholds, device=DEVICE))
    dropped = torch.stack([p.dropped(threshold) for threshold in thresholds])
    assert torch.equal(count, (~dropped).sum(2).int())
    expected = torch.where(dropped, p.signed.abs(), 0).sum(2)
    assert_within(mass, expected, 1e-5 * expected)


def test_count_pairs_keeps_all_under_a_threshold_of_minus_1_or_nan():
    p = Plan()
    count, mass = pair_plan.count_pairs(*p.map, torch.tensor([-1.0, NAN], device=DEVICE))
    assert (count == len(p.d_rest)).all() and (mass == 0).all()


@pytest.mark.parametrize("most", [None, 0.5, 0.1, 0.01, 0.0])
@pytest.mark.parametrize("crowd", [-1, 20, 60, 1000])
@pytest.mark.parametrize("T", [1, pair_plan.BLOCK_T, 2 * pair_plan.BLOCK_T + 3])
@pytest.mark.parametrize("share", [0.3, 2])
def test_plan_tiles(T, crowd, most, share):
    """Against a search by hand. Two tiles gain the same: the boundary is behind the first of them."""
    g, M, chunk, K = torch.Generator().manual_seed(T), 100, 16, 3
    count = torch.randint(0, M, (K, T), generator=g).int()
    count[:, T // 2 :] //= 3
    dropped = torch.tensor([[0.4], [0.05], [0.002]]) * torch.rand(K, T, generator=g)
    thresholds, total, dense = torch.tensor([0.5, 0.25, 0.125]), float(T), round(share * T * M)
    threshold, plan = pair_plan.plan_tiles(
        *(x.to(DEVICE) for x in (count, dropped, thresholds, torch.tensor(total))), most, M, crowd, dense, chunk
    )
    little = [k for k in range(K) if most is None or dropped[k].sum() <= most * total]
    kept = count[little[0]].tolist() if little else [M] * T
    assert threshold.tolist() == [thresholds[little[0]].item() if little else -1]
    saved = [sum(kept[:t]) - t * crowd for t in range(T + 1)]
    first = saved.index(max(saved))
    first = T if first * M + sum(kept[first:]) > dense else first
    kept = [0] * first + kept[first:]
    pairs, chunks = ([sum(x[:t]) for t in range(T + 1)] for x in (kept, [-(-k // chunk) for k in kept]))
    assert plan.tolist() == [*pairs, *chunks, first]


# ---------------------------------------------------------------------------------------------- upstream


def upstream_gradients(factor, M=2 * upstream.BLOCK_M + 5):
    return [factor * randn(M, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("factor", [1.0, 3e-30, 2.0**100])  # squares would not have float32's range
@pytest.mark.parametrize("with_mean", [False, True])
def test_upstream(with_mean, factor):
    d = upstream_gradients(factor)
    weight = torch.tensor(7.0, device=DEVICE) if with_mean else None
    got = upstream.upstream(d[0], d[1], d[2] if with_mean else None, weight, 0.1, 5)
    d = d if with_mean else d[:2]
    largest, scale = max(x.abs().max().item() for x in d), got.scale.item()
    assert math.frexp(scale)[0] == 0.5 and scale <= largest < 2 * scale
    assert got.d_zbar is None or with_mean
    for x, y in zip(d, got, strict=False):
        assert torch.equal(y * scale, x)  # exactly
    size = (d[0].double().abs() + d[1].double().abs() + (7 * d[2].double().abs() if with_mean else 0)) / scale
    assert got.total.item() == pytest.approx((d[1].double().abs() / scale).sum().item(), rel=1e-5)
    top = 0.1 * size.square().mean().sqrt().item()
    assert got.thresholds.tolist() == pytest.approx([top / 2 ** (k / 2) for k in range(5)], rel=1e-5)


@pytest.mark.parametrize("value", [0.0, INF])
def test_upstream_gradients_without_a_size_are_not_scaled(value):
    d = torch.full((5,), value, device=DEVICE)
    got = upstream.upstream(d, d, None, None, 0.1, 2)
    assert got.scale == 1 and torch.equal(got.d_zy, d)
    assert got.thresholds.isnan().all() if value else (got.thresholds == 0).all()


@pytest.mark.parametrize("value", [INF, NAN])
def test_one_upstream_gradient_that_is_not_finite_lets_nothing_be_dropped(value):
    d = torch.ones(2 * upstream.BLOCK_M + 5, device=DEVICE)
    broken = d.index_fill(0, torch.tensor([upstream.BLOCK_M], device=DEVICE), value)
    assert upstream.upstream(d, broken, None, None, 0.1, 8).thresholds.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_gain", [False, True])
def test_tail_mass(dtype, with_gain):
    p, unit, first_tile = Plan(), 1024.0, 1
    gain = randn(*p.log_share.shape, seed=3).sigmoid().half() if with_gain else None
    threshold = torch.tensor([3e-3], device=DEVICE)
    tail = pair_plan.tail_mass(
        p.log_share, gain, *p.map[1:], threshold, torch.tensor(first_tile, device=DEVICE), unit, dtype
    )
    dropped = p.dropped(3e-3)
    dropped[:first_tile] = False
    expected = torch.where(dropped, unit * p.signed * (1 if gain is None else gain.double()), 0)
    assert tail.dtype == dtype
    assert_within(tail, expected, (ROUNDOFF[dtype] + 2**-20) * expected.abs() + 2**-24)
    assert not tail[expected == 0].any() and (expected[tail == 0].abs() < 2**-24).all()


def starts_of(kept, chunk):
    """pair_plan's running totals [T + 1] of kept pairs and chunks, from the mask [T, M]."""
    count = kept.sum(1)
    totals = torch.stack((count, (count + chunk - 1) // chunk)).cumsum(1)
    return torch.nn.functional.pad(totals, (1, 0)).int()


@pytest.mark.parametrize("tiles", [range(5), range(2, 5), range(3, 4)], ids=str)
@pytest.mark.parametrize("room", ["enough", "two tiles"])
def test_list_pairs(tiles, room):
    p, chunk = Plan(), 16
    kept = ~p.dropped(3e-3)
    pair_start, chunk_start = starts_of(kept, chunk)
    capacity = int((kept if room == "enough" else kept[tiles.start : tiles.start + 2]).sum())
    listed = range(tiles.start, tiles.stop if room == "enough" else min(tiles.start + 2, tiles.stop))
    rows, chunk_tile = pair_plan.list_pairs(
        *p.map, torch.tensor([3e-3], device=DEVICE), pair_start, chunk_start, tiles, capacity, chunk
    )
    expected = torch.cat([kept[t].nonzero()[:, 0] for t in listed])
    assert rows[: len(expected)].tolist() == expected.tolist()
    chunks = [t for t in listed for _ in range(-(-int(kept[t].sum()) // chunk))]
    assert chunk_tile[: len(chunks)].tolist() == chunks


def test_pair_plan_of_a_block_of_tokens():
    """The map's columns of some tokens, whose rows are further apart than they are long."""
    p, here, chunk = Plan(), slice(3, pair_plan.BLOCK_M + 9), 16
    share, d_rest, position = p.log_share[:, here], p.d_rest[here], p.position[here]
    dropped, threshold = p.dropped(3e-3)[:, here], torch.tensor([3e-3], device=DEVICE)
    count, _ = pair_plan.count_pairs(share, d_rest, position, threshold)
    assert torch.equal(count[0], (~dropped).sum(1).int())
    tail = pair_plan.tail_mass(
        share, None, d_rest, position, threshold, torch.tensor(0, device=DEVICE), 1.0, torch.float32
    )
    assert_within(tail, torch.where(dropped, p.signed[:, here], 0), 1e-8)
    starts = starts_of(~dropped, chunk)
    rows, _ = pair_plan.list_pairs(share, d_rest, position, threshold, *starts, range(5), share.numel(), chunk)
    assert rows[: starts[0, -1]].tolist() == (~dropped).nonzero()[:, 1].tolist()


# ---------------------------------------------------------------------------------------------- gather_backward


@triton.jit
def quantum_kernel(bound_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    per_quantum, q = gather_backward.quantum(tl.load(bound_ptr + i))
    tl.store(out_ptr + i, per_quantum)
    tl.store(out_ptr + SIZE + i, q)


def quanta(bounds):
    """(1 / q, q) of each bound, as the kernel has them."""
    size = triton.next_power_of_2(len(bounds))
    out = torch.empty(2, size, device=DEVICE)
    padded = torch.ones(size).index_put_((torch.arange(len(bounds)),), bounds)
    quantum_kernel[(1,)](padded.to(DEVICE), out, SIZE=size)
    return out[:, : len(bounds)].cpu()


def test_quantum_is_2_to_the_minus_22_of_the_power_of_two_above():
    bounds = torch.tensor([1.0, 1.5, 2.0, 1.9999999, 3e-5, 7e20, 0.0, 1e-40, 1e-36])
    per_quantum, q = quanta(bounds)
    assert torch.equal(per_quantum * q, torch.ones_like(q))
    P = q.double() * 2**22
    assert (P > bounds).all() and (torch.frexp(P)[0] == 0.5).all()
    normal = bounds > 1e-30
    assert (P[normal] <= 2 * bounds[normal]).all()


@pytest.mark.parametrize("seed", range(4))
def test_shares_rounded_to_the_quantum_sum_exactly_in_any_order(seed):
    """At the limit of what a token may have: the bound is used up by shares of one sign, and there are as many as tiles of a large V."""
    g = torch.Generator().manual_seed(seed)
    raw = torch.rand(2000, 3, generator=g) * torch.tensor([1.0, 1e-6, 1e4])
    if seed % 2:
        raw *= torch.randn(2000, 3, generator=g).sign()
    bounds = raw.double().abs().sum(0).float()
    per_quantum, q = quanta(bounds)
    shares = torch.floor(raw * per_quantum + 0.5) * q
    sums = []
    for _ in range(20):
        total = torch.zeros(3)
        for row in shares[torch.randperm(len(shares), generator=g)]:
            total += row
        sums.append(total)
    assert all(torch.equal(total, sums[0]) for total in sums)
    assert torch.equal(sums[0].double(), shares.double().sum(0))
    assert ((sums[0].double() - raw.double().sum(0)).abs() <= 2000 * 0.5 * q.double()).all()


class Gathered:
    """A problem for pair_gradient and tile_gradient: a random mask of kept pairs in a random order of the classes."""

    def __init__(self, M=40, D=24, V=2 * TILE + 6, dtype=torch.float32, with_bias=False, softcap=None, density=0.4):
        g = torch.Generator().manual_seed(9)
        self.e, self.c, bias, targets = problem(M, D, V, dtype)
        self.bias, self.softcap = bias if with_bias else None, softcap
        self.order = torch.randperm(V, generator=g).to(DEVICE)
        self.position = torch.empty_like(self.order)
        self.position[self.order] = torch.arange(V, device=DEVICE)
        self.position = self.position[targets]
        self.position[1:3] = torch.tensor([-1, -2])[: M - 1]
        self.d_zy, self.d_rest = randn(M, seed=5), randn(M, seed=6)
        rows = self.c[self.order], None if self.bias is None else self.bias[self.order]
        self.lse_rest = lse_rest64(self.e, rows[0], self.position, rows[1], softcap).float()
        s, is_target = logit_gradient64(
            self.e, *rows, self.position, self.lse_rest, self.d_zy, self.d_rest, softcap=softcap
        )
        self.s = torch.where(is_target, self.d_zy.double()[:, None], s)  # [M, V] in that order; d_zy has its slope
        self.T = -(-V // TILE)
        self.kept = (torch.rand(self.T, M, generator=g) < density).to(DEVICE)
        self.tail_dc = randn(self.T, D, seed=7)

    def run(self, want="ecb", tiles=None, mean=False, scale=1.0, crowded=0, missing=0):
        """(S, tail, Outputs) after both kernels. missing: by so many pairs the list is too short."""
        (M, D), V, chunk = self.e.shape, len(self.c), blocks_of("pair_gradient", self.e.dtype).BLOCK_N
        tiles = range(self.T) if tiles is None else tiles
        pair_start, chunk_start = starts_of(self.kept, chunk)
        rows = torch.cat([self.kept[t].nonzero()[:, 0] for t in tiles]).int()
        chunk_tile = torch.arange(self.T, device=DEVICE).repeat_interleave(chunk_start.diff())
        chunk_tile = chunk_tile[chunk_start[tiles.start] : chunk_start[tiles.stop]].int()
        rows, more = rows[: len(rows) - missing], torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
        chunk_tile = torch.cat([chunk_tile, more])  # programs without a chunk
        crowded = torch.tensor([crowded], dtype=torch.int32, device=DEVICE)
        pairs = gather_backward.Pairs(tiles, rows, chunk_tile, pair_start, chunk_start, crowded)
        out = gather_backward.Outputs(
            torch.zeros(M, D, device=DEVICE) if "e" in want else None,
            torch.full((V, D), NAN, dtype=self.e.dtype, device=DEVICE) if "c" in want else None,
            torch.full((V,), NAN, device=DEVICE) if "b" in want else None,
            torch.full((self.T, M), 7.0, dtype=self.e.dtype, device=DEVICE) if "e" in want else None,
            self.tail_dc if "c" in want else None,
            randn(V, seed=8) if mean else None,
            randn(D, seed=10) if mean else None,
            torch.tensor(scale, device=DEVICE),
        )
        largest = self.c.float().abs().amax(0)
        arguments = (
            self.e,
            self.c,
            self.bias,
            self.order,
            self.position,
            self.softcap,
            self.lse_rest,
            self.d_zy,
            self.d_rest,
        )
        s = gather_backward.pair_gradient(*arguments, largest, pairs, 1024.0, out)
        if "c" in want or "b" in want:
            gather_backward.tile_gradient(self.e, s, self.order, pairs, out)
        return s, rows, out

    def check(self, tiles=None, mean=False, scale=1.0, **options):
        tiles = range(self.T) if tiles is None else tiles
        s, rows, out = self.run(tiles=tiles, mean=mean, scale=scale, **options)
        V, dtype = len(self.c), self.e.dtype
        live = self.kept.T & torch.isin(torch.arange(self.T, device=DEVICE), torch.tensor(tiles, device=DEVICE))
        live = live.repeat_interleave(TILE, 1)[:, :V]  # [M, V]
        kept = self.s * live
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-4, torch.bfloat16: 3e-3}[
            dtype
        ]  # S's rounding; dc's own, too
        if out.dc is not None or out.dbias is not None:
            expected = torch.cat([in_tiles(self.s)[self.kept[t], t] for t in tiles])
            assert s.dtype == dtype and s.shape == expected.shape
            assert_within(s, expected, (1.01 * ROUNDOFF[dtype] + 1e-5) * expected.abs() + 2**-24)
        if out.de is not None:
            assert_close(out.de, kept @ self.c[self.order].double(), tolerance)
            lost = in_tiles(self.s - self.s.to(dtype).double()).sum(2).T * 1024  # [T, M]
            mine = torch.zeros_like(self.kept)
            mine[tiles.start : tiles.stop] = self.kept[tiles.start : tiles.stop]
            assert (out.tail[~mine] == 7).all()
            if dtype != torch.float32:
                assert_close(
                    out.tail[mine], lost[mine], 0.1
                )  # where S lies across a rounding boundary it is an ulp apart
        inside = slice(tiles.start * TILE, min(tiles.stop * TILE, V))
        sizes = torch.full((self.T,), TILE, device=DEVICE).index_fill(
            0, torch.tensor(self.T - 1, device=DEVICE), V - TILE * (self.T - 1)
        )
        if out.dc is not None:
            dc = kept.T @ self.e.double() + (self.tail_dc.double() / sizes[:, None]).repeat_interleave(TILE, 0)[:V]
            if mean:
                dc += out.mean_weight.double()[self.order, None] * out.mean_e.double()
            dc *= scale
            assert_close(out.dc[self.order][inside], dc[inside], tolerance)
            outside = torch.ones(V, dtype=torch.bool, device=DEVICE)
            outside[inside] = False
            assert out.dc[self.order][outside].isnan().all()
        if out.dbias is not None:
            bound = (1.01 * ROUNDOFF[dtype] + 1e-5) * kept.abs().sum(0)
            assert_within(out.dbias[self.order][inside], kept.sum(0)[inside], bound[inside])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_bias", "softcap"), [(False, None), (True, None), (True, 1.5)])
def test_pair_and_tile_gradient(dtype, with_bias, softcap):
    Gathered(dtype=dtype, with_bias=with_bias, softcap=softcap).check()


@pytest.mark.parametrize(("M", "D", "V"), [(1, 1, 1), (3, 13, TILE - 3), (70, 70, TILE)])
def test_pair_and_tile_gradient_of_ragged_sizes(M, D, V):
    Gathered(M, D, V, density=0.9).check()


@pytest.mark.parametrize("want", ["e", "c", "b", "ec", "cb"])
def test_pair_and_tile_gradient_make_only_what_is_wanted(want):
    Gathered(dtype=torch.bfloat16, with_bias=True).check(want=want)


@pytest.mark.parametrize("tiles", [range(0, 1), range(1, 3)], ids=str)
def test_pair_and_tile_gradient_of_a_slab(tiles):
    Gathered().check(tiles=tiles)


def test_pair_and_tile_gradient_of_tiles_that_keep_nothing_or_everything():
    g = Gathered()
    g.kept[0], g.kept[1] = False, True
    g.check()


def test_tile_gradient_adds_label_smoothings_part_and_multiplies_by_the_scale():
    Gathered(dtype=torch.float16).check(mean=True, scale=2.0**-3)


def test_pair_and_tile_gradient_do_nothing_where_the_list_is_too_short():
    _, _, out = Gathered().run(missing=1)
    assert not out.de.any() and (out.tail == 7).all()
    assert out.dc.isnan().all() and out.dbias.isnan().all()


def test_tile_gradient_leaves_crowded_tiles_alone():
    g = Gathered()
    g.kept[0] = False
    _, _, out = g.run(crowded=1)
    of_tiles = out.dc[g.order].isnan().all(1)
    assert of_tiles[:TILE].all() and not of_tiles[TILE:].any()
    assert out.dbias[g.order[:TILE]].isnan().all() and not out.dbias[g.order[TILE:]].isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pair_and_tile_gradient_take_any_strides(layout):
    g = Gathered()
    g.e, g.c = layouts(g.e)[layout], layouts(g.c)[layout]
    g.check()


# ---------------------------------------------------------------------------------------------- logit_gradient, slab_gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_bias", "softcap"), [(False, None), (True, None), (True, 1.5)])
def test_logit_gradient(dtype, with_bias, softcap):
    """S, what rounding took from its rows, and its sum over tokens before rounding; V ragged."""
    b = Backward(blocks_of("tile_lse").BLOCK_N + 3, 16, blocks_of("tile_lse").BLOCK_V + 6, dtype, with_bias, softcap)
    s, lost, dbias = logit_gradient(
        b.e, b.c, b.bias, b.targets, softcap, b.lse_rest, b.d_zy, b.d_rest, with_lost=True, with_bias=True
    )
    expected, is_target = b.s64()
    expected = torch.where(is_target, b.d_zy.double()[:, None], expected)  # d_zy comes with the softcap's slope
    assert s.dtype == dtype and descriptors_supported(s)
    assert_within(s, expected, (1.01 * ROUNDOFF[dtype] + 1e-5) * expected.abs() + 2**-24)
    assert_within(lost, (expected - s.double()).sum(1), 2**-18 * expected.abs().sum(1))
    assert_within(dbias, expected.sum(0), 2**-18 * expected.abs().sum(0))


def test_logit_gradient_of_a_slab_whose_targets_are_elsewhere():
    """Targets are rows of the slab; in another slab they may be negative, or a column of this one's padding."""
    b = Backward(7, 16, 70)
    b.targets[:] = torch.tensor([-1, -2, 70, 1000, -50, 5, 6])
    b.d_zy[:5] = NAN
    s, lost, dbias = logit_gradient(
        b.e, b.c, None, b.targets, None, b.lse_rest, b.d_zy, b.d_rest, with_lost=False, with_bias=False
    )
    assert_close(s, b.s64()[0], 1e-5)
    assert lost is None and dbias is None


def test_logit_gradient_where_no_other_class_can_be():
    b = Backward(5, 16, 1)
    assert (b.lse_rest == -INF).all()
    s, _, _ = logit_gradient(b.e, b.c, None, b.targets, None, b.lse_rest, b.d_zy, b.d_rest, False, False)
    assert torch.equal(s[:, 0], b.d_zy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_order", "mean", "scale"), [(False, False, 1.0), (True, True, 2.0**-3)])
@pytest.mark.parametrize(("M", "K", "D"), [(5, 6, 3), (70, 70, 66)])
def test_slab_gradient(dtype, with_order, mean, scale, M, K, D):
    V, first = 90, 10
    s, e = aligned(randn(M, K, dtype=dtype)), aligned(randn(M, D, seed=1, dtype=dtype))
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:K].to(DEVICE) if with_order else None
    home = torch.arange(first, first + K, device=DEVICE) if order is None else order
    weight, mean_e = (randn(V, seed=2), randn(D, seed=3)) if mean else (None, None)
    dc = torch.full((V, D), NAN, dtype=dtype, device=DEVICE)
    slab_gradient(s, e, order, first, weight, mean_e, torch.tensor(scale, device=DEVICE), dc)
    expected = s.double().T @ e.double()
    if mean:
        expected += weight[home, None].double() * mean_e.double()
    expected *= scale
    assert_within(dc[home], expected, ROUNDOFF[dtype] * expected.abs() + 2**-20 * M)
    assert dc.isnan().all(1).sum() == V - K


# ---------------------------------------------------------------------------------------------- target_facts


@pytest.mark.parametrize(
    "targets",
    [[3, -100, 5], [-100], [-100, -7, 2**40], [0], list(range(5000)), [-100] * 2048 + [9]],
    ids=["some", "none", "out of range", "one", "several blocks", "in the second block"],
)
def test_target_facts(targets):
    counted = [t for t in targets if t != -100]
    facts = target_facts(torch.tensor(targets, device=DEVICE), -100)
    assert facts.tolist() == [len(counted), min([*counted, 0]), max([*counted, 0])]


def test_target_facts_of_every_second_target():
    assert target_facts(torch.arange(10, device=DEVICE)[1::2], 5).tolist() == [4, 0, 9]


# ---------------------------------------------------------------------------------------------- common pieces


@triton.jit
def tiles_kernel(out_ptr, rows, columns, GROUP: tl.constexpr):
    for pid in range(rows * columns):
        row, column = grouped_tile(pid, rows, columns, GROUP)
        tl.store(out_ptr + 2 * pid, row)
        tl.store(out_ptr + 2 * pid + 1, column)


def tiles(rows, columns, group):
    out = torch.full((rows * columns, 2), -1, dtype=torch.int32, device=DEVICE)
    tiles_kernel[(1,)](out, rows, columns, GROUP=group)
    return [tuple(pair) for pair in out.tolist()]


@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(1, 1, 8), (1, 7, 8), (7, 1, 3), (8, 3, 4), (7, 5, 3), (5, 2, 8)]
)
def test_grouped_tile_visits_every_tile_once(rows, columns, group):
    assert sorted(tiles(rows, columns, group)) == list(itertools.product(range(rows), range(columns)))


def test_grouped_tile_walks_down_a_group_of_rows_then_to_the_next_column():
    assert tiles(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@triton.jit
def pieces_kernel(a_ptr, b_ptr, out_ptr, softcap, PIECE: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a = tl.load(a_ptr + i)
    if PIECE == "logaddexp":
        x = logaddexp(a, tl.load(b_ptr + i))
    if PIECE == "capped":
        x = capped(a, softcap)
    if PIECE == "capped_slope":
        x = capped_slope(a, softcap)
    if PIECE == "round_to":
        x = round_to(a, out_ptr.dtype.element_ty)
    tl.store(out_ptr + i, x)


def piece(name, a, b=None, softcap=1.0, dtype=None):
    size = triton.next_power_of_2(len(a))
    pad = lambda x: torch.cat([x, x.new_zeros(size - len(x))]).to(DEVICE)
    out = torch.empty(size, dtype=dtype or a.dtype, device=DEVICE)
    pieces_kernel[(1,)](pad(a), pad(a if b is None else b), out, softcap, PIECE=name, SIZE=size)
    return out[: len(a)].cpu()


def test_logaddexp():
    values = torch.tensor([-INF, -1e4, -100.0, -1.0, 0.0, 1e-3, 1.0, 1.0, 80.0, 1e4])
    a, b = (x.reshape(-1) for x in torch.meshgrid(values, values, indexing="ij"))
    expected = torch.logaddexp(a.double(), b.double())
    assert_within(piece("logaddexp", a, b), expected, 2**-22 * expected.abs().clamp(min=1, max=1e9))


@pytest.mark.parametrize("pair", [(NAN, 0.0), (0.0, NAN), (-INF, NAN), (NAN, -INF), (NAN, NAN)])
def test_logaddexp_of_nan_is_nan(pair):
    assert piece("logaddexp", torch.tensor(pair[:1]), torch.tensor(pair[1:])).isnan().all()


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_and_its_slope(softcap):
    z = torch.cat([torch.linspace(-3, 3, 61) * softcap, torch.tensor([0.0, 1e-3, -1e-3, 1e4, -1e4, INF, -INF])])
    expected = softcap * torch.tanh(z.double() / softcap)
    y = piece("capped", z, softcap=softcap)
    assert_within(y, expected, 2**-21 * softcap)
    slope = piece("capped_slope", expected.float(), softcap=softcap)
    assert_within(slope, 1 - torch.tanh(z.double() / softcap) ** 2, 2**-21)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_to_is_to_nearest_even(dtype):
    one_ulp = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}[dtype]
    ties = 1 + one_ulp * torch.tensor([0.5, 1.5, 2.5, 0.4999, 0.5001, 1.4999, 1.5001])
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, 65504.0, 65519.0, 1e-7, -3e-8, 3.4028235e38, -3.39e38])
    a = torch.cat([ties, -ties, ties * 2.0**-9, special, torch.randn(200, generator=torch.Generator().manual_seed(0))])
    rounded, expected = piece("round_to", a, dtype=dtype), a.to(dtype)
    assert rounded.dtype == dtype
    assert_within(rounded, expected, 0)
    assert torch.equal(rounded.signbit()[~a.isnan()], expected.signbit()[~a.isnan()])


# ---------------------------------------------------------------------------------------------- descriptors


def test_descriptors_read_aligned_rows_of_contiguous_columns():
    x = torch.zeros(6, 16, dtype=torch.bfloat16, device=DEVICE)
    flat = x.view(-1)
    assert descriptors_supported(x)
    assert descriptors_supported(x[2:]) and descriptors_supported(x[::2]) and descriptors_supported(x[:, :5])
    assert descriptors_supported(x[:, 8:])  # 16 bytes in
    not_supported = {
        "columns not contiguous": x[:, ::2],
        "transposed": x.T,
        "rows 10 bytes long": x.new_zeros(6, 5),
        "base 2 bytes in": flat[1:81].view(5, 16),
        "columns 8 bytes in": x[:, 4:],
        "the same row again and again": x[:1].expand(6, 16),
        "overlapping rows": flat.as_strided((6, 16), (8, 1)),
        "no rows": x[:0],
        "no columns": x[:, :0],
    }
    assert [name for name, view in not_supported.items() if descriptors_supported(view)] == []


def test_what_descriptors_support_depends_on_the_size_of_an_element():
    assert [
        descriptors_supported(torch.zeros(4, 4, dtype=dtype, device=DEVICE))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ] == [True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 8, 35])
def test_aligned_is_equal_and_supported(dtype, D):
    x = randn(6, D, dtype=dtype)
    for name, view in {**layouts(x), "expanded": x[:1].expand(6, D)}.items():
        y = aligned(view)
        assert descriptors_supported(y) and torch.equal(y, view) and y.dtype == dtype, name
        assert (y is view) == descriptors_supported(view), name


# ---------------------------------------------------------------------------------------------- blocks

SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@pytest.mark.parametrize("kernel", ["target_logit", "lse_forward", "backward"])
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_chip_has_a_block_shape_that_it_can_hold(kernel, element_size):
    needs = {shape: needed for needed, shape in blocks.TABLE[kernel, element_size]}
    for chip, kib in SHARED_KIB.items():
        shape = blocks.blocks_within(kernel, element_size, kib)
        assert needs[shape] <= kib, f"sm_{chip}"
        for size in shape[:4]:
            assert size == triton.next_power_of_2(size)
        assert shape.BLOCK_D >= 16 and shape.BLOCK_D * element_size <= 256  # a descriptor's box is at most 256 a side
        assert max(shape[:3]) <= 256


@pytest.mark.parametrize("rows", blocks.TABLE.values(), ids=map(str, blocks.TABLE))
def test_a_chip_gets_the_largest_block_shape_that_fits(rows):
    needs = [needed for needed, _ in rows]
    assert needs == sorted(needs, reverse=True) and needs[-1] <= min(SHARED_KIB.values())


# ---------------------------------------------------------------------------------------------- cut.py

STANDARD_SHAPES = [(4096, 4096, 128256), (8192, 2304, 256000)]  # N, D, V


def empty_like_shape(rows, columns, dtype=torch.bfloat16):
    """A tensor of that shape which takes no memory."""
    return torch.empty(1, 1, dtype=dtype, device=DEVICE).expand(rows, columns)


@pytest.mark.parametrize(("N", "D", "V"), STANDARD_SHAPES)
@pytest.mark.parametrize(("want_e", "want_c"), [(True, True), (True, False), (False, True)])
def test_a_slab_takes_a_small_share_of_the_gradients(N, D, V, want_e, want_c):
    e, c = empty_like_shape(N, D), empty_like_shape(V, D)
    rows = cut.slab_rows(e, c, want_e, want_c)
    gradients = 2 * D * (N * want_e + V * want_c)
    buffers = 2 * rows * D * (4 * want_c + 2)  # two lanes, each with a float32 dc and the gathered rows of c
    block = blocks_of("backward", torch.bfloat16).BLOCK_V
    assert rows % block == 0 and rows >= block
    assert buffers <= cut.SLAB_SHARE * gradients
    assert (
        buffers + 2 * block * D * (4 * want_c + 2) > cut.SLAB_SHARE * gradients
    )  # and no slab is smaller than it has to be


def test_a_slab_is_at_least_one_block_and_at_most_the_vocabulary():
    block = blocks_of("backward", torch.bfloat16).BLOCK_V
    assert cut.slab_rows(empty_like_shape(1, 8), empty_like_shape(10 * block, 8), True, False) == block
    assert cut.slab_rows(empty_like_shape(5, 8), empty_like_shape(7, 8), True, True) == 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_sort_vocabulary(dtype):
    e, c, _, targets = problem(9, 16, 50, dtype)
    targets[:2] = torch.tensor([-1, -2])
    order, position = cut.sort_vocabulary(e, c, targets)
    assert sorted(order.tolist()) == list(range(50))
    average_logit = logits64(e, c).mean(0)[order]
    assert (average_logit.diff() <= {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}[dtype]).all()
    assert position.dtype == torch.int64 and position[:2].tolist() == [-1, -2]
    assert torch.equal(order[position[2:]], targets[2:])
