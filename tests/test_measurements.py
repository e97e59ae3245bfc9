"""What the texts claim of the stored measurements. Each is a statement about figures/data/*.json, not a new measurement."""

import pytest

pytest.importorskip("matplotlib")

from cce.bench.figures import load  # noqa: E402


def test_chunked_costs_no_more_than_the_naive_loss_on_a_cpu():
    (run,) = load("chunked_cpu")["runs"]
    rows = run["contenders"]
    assert rows["chunked"]["forward_backward_ms"] <= rows["naive"]["forward_backward_ms"]
    assert rows["chunked"]["forward_backward_bytes"] <= rows["torch.linear_cross_entropy"]["forward_backward_bytes"]


@pytest.mark.parametrize("run", load("cut")["runs"], ids=lambda r: f"{r['input']}-{r['V']}")
class TestCut:
    """The paper's algorithm against cut-cross-entropy on an H200."""

    def test_memory(self, run):
        ours, gradients = run["contenders"]["cce"], run["gradient_bytes"]
        assert ours["forward_bytes"] <= 2e6
        assert ours["forward_backward_bytes"] <= 1.25 * gradients

    def test_gradients_are_at_least_as_close(self, run):
        ours, theirs = run["contenders"]["cce"], run["contenders"]["cut-cross-entropy"]
        assert ours["de_error"] <= theirs["de_error"] and ours["dc_error"] <= theirs["dc_error"]

    def test_no_slower(self, run):
        ours, theirs = run["contenders"]["cce"], run["contenders"]["cut-cross-entropy"]
        assert ours["forward_ms"] <= 0.82 * theirs["forward_ms"]
        assert ours["forward_backward_ms"] <= 0.92 * theirs["forward_backward_ms"]

    def test_exact_is_exact(self, run):
        exact = run["contenders"]["cce_exact"]
        assert max(exact["de_error"], exact["dc_error"]) <= 3e-3


def test_reductions_are_faster_than_locks():
    for run in load("accumulation")["runs"]:
        times = run["forward_backward_ms"]
        for impl in ("cce", "cce_exact"):
            assert times[f"{impl}, locks"] > 1.3 * times[f"{impl}, reductions"]
