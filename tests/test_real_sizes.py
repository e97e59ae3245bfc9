"""The kernels at the sizes of real models, on a GPU, judged by float64 (the chunked loss, which other tests pin to the naive)."""

import pytest
import torch
from oracle import TOL

from cce import linear_cross_entropy
from cce.bench.inputs import random, trained_like

pytestmark = pytest.mark.gpu

# (N, D, V, options): the vocabularies of Llama 2, Llama 3, Qwen 2.5 and Gemma 2, with ragged numbers of tokens
SIZES = [
    (8192, 2304, 256000, {}),
    (8192, 3584, 256000, {"softcap": 30.0}),
    (4096, 4096, 128256, {"z_loss": 1e-4, "weight": True}),
    (8191, 3584, 151936, {"bias": True, "ignored": 0.3}),
    (4097, 2048, 151936, {"label_smoothing": 0.1, "weight": True, "bias": True}),
    (8192, 5120, 32000, {"reduction": "none"}),
    (1, 4096, 128256, {}),
]


def loss_and_gradients(e, c, targets, bias, upstream, impl, options):
    leaves = [x.detach().clone().requires_grad_() for x in (e, c, bias) if x is not None]
    bias = leaves[2] if len(leaves) == 3 else None
    loss = linear_cross_entropy(leaves[0], leaves[1], targets, bias, impl=impl, **options)
    (loss * upstream.to(loss.dtype)).sum().backward()
    return [loss.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("make", [random, trained_like])
@pytest.mark.parametrize(
    ("N", "D", "V", "options"), SIZES, ids=lambda x: "-".join(x) if isinstance(x, dict) else str(x)
)
def test_against_float64(N, D, V, options, make):
    options = dict(options)
    e, c, targets = make(N, D, V)
    bias = torch.randn(V, device="cuda").bfloat16() if options.pop("bias", False) else None
    if options.get("weight"):
        options["weight"] = torch.rand(V, device="cuda")
    if ignored := options.pop("ignored", 0):
        targets[torch.rand(N, device="cuda") < ignored] = -100
    upstream = torch.rand(N, device="cuda") if options.get("reduction") == "none" else torch.ones((), device="cuda")
    wide = [None if x is None else x.double() for x in (e, c, bias)]
    expected = loss_and_gradients(wide[0], wide[1], targets, wide[2], upstream, "chunked", options)
    max_z = max((x.float() @ c.float().T).abs().amax().item() for x in e.split(1024)) + 5 * (bias is not None)
    for impl in ("cce_exact", "gather", "chunked"):
        got = loss_and_gradients(e, c, targets, bias, upstream, impl, {**options, "filter_eps": None})
        for name, x, exact in zip(("loss", "de", "dc", "dbias"), got, expected, strict=False):
            if name == "loss":
                # Tensor cores cut off what does not fit as they add 16 products at a time: up to 2^-23 of the sum so far, so 2^-24 |z|
                # for each of D / 16 steps if the sum grows evenly. z_y and lse_rest lose alike; a quarter of that is kept for the
                # difference, which was 24 units at D = 5120 (figures/data/truncation.json), where a quarter is 80.
                bound = 1e-5 * exact.abs() + (4 + D / 16 / 4) * 2**-24 * max_z
                assert ((x.double() - exact).abs() <= bound).all(), (impl, x, exact)
            else:
                error = (x.double() - exact).norm() / exact.norm()
                assert error < TOL[torch.bfloat16], f"{impl} {name}: {error:.1e}"


def test_float32_products_are_not_tf32():
    """One TF32 product would cost 3e-4."""
    e, c, targets = random(512, 1024, 32000, dtype=torch.float32)
    expected = loss_and_gradients(e.double(), c.double(), targets, None, torch.ones((), device="cuda"), "chunked", {})
    torch.set_float32_matmul_precision("high")
    try:
        for impl in ("cce_exact", "gather", "chunked"):
            got = loss_and_gradients(e, c, targets, None, torch.ones((), device="cuda"), impl, {})
            for x, exact in zip(got, expected, strict=True):
                assert (x.double() - exact).norm() / exact.norm() < 1e-5
    finally:
        torch.set_float32_matmul_precision("highest")


def test_many_slabs_many_times():
    """Two lanes of slabs share de and the copy home: the same answer twenty times, and the right one."""
    e, c, targets = random(1024, 1024, 128256)
    one = torch.ones((), device="cuda")
    expected = loss_and_gradients(e.double(), c.double(), targets, None, one, "chunked", {})
    for _ in range(20):
        got = loss_and_gradients(e, c, targets, None, one, "cce_exact", {})
        for x, exact in zip(got[1:], expected[1:], strict=True):
            assert (x.double() - exact).norm() / exact.norm() < TOL[torch.bfloat16]


@pytest.mark.parametrize("impl", ["cce", "cce_exact", "gather", "chunked"])
def test_graph_capture(impl):
    """Nothing can be raised or compacted there: a bad target's loss is NaN, an ignored row leaves no trace even if e is NaN."""
    N, D, V = 300, 256, 5003
    e, c, targets = random(N, D, V)
    targets[::5] = -100
    e[::5] = torch.nan
    e.requires_grad_(), c.requires_grad_()

    def step():
        e.grad = c.grad = None
        loss = linear_cross_entropy(e, c, targets, reduction="none", impl=impl)
        loss.sum().backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    captured = [loss.clone(), e.grad.clone(), c.grad.clone()]
    assert (captured[1][::5] == 0).all() and all(x.isfinite().all() for x in captured)
    eager = [step().detach(), e.grad, c.grad]
    for x, y in zip(captured, eager, strict=True):
        assert (x.float() - y.float()).norm() / y.float().norm() < 1e-2
    targets[1] = V
    graph.replay()
    assert loss[1].isnan() and loss[2:].isfinite().all()


def test_a_new_number_of_tokens_compiles_nothing():
    from cce.kernels.lse_forward import lse_forward_kernel

    e, c, targets = random(4096, 512, 32000)
    for N in (4096, 4095):
        linear_cross_entropy(e[:N], c, targets[:N], impl="cce_exact")
    cache = lse_forward_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(cache)
    for N in (1, 2, 17, 1000, 1024, 4000):
        linear_cross_entropy(e[:N], c, targets[:N], impl="cce_exact")
    assert len(cache) == before


def test_forward_memory_is_per_token():
    from cce.bench import peak_memory

    e, c, targets = random(8192, 2304, 256000)
    run = lambda: linear_cross_entropy(e, c, targets, impl="cce")  # noqa: E731
    run()
    assert peak_memory(run) <= 2e6
