"""The oracle is itself pinned: naive in float64 is `F.cross_entropy(F.linear(...))`, and its gradients are the finite differences."""

import pytest
import torch
import torch.nn.functional as F
from oracle import problem, run

from cce import linear_cross_entropy, naive

N, V, D = 13, 17, 6
DOUBLE = dict(rtol=1e-12, atol=1e-12)


def reference(e, c, targets, bias=None, *, softcap=None, z_loss=0.0, ignore_index=-100, reduction="mean", **options):
    """The loss as torch computes it; softcap and z-loss, which it does not have, by their definitions."""
    z = F.linear(e, c, bias).flatten(0, -2)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    flat = targets.flatten()
    loss = F.cross_entropy(z, flat, ignore_index=ignore_index, reduction=reduction, **options)
    counted = flat != ignore_index
    extra = torch.where(counted, z_loss * z.logsumexp(1) ** 2, 0)
    extra = {"none": extra, "sum": extra.sum(), "mean": extra.sum() / counted.sum()}[reduction]
    return (loss + extra).reshape(targets.shape if reduction == "none" else ())


WEIGHT = torch.linspace(0, 2, V, dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0},
        {"weight": WEIGHT},
        {"weight": WEIGHT, "label_smoothing": 0.3},
        {"softcap": 1.5},
        {"softcap": 1.5, "label_smoothing": 0.2, "weight": WEIGHT},
        {"z_loss": 1e-2},
        {"z_loss": 1e-2, "weight": WEIGHT, "label_smoothing": 0.1},
        {"ignore_index": 5},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("impl", ["naive", "checkpoint", "chunked"])
def test_float64_equals_torch(impl, options, reduction):
    e, c, targets, bias = problem(N, V, D, torch.float64, bias=True, ignored=0.3)
    if "ignore_index" in options:
        targets = targets.clamp(min=0)
    upstream = torch.linspace(0.1, 2, N, dtype=torch.float64) if reduction == "none" else torch.tensor(1.0)
    got = run(e, c, targets, bias, impl=impl, reduction=reduction, upstream=upstream, **options)
    leaves = [x.clone().requires_grad_() for x in (e, c, bias)]
    want = reference(*leaves[:2], targets, leaves[2], reduction=reduction, **options)
    torch.testing.assert_close(got.loss, want, **DOUBLE)
    gradients = torch.autograd.grad((want * upstream.to(want)).sum(), leaves)
    for x, o in zip((got.de, got.dc, got.dbias), gradients, strict=True):
        torch.testing.assert_close(x, o, **DOUBLE)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("impl", ["naive", "checkpoint", "chunked"])
def test_gradcheck(impl, softcap):
    """Loss and lse, so that z_y, lse_rest and z_bar all have upstream gradients of their own."""
    e, c, targets, bias = problem(5, 4, 3, torch.float64, bias=True, ignored=0.3)

    def call(e, c, bias):
        options = dict(label_smoothing=0.2, z_loss=0.1, softcap=softcap, reduction="none", return_lse=True)
        return linear_cross_entropy(e, c, targets, bias, impl=impl, **options)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (e, c, bias)])


def test_primitive_gradcheck():
    e, c, targets, bias = problem(5, 4, 3, torch.float64, bias=True)
    mean_weight = torch.rand(4, dtype=torch.float64)
    primitive = lambda e, c, bias: naive.target_and_rest(e, c, targets, bias, 2.0, mean_weight)
    assert torch.autograd.gradcheck(primitive, [x.requires_grad_() for x in (e, c, bias)])


def test_primitive_values():
    """z_y is 0 for a target of another shard, NaN for a target nobody has; lse_rest leaves the target out."""
    e, c = torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    z_y, lse_rest, z_bar = naive.target_and_rest(e, c, torch.tensor([0, naive.ELSEWHERE, naive.NOWHERE]))
    assert z_y[:2].tolist() == [1.0, 0.0] and z_y[2].isnan() and z_bar is None
    others = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(lse_rest, others.logsumexp(1), **DOUBLE)


def test_one_class():
    e, c, targets = problem(4, 1, 3, torch.float64)
    got = run(e, c, targets, impl="naive", lse_upstream=torch.zeros(4))
    assert got.loss == 0 and not got.de.any() and not got.dc.any()
    torch.testing.assert_close(got.lse, (e @ c.T)[:, 0], **DOUBLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_checkpoint_is_naive_bit_for_bit(dtype, device):
    inputs = problem(N, V, D, dtype, device, bias=True, ignored=0.3)
    options = dict(label_smoothing=0.1, z_loss=1e-3, softcap=3.0, lse_upstream=torch.ones(N, device=device))
    a, b = (run(*inputs, impl=impl, **options) for impl in ("naive", "checkpoint"))
    for x in ("loss", "lse", "de", "dc", "dbias"):
        assert torch.equal(getattr(a, x), getattr(b, x)), x
