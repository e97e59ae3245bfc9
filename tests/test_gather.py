"""cce.gather: every path of the backward against its specification, the default filter against the accuracy rule, and its promises.

The specification is one line: a dropped (token, tile) pair's logit gradient is replaced by its mean over the tile. On a CPU a tile has 32
classes and blocks are small, so that a few hundred classes make every path run; `PATHS` says which.
"""

import contextlib
import functools
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from oracle import FEW_TOL, TOL, assert_gradient, check, oracle, problem, run

pytest.importorskip("triton", reason="Triton's wheels exist for Linux only")

from cce import autograd, gather, linear_cross_entropy
from cce.cut import vocabulary_order
from cce.loss import MOST_DROPPED, Filter

TILE = gather.TILE
V = 5 * TILE - 10  # five tiles, the last one ragged
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
ROUNDOFF = {FLOAT32: 2.0**-24, FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}

# name -> (constants of cce.gather, what must have run, once or several times)
GATHERED = dict(
    DENSE=2, MOSTLY_DENSE=2, DE_SHARE=9
)  # no tile is crowded, never are all pairs computed, all tokens at once
MIXED = dict(DENSE=0.5, MOSTLY_DENSE=2, DE_SHARE=9)
EVERYTHING = dict(MOSTLY_DENSE=-1, DE_SHARE=9)
SMALL_SLABS = dict(SLAB_SHARE=0, SLAB_BYTES=0)  # a tile of classes, or as many pairs as there are tokens
TOKENS = dict(DE_SHARE=0, BLOCK_SHARE=0, TOKENS=16)
PATHS = {
    "gathered": (GATHERED, {"pair_gradient": 1}),
    "slabs of pairs": ({**GATHERED, **SMALL_SLABS}, {"pair_gradient": 2}),
    "mixed": (MIXED, {"pair_gradient": 1, "add_crowded": 1, "logit_gradient": 1}),
    "slabs of crowded tiles": ({**MIXED, **SMALL_SLABS}, {"pair_gradient": 1, "add_crowded": 1, "logit_gradient": 2}),
    "everything": (EVERYTHING, {"add_all": 1, "logit_gradient": 1}),
    "slabs of everything": ({**EVERYTHING, **SMALL_SLABS}, {"add_all": 1, "logit_gradient": 5}),
    "tokens": ({**GATHERED, **TOKENS}, {"pair_gradient": 4}),
    "tokens, mixed": ({**MIXED, **TOKENS}, {"pair_gradient": 4, "logit_gradient": 4}),
}
EXACT_PATHS = ("everything", "slabs of everything")


def pairs_done(pairs):
    """How many pairs the kernels do of a slab: all or none."""
    total = int(pairs.pair_start[pairs.tiles.stop] - pairs.pair_start[pairs.tiles.start])
    return total if total <= len(pairs.rows) else 0


@contextlib.contextmanager
def forced(path):
    """The path, and the proof that it was taken."""
    constants, expected = PATHS[path]
    calls = Counter()

    def counting(name):
        original = getattr(gather, name)

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            calls[name] += name != "pair_gradient" or bool(pairs_done(args[10]))
            return original(*args, **kwargs)

        return wrapper

    watched = {name: counting(name) for name in ("pair_gradient", "logit_gradient", "add_crowded", "add_all")}
    with mock.patch.multiple(gather, **constants, **watched):
        yield calls
    assert all(calls[name] >= times for name, times in expected.items()), f"{path}: {calls}"
    if "gathered" in path or path in ("slabs of pairs", "tokens"):
        assert not calls["logit_gradient"], calls
    if path in EXACT_PATHS:
        assert not calls["pair_gradient"], calls


def skewed(M=40, V=V, D=24, dtype=FLOAT32, device="cpu", *, bias=False, scale=4.0, seed=0):
    """A softmax with crowded tiles and others that few tokens need: some classes are likely for everybody, most for a few tokens or none.
    Targets are drawn from the softmax."""
    g = torch.Generator().manual_seed(seed)
    e, c = torch.randn(M, D, generator=g), scale * torch.randn(V, D, generator=g) / D**0.5
    e[:, 0] = 2
    c[:, 0] = torch.linspace(1.5, -2.5, V)[torch.randperm(V, generator=g)]
    b = torch.randn(V, generator=g)
    e, c, b = (x.to(dtype) for x in (e, c, b))
    z = (e.float() @ c.float().T + (b.float() if bias else 0)).softmax(1)
    targets = torch.multinomial(z, 1, generator=g)[:, 0]
    return tuple(x.to(device) for x in ((e, c, targets, b) if bias else (e, c, targets)))


def relative(x, o):
    return ((x.double() - o.double()).norm() / o.double().norm().clamp(min=1e-30)).item()


# ---------------------------------------------------------------------------------- the specification


def specification(e, c, targets, bias, softcap, mean_weight, d_zy, d_rest, d_zbar, eps, dense):
    """(de, dc, dbias) in float64; which pairs are dropped, the mass of each, and the threshold. dense: DENSE, for the crowded tiles."""
    order = vocabulary_order(e, c, bias)
    e, c, d_zy, d_rest = (x.double() for x in (e, c, d_zy, d_rest))
    tile = order.argsort() // TILE
    members = torch.nn.functional.one_hot(tile).double()  # [V, T]
    z = e @ c.T + (0 if bias is None else bias.double())
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    slope = lambda z: torch.ones_like(z) if softcap is None else 1 - (z / softcap) ** 2
    is_target = targets[:, None] == torch.arange(len(c), device=e.device)
    d_zy = torch.where(is_target.any(1), d_zy * (slope(z) * is_target).sum(1), d_zy)
    lse_rest = z.masked_fill(is_target, -torch.inf).logsumexp(1)
    s = torch.where(is_target, 0, (z - lse_rest[:, None]).exp()) * d_rest[:, None]

    size = d_rest.abs() + d_zy.abs()
    if d_zbar is not None:
        size = size + d_zbar.double().abs() * mean_weight.double().sum()
    threshold = eps * size.square().mean().sqrt()
    mass = s.abs() @ members  # [M, T]
    small = (mass <= threshold) & ~(is_target.double() @ members).bool()
    mean = (s @ members) / members.sum(0)
    if softcap is not None:  # times the gain: the slopes of the tile's largest logit and of the others' log-mean-exp
        in_tile = torch.where(members.T.bool()[None], z[:, None, :], -torch.inf)  # [M, T, V]
        high = in_tile.amax(2)
        others = (in_tile - high[:, :, None]).exp().sum(2) - 1
        rest = high + (others / (members.sum(0) - 1)).log()
        mean = mean * (slope(high) + others * slope(rest)) / (1 + others)
    s = torch.where(is_target, d_zy[:, None], s * slope(z))

    def filtered(dropped):
        filtered_s = torch.where(dropped[:, tile], mean[:, tile], s)
        return filtered_s if d_zbar is None else filtered_s + d_zbar.double()[:, None] * mean_weight.double()

    dropped = not_crowded(small, dense)
    s_e = s_c = filtered(dropped)
    if gather.DE_SHARE == 0:  # de in blocks of tokens, each with its own crowded tiles
        s_e = filtered(torch.cat([not_crowded(block, dense) for block in small.split(gather.TOKENS)]))
    return (s_e @ c, s_c.T @ e, s_c.sum(0)), dropped, mass, threshold


def not_crowded(dropped, dense):
    """The pairs [M, T] that are dropped when the first tiles are computed for all tokens: as many as save most."""
    saved = ((~dropped).sum(0) - round(dense * len(dropped))).cumsum(0)
    dropped = dropped.clone()
    dropped[:, : int(saved.argmax()) + 1 if saved.max() > 0 else 0] = False
    return dropped


def primitive(e, c, targets, bias, softcap, mean_weight, upstream, eps, most=None, frozen=""):
    """(outputs, gradients) of gather's primitive; None for frozen ones."""
    leaves = [
        None if x is None else x.detach().clone().requires_grad_(name not in frozen)
        for name, x in zip("ecb", (e, c, bias))
    ]
    outputs = autograd.target_and_rest(
        "gather", leaves[0], leaves[1], targets, leaves[2], softcap, mean_weight, Filter(eps, most=most)
    )
    pairs = [(x, d) for x, d in zip(outputs, upstream) if x is not None]
    torch.autograd.backward([x for x, _ in pairs], [d for _, d in pairs])
    return outputs, [None if x is None else x.grad for x in leaves]


def gap_in(masses, low, high):
    """A threshold with no mass near it, so that float16's rounding of the map decides nothing."""
    logs = masses[masses > 0].log().flatten().sort().values
    logs = logs[int(low * len(logs)) : int(high * len(logs))]
    widest = logs.diff().argmax()
    assert logs.diff()[widest] > 0.03, "choose another problem"
    return ((logs[widest] + logs[widest + 1]) / 2).exp().item()


SETTINGS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 4.0, "bias": True},
    "smoothing": {"smoothing": True, "bias": True},
}


def check_specification(
    dtype, device, dense, frozen="", bias=False, softcap=None, smoothing=False, share=(0.4, 0.6), **sizes
):
    """Drops about half of the pairs, and compares with the specification; returns which."""
    e, c, targets, *b = skewed(dtype=dtype, device=device, bias=bias, **sizes)
    b, M = b[0] if b else None, len(e)
    g = torch.Generator().manual_seed(5)
    d_zy, d_rest, d_zbar = (torch.randn(M, generator=g).to(device) for _ in range(3))
    mean_weight = torch.rand(len(c), generator=g).to(device) if smoothing else None
    if not smoothing:
        d_zbar = None
    case = e, c, targets, b, softcap, mean_weight
    _, _, mass, unit = specification(*case, d_zy, d_rest, d_zbar, 1.0, 2)
    eps = gap_in(mass, *share) / unit.item()
    expected, dropped, mass, _ = specification(*case, d_zy, d_rest, d_zbar, eps, dense)
    _, got = primitive(*case, (d_zy, d_rest, d_zbar), eps, frozen=frozen)
    # In the tail log_share is rounded to float16 (relative 2^-11 of at most 16), the mass and the mean row to dtype.
    tail = (mass * dropped).norm(dim=1) * (2**-7 + 2 * ROUNDOFF[dtype])
    sum_d = (d_zy.abs() + d_rest.abs()).sum().item()
    slack = 8 * 2**-24 * 30 * sum_d
    tol = TOL[dtype]
    de_slack = tail.norm() * c.double().norm(dim=1).max() + slack * c.double().norm(dim=1).max()
    dc_slack = (tail.sum() + slack) * e.double().norm(dim=1).max()
    # dbias is a sum over tokens of rounded numbers of either sign
    b_slack = tail.sum() + slack + ROUNDOFF[dtype] * sum_d / M**0.5
    for name, x, o, extra in zip(("de", "dc", "dbias"), got, expected, (de_slack, dc_slack, b_slack)):
        if x is not None:
            assert_gradient(name, x, o, tol, extra)
    assert [x is None for x in got] == [name in frozen or (name == "b" and b is None) for name in "ecb"]
    return dropped


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_gathered(dtype, setting, device):
    with forced("gathered"):
        dropped = check_specification(dtype, device, dense=2, **SETTINGS[setting])
    assert 0.25 < dropped.double().mean() < 0.75


@pytest.mark.parametrize("path", [name for name in PATHS if name != "gathered"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_paths(path, dtype, device):
    setting = SETTINGS["smoothing" if dtype == FLOAT32 else "softcap"]
    dense = -1 if path in EXACT_PATHS else PATHS[path][0]["DENSE"]
    with forced(path):
        dropped = check_specification(dtype, device, dense=dense, **setting)
    assert dropped.any() == (path not in EXACT_PATHS)
    if "mixed" in path:
        assert not dropped[:, 0].any() and dropped[:, -1].any()


@pytest.mark.parametrize("frozen", ["e", "c", "b", "ec", "eb", "cb"])
@pytest.mark.parametrize("path", ["gathered", "mixed", "tokens"])
def test_frozen_inputs(path, frozen, device):
    constants = PATHS[path][0]
    with mock.patch.multiple(gather, **constants):
        check_specification(BFLOAT16, device, constants["DENSE"], frozen, bias=True, smoothing=frozen != "c")


@pytest.mark.parametrize(
    "sizes",
    [dict(M=1), dict(V=TILE - 5), dict(V=2), dict(V=2 * TILE + 1), dict(D=1), dict(D=13), dict(M=70, D=70)],
    ids=str,
)
def test_ragged_sizes(sizes, device):
    """With everything kept, the exact gradients: one token, less than a tile of classes, a last tile of one class, any D."""
    e, c, targets = skewed(dtype=FLOAT32, device=device, **sizes)
    with mock.patch.multiple(gather, **GATHERED):
        check(e, c, targets, impl="gather", filter_eps=0.0)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_one_class(dtype, device):
    e, c, targets = problem(40, 1, 16, dtype, device)
    for eps in ("auto", 0.1):
        with mock.patch.multiple(gather, **GATHERED):
            got = run(e, c, targets, impl="gather", filter_eps=eps)
        assert got.loss == 0 and not got.de.any() and not got.dc.any()


@pytest.mark.parametrize("which", ["e", "c"])
def test_odd_strides(which, device):
    e, c, targets = skewed(device=device)
    odd = lambda x: x.new_full((2 * len(x), x.shape[1] + 3), 77)[::2, 1:-2].copy_(x)
    with mock.patch.multiple(gather, **GATHERED):
        check(odd(e) if which == "e" else e, odd(c) if which == "c" else c, targets, impl="gather", filter_eps=0.0)


@pytest.mark.parametrize("path", ["gathered", "everything"])
def test_strided_class_weights(path, device):
    """Label smoothing's weights as every second element of a larger tensor."""
    e, c, targets = skewed(device=device)
    weight = torch.linspace(0, 2, 2 * V, device=device)[::2]
    with forced(path):
        check(e, c, targets, impl="gather", filter_eps=0.0, weight=weight, label_smoothing=0.1)


# ------------------------------------------------------------------------------- tiles, targets, gradients


def test_all_tokens_in_one_tile(device):
    """The other tiles keep nothing, or the one token whose target they hold, and get their mean."""
    e, c, targets = skewed(scale=1.0, device=device)
    order = vocabulary_order(e, c)
    e[:, 1], c[:, 1] = 1, 0
    c[order[:TILE], 1] = 40
    targets[:] = order[3]
    targets[7] = order[-1]
    plans, new = [], gather.Plan
    with forced("gathered"), mock.patch.object(gather, "Plan", lambda *args: plans.append(new(*args)) or plans[-1]):
        check(e, c, targets, impl="gather", filter_eps=1e-4)
    (plan,) = plans
    assert plan.pair_start.diff().tolist() == [40, 0, 0, 0, 1]


def test_no_pair_is_kept_but_the_targets(device):
    """eps so large that whatever may be dropped is: every tile holds its mean, and the row sums are still those of the loss."""
    e, c, targets = skewed(device=device)
    with forced("gathered"):
        _, got = primitive(e, c, targets, None, None, None, (*(2 * [torch.ones(40, device=device)]), None), 1e9)
    expected, dropped, _, _ = specification(
        e, c, targets, None, None, None, *(2 * [torch.ones(40, device=device)]), None, 1e9, 2
    )
    assert dropped.sum() == 4 * 40
    # the map's float16, as in check_specification, of the whole mass
    assert relative(got[0], expected[0]) < 2**-7 and relative(got[1], expected[1]) < 2**-7


@pytest.mark.parametrize("path", ["gathered", "mixed", "everything", "tokens"])
def test_targets_elsewhere_and_nowhere(path, device):
    """-1 (another shard's): z_y is 0 and its gradient goes nowhere. -2 (nobody's): z_y is NaN, and with gradients of 0 leaves no trace."""
    e, c, targets = skewed(device=device)
    targets[:20], targets[20] = -1, -2
    g = torch.Generator().manual_seed(1)
    d_zy, d_rest = torch.rand(40, generator=g).to(device), torch.rand(40, generator=g).to(device)
    d_zy[20] = d_rest[20] = 0
    with mock.patch.multiple(gather, **PATHS[path][0]):
        (z_y, lse_rest, _), got = primitive(e, c, targets, None, None, None, (d_zy, d_rest, None), 0.0)
    assert (z_y[:20] == 0).all() and z_y[20].isnan() and z_y[21:].isfinite().all()
    torch.testing.assert_close(
        lse_rest[:21].double(), (e.double() @ c.double().T).logsumexp(1)[:21], rtol=1e-5, atol=1e-5
    )
    expected = specification(e, c, targets, None, None, None, d_zy, d_rest, None, 0.0, -1)[0]
    assert relative(got[0], expected[0]) < 1e-5 and relative(got[1], expected[1]) < 1e-5
    assert not got[0][20].any()


def test_all_gradients_zero(device):
    e, c, targets = skewed(dtype=BFLOAT16, device=device)
    zero = torch.zeros(40, device=device)
    with mock.patch.multiple(gather, **GATHERED):
        for most in (None, 0.03):
            _, (de, dc, _) = primitive(e, c, targets, None, None, None, (zero, zero, None), 2.0**-12, most)
            assert not de.any() and not dc.any()


@pytest.mark.parametrize("path", ["gathered", "mixed", "everything"])
def test_nan_in_a_hidden_state_is_not_dropped(path, device):
    """Its own row of de, and all of dc, say so; the other rows of de are what they would be."""
    e, c, targets = skewed(dtype=BFLOAT16, device=device)
    e[3, 5] = torch.nan
    with mock.patch.multiple(gather, **PATHS[path][0]):
        got = run(e, c, targets, impl="gather", reduction="sum")
    assert got.de[3].isnan().all() and got.dc.isnan().any() and got.loss.isnan()


@pytest.mark.parametrize("path", ["gathered", "mixed"])
def test_nan_in_an_ignored_row_leaves_no_trace(path, device):
    e, c, targets = skewed(dtype=BFLOAT16, device=device)
    targets[::4] = -100
    e[targets == -100] = torch.nan
    with mock.patch.multiple(gather, **PATHS[path][0]):
        got = run(e, c, targets, impl="gather")
    assert not got.de[targets == -100].any()
    assert_no_worse_than_naive(got, torch.nan_to_num(e), c, targets)


def test_expanded_upstream_gradient(device):
    """sum().backward() sends a scalar expanded to [M], of stride 0."""
    e, c, targets = skewed(device=device)
    one, weight = torch.ones((), device=device).expand(40), torch.ones(V, device=device)
    with forced("gathered"):
        _, expanded = primitive(e, c, targets, None, None, weight, (one, one, one), 2.0**-8)
        _, plain = primitive(e, c, targets, None, None, weight, 3 * (one.contiguous(),), 2.0**-8)
    assert torch.equal(expanded[0], plain[0]) and torch.equal(expanded[1], plain[1])


# ------------------------------------------------------------------------------------- the accuracy rule


def assert_no_worse_than_naive(got, e, c, targets, bias=None, **options):
    """What `gather`'s default promises: no further from float64 than PyTorch's own 16-bit loss on the same input."""
    want = oracle(e, c, targets, bias, **options)
    naive = run(e, c, targets, bias, impl="naive", **options)
    for name in ("de", "dc", "dbias"):
        x = getattr(got, name)
        if x is not None:
            error, theirs = ((getattr(y, name).double() - getattr(want, name)).norm().item() for y in (got, naive))
            assert error <= theirs, f"{name}: {error:.3e}, naive {theirs:.3e} of {getattr(want, name).norm():.3e}"
    loss, theirs = ((y.loss.double() - want.loss).norm().item() for y in (got, naive))
    assert loss <= max(theirs, 1e-5 * want.loss.norm().item()), f"loss: {loss:.3e}, naive {theirs:.3e}"


def check_accuracy_rule(*inputs, path="gathered", **options):
    """The default filter, with nothing computed that it would drop."""
    with mock.patch.multiple(gather, **PATHS[path][0]):
        got = run(*inputs, impl="gather", **options)
    assert_no_worse_than_naive(got, *inputs, **options)
    return got


@pytest.mark.parametrize("path", ["gathered", "mixed", "tokens"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_accuracy_rule(path, dtype, device):
    check_accuracy_rule(*skewed(dtype=dtype, device=device, bias=True), path=path)


def test_accuracy_rule_with_everything_at_once(device):
    """Label smoothing, class weights, ignored tokens, z-loss, lse, and uneven upstream gradients of "none"."""
    e, c, targets, bias = skewed(dtype=BFLOAT16, device=device, bias=True)
    targets[::5] = -100
    check_accuracy_rule(
        e, c, targets, bias, label_smoothing=0.1, weight=torch.linspace(0, 2, V, device=device), z_loss=1e-2,
        reduction="none", upstream=torch.linspace(-1, 3, 40, device=device), lse_upstream=torch.linspace(1, -1, 40, device=device),
    )  # fmt: skip


@pytest.mark.parametrize("softcap", [3.0, 30.0])
def test_accuracy_rule_with_softcap(softcap, device):
    check_accuracy_rule(*skewed(dtype=BFLOAT16, device=device, bias=True), softcap=softcap)


@pytest.mark.parametrize("path", ["gathered", "mixed"])
def test_case_02_uneven_weights(path, device):
    """0, 1 and 100: the threshold is that of the whole tensor, so the 1s may lose more of theirs than the 100s."""
    weights = torch.ones(40, device=device)
    weights[::4], weights[7] = 0, 100
    got = check_accuracy_rule(*skewed(dtype=BFLOAT16, device=device), path=path, reduction="none", upstream=weights)
    assert not got.de[weights == 0].any()


@pytest.mark.parametrize("path", ["gathered", "mixed"])
def test_case_16_memorised_batch(path, device):
    """Every target's probability above 0.999: gradients are small, and so must be what is dropped."""
    e, c, targets = problem(48, V, 64, BFLOAT16, device)
    c *= 8
    e = (c[targets].float() * (20 / c[targets].float().square().sum(1, keepdim=True)) + 0.01 * e.float()).bfloat16()
    got = check_accuracy_rule(e, c, targets, path=path, reduction="none")
    assert (got.loss >= 0).all() and got.loss.max() < 1e-3


@pytest.mark.parametrize("path", ["gathered", "mixed", "everything"])
def test_case_18_common_vector(path, device):
    """c = a common vector ten times larger than the differences between its rows: every row of S must keep its sum."""
    e, c, targets = problem(70, V, 64, FLOAT32, device)
    c += (
        10
        * c.std()
        * torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(1)), dim=0).to(device)
        * 8
    )
    check_accuracy_rule(e.bfloat16(), c.bfloat16(), targets, path=path)


def test_case_19_grad_scaler(device):
    """float16, reduction sum, loss times 65536: S and the tail's masses are beyond float16 (and the naive loss's S, too), the
    gradients are not."""
    e, c, targets, bias = skewed(dtype=FLOAT16, device=device, bias=True)
    with forced("gathered"):
        check(
            e / 64, c / 64, targets, 3 * bias.float(), impl="gather", reduction="sum", frozen="b",
            upstream=torch.tensor(2.0**16, device=device),
        )  # fmt: skip


def test_case_19_mean_over_many_tokens(device):
    """An upstream of 1/131072, under float16's normal numbers, and the tail's masses further below."""
    e, c, targets = skewed(dtype=FLOAT16, device=device)
    with forced("gathered"):
        plain = run(e, c, targets, impl="gather", filter_eps=2.0**-8)
        tiny = run(
            64 * e, c / 64, targets, impl="gather", filter_eps=2.0**-8, upstream=torch.tensor(2.0**-12, device=device)
        )
    assert relative(tiny.dc * 2.0**6, plain.dc) < TOL[FLOAT16]  # dc has e's 64 in it


def with_outlier(entry, device):
    """One large entry in the row of a class that nobody predicts."""
    e, c, targets = skewed(dtype=BFLOAT16, device=device, scale=2.0)
    e[:, 3] = e[:, 3].abs() + 0.1
    targets[targets == 7] = 8
    c[7, 3] = entry
    return e, c, targets


def test_an_outlier_in_the_classifier_costs_nothing(device):
    check_accuracy_rule(*with_outlier(-64, device))


def test_a_huge_outlier_costs_its_own_feature_only(device):
    """Shares of de are multiples of 2^-22 of the largest that their feature could have; and the tile's mean has the outlier in it."""
    inputs = with_outlier(-(2.0**20), device)
    with mock.patch.multiple(gather, **PATHS["gathered"][0]):
        got = run(*inputs, impl="gather")
    want, naive = oracle(*inputs), run(*inputs, impl="naive")
    error, theirs = ((x.de.double() - want.de).norm(dim=0) for x in (got, naive))
    error[3] = theirs[3] = 0
    assert error.norm() < theirs.norm()


# ------------------------------------------------------------------------------------------- promises


@pytest.mark.parametrize("path", ["gathered", "slabs of pairs", "mixed", "everything", "tokens"])
def test_row_sums_are_conserved(path, device):
    """With every row of c a vector of ones, de is the row's sum of the logit gradient: d_zy + d_rest, whatever was dropped."""
    M = 40
    e, c, targets, bias = skewed(M, V, 8, BFLOAT16, device, bias=True)
    bias = 3 * bias  # with equal rows, it is the bias that makes a softmax
    g = torch.Generator().manual_seed(1)
    d_zy, d_rest = -torch.rand(M, generator=g).to(device), torch.rand(M, generator=g).to(device)
    ones = torch.ones_like(c)
    _, _, mass, unit = specification(e, ones, targets, bias, None, None, d_zy, d_rest, None, 1.0, 2)
    eps = (mass.quantile(0.85) / unit).item()
    with mock.patch.multiple(gather, **PATHS[path][0]), gather.observed() as plans:
        _, (de, _, _) = primitive(e, ones, targets, bias, None, None, (d_zy, d_rest, None), eps)
    assert any(plan["dropped"] > 0 for plan in plans) == (path != "everything")
    # At most eps R of each of five tiles is dropped, off by the map's float16 (2^-8) and the rounding of the mass (2^-9); what
    # rounding took from S is given back rounded itself (2^-9 of 2^-9); a share of de is a multiple of 2^-22; de is rounded once (2^-8).
    size, want = d_zy.abs() + d_rest.abs(), (d_zy + d_rest).double()
    bound = 5 * eps * size.square().mean().sqrt() * (2**-8 + 2**-9) + 2**-8 * want.abs() + 2**-16 * size
    assert ((de.double() - want[:, None]).abs() <= bound[:, None]).all()
    assert (de == de[:, :1]).all()


@pytest.mark.parametrize("frozen", ["", "e", "c"])
def test_observed(frozen, device):
    """The dropped mass is the specification's, whichever gradients are asked for; a list of one's own, and nothing outside."""
    e, c, targets = skewed(device=device)
    with mock.patch.multiple(gather, **GATHERED), gather.observed() as outer:
        with gather.observed() as inner:
            pass
        loss = run(e, c, targets, impl="gather", filter_eps=0.1, reduction="none", frozen=frozen).loss
    assert inner == [] and len(outer) == 1
    d = 1 - loss.neg().exp()  # the gradient's size: of z_y -d, of lse_rest d
    _, dropped, mass, _ = specification(e, c, targets, None, None, None, -d, d, None, 0.1, 2)
    want = (mass * dropped).sum() / d.double().sum()
    assert want > 0.01 and outer[0]["dropped"] == pytest.approx(want.item(), rel=2**-9)
    assert outer[0]["gathered"] == pytest.approx(1 - dropped.double().mean().item()) and outer[0]["crowded"] == 0


def test_observed_without_a_gradient_to_drop(device):
    e, c, targets = skewed(device=device)
    with gather.observed() as plans:
        run(e, c, targets, impl="gather", filter_eps=0.1, reduction="none", upstream=torch.zeros(len(e), device=device))
    assert plans[0]["dropped"] == 0


def test_classes_switched_off_have_tiles_of_their_own(device):
    """bias -inf: sorted behind all others, and no gradient is spread over them, but for those that share the last tile."""
    e, c, targets, bias = skewed(bias=True, device=device)
    c[:, 0] += 4 * (torch.arange(V, device=device) % 3 == 0)  # would be the most likely ones
    off = torch.arange(V, device=device) % 3 == 0
    off[targets] = False
    bias[off] = -torch.inf
    with forced("gathered"), gather.observed() as plans:
        got = run(e, c, targets, bias, impl="gather", filter_eps=0.05)
    assert plans[0]["dropped"] > 1e-3
    assert got.dbias[off].count_nonzero() == got.dc[off].any(1).sum() <= TILE - 1 < off.sum()
    assert got.dc.isfinite().all() and got.de.isfinite().all()


@pytest.mark.parametrize("filter_eps", [None, 1e-3])
def test_unlikely_classes_all_of_them(filter_eps, device):
    """Logits far under -88, where exp(-z) is infinite, beside a padded block and an empty tile."""
    c = torch.full((257, 1), -95.0, device=device)
    check(torch.ones(4, 1, device=device), c, torch.arange(4, device=device), impl="gather", filter_eps=filter_eps)
    e, c, targets, bias = skewed(bias=True, device=device)
    bias -= 300
    bias[TILE : 2 * TILE] = -torch.inf
    targets[:] = targets % TILE
    with mock.patch.multiple(gather, **GATHERED):
        check(e, c, targets, bias, impl="gather", filter_eps=0.0 if filter_eps else None)


def test_tail_makes_up_for_what_is_dropped(device):
    """Without the tail's masses the same filter is far worse: what the tests above would miss if they let too much pass."""
    e, c, targets = skewed(dtype=BFLOAT16, device=device)
    c[:, 1] = 30  # a common part, as real heads have
    want = oracle(e, c, targets)
    none = lambda *args: torch.zeros_like(original(*args))
    original = gather.tail_mass
    with forced("gathered"):
        with_tail = relative(run(e, c, targets, impl="gather", filter_eps=0.05).de, want.de)
        with mock.patch.object(gather, "tail_mass", none):
            without = relative(run(e, c, targets, impl="gather", filter_eps=0.05).de, want.de)
    assert with_tail < without / 3


def test_gain_is_what_makes_the_tail_right_under_a_softcap(device):
    e, c, targets = skewed(dtype=BFLOAT16, device=device)
    c[:, 1] = 30
    want = oracle(e, c, targets, softcap=4.0)
    original = gather.tail_mass

    def without(log_share, gain, *args):
        return original(log_share, torch.ones_like(gain), *args)

    with forced("gathered"):
        error = relative(run(e, c, targets, impl="gather", filter_eps=0.05, softcap=4.0).de, want.de)
        with mock.patch.object(gather, "tail_mass", without):
            plain = relative(run(e, c, targets, impl="gather", filter_eps=0.05, softcap=4.0).de, want.de)
    assert error < plain / 1.5  # a third in tiles of 32 classes, half in those of 128


@pytest.mark.parametrize("eps", [2.0**-8, 2.0**-4, 0.5])
def test_what_a_numeric_eps_may_cost(eps, device):
    """A dropped pair's mass m <= eps R moves from its classes to the tile's mean: de_n moves by at most m times the distance of a row of
    the tile from the mean row, dc_v by at most m ‖e_n‖."""
    e, c, targets = skewed(device=device)
    got, want = None, oracle(e, c, targets, reduction="sum")
    z = e.double() @ c.double().T
    p_y = z.softmax(1).gather(1, targets[:, None])[:, 0]
    size = 2 * (1 - p_y)
    R = size.square().mean().sqrt()
    with forced("gathered"):
        got = run(e, c, targets, impl="gather", filter_eps=eps, reduction="sum")
    rows = c[vocabulary_order(e, c)].double()
    distance = torch.stack([(tile - tile.mean(0)).norm(dim=1).max() for tile in rows.split(TILE)])
    rounding = 1e-5 + 2**-7 * eps  # of the exact part, and of the map
    moved = (got.de.double() - want.de).norm(dim=1)
    assert (moved <= eps * R * distance.sum() + rounding * want.de.norm()).all()
    moved = (got.dc.double() - want.dc).norm(dim=1)
    assert (moved <= eps * R * e.double().norm(dim=1).sum() + rounding * want.dc.norm()).all()
    if eps == 0.5:
        assert relative(got.de, want.de) > 1e-3  # something was dropped


def test_no_filter_for_float32_by_default(device):
    e, c, targets = skewed(device=device)
    with mock.patch.multiple(gather, **GATHERED):
        check(e, c, targets, impl="gather")


@pytest.mark.parametrize("name", ["e", "c"])
def test_filter_switches_turn_it_off(name, device):
    e, c, targets = skewed(device=device)
    with mock.patch.multiple(gather, **GATHERED):
        check(e, c, targets, impl="gather", filter_eps=0.5, **{f"filter_{name}_grad": False})


@pytest.mark.parametrize("path", PATHS)
def test_same_bits_twice(path, device):
    e, c, targets, bias = skewed(dtype=BFLOAT16, device=device, bias=True)
    with mock.patch.multiple(gather, **PATHS[path][0]):
        first, second = (run(e, c, targets, bias, impl="gather", filter_eps=2.0**-6) for _ in range(2))
    for name in ("loss", "de", "dc", "dbias"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_same_bits_whatever_order_programs_run_in(device):
    """Chunks listed backwards: the programs of pair_gradient then add their shares of de in the other order."""
    e, c, targets = skewed(M=70, dtype=BFLOAT16, device=device)
    original = gather.pair_gradient

    def backwards(*args):
        *before, pairs, unit, out = args
        # One launch a chunk, the last one first: each sees the lists of its own tile only.
        tiles = [t for t in pairs.tiles if int(pairs.chunk_start[t + 1]) > int(pairs.chunk_start[t])]
        s = e.new_empty(len(pairs.rows), TILE)
        for t in reversed(tiles):
            some = [
                slice(int(x[t] - x[pairs.tiles.start]), int(x[t + 1] - x[pairs.tiles.start]))
                for x in (pairs.pair_start, pairs.chunk_start)
            ]
            one = pairs._replace(tiles=range(t, t + 1), rows=pairs.rows[some[0]], chunk_tile=pairs.chunk_tile[some[1]])
            part = original(*before, one, unit, out)
            s[some[0]] = part if len(part) else 0
        assert len(tiles) > 2
        return s

    with forced("gathered"):
        forwards = run(e, c, targets, impl="gather", filter_eps=2.0**-6)
        with mock.patch.object(gather, "pair_gradient", backwards):
            other = run(e, c, targets, impl="gather", filter_eps=2.0**-6)
    assert torch.equal(forwards.de, other.de) and torch.equal(forwards.dc, other.dc)


def test_second_backward_gives_the_same_bits(device):
    e, c, targets = (x.requires_grad_() if x.is_floating_point() else x for x in skewed(dtype=BFLOAT16, device=device))
    loss = linear_cross_entropy(e, c, targets, impl="gather")
    with mock.patch.multiple(gather, **GATHERED):
        first = torch.autograd.grad(loss, (e, c), retain_graph=True)
        second = torch.autograd.grad(loss, (e, c))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_create_graph_is_an_error(device):
    e, c, targets = (x.requires_grad_() if x.is_floating_point() else x for x in skewed(dtype=BFLOAT16, device=device))
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(linear_cross_entropy(e, c, targets, impl="gather"), e, create_graph=True)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_compiled_with_the_default_filter(softcap, device):
    """One graph, and the eager bits: the state goes through the operator."""
    e, c, targets, bias = skewed(dtype=BFLOAT16, device=device, bias=True)
    leaves = [x.requires_grad_() for x in (e, c, bias)]

    def step(e, c, targets, bias):
        return linear_cross_entropy(2 * e, c, targets, bias, impl="gather", softcap=softcap)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with forced("gathered"):
        eager, traced = (
            [value := function(e, c, targets, bias), *torch.autograd.grad(value, leaves)]
            for function in (step, compiled)
        )
    for x, y in zip(eager, traced, strict=True):
        assert torch.equal(x, y)


# ------------------------------------------------------------------------------------------ the threshold


def planning_problem(dtype=BFLOAT16, **options):
    """What a Plan reads, with the sorted vocabulary's true map."""
    e, c, targets = skewed(dtype=dtype, **options)
    order = vocabulary_order(e, c)
    position = order.argsort()[targets]
    lse, tiles, _ = gather.tile_lse(e, c[order], position, None, None, with_map=True)
    state = gather.State((tiles - lse).half(), lse.new_empty(0), order, position, None, None)
    d = torch.linspace(0.1, 2, len(e), device=e.device)
    return gather.Problem(
        e, c, targets, None, None, None, lse, -d, d, d_zbar=None, scale=None, block=len(e), room=0, state=state
    )


def chosen_threshold(p, eps, most) -> float:
    """What the backward chooses for this problem."""
    total_weight = None if p.d_zbar is None else p.mean_weight.sum()
    d = gather.upstream(p.d_zy, p.d_rest, p.d_zbar, total_weight, eps, gather.CANDIDATES)
    threshold = gather.Plan(p._replace(d_rest=d.d_rest), d.thresholds, most, d.total).threshold.item()
    return threshold * d.scale.item() if threshold > 0 else threshold


def dropped_mass(p, threshold):
    """Share of the whole gradient mass under the threshold, and outside the targets' tiles."""
    mass = p.state.log_share.double().exp() * p.d_rest.double()
    owns = torch.arange(len(mass), device=mass.device)[:, None] == p.state.position // TILE
    return (mass * ((mass <= threshold) & ~owns)).sum() / p.d_rest.double().sum()


@pytest.mark.parametrize("most", [0.2, 0.03, 1e-3])
def test_threshold_drops_at_most_so_much(most, device):
    """The largest of eps R / sqrt(2)^k that drops at most `most`: the next larger one would drop more."""
    p, eps = planning_problem(device=device), 0.05
    top = chosen_threshold(p, eps, None)
    assert top == pytest.approx(eps * (2 * p.d_rest).square().mean().sqrt().item(), rel=1e-5)
    chosen = chosen_threshold(p, eps, most)
    k = 2 * torch.log2(torch.tensor(top / chosen)).item() if chosen > 0 else gather.CANDIDATES
    assert k == pytest.approx(round(k), abs=1e-3)
    assert dropped_mass(p, chosen) <= most
    if round(k) > 0:
        assert dropped_mass(p, top * 2 ** (-(round(k) - 1) / 2) * (1 + 1e-6)) > most


def test_threshold_where_even_the_smallest_drops_too_much(device):
    """-1: nothing is dropped, not even what has no mass."""
    p = planning_problem(device=device)
    assert chosen_threshold(p, 1e6, 0.0) == -1


def test_an_infinite_gradient_drops_nothing_of_the_others(device):
    """The rest of the batch is what it would be without: a typical token's gradient is not infinite."""
    e, c, targets = skewed(dtype=BFLOAT16, device=device)
    d = torch.full((len(e),), 1 / len(e), device=device)
    d[3] = torch.inf
    got = run(e, c, targets, impl="gather", reduction="none", upstream=d)
    want = run(e, c, targets, impl="naive", reduction="none", upstream=d)
    exact = oracle(e, c, targets, reduction="none", upstream=d)
    others = torch.arange(len(e), device=device) != 3
    assert relative(got.de[others], exact.de[others]) <= 1.1 * relative(want.de[others], exact.de[others])


@pytest.mark.parametrize("exponent", [66, -80])  # squares are outside float32
def test_threshold_knows_no_unit(exponent, device):
    """Gradients times a power of two are the same bits times it."""
    e, c, targets = skewed(device=device)
    options = dict(impl="gather", filter_eps=1e-3, reduction="none")
    with forced("gathered"), gather.observed() as plans:
        want, got = (
            run(e, c, targets, upstream=torch.full((len(e),), d, device=device), **options)
            for d in (1.0, 2.0**exponent)
        )
    assert plans[0] == plans[1] and plans[0]["dropped"] > 0
    for x, y in ((got.de, want.de), (got.dc, want.dc)):
        assert torch.equal(x * 2.0**-exponent, y)


def test_default_filter_drops_at_most_three_percent(device):
    p = planning_problem(device=device)
    block_filter = Filter.of("gather", "auto", True, True, 0.0, BFLOAT16)
    assert (block_filter.eps, block_filter.most) == (2.0**-12, MOST_DROPPED)
    for eps in (block_filter.eps, 0.1):
        assert dropped_mass(p, chosen_threshold(p, eps, block_filter.most)) <= 0.03


def test_threshold_counts_label_smoothing(device):
    p = planning_problem(device=device)
    plain = chosen_threshold(p, 0.1, None)
    p = p._replace(d_zbar=torch.full_like(p.d_rest, -0.5), mean_weight=torch.full((V,), 2.0, device=device))
    size = 2 * p.d_rest + 0.5 * 2 * V
    assert chosen_threshold(p, 0.1, None) == pytest.approx(0.1 * size.square().mean().sqrt().item(), rel=1e-5)
    assert plain < chosen_threshold(p, 0.1, None)


# --------------------------------------------------------------------------------------------- the plan


def test_plan_puts_the_crowded_tiles_first_and_cuts_the_rest_into_slabs(device):
    """first_tile maximises what is saved: sum over the tiles before it of (kept - DENSE M); brute force in NumPy's place."""
    p = planning_problem(device=device)
    thresholds, total = torch.tensor([0.02], device=device), torch.ones((), device=device)
    M, T = 40, 5
    mass = p.state.log_share.double().exp() * p.d_rest.double()
    owns = torch.arange(T, device=device)[:, None] == p.state.position // TILE
    kept = (mass > 0.02) | owns
    for dense in (0.2, 0.5, 0.7, 2):
        with mock.patch.multiple(gather, DENSE=dense, MOSTLY_DENSE=2):
            plan = gather.Plan(p, thresholds, None, total)
            slabs = list(plan.slabs())
        saved = [sum(int(kept[t].sum()) - round(dense * M) for t in range(k)) for k in range(T + 1)]
        assert saved[plan.tiles.start] == max(saved) and plan.tiles.stop == T
        rows = [x.rows[: pairs_done(x)] for x in slabs]
        assert torch.cat(rows).tolist() == kept[plan.tiles.start :].nonzero()[:, 1].tolist()
        assert slabs[0].tiles == range(T) and all(len(slab.rows) <= plan.capacity for slab in slabs)
        if len(slabs) > 1:
            assert [t for slab in slabs[1:] for t in slab.tiles] == list(plan.tiles)


def test_tokens_of_a_problem_are_views(device):
    """A block of tokens costs no copy, and has its own rows of everything that has some."""
    p = planning_problem(device=device)
    block = p.tokens(slice(8, 20))
    assert block.state.log_share.data_ptr() == p.state.log_share.data_ptr() + 2 * 8
    for whole, part in ((p.e, block.e), (p.d_rest, block.d_rest), (p.state.position, block.state.position)):
        assert torch.equal(part, whole[8:20])
    assert block.c is p.c and block.state.order is p.state.order


def test_state_has_the_shapes_that_torch_compile_is_told(device):
    e, c, targets, bias = skewed(dtype=BFLOAT16, device=device, bias=True)
    for softcap in (None, 4.0):
        _, state = gather.forward(e, c, targets, bias, softcap, None, SimpleNamespace(eps=0.1), (True, True, False))
        told = gather.empty_state(e, c, softcap)
        assert [(x.shape, x.dtype) for x in state] == [(x.shape, x.dtype) for x in told]


def test_the_sorted_copy_goes_before_the_map_is_there_twice(device):
    e, c, targets = skewed(device=device)
    copies, sort, subtract = [], gather.sort_rows, torch.sub

    def sorting(*args):
        made = sort(*args)
        copies.append(weakref.ref(made.rows))
        return made

    def subtracting(*args, **kwargs):
        assert len(copies) == 1 and copies[0]() is None
        return subtract(*args, **kwargs)

    with mock.patch.object(gather, "sort_rows", sorting), mock.patch.object(torch, "sub", subtracting):
        gather.forward(e, c, targets, None, None, None, SimpleNamespace(eps=0.1), (True, True, False))
    assert copies


@pytest.mark.parametrize("ignored", [0, 1, 40])
@pytest.mark.parametrize("filter_eps", [None, 1e-3])
def test_the_product_begins_before_the_host_knows_the_targets(filter_eps, ignored, device):
    """Once, if all tokens count; else the first attempt finds that they do not and does nothing."""
    e, c, targets = skewed(device=device)
    targets[:ignored] = -100
    products, original = [], gather.tile_lse
    watch = lambda *args: products.append((args, original(*args))) or products[-1][1]
    with mock.patch.object(gather, "tile_lse", watch):
        run(e, c, targets, impl="gather", filter_eps=filter_eps)
    assert len(products) == (1 if ignored in (0, 40) else 2)
    (*_, with_map, rank, count), (lse, _, _) = products[0]
    assert with_map == (filter_eps is not None) and count.tolist()[0] == len(e) - ignored
    assert (lse == -torch.inf).all() == (ignored > 0)
    assert len(products) == 1 or products[1][0][-1] is None and len(products[1][1][0]) == len(e) - ignored


def test_forward_without_gradients_makes_no_map(device):
    e, c, targets = skewed(dtype=BFLOAT16, device=device)
    products, original = [], gather.tile_lse
    with (
        mock.patch.object(gather, "tile_lse", lambda *args: products.append(original(*args)) or products[-1]),
        mock.patch.object(gather, "sort_rows") as sort,
    ):
        linear_cross_entropy(e, c, targets, impl="gather")
        with torch.no_grad():
            linear_cross_entropy(e.requires_grad_(), c, targets, impl="gather")
    assert len(products) == 2 and not sort.called
    assert all(tiles is None for _, tiles, _ in products)


# --------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_same_bits_twice_on_a_gpu(device):
    e, c, targets = skewed(2048, 32768, 512, BFLOAT16, device)
    for options in (GATHERED, dict(DENSE=gather.DENSE), dict(DE_SHARE=0, BLOCK_SHARE=0, TOKENS=1024)):
        with mock.patch.multiple(gather, **options):
            first, second, third = (run(e, c, targets, impl="gather") for _ in range(3))
        for x in (second, third):
            assert torch.equal(first.de, x.de) and torch.equal(first.dc, x.dc)


@pytest.mark.gpu
@pytest.mark.parametrize("common", [0.0, 1.0])
def test_gathered_is_dense_on_a_gpu(common, device):
    """filter_eps=0 keeps all. With a common vector in c, what the tensor cores cut off a share of de shows: rounding the shares by adding
    a large number had the product accumulate on it."""
    e, c, targets = skewed(1024, 8192, 512, BFLOAT16, device)
    c += common
    with mock.patch.multiple(gather, **GATHERED):
        got = run(e, c, targets, impl="gather", filter_eps=0.0)
    with mock.patch.multiple(gather, MOSTLY_DENSE=-1):
        want = run(e, c, targets, impl="gather", filter_eps=0.0)
    # both are rounded to bfloat16 at the end: a flip here and there is an ulp, 2^-8, of a few per cent of the entries
    assert relative(got.de, want.de) < 1e-3 and relative(got.dc, want.dc) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["gathered", "everything"])
def test_offsets_beyond_31_bits(path, device):
    """V D = 2.15e9 elements of c (4.3 GB): the last classes, whose offsets overflow, get the gradients that they have alone."""
    M, V, D = 64, 262_400, 8_200
    assert V * D > 2**31
    g = torch.Generator(device).manual_seed(0)
    e = torch.randn(M, D, generator=g, device=device, dtype=BFLOAT16)
    c = torch.randn(V, D, generator=g, device=device, dtype=BFLOAT16).mul_(D**-0.5)
    targets = V - 1 - torch.arange(M, device=device)
    with mock.patch.multiple(gather, **PATHS[path][0]):
        got = run(e, c, targets, impl="gather")
    lse = torch.stack([(e.float() @ x.float().T).logsumexp(1) for x in c.split(1 << 14)]).logsumexp(0).double()
    some = slice(V - 4096, V)
    z = e.double() @ c[some].double().T
    s = ((z - lse[:, None]).exp() - (targets[:, None] == torch.arange(V - 4096, V, device=device)).double()) / M
    # what is dropped, at most 3 % of the mass and here all of it alike, is far below the targets' part of these rows
    assert relative(got.dc[some], s.T @ e.double()) < TOL[BFLOAT16]
    assert got.dc[: 1 << 16].isfinite().all()


@pytest.mark.gpu
def test_map_beyond_31_bits(device):
    """N T = 2.1e9 entries of the map (4.3 GB, 8.5 in the forward): tokens repeat, so the last ones must get what the first get."""
    block, times, V, D = 2048, 525, 256_000, 64
    assert block * times * -(-V // TILE) > 2**31
    e, c, targets = skewed(block, V, D, BFLOAT16, device)
    with mock.patch.object(gather, "TOKENS", 1 << 16):  # larger blocks than usual, so that there are few
        got = run(
            e.repeat(times, 1), c, targets.repeat(times), impl="gather", reduction="none",
            upstream=torch.tensor(1.0, device=device),
        )  # fmt: skip
    for i in (1, times // 2, times - 1):
        here = slice(i * block, (i + 1) * block)
        assert torch.equal(got.loss[here], got.loss[:block])
        assert relative(got.de[here], got.de[:block]) < TOL[BFLOAT16]
    alone = run(e, c, targets, impl="gather", filter_eps=None, reduction="sum")
    assert relative(got.de[:block], alone.de) < FEW_TOL and relative(got.dc / times, alone.dc) < FEW_TOL


@pytest.mark.gpu
def test_forward_memory_is_per_token(device):
    from cce.bench import peak_memory

    e, c, targets = problem(8192, 128_000, 256, BFLOAT16, device)
    forward = lambda: linear_cross_entropy(e, c, targets, impl="gather")  # noqa: E731
    forward()
    assert peak_memory(forward) <= 2e6
    with torch.no_grad():
        e.requires_grad_(), c.requires_grad_()
        assert peak_memory(forward) <= 2e6
