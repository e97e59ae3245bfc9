"""The public call: every implementation, dtype, shape and option against the float64 oracle, and the drop-in surface."""

import enum
import functools
import inspect
import shutil
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import TOL, Outcome, assert_close_to_oracle, assert_gradient, check, oracle, problem, run
from torch.utils._python_dispatch import TorchDispatchMode

import cce
from cce import LinearCrossEntropy, LinearCrossEntropyHead, autograd, checks, linear_cross_entropy, naive
from cce import loss as loss_module
from cce.bench import peak_memory

FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KERNELS = ("cce_exact", "cce", "gather")  # the last two tested with filter_eps=None wherever exactness is asked
ALL = ("naive", "checkpoint", "chunked", *KERNELS)


def name_of(x):
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else None


def exact(impl):
    return {"impl": impl, "filter_eps": None} if impl in ("cce", "gather") else {"impl": impl}


@pytest.fixture(params=ALL)
def impl(request):
    return exact(request.param)


@pytest.fixture(params=["chunked", "cce_exact", "gather"])
def fast(request):
    return exact(request.param)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few tokens, so that small inputs have several, the last one ragged."""
    from cce import chunked

    monkeypatch.setattr(chunked, "chunk_size", lambda num_classes, device: 7)


# ------------------------------------------------------------------------------------- values and gradients

OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "ignored": {"ignored": 0.4},
    "sum": {"reduction": "sum", "bias": True},
    "none": {"reduction": "none", "ignored": 0.4, "bias": True},
    "softcap": {"softcap": 2.0, "bias": True},
    "smoothing": {"label_smoothing": 0.1, "ignored": 0.4},
    "smoothing+softcap": {"label_smoothing": 0.1, "softcap": 2.0, "bias": True},
    "weight": {"weight": True, "ignored": 0.4},
    "z_loss": {"z_loss": 1e-2, "ignored": 0.4, "bias": True},
    "everything": {
        "weight": True, "label_smoothing": 0.3, "z_loss": 1e-2, "reduction": "none", "ignored": 0.4, "bias": True, "lse": True
    },
}  # fmt: skip


def build(shape, dtype, device, *, bias=False, ignored=0.0, weight=False, lse=False, **options):
    """(inputs, options) of `check`: uneven upstream gradients for "none", and for lse if that is returned."""
    N, V, D = shape
    inputs = problem(N, V, D, dtype, device, bias=bias, ignored=ignored)
    uneven = torch.linspace(-1, 3, N, device=device, dtype=FLOAT64)
    if weight:
        options["weight"] = torch.linspace(0, 2, V, device=device)
    if options.get("reduction") == "none":
        options["upstream"] = uneven
    if lse:
        options["lse_upstream"] = uneven.flip(0)
    return inputs, options


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(40, 37, 24), (33, 65, 7), (64, 64, 32)], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16, FLOAT64], ids=name_of)
@pytest.mark.parametrize("impl_name", ["naive", "checkpoint", "chunked"])
def test_torch_implementations(impl_name, dtype, shape, options, device, small_chunks):
    inputs, options = build(shape, dtype, device, **options)
    check(*inputs, impl=impl_name, **options)


# Pairwise: each implementation meets each dtype, each dtype each option, ragged shapes included.
KERNEL_CASES = [
    ("cce_exact", BFLOAT16, (40, 70, 24), "plain"),
    ("cce_exact", FLOAT32, (33, 65, 7), "bias"),
    ("cce", FLOAT16, (40, 37, 24), "ignored"),
    ("cce_exact", FLOAT16, (33, 65, 7), "sum"),
    ("cce_exact", BFLOAT16, (33, 37, 70), "none"),
    ("cce", FLOAT32, (40, 37, 24), "softcap"),
    ("cce_exact", BFLOAT16, (33, 65, 7), "softcap"),
    ("cce_exact", FLOAT32, (64, 64, 32), "smoothing"),
    ("cce", BFLOAT16, (64, 37, 24), "smoothing"),
    ("cce_exact", FLOAT16, (40, 37, 24), "weight"),
    ("cce", BFLOAT16, (33, 65, 7), "z_loss"),
    ("cce_exact", FLOAT32, (33, 37, 70), "everything"),
    ("cce_exact", FLOAT16, (40, 65, 24), "everything"),
    ("cce", BFLOAT16, (64, 37, 24), "everything"),
    ("gather", BFLOAT16, (40, 70, 24), "plain"),
    ("gather", FLOAT32, (33, 65, 7), "bias"),
    ("gather", FLOAT16, (33, 65, 7), "sum"),
    ("gather", BFLOAT16, (33, 37, 70), "none"),
    ("gather", FLOAT32, (40, 37, 24), "softcap"),
    ("gather", FLOAT16, (40, 65, 24), "everything"),
]


@pytest.mark.parametrize(("impl_name", "dtype", "shape", "option"), KERNEL_CASES, ids=name_of)
def test_kernels(impl_name, dtype, shape, option, device):
    inputs, options = build(shape, dtype, device, **OPTIONS[option])
    check(*inputs, **exact(impl_name), **options)


@pytest.mark.parametrize("option", ["bias", "ignored", "softcap", "weight", "none"])
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=name_of)
@pytest.mark.parametrize("impl_name", ["cce", "gather"])
def test_filter_of_zero_is_exact(impl_name, dtype, option, device):
    """No softmax is below 0: the sorted vocabulary, its slabs and the way back to dc's and dbias's rows, with nothing dropped."""
    inputs, options = build((33, 70, 7), dtype, device, **OPTIONS[option])
    check(*inputs, impl=impl_name, filter_eps=0.0, **options)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=name_of)
@pytest.mark.parametrize(("V", "smoothing", "scale"), [(1, 0.1, 1.0), (70, 1.0, 1e-3)])
def test_smoothing_that_cancels(V, smoothing, scale, dtype, fast, device):
    """Where softmax and the smoothed target are (nearly) the same distribution, S is a difference of equal numbers: its part off
    by its rounding (2^-8 in bfloat16, and some 8 u in float32), its rank-one part exact. No bound relative to the difference can
    hold, nor the rule's slack, which vanishes with the logits; what holds is  2^-8 Σ|d| · max‖c_v‖  (or 8 u Σ|d| …)."""
    e, c, targets = problem(64, V, 16, dtype, device, scale=scale)
    got = run(e, c, targets, label_smoothing=smoothing, **fast)
    want = oracle(e, c, targets, label_smoothing=smoothing)
    of_s = 2.0**-8 if dtype == BFLOAT16 else 8 * 2.0**-24
    assert_gradient("de", got.de, want.de, TOL[dtype], of_s * want.sum_d * want.max_c)
    assert_gradient("dc", got.dc, want.dc, TOL[dtype], of_s * want.sum_d * want.max_e)


def test_filter_drops_no_more_than_eps_of_softmax_an_entry(device):
    """Every dropped entry of S is below eps times the token's |d_rest| share: |Δde_n| <= eps Σ_v ‖c_v‖ / N, and so for dc."""
    N, V, D, eps = 70, 130, 16, 2.0**-8
    e, c, targets = problem(N, V, D, BFLOAT16, device, scale=3.0)
    got, want = run(e, c, targets, impl="cce", filter_eps=eps), oracle(e, c, targets)
    rounding = 3e-3
    de_bound = rounding * want.de.norm() + eps * c.double().norm(dim=1).sum() * N**0.5 / N
    dc_bound = rounding * want.dc.norm() + eps * e.double().norm(dim=1).sum() * V**0.5 / N
    assert (got.de.double() - want.de).norm() <= de_bound
    assert (got.dc.double() - want.dc).norm() <= dc_bound
    torch.testing.assert_close(got.loss.double(), want.loss, rtol=1e-5, atol=0)


# --------------------------------------------------------------------------------------------- shapes, shift


@pytest.mark.parametrize("shift", [0, False, True, 1, 3])
@pytest.mark.parametrize("impl_name", ["naive", "chunked", "cce_exact", "gather"])
def test_shift(impl_name, shift, device):
    """e[..., t] is scored against targets[..., t + shift]."""
    k = int(shift)
    e, c, targets = problem((2, 3, 5), 11, 6, FLOAT32, device, ignored=0.2)
    upstream = torch.rand(2, 3, 5 - k, device=device)
    options = dict(reduction="none", upstream=upstream, lse_upstream=upstream.flip(0))
    got = run(e, c, targets, impl=impl_name, shift=shift, **options)
    want = oracle(e[:, :, : 5 - k].reshape(-1, 6), c, targets[:, :, k:].reshape(-1), reduction="none",
                  upstream=upstream.reshape(-1), lse_upstream=upstream.flip(0).reshape(-1))  # fmt: skip
    assert got.loss.shape == got.lse.shape == (2, 3, 5 - k)
    want.loss, want.lse = want.loss.view(2, 3, 5 - k), want.lse.view(2, 3, 5 - k)
    want.de = F.pad(want.de.view(2, 3, 5 - k, 6), (0, 0, 0, k))
    assert_close_to_oracle(got, want, FLOAT32)


def test_shift_of_a_single_sequence(device):
    e, c, targets = problem(6, 11, 5, FLOAT32, device)
    loss = linear_cross_entropy(e, c, targets, shift=2, reduction="none")
    torch.testing.assert_close(loss, F.cross_entropy(e[:-2] @ c.T, targets[2:], reduction="none"))


def test_shift_by_the_whole_sequence_leaves_nothing(device):
    e, c, targets = problem((2, 3), 11, 5, FLOAT32, device)
    assert linear_cross_entropy(e, c, targets, shift=3, reduction="none").shape == (2, 0)
    assert linear_cross_entropy(e, c, targets, shift=3).isnan()


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (1, 2, 3)], ids=str)
def test_leading_shape(lead, fast, device):
    e, c, targets = problem(lead, 11, 5, FLOAT32, device)
    for reduction in ("mean", "none"):
        got = check(e, c, targets, reduction=reduction, lse_upstream=torch.ones(lead, device=device), **fast)
        assert got.loss.shape == (lead if reduction == "none" else ()) and got.lse.shape == lead


def test_no_tokens(impl, device):
    e, c, targets = (
        torch.zeros(2, 0, 5, device=device),
        torch.ones(7, 5, device=device),
        torch.zeros(2, 0).long().to(device),
    )
    for reduction in ("mean", "sum", "none"):
        got = run(e, c, targets, reduction=reduction, **impl)
        want = F.cross_entropy((e @ c.T).flatten(0, 1), targets.flatten(), reduction=reduction)
        torch.testing.assert_close(got.loss.flatten(), want.flatten(), equal_nan=True)
        assert got.de.shape == e.shape and torch.equal(got.dc, torch.zeros_like(c))


# ------------------------------------------------------------------------------------------------- gradients


def test_lse_is_differentiable(impl, device):
    """A loss made of lse alone, and one of both outputs."""
    inputs = problem(33, 37, 8, FLOAT32, device, ignored=0.3, bias=True)
    upstream = torch.linspace(-1, 2, 33, device=device)
    check(*inputs, upstream=torch.zeros((), device=device), lse_upstream=upstream, **impl)
    check(*inputs, upstream=torch.tensor(0.7, device=device), lse_upstream=upstream, **impl)


def test_lse_of_a_reduced_loss_changes_nothing_about_the_loss(fast, device):
    inputs = problem(33, 37, 8, FLOAT32, device, ignored=0.3, bias=True)
    plain, both = run(*inputs, **fast), run(*inputs, lse_upstream=torch.zeros(33, device=device), **fast)
    for x in ("loss", "de", "dc", "dbias"):
        torch.testing.assert_close(getattr(plain, x), getattr(both, x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice(impl, reduction, device):
    """Saved gradients are never modified: a second backward through the same graph adds the same again."""
    e, c, targets = problem(33, 37, 8, FLOAT32, device)
    e, c = e.requires_grad_(), c.requires_grad_()
    loss = linear_cross_entropy(e, c, targets, reduction=reduction, **impl).sum()
    loss.backward(retain_graph=True)
    once = (e.grad.clone(), c.grad.clone())
    loss.backward()
    torch.testing.assert_close((e.grad, c.grad), tuple(2 * x for x in once), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("upstream", [0.125, -3.0, 0.0, 1e-6, 7e5])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=name_of)
def test_upstream_gradient_of_the_mean(dtype, upstream, device):
    inputs = problem(64, 37, 32, dtype, device)
    if dtype == FLOAT16 and upstream == 7e5:
        upstream = 7e3  # the gradients themselves must fit float16
    check(*inputs, impl="chunked", upstream=torch.tensor(upstream, device=device))


@pytest.mark.parametrize("frozen", ["e", "c", "b", "eb", "cb", "ec"])
def test_frozen_inputs_get_no_gradient(impl, frozen, device):
    inputs = problem(33, 37, 8, FLOAT32, device, bias=True)
    for options in ({}, {"label_smoothing": 0.1}):
        if options and impl["impl"] in KERNELS and frozen not in ("c", "eb"):
            continue
        got = check(*inputs, frozen=frozen, **options, **impl)
        assert [x is None for x in (got.de, got.dc, got.dbias)] == [name in frozen for name in "ecb"]


def test_nothing_requires_grad(impl, device):
    e, c, targets = problem(33, 37, 8, FLOAT32, device)
    assert not linear_cross_entropy(e, c, targets, **impl).requires_grad
    with torch.no_grad():
        loss = linear_cross_entropy(e.requires_grad_(), c.requires_grad_(), targets, **impl)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(e @ c.T, targets))


def test_frozen_classifier_costs_no_buffer(device):
    """chunked with c frozen: no [V, D] tensor ever exists; without any gradient, the chunk's logits are all there is."""
    N, V, D = 64, 600, 512
    e, c, targets = problem(N, V, D, FLOAT32, device)
    e.requires_grad_()
    logits = 4 * N * V

    def step():
        linear_cross_entropy(e, c, targets, impl="chunked").backward()
        e.grad = None

    small = 64 * 1024
    assert peak_memory(step, device) <= logits + 2 * 4 * N * D + small < 4 * V * D
    e.requires_grad_(False)
    assert peak_memory(lambda: linear_cross_entropy(e, c, targets, impl="chunked"), device) <= logits + small


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_derivative_is_an_error(fast, reduction, device):
    """Never a silent zero: a gradient penalty must not vanish from the objective without a word."""
    e, c, targets = problem(5, 7, 3, FLOAT32, device)
    e.requires_grad_()
    loss = linear_cross_entropy(e, c, targets, reduction=reduction, **fast).sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, e, create_graph=True)
    (gradient,) = torch.autograd.grad(loss, e)
    assert not gradient.requires_grad


@pytest.mark.parametrize("algorithm", ["chunked", "cut", "gather"])
def test_primitive_takes_an_expanded_upstream_gradient(algorithm, device):
    """sum().backward() sends a scalar expanded to [M], of stride 0."""
    e, c, targets = problem(33, 37, 8, FLOAT32, device)
    e.requires_grad_()
    gradients = []
    for primitive in (
        naive.target_and_rest,
        functools.partial(autograd.target_and_rest, algorithm, block_filter=loss_module.Filter(None)),
    ):
        z_y, lse_rest, _ = primitive(e, c, targets, None, None, None)
        gradients += torch.autograd.grad(z_y.sum() + lse_rest.sum(), e)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------- strides and dtypes


def strided(x):
    """The same values at every second place of a larger tensor."""
    out = x.new_full([2 * n for n in x.shape], 77)
    view = out[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def transposed(x):
    return x.mT.contiguous().mT


def row_padded(x):
    """Rows further apart than they are long, and a start that is not aligned to 16 bytes."""
    return x.new_full((x.shape[0], x.shape[1] + 3), 77)[:, 1 : 1 + x.shape[1]].copy_(x)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=name_of)
@pytest.mark.parametrize("layout", [strided, transposed, row_padded])
@pytest.mark.parametrize("which", ["e", "c"])
def test_strides_of_e_and_c(which, layout, dtype, fast, device):
    e, c, targets = problem(33, 37, 24, dtype, device)
    check(layout(e) if which == "e" else e, layout(c) if which == "c" else c, targets, **fast)


def test_strides_of_targets(impl, device):
    e, c, targets = problem(33, 37, 8, FLOAT32, device)
    check(e, c, strided(targets), **impl)
    check(e, c, torch.stack([targets, targets.flip(0)], 1)[:, 0], **impl)


def test_strides_of_bias_and_weight(impl, device):
    e, c, targets, bias = problem(33, 37, 8, FLOAT32, device, bias=True)
    check(e, c, targets, strided(bias), **impl)
    weight = torch.linspace(0, 2, 37, device=device)
    check(e, c, targets, strided(bias), weight=strided(weight), label_smoothing=0.1, **impl)


def test_expanded_inputs(fast, device):
    """Stride 0: one hidden state for all tokens, one target for all."""
    e, c, targets = problem(1, 37, 8, FLOAT32, device)
    check(e.expand(40, 8), c, targets.expand(40), **fast)
    check(e.expand(40, 8), c[:1].expand(37, 8), targets.expand(40), **fast)


def test_gradients_have_the_inputs_values_at_any_layout(fast, device):
    """A slice h[:, :-1] as e: its gradient flows into h, zero at the last position."""
    h, c, targets = problem((2, 6), 37, 8, FLOAT32, device)
    h.requires_grad_()
    linear_cross_entropy(h[:, :-1], c, targets[:, 1:], **fast).backward()
    got, h.grad = h.grad, None
    F.cross_entropy((h[:, :-1] @ c.T).flatten(0, 1), targets[:, 1:].flatten()).backward()
    torch.testing.assert_close(got, h.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", checks.INTEGERS, ids=name_of)
@pytest.mark.parametrize("impl_name", ["naive", "chunked", "cce_exact", "gather"])
def test_integer_dtypes_of_targets(impl_name, kind, device):
    e, c, targets = problem(9, 37, 8, FLOAT32, device)
    want = linear_cross_entropy(e, c, targets, impl="naive", ignore_index=5)
    torch.testing.assert_close(linear_cross_entropy(e, c, targets.to(kind), impl=impl_name, ignore_index=5), want)


@pytest.mark.parametrize("ignore_index", [5, -1, -7, 10**6])
def test_ignore_index(impl, ignore_index, device):
    e, c, targets = problem(33, 37, 8, FLOAT32, device)
    targets[::3] = ignore_index
    for reduction in ("mean", "none"):
        got = run(e, c, targets, ignore_index=ignore_index, reduction=reduction, **impl)
        assert_close_to_oracle(got, oracle(e, c, targets, ignore_index=ignore_index, reduction=reduction), FLOAT32)
        assert not got.de[targets == ignore_index].any()


def test_ignored_rows_may_hold_nan(impl, device):
    e, c, targets = problem(33, 37, 8, FLOAT32, device, ignored=0.3)
    e[targets == -100] = torch.nan
    got = run(e, c, targets, **impl)
    assert got.loss.isfinite() and got.dc.isfinite().all()
    assert torch.equal(got.de[targets == -100], torch.zeros_like(e[targets == -100]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("extra", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"weight": 1.0}], ids=str)
def test_everything_ignored(impl, extra, reduction, device):
    e, c, targets, bias = problem((2, 5), 7, 3, FLOAT32, device, bias=True)
    targets.fill_(-100)
    extra = {name: torch.ones(7, device=device) if name == "weight" else value for name, value in extra.items()}
    got = run(e, c, targets, bias, reduction=reduction, lse_upstream=torch.ones(2, 5, device=device), **extra, **impl)
    want = F.cross_entropy(F.linear(e, c, bias).flatten(0, 1), targets.flatten(), reduction=reduction)
    torch.testing.assert_close(got.loss, want.view(got.loss.shape), equal_nan=True)
    for x, like in ((got.lse, targets.float()), (got.de, e), (got.dc, c), (got.dbias, bias)):
        assert torch.equal(x, torch.zeros_like(like))


def test_nothing_counts_loss_and_lse_are_two_tensors(device):
    e, c, targets = problem(5, 7, 3, FLOAT32, device)
    loss, lse = linear_cross_entropy(e, c, torch.full_like(targets, -100), reduction="none", return_lse=True)
    assert loss.data_ptr() != lse.data_ptr()


def test_class_weights_all_zero(impl, device):
    """PyTorch's values: 0/0 for the mean, 0 for sum."""
    e, c, targets = problem(5, 7, 3, FLOAT32, device)
    weight = torch.zeros(7, device=device)
    assert linear_cross_entropy(e, c, targets, weight=weight, **impl).isnan()
    assert linear_cross_entropy(e, c, targets, weight=weight, reduction="sum", **impl) == 0


@pytest.mark.parametrize("kind", [FLOAT32, BFLOAT16, FLOAT16, FLOAT64], ids=name_of)
def test_bias_and_weight_may_have_another_dtype(impl, kind, device):
    """float32 bias or weight beside bfloat16 hidden states: gradients come back in each one's dtype."""
    e, c, targets, bias = problem(40, 37, 8, BFLOAT16, device, bias=True)
    weight = torch.linspace(0, 2, 37, device=device).to(kind)
    for options in ({}, {"weight": weight, "label_smoothing": 0.1}):
        got = check(e, c, targets, bias.to(kind), **options, **impl)
        assert got.dbias.dtype == kind


# ------------------------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=name_of)
def test_autocast(impl, dtype, device):
    """As F.linear does it: operands are cast, gradients come back in float32, the loss is float32."""
    e, c, targets, bias = problem(40, 37, 8, FLOAT32, device, bias=True)
    with torch.autocast(device.type, dtype):
        got = run(e, c, targets, bias, **impl)
    assert got.loss.dtype == got.de.dtype == got.dc.dtype == got.dbias.dtype == FLOAT32
    cast = [x.to(dtype) for x in (e, c, bias)]
    want = oracle(cast[0], cast[1], targets, cast[2])
    for x, o in ((got, want),):
        x.de, x.dc, x.dbias = x.de.to(dtype), x.dc.to(dtype), x.dbias.to(dtype)
        assert_close_to_oracle(x, o, dtype, baseline=impl["impl"] in ("naive", "checkpoint"))


def test_autocast_of_mixed_inputs(fast, device):
    """Hidden states that a model under autocast made in bfloat16, beside a float32 classifier."""
    e, c, targets = problem(40, 37, 8, FLOAT32, device)
    with torch.autocast(device.type, BFLOAT16):
        got = run(e.bfloat16(), c, targets, **fast)
    assert (got.de.dtype, got.dc.dtype) == (BFLOAT16, FLOAT32)


# ------------------------------------------------------------------------------------------------- modules


def test_module_without_parameters(device):
    e, c, targets, bias = problem((2, 6), 37, 8, FLOAT32, device, bias=True)
    module = LinearCrossEntropy(ignore_index=5, softcap=2.0, reduction="sum", shift=1, impl="chunked")
    assert not list(module.parameters()) and "softcap=2.0" in repr(module)
    want = linear_cross_entropy(e, c, targets, bias, ignore_index=5, softcap=2.0, reduction="sum", shift=1)
    torch.testing.assert_close(module(e, c, targets, bias), want)


@pytest.mark.parametrize("bias", [False, True])
def test_head_is_linear_and_cross_entropy(bias, fast, device):
    head = LinearCrossEntropyHead(8, 37, bias=bias, device=device, shift=1, **fast)
    assert head.weight.shape == (37, 8) and (head.bias.shape == (37,) if bias else head.bias is None)
    assert {name for name, _ in head.named_parameters()} == ({"weight", "bias"} if bias else {"weight"})
    e, _, targets = problem((2, 6), 37, 8, FLOAT32, device)
    head(e, targets).backward()
    got, head.weight.grad = head.weight.grad, None
    want = F.cross_entropy(head.logits(e)[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    want.backward()
    torch.testing.assert_close(got, head.weight.grad, rtol=1e-5, atol=1e-7)


def test_head_loads_and_initialises_like_linear(device):
    linear = torch.nn.Linear(64, 50, device=device)
    head = LinearCrossEntropyHead(64, 50, bias=True, device=device, dtype=BFLOAT16)
    assert head.weight.dtype == head.bias.dtype == BFLOAT16
    assert head.weight.abs().max() <= 0.125 and head.weight.float().std() > 0.06  # uniform in ±1/8: std 0.072
    head.float().load_state_dict(linear.state_dict())
    e = torch.randn(3, 64, device=device)
    assert torch.equal(head.logits(e), linear(e))
    assert LinearCrossEntropyHead(4, 5, device="meta").weight.is_meta


def test_head_logits_are_softcapped(device):
    head = LinearCrossEntropyHead(8, 37, device=device, softcap=0.5)
    e = torch.randn(2, 3, 8, device=device)
    z = e @ head.weight.T
    torch.testing.assert_close(head.logits(e), 0.5 * torch.tanh(z / 0.5))


def test_head_tied_to_an_embedding(device):
    """One parameter, both gradients."""
    embedding = torch.nn.Embedding(37, 8, device=device)
    head = LinearCrossEntropyHead(8, 37, device=device, impl="chunked")
    head.weight = embedding.weight
    tokens = torch.randint(0, 37, (2, 6), device=device)
    head(embedding(tokens), tokens.roll(-1, 1)).backward()
    got, embedding.weight.grad = head.weight.grad, None
    F.cross_entropy((embedding(tokens) @ embedding.weight.T).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    torch.testing.assert_close(got, embedding.weight.grad, rtol=1e-5, atol=1e-7)


# -------------------------------------------------------------------------------- cut-cross-entropy's calls


class LinearCrossEntropyImpl(enum.IntEnum):
    """The enum of cut_cross_entropy, by name."""

    CCE = enum.auto()
    TORCH_COMPILE = enum.auto()
    CCE_EXACT = enum.auto()
    CCE_KAHAN = enum.auto()
    CCE_KAHAN_FULL = enum.auto()
    CCE_KAHAN_FULL_C = enum.auto()
    CCE_KAHAN_FULL_E = enum.auto()
    CCE_KAHAN_FULL_C_FULL_E = enum.auto()


@pytest.mark.parametrize("name", [x.name for x in LinearCrossEntropyImpl if x.name != "TORCH_COMPILE"])
def test_drop_in_implementations(name, device):
    e, c, targets = problem(9, 37, 8, BFLOAT16, device)
    want = oracle(e, c, targets)
    for impl in (name.lower(), LinearCrossEntropyImpl[name]):
        loss = linear_cross_entropy(e, c, targets, impl=impl)
        torch.testing.assert_close(loss.double(), want.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="torch.compile needs a C++ compiler")
def test_drop_in_torch_compile(device):
    check(*problem(40, 37, 8, FLOAT32, device), impl=LinearCrossEntropyImpl.TORCH_COMPILE)


@pytest.mark.parametrize("impl_name", ["cce_kahan_full_c", "cce_kahan_full_e", "cce_kahan_full_c_full_e", "cce"])
def test_drop_in_full_gradients_are_unfiltered(impl_name, device):
    """With a filter that skips every block without a target, what the name calls full is exact, and the rest is not."""
    e, c, _ = problem(33, 200, 8, FLOAT32, device)
    targets = torch.zeros(33, dtype=torch.int64, device=device)
    got, want = run(e, c, targets, impl=impl_name, filter_eps=1.0), oracle(e, c, targets)
    is_exact = lambda x, o: bool((x - o).norm() <= 1e-4 * o.norm())
    assert is_exact(got.de, want.de) == ("full_e" in impl_name)
    assert is_exact(got.dc, want.dc) == ("full_c" in impl_name)


@pytest.mark.parametrize("name", ["e", "c"])
def test_drop_in_filter_switches(name, device):
    e, c, _ = problem(33, 200, 8, FLOAT32, device)
    targets = torch.zeros(33, dtype=torch.int64, device=device)
    got = run(e, c, targets, impl="cce", filter_eps=1.0, **{f"filter_{name}_grad": False})
    want = oracle(e, c, targets)
    is_exact = lambda x, o: bool((x - o).norm() <= 1e-4 * o.norm())
    assert (is_exact(got.de, want.de), is_exact(got.dc, want.dc)) == (name == "e", name == "c")


def test_drop_in_call_with_every_keyword(device):
    e, c, targets, bias = problem((2, 6), 37, 8, BFLOAT16, device, bias=True)
    loss, lse = linear_cross_entropy(
        e, c, targets, bias=bias, ignore_index=3, softcap=30.0, reduction="none", shift=True, return_lse=True, filter_eps="high",
        accum_e_fp32=True, accum_c_fp32=True, filter_e_grad=True, filter_c_grad=False, impl="cce", vocab_parallel_options=None,
    )  # fmt: skip
    assert loss.shape == lse.shape == (2, 5)


def test_drop_in_positional_arguments(device):
    """Main branch: bias fourth. 25.1.1: ignore_index fourth, as a plain int."""
    e, c, targets, bias = problem(9, 37, 8, FLOAT32, device, bias=True)
    z = e @ c.T
    got = linear_cross_entropy(
        e, c, targets, bias, 5, 2.0, "sum", 0, False, "auto", False, False, True, True, "cce_exact", None
    )
    want = F.cross_entropy(2 * torch.tanh((z + bias) / 2), targets, ignore_index=5, reduction="sum")
    torch.testing.assert_close(got, want)
    old = int(targets[0])
    got = linear_cross_entropy(e, c, targets, old, reduction="sum")
    torch.testing.assert_close(got, F.cross_entropy(z, targets, ignore_index=old, reduction="sum"))


def test_drop_in_module(device):
    e, c, targets = problem((2, 6), 37, 8, BFLOAT16, device)
    module = LinearCrossEntropy(
        ignore_index=-100, softcap=None, reduction="mean", shift=1, filter_eps="auto", accum_e_fp32=False, accum_c_fp32=False,
        filter_e_grad=True, filter_c_grad=True, impl=LinearCrossEntropyImpl.CCE, return_lse=False,
    )  # fmt: skip
    want = oracle(e[:, :-1].reshape(-1, 8), c, targets[:, 1:].reshape(-1))
    torch.testing.assert_close(module(e, c, targets).double(), want.loss, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------------- impl="auto"


def chosen(e, c, smoothed_softcap=None):
    return loss_module._choose(e, c, smoothed_softcap)


def test_auto_on_a_cpu_is_chunked():
    e, c, targets = problem(9, 37, 8, FLOAT32)
    assert chosen(e, c) == "chunked"
    auto, chunked = run(e, c, targets, impl="auto"), run(e, c, targets, impl="chunked")
    assert torch.equal(auto.loss, chunked.loss) and torch.equal(auto.dc, chunked.dc)
    check(e.double(), c.double(), targets, impl="auto", softcap=2.0, label_smoothing=0.1)


def test_auto_by_gpu(monkeypatch):
    monkeypatch.setattr(loss_module, "_kernels_run", lambda device, dtype, impl: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    gpu = lambda dtype=BFLOAT16: types.SimpleNamespace(dtype=dtype, is_cuda=True, device=torch.device("cuda"))
    for capability, fast in {(7, 5): False, (8, 0): True, (9, 0): True, (12, 0): True}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, value=capability: value)
        for dtype, want in {BFLOAT16: "gather", FLOAT16: "gather", FLOAT32: "cce_exact"}.items():
            assert chosen(gpu(dtype), None) == (want if fast else "chunked")
    assert chosen(gpu(FLOAT64), None) == "chunked"
    assert chosen(gpu(), None, smoothed_softcap=2.0) == "chunked"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert chosen(gpu(), None) == "chunked"


def test_auto_tries_the_implementation_that_it_would_choose(monkeypatch):
    tried = []
    monkeypatch.setattr(loss_module, "_kernels_run", lambda device, dtype, impl: tried.append((dtype, impl)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    for dtype in (BFLOAT16, FLOAT32):
        chosen(types.SimpleNamespace(dtype=dtype, is_cuda=True, device=torch.device("cuda")), None)
    assert tried == [(BFLOAT16, "gather"), (FLOAT32, "cce_exact")]


@pytest.fixture
def broken_kernels(monkeypatch):
    real = loss_module._primitive

    def primitive(impl):
        if impl.startswith("cce") or impl == "gather":
            raise RuntimeError("no C compiler here")
        return real(impl)

    monkeypatch.setattr(loss_module, "_primitive", primitive)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CPU build of torch has none
    loss_module._kernels_run.cache_clear()
    yield
    loss_module._kernels_run.cache_clear()


def test_auto_falls_back_with_one_warning(broken_kernels, device):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert not loss_module._kernels_run(device, FLOAT32, "cce_exact")
    ours = [w for w in caught if "impl=" in str(w.message)]
    assert len(ours) == 1 and "no C compiler here" in str(ours[0].message) and "chunked" in str(ours[0].message)


@pytest.mark.parametrize("impl_name", ["cce", "gather"])
def test_explicit_kernels_raise(impl_name, broken_kernels, device):
    e, c, targets = problem(9, 37, 8, FLOAT32, device)
    with pytest.raises(RuntimeError, match="no C compiler here"):
        linear_cross_entropy(e, c, targets, impl=impl_name)


def test_auto_does_not_remember_what_it_could_not_try(broken_kernels, monkeypatch):
    """A first call under graph capture cannot try the kernels; the next call outside must."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    e = types.SimpleNamespace(dtype=BFLOAT16, is_cuda=True, device=torch.device("cuda"))
    assert chosen(e, None) == "gather"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.warns(RuntimeWarning, match="kernels do not run"):
        assert chosen(e, None) == "chunked"


@pytest.mark.parametrize("impl_name", ["cce_exact", "gather"])
def test_kernels_run_here(impl_name, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loss_module._kernels_run.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="cce:")
        assert loss_module._kernels_run(device, BFLOAT16, impl_name)


# ------------------------------------------------------------------------- under torch.compile or CUDA capture


@pytest.fixture
def captured(monkeypatch):
    """The path that torch.compile and graph capture take: no compaction, nothing raised, all rows run."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


class NoSync(TorchDispatchMode):
    """Fails where a tensor's value comes to the host: an error under graph capture, a graph break under torch.compile."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [OPTIONS[x] for x in ("ignored", "none", "weight", "everything")], ids=str)
def test_captured_values(impl, options, captured, device):
    """Ignored rows may hold NaN: their de is exactly 0, and they leave no trace in the rest."""
    (e, c, targets, *bias), options = build((33, 37, 8), FLOAT32, device, **options)
    want = oracle(e, c, targets, *bias, **options)
    e[targets == -100] = torch.nan
    got = run(e, c, targets, *bias, **options, **impl)
    assert_close_to_oracle(got, want, FLOAT32)
    assert not got.de[targets == -100].any()


def test_captured_out_of_range_targets_are_nan(impl, captured, device):
    e, c, targets = problem(33, 37, 8, FLOAT32, device)
    targets[3], targets[4] = 37, -1
    loss = linear_cross_entropy(e, c, targets, reduction="none", **impl)
    assert loss.isnan().nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize(("reduction", "value"), [("mean", torch.nan), ("sum", 0.0)])
def test_captured_everything_ignored(impl, reduction, value, captured, device):
    e, c, targets = problem(9, 37, 8, FLOAT32, device)
    got = run(e, c, torch.full_like(targets, -100), reduction=reduction, **impl)
    torch.testing.assert_close(got.loss, torch.tensor(value, device=device), equal_nan=True)
    assert not got.de.any() and not got.dc.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl_name", ["naive", "chunked"])
def test_captured_path_does_not_synchronise(impl_name, reduction, captured, device):
    e, c, targets = problem(9, 37, 8, FLOAT32, device, ignored=0.3)
    with NoSync():
        run(e, c, targets, impl=impl_name, reduction=reduction)


@pytest.mark.gpu
@pytest.mark.parametrize("impl_name", ["naive", "chunked", "cce_exact", "gather"])
def test_cuda_graph(impl_name, device):
    """Captured once, replayed on other values, with other targets ignored."""
    e, c, targets = problem(70, 130, 64, BFLOAT16, device, ignored=0.3)
    e, c = e.requires_grad_(), c.requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm-up: compiles the kernels
        for _ in range(2):
            linear_cross_entropy(e, c, targets, impl=impl_name).backward()
            e.grad = c.grad = None
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(e, c, targets, impl=impl_name)
        loss.backward()
    new_e, new_c, new_targets = problem(70, 130, 64, BFLOAT16, device, ignored=0.5, seed=1)
    with torch.no_grad():
        e.copy_(new_e), c.copy_(new_c), targets.copy_(new_targets)
    graph.replay()
    want = oracle(new_e, new_c, new_targets)
    got = Outcome(loss.detach(), None, e.grad, c.grad, None)
    assert_close_to_oracle(got, want, BFLOAT16, baseline=impl_name == "naive")


@pytest.mark.gpu
@pytest.mark.parametrize("impl_name", ["chunked", "cce_exact"])
def test_one_synchronisation_a_step(impl_name, device):
    e, c, targets = problem(70, 130, 64, BFLOAT16, device, ignored=0.3)
    e, c = e.requires_grad_(), c.requires_grad_()
    linear_cross_entropy(e, c, targets, impl=impl_name).backward()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            linear_cross_entropy(e, c, targets, impl=impl_name).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(w.message) for w in caught) == 1


# --------------------------------------------------------------------------------------------- environment


def test_result_does_not_depend_on_the_float32_matmul_precision(device):
    inputs = problem(64, 128, 64, FLOAT32, device)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        check(*inputs, impl="chunked")
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # left as it was
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.fixture
def compiled_caller():
    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("torch.compile needs a C++ compiler")
    torch._dynamo.reset()

    def caller(impl, **options):
        @torch.compile
        def step(h, c, targets):
            return linear_cross_entropy(h * 2, c, targets, impl=impl, **options)

        return step

    yield caller
    torch._dynamo.reset()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_caller(compiled_caller, reduction, device):
    """Under torch.compile nothing is compacted; values, and zeros at ignored rows that hold NaN, are the same."""
    e, c, targets = problem(40, 37, 8, FLOAT32, device, ignored=0.3)
    want = oracle(2 * e, c, targets, reduction=reduction)
    e[targets == -100] = torch.nan
    e.requires_grad_(), c.requires_grad_()
    loss = compiled_caller("chunked", reduction=reduction)(e, c, targets)
    loss.sum().backward()
    torch.testing.assert_close(loss.double(), want.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(c.grad.double(), want.dc, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(e.grad.double(), 2 * want.de, rtol=1e-5, atol=1e-5)
    assert not e.grad[targets == -100].any()


def test_compiled_caller_out_of_range_target(compiled_caller, device):
    """NaN, or an IndexError where the graph breaks before the call: never a silent number."""
    e, c, targets = problem(40, 37, 8, FLOAT32, device)
    targets[7] = 37
    try:
        loss = compiled_caller("chunked", reduction="none")(e, c, targets)
    except IndexError:
        return
    assert loss[7].isnan() and loss.isfinite().sum() == 39


def test_compiled_caller_everything_ignored(compiled_caller, device):
    e, c, targets = problem(40, 37, 8, FLOAT32, device)
    assert compiled_caller("chunked")(e, c, torch.full_like(targets, -100)).isnan()


def test_signature():
    """The positions are cut-cross-entropy's, main branch; what it does not have is keyword-only."""
    parameters = inspect.signature(linear_cross_entropy).parameters
    positional = [x for x in parameters if parameters[x].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert (
        positional
        == (
            "e c targets bias ignore_index softcap reduction shift return_lse filter_eps accum_e_fp32 accum_c_fp32 "
            "filter_e_grad filter_c_grad impl vocab_parallel_options"
        ).split()
    )
    assert set(parameters) - set(positional) == {"label_smoothing", "weight", "z_loss"}


def test_public_names():
    assert set(cce.__all__) >= {"linear_cross_entropy", "LinearCrossEntropy", "LinearCrossEntropyHead", "__version__"}
