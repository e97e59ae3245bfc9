"""torch.compile sees the primitive as one operator: no graph break, whatever the algorithm."""

import pytest
import torch
from oracle import problem

from cce import linear_cross_entropy

OPTIONS = [{}, {"reduction": "none", "softcap": 3.0}, {"label_smoothing": 0.1, "z_loss": 1e-2, "return_lse": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("impl", ["chunked", "cce", "cce_exact", "gather"])
def test_one_graph_same_numbers(impl, options, device):
    e, c, targets, bias = problem(40, 37, 16, bias=True, ignored=0.3, device=device)
    leaves = [x.requires_grad_() for x in (e, c, bias)]

    def step(e, c, targets, bias):
        result = linear_cross_entropy(2 * e, c, targets, bias, impl=impl, **options)
        return sum(x.sum() for x in result) if isinstance(result, tuple) else result.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    outcomes = []
    for function in (step, compiled):
        value = function(e, c, targets, bias)
        outcomes.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for eager, traced in zip(*outcomes, strict=True):
        torch.testing.assert_close(
            traced, eager, rtol=1e-5, atol=1e-5
        )  # 28 terms below 4, added in any order: 28 * 4 * 2^-24


def test_no_gradient_for_a_frozen_input():
    e, c, targets = problem(40, 37, 16)
    e.requires_grad_()
    compiled = torch.compile(
        lambda e: linear_cross_entropy(e, c, targets, impl="chunked"), fullgraph=True, backend="aot_eager"
    )
    compiled(e).backward()
    linear_cross_entropy(e.detach(), c, targets)
    assert c.grad is None and e.grad.isfinite().all()


def test_a_bad_target_is_nan():
    e, c, targets = problem(10, 7, 16)
    targets[3] = 7
    compiled = torch.compile(
        lambda e, c: linear_cross_entropy(e, c, targets, reduction="none", impl="chunked"),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    assert torch.equal(compiled(e, c).isnan(), torch.arange(10) == 3)
