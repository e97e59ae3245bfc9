"""Random problems against the oracle. Fixed seed, 200 examples in all; ten times as many under the `slow` marker."""

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_close_to_oracle, oracle, problem, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def fixed(max_examples):
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=max_examples, derandomize=True, deadline=None, database=None, suppress_health_check=suppressed
    )


@st.composite
def problems(draw, dtypes, max_tokens, max_classes, max_width, softcap_with_smoothing):
    """(inputs, options): everything the public call takes, ragged sizes included. One class is left to test_cases.py."""
    sizes = [draw(st.integers(low, high)) for low, high in ((1, max_tokens), (2, max_classes), (1, max_width))]
    lead = draw(st.sampled_from([lambda n: (n,), lambda n: (1, n), lambda n: (2, n)]))(sizes[0])
    scale = draw(st.sampled_from([0.1, 1.0, 5.0]))
    inputs = problem(
        lead, *sizes[1:], draw(st.sampled_from(dtypes)), bias=draw(st.booleans()), scale=scale,
        ignored=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])), seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "softcap": draw(st.sampled_from([None, 1.0, 30.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-2])),
    }
    if options["softcap"] and options["label_smoothing"] and not softcap_with_smoothing:
        options["label_smoothing"] = 0.0
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if draw(st.booleans()):
        options["weight"] = torch.rand(sizes[1], generator=g) + 0.1
    if options["reduction"] == "none" and draw(st.booleans()):
        options["upstream"] = torch.randn(lead, generator=g)
    else:
        options["upstream"] = torch.tensor(draw(st.sampled_from([1.0, 0.3, -2.0])))
    if draw(st.booleans()):
        options["lse_upstream"] = torch.randn(lead, generator=g)
    return inputs, options


def judge(case, impl, device, **settings):
    inputs, options = case
    move = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x
    inputs, options = [move(x) for x in inputs], {name: move(x) for name, x in options.items()}
    got, want = run(*inputs, impl=impl, **settings, **options), oracle(*inputs, **options)
    assert_close_to_oracle(got, want, inputs[0].dtype)
    ignored = inputs[2] == -100
    assert not got.de[ignored].any()
    if options["reduction"] == "none":
        assert not got.loss[ignored].any()
    if options["reduction"] != "mean" or not ignored.all():
        assert (got.loss >= 0).all()


CHUNKED = problems(DTYPES, 30, 40, 24, softcap_with_smoothing=True)
KERNELS = problems(DTYPES[:3], 20, 40, 24, softcap_with_smoothing=False)


@fixed(170)
@given(CHUNKED)
def test_chunked(device, case):
    judge(case, "chunked", device)


@fixed(30)
@given(KERNELS)
def test_cce_exact(device, case):
    judge(case, "cce_exact", device)


@fixed(15)
@given(KERNELS)
def test_gather(device, case):
    judge(case, "gather", device, filter_eps=None)


@fixed(15)
@given(KERNELS)
def test_gather_of_pairs_that_are_all_kept(device, case):
    """filter_eps=0 drops what is exactly 0; no tile counts as crowded."""
    from cce import gather

    with mock.patch.multiple(gather, DENSE=2, MOSTLY_DENSE=2):
        judge(case, "gather", device, filter_eps=0.0)


@pytest.mark.slow
@fixed(1700)
@given(CHUNKED)
def test_chunked_at_length(device, case):
    judge(case, "chunked", device)


@pytest.mark.slow
@fixed(300)
@given(problems(DTYPES[:3], 40, 100, 70, softcap_with_smoothing=False))
def test_cce_exact_at_length(device, case):
    judge(case, "cce_exact", device)


@pytest.mark.slow
@fixed(300)
@given(problems(DTYPES[:3], 40, 100, 70, softcap_with_smoothing=False))
def test_gather_at_length(device, case):
    judge(case, "gather", device, filter_eps=None)


@pytest.mark.slow
@fixed(300)
@given(problems(DTYPES[:3], 40, 100, 70, softcap_with_smoothing=False))
def test_gather_of_pairs_that_are_all_kept_at_length(device, case):
    from cce import gather

    with mock.patch.multiple(gather, DENSE=2, MOSTLY_DENSE=2):
        judge(case, "gather", device, filter_eps=0.0)
