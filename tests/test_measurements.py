"""What the texts claim of the stored measurements. Each is a statement about figures/data/*.json, not a new measurement."""

import pytest

pytest.importorskip("matplotlib")

from cce.bench.figures import load  # noqa: E402


def test_chunked_costs_no_more_than_the_naive_loss_on_a_cpu():
    (run,) = load("chunked_cpu")["runs"]
    rows = run["contenders"]
    assert rows["chunked"]["forward_backward_ms"] <= rows["naive"]["forward_backward_ms"]
    assert rows["chunked"]["forward_backward_bytes"] <= rows["torch.linear_cross_entropy"]["forward_backward_bytes"]


# (input, V) -> cce's time as a share of cut-cross-entropy's: forward, forward + backward
RATIOS = {
    ("random", 128256): (0.84, 0.86),
    ("trained_like", 128256): (0.83, 0.88),
    ("random", 256000): (0.76, 0.83),
    ("trained_like", 256000): (0.76, 0.88),
}


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

    def test_times(self, run):
        """The goal was 0.80 and 0.85 everywhere; what is reached is held."""
        ours, theirs = run["contenders"]["cce"], run["contenders"]["cut-cross-entropy"]
        forward, both = RATIOS[run["input"], run["V"]]
        assert ours["forward_ms"] <= forward * theirs["forward_ms"]
        assert ours["forward_backward_ms"] <= both * theirs["forward_backward_ms"]

    def test_exact_is_exact(self, run):
        exact = run["contenders"]["cce_exact"]
        assert max(exact["de_error"], exact["dc_error"]) <= 3e-3


def test_reductions_are_faster_than_locks():
    for run in load("accumulation")["runs"]:
        times = run["forward_backward_ms"]
        for impl in ("cce", "cce_exact"):
            assert times[f"{impl}, locks"] > 1.3 * times[f"{impl}, reductions"]


def test_tensor_cores_round_towards_zero_and_z_y_shares_it():
    """Half a unit a step of 16 products, on average; a float32 z_y would leave several times as much in the loss."""
    for run in load("truncation")["runs"]:
        if run["input"] != "trained_like":
            continue
        steps = run["D"] / 16
        assert 0.3 * steps < -run["relative_z"] < 0.5 * steps
        assert run["loss_beyond_1e-5"] < 4 + steps / 4  # the tolerance of test_real_sizes.py
        assert run["loss_beyond_1e-5_with_plain_z_y"] > 2.5 * run["loss_beyond_1e-5"]


def test_what_the_filter_costs_on_a_trained_model():
    inputs = {run["name"]: run for run in load("real_softmax")["inputs"]}
    for name, (with_de, with_dc, de, dc) in {
        "real, train tokens": (7.0e-2, 2.6e-3, 2.7e-3, 1.9e-3),
        "trained_like": (2.7e-3, 2.2e-3, 2.7e-3, 2.2e-3),
        "random": (2.0e-2, 4.6e-3, 1.7e-3, 7.8e-4),
    }.items():
        run = inputs[name]
        (row,) = [r for r in run["filter"] if r["sorted"] and r["eps"] == 2**-12]
        exact = run["baseline"]["cce_exact"]
        got = [row["de_error"], row["dc_error"], exact["de_error"], exact["dc_error"]]
        assert [f"{x:.1e}" for x in got] == [f"{x:.1e}" for x in (with_de, with_dc, de, dc)]


@pytest.mark.parametrize("run", load("real_gather")["inputs"], ids=lambda r: r["name"])
def test_gather_is_never_further_from_exact_than_the_baseline(run):
    """The accuracy rule. A thousandth for inputs where both are nothing but the rounding of the output."""
    ours, baseline = run["contenders"]["gather"], run["contenders"]["naive"]
    assert ours["de_error"] <= 1.001 * baseline["de_error"]
    assert ours["dc_error"] <= 1.001 * baseline["dc_error"]


# (input, V) -> gather's forward and backward as a multiple of the logits GEMM, and of torch.compile's time; the same of exact gather. The
# goals were, trained-like, 1.35 and 1 / 2.6 (Gemma 2), 1.50 and 1 / 2.0 (Llama 3); random and exact, 1.30 of torch.compile. What is reached
# is held.
GATHER = {
    ("trained_like", 256000): ((1.38, 0.37), (4.9, 1.31)),
    ("trained_like", 128256): ((1.61, 0.503), (4.6, 1.43)),
    ("random", 256000): ((4.45, 1.27), (4.6, 1.30)),
    ("random", 128256): ((4.45, 1.45), (4.4, 1.41)),
}


@pytest.mark.parametrize("run", load("gather")["runs"], ids=lambda r: f"{r['input']}-{r['V']}")
class TestGather:
    def test_times(self, run):
        rows = run["contenders"]
        for name, (products, compiled) in zip(("gather", "gather, exact"), GATHER[run["input"], run["V"]], strict=True):
            assert rows[name]["forward_backward_ms"] <= products * run["gemm_ms"]
            assert rows[name]["forward_backward_ms"] <= compiled * rows["torch.compile"]["forward_backward_ms"]
        assert rows["gather"]["forward_ms"] <= run["gemm_ms_beside_forward"] / 0.94

    def test_memory(self, run):
        for name in ("gather", "gather, exact"):
            assert run["contenders"][name]["forward_bytes"] <= 2e6
            assert run["contenders"][name]["forward_backward_bytes"] <= 1.20 * run["gradient_bytes"]

    def test_gradients(self, run):
        ours, baseline = run["contenders"]["gather"], run["contenders"]["naive"]
        assert ours["de_error"] <= 1.001 * baseline["de_error"] and ours["dc_error"] <= 1.001 * baseline["dc_error"]
        exact = run["contenders"]["gather, exact"]
        assert max(exact["de_error"], exact["dc_error"]) <= 3e-3


def test_a_threshold_of_two_to_the_minus_12_on_a_trained_model():
    """Closer to exact than bfloat16 PyTorch, and this much faster than torch.compile."""
    for run in load("real_gather")["inputs"]:
        if run["name"] in ("real, train tokens", "real, held-out tokens"):
            rows = run["contenders"]
            for error in ("de_error", "dc_error"):
                assert rows["eps 2^-12"][error] <= 0.75 * rows["naive"][error]
            assert rows["torch.compile"]["ms"] >= 1.45 * rows["eps 2^-12"]["ms"]


def test_from_flat_to_sharp_there_is_no_cliff():
    """The flat end costs what exact gradients cost; on the way down nothing is slower than that, nor further from exact than bfloat16."""
    points = load("sharpness")["points"]
    times = [point["contenders"]["gather"]["ms"] for point in points]
    assert max(times) <= 1.07 * times[0] and times[-1] <= 0.31 * times[0]
    for point in points:
        ours, baseline = point["contenders"]["gather"], point["contenders"]["naive"]
        assert ours["de_error"] <= 1.001 * baseline["de_error"] and ours["dc_error"] <= 1.001 * baseline["dc_error"]


def test_from_an_idle_device():
    for run in load("gather_idle")["runs"]:
        assert run["idle"]
        rows, products = run["contenders"], {128256: 1.70, 256000: 1.42}[run["V"]]
        assert rows["gather"]["forward_backward_ms"] <= products * run["gemm_ms"]


# option -> its time as a multiple of the plain step's, Llama 3 and Gemma 2. The goal was 1.15 for softcap, bias and z-loss together.
OPTIONS = {
    "z-loss": (1.01, 1.01),
    "bias": (1.08, 1.08),
    "label smoothing": (1.12, 1.09),
    "softcap": (1.30, 1.71),
    "softcap, bias, z-loss": (1.41, 1.83),
}


def test_options():
    for run in load("options")["runs"]:
        for name, bounds in OPTIONS.items():
            assert run["options"][name]["times_plain"] <= bounds[run["V"] == 256000]


def test_long_contexts_need_at_most_half_the_gradients_more():
    """The goal for the time was 5 % a token above 8,192 tokens'; what is reached is held."""
    first, *others = load("context")["runs"]
    for run in others:
        assert run["bytes"] <= 1.5 * run["gradient_bytes"]
        assert run["us_per_token"] <= 1.24 * first["us_per_token"]
