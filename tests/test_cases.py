"""shared/cases.md: inputs from public bug reports of this field, one test a number, each with what went wrong there.

The judge is the float64 oracle, which test_naive.py pins to F.cross_entropy. Sizes are the report's where it costs seconds; the
kernels, interpreted on a CPU, get as few tiles as still show the case (real sizes on a GPU).
"""

import pytest
import torch
import torch.nn.functional as F
from oracle import TOL, Outcome, assert_close_to_oracle, assert_gradient, check, oracle, problem, run

from cce import LinearCrossEntropyHead, linear_cross_entropy

FLOAT32, FLOAT16, BFLOAT16 = (torch.float32, torch.float16, torch.bfloat16)
IMPLS = ["naive", "checkpoint", "chunked", "cce_exact", "cce", "gather"]
all_impls = pytest.mark.parametrize("impl", IMPLS)
fast_impls = pytest.mark.parametrize("impl", ["chunked", "cce_exact", "gather"])


def exact(impl):
    return {"impl": impl, "filter_eps": None} if impl in ("cce", "gather") else {"impl": impl}


def interpreted(impl, device):
    return impl in ("cce", "cce_exact", "gather") and device.type == "cpu"


@fast_impls
def test_case_01_few_classes_many_tokens(impl, device):
    """A peer's classifier gradient was far off: it summed thousands of tokens' contributions in 16 bits."""
    N = 1024 if interpreted(impl, device) else 8192
    check(*problem(N, 32, 128, BFLOAT16, device), **exact(impl))


@all_impls
def test_case_02_uneven_upstream_gradient(impl, device):
    """reduction="none" times per-token weights with zeros and a 100: a peer used the first token's upstream for all."""
    weights = torch.ones(40, device=device)
    weights[::4], weights[7] = 0, 100
    got = check(*problem(40, 37, 16, FLOAT32, device), reduction="none", upstream=weights, **exact(impl))
    assert not got.de[weights == 0].any()


@all_impls
def test_case_03_tiny_input_is_not_zero(impl, device):
    """N=4, V=3: a peer returned 0 on a machine without a usable GPU."""
    got = check(*problem(4, 3, 5, FLOAT32, device), **exact(impl))
    assert got.loss > 0.1


@all_impls
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_case_04_every_target_ignored(impl, reduction, device):
    """NaN for the mean, 0 else, as PyTorch; backward does not crash and gives zeros."""
    e, c, targets = problem(6, 7, 5, FLOAT32, device, ignored=1.0)
    got = run(e, c, targets, reduction=reduction, **exact(impl))
    torch.testing.assert_close(got.loss, F.cross_entropy(e @ c.T, targets, reduction=reduction), equal_nan=True)
    assert torch.equal(got.de, torch.zeros_like(e)) and torch.equal(got.dc, torch.zeros_like(c))


@all_impls
@pytest.mark.parametrize("ignore_index", [5, -1, -3])
def test_case_05_ignore_index(impl, ignore_index, device):
    """Inside the valid range, and negative other than -100."""
    e, c, targets = problem(40, 9, 8, FLOAT32, device)
    targets[::5] = ignore_index
    check(e, c, targets, ignore_index=ignore_index, **exact(impl))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("dist") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@fast_impls
def test_case_06_dtensor_classifier(impl, mesh):
    """A peer read a DTensor's address: illegal access. Here an error says what to do, and what it says works."""
    if impl in ("cce_exact", "gather") and torch.cuda.is_available():
        pytest.skip("the mesh is the CPU's, and here the kernels are compiled for the GPU")
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    e, c, targets = problem(8, 7, 5)
    sharded = torch.nn.Parameter(distribute_tensor(c, mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"c: .*DTensor.*full_tensor.*LinearCrossEntropyHead"):
        linear_cross_entropy(e, sharded, targets, impl=impl)
    want = linear_cross_entropy(e, c, targets, impl="naive")
    torch.testing.assert_close(linear_cross_entropy(e, sharded.full_tensor(), targets, impl=impl), want)
    head = LinearCrossEntropyHead(5, 7, impl=impl)
    head.weight.data.copy_(c)
    fully_shard(head, mesh=mesh)
    loss = head(e, targets)
    loss.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(head.weight.grad.full_tensor().double(), oracle(e, c, targets).dc, rtol=1e-5, atol=1e-7)


@all_impls
def test_case_07_autocast(impl, device):
    """float32 parameters under bfloat16 autocast: gradients in float32, dtypes never mixed inside a product."""
    e, c, targets = problem(40, 37, 8, FLOAT32, device)
    with torch.autocast(device.type, BFLOAT16):
        got = run(e, c, targets, **exact(impl))
    want = oracle(e.bfloat16(), c.bfloat16(), targets)
    assert got.loss.dtype == got.de.dtype == got.dc.dtype == FLOAT32
    got.de, got.dc = got.de.bfloat16(), got.dc.bfloat16()
    assert_close_to_oracle(got, want, BFLOAT16, baseline=impl in ("naive", "checkpoint"))


@pytest.mark.parametrize("V", [32_003, 50_257, 151_669])
def test_case_08_ragged_vocabulary_with_softcap(V, device):
    """Out-of-range columns masked before the softcap count as logits of -softcap."""
    check(*problem(9, V, 4, FLOAT32, device), impl="chunked", softcap=1.0)
    check(*problem(9, V, 4, BFLOAT16, device, bias=True), impl="chunked", softcap=1.0, reduction="sum")


@pytest.mark.parametrize("impl", ["cce_exact", "gather"])
@pytest.mark.parametrize("V", [63, 65, 129, 257])
def test_case_08_ragged_vocabulary_with_softcap_in_kernels(V, impl, device):
    check(*problem(9, V, 4, FLOAT32, device), softcap=1.0, **exact(impl))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cce_exact", "gather"])
@pytest.mark.parametrize("V", [32_003, 50_257, 151_669])
def test_case_08_ragged_vocabulary_with_softcap_on_a_gpu(V, impl, device):
    check(*problem(300, V, 72, BFLOAT16, device), softcap=1.0, **exact(impl))


@all_impls
def test_case_09_huge_logits(impl, device):
    """Logits of ±1e4: finite loss and gradients."""
    e, c, targets = problem(40, 37, 16, FLOAT32, device)
    e *= 1e4 / (e @ c.T).abs().max()
    assert (e @ c.T).abs().max() > 9e3
    got = check(e, c, targets, **exact(impl))
    assert all(x.isfinite().all() for x in (got.loss, got.de, got.dc))


@all_impls
def test_case_09_equal_logits(impl, device):
    e, c, targets = problem(40, 37, 16, FLOAT32, device)
    e[3], e[7] = 0, 1
    c[:] = c[0]
    got = check(e, c, targets, reduction="none", **exact(impl))
    torch.testing.assert_close(got.loss, torch.full_like(got.loss, 37.0).log(), rtol=1e-5, atol=1e-5)


@all_impls
@pytest.mark.parametrize("margin", [16.2, 40.0, 80.0])
def test_case_09_target_of_probability_one(impl, margin, device):
    """1 - p of 1e-7 and far less: lse - z_y and p - 1 cancel there; softplus(lse_rest - z_y) does not.
    (From a margin of 88 on the loss is below float32's normal numbers.)"""
    e, c = (margin * torch.eye(8, 8, device=device), torch.eye(8, device=device))
    got = check(e, c, torch.arange(8, device=device), reduction="none", **exact(impl))
    exactly = torch.log1p(7 * torch.exp(torch.tensor(-margin, dtype=torch.float64))).item()
    torch.testing.assert_close(got.loss.cpu(), torch.full((8,), exactly), rtol=1e-4, atol=1e-44)


@all_impls
@pytest.mark.parametrize("layout", ["transposed", "slice", "row stride", "odd offset", "int32", "every second"])
def test_case_10_strides(impl, layout, device):
    e, c, targets = problem((3, 14), 37, 24, FLOAT32, device)
    if layout == "transposed":
        e = e.mT.contiguous().mT
    elif layout == "slice":
        e, targets = e[:, :-1], targets[:, 1:]
    elif layout == "row stride":
        c = F.pad(c, (1, 3))[:, 1:-3]
    elif layout == "odd offset":
        e, targets = e.flatten(0, 1)[1:], targets.flatten()[1:]
    elif layout == "int32":
        targets = targets.int()
    elif layout == "every second":
        e, targets = e.flatten(0, 1)[::2], targets.flatten()[::2]
    check(e, c, targets, **exact(impl))


@all_impls
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("N", "V", "D"), [(1, 37, 16), (40, 37, 1), (40, 37, 13), (1, 2, 1), (40, 1, 16), (1, 1, 1)])
def test_case_11_degenerate_sizes(impl, N, V, D, dtype, device):
    """N=1, D=1, V=1, D not a multiple of 16."""
    got = check(*problem(N, V, D, dtype, device), **exact(impl))
    if V == 1:
        assert got.loss == 0 and not got.de.any() and not got.dc.any()


@all_impls
def test_case_11_one_class_with_all_options(impl, device):
    """V=1 in float32: lse is the only logit, and only z-loss has a gradient. In 16 bits a smoothed target's S is rounded, where
    the true sum with the smoothing's rank-one part is 0: dc's error is then 2^-9 of α‖e‖, which no rule relative to 0 can hold."""
    inputs = problem(40, 1, 16, FLOAT32, device, bias=True, ignored=0.3)
    options = dict(label_smoothing=0.1, z_loss=1e-2, weight=torch.ones(1, device=device))
    check(*inputs, lse_upstream=torch.linspace(-1, 1, 40, device=device), **options, **exact(impl))


@all_impls
def test_case_11_no_tokens(impl, device):
    e, c, targets = problem(0, 7, 5, FLOAT32, device)
    assert run(e, c, targets, **exact(impl)).loss.isnan()
    got = run(e, c, targets, reduction="none", **exact(impl))
    assert got.loss.shape == (0,) and got.de.shape == (0, 5) and torch.equal(got.dc, torch.zeros_like(c))


def chunk_oracle(e, c, targets, rows=512):
    """The mean loss and its gradients in float64, where N x V float64 logits would not fit; max |z| and Σ|d| with them."""
    loss, max_z, sum_d = 0.0, 0.0, 0.0
    de = torch.empty(e.shape, dtype=torch.float64, device=e.device)
    dc = torch.zeros(c.shape, dtype=torch.float64, device=c.device)
    for some in torch.arange(len(e), device=e.device).split(rows):
        x, wide_c = e[some].double(), c.double()
        z = x @ wide_c.T
        max_z = max(max_z, z.abs().max().item())
        loss += F.cross_entropy(z, targets[some], reduction="sum").item() / len(e)
        s = z.softmax(1)
        s[torch.arange(len(some)), targets[some]] -= 1
        s /= len(e)
        sum_d += s.abs().sum().item()
        de[some] = s @ wide_c
        dc.addmm_(s.T, x)
    loss = torch.tensor(loss, dtype=torch.float64, device=e.device)
    lengths = [x.double().norm(dim=1).max().item() for x in (e, c)]
    return Outcome(loss, None, de, dc, None, max_z, sum_d, *lengths, num_tokens=len(e))


@pytest.mark.gpu
@fast_impls
@pytest.mark.parametrize(("N", "V", "D"), [(64, 262_400, 8_200), (9_000, 250_000, 64)], ids=["V*D", "N*V"])
def test_case_12_offsets_beyond_31_bits(impl, N, V, D, device):
    """V·D = 2.15e9 elements of c (4.3 GB in bfloat16, 17 GB for the oracle's dc), and N·V = 2.25e9 logits. The highest classes
    and tokens, whose offsets overflow, are targets."""
    g = torch.Generator(device).manual_seed(0)
    e = torch.randn(N, D, generator=g, device=device, dtype=BFLOAT16)
    c = torch.randn(V, D, generator=g, device=device, dtype=BFLOAT16).mul_(D**-0.5)
    targets = torch.randint(0, V, (N,), generator=g, device=device)
    targets[-2:] = torch.tensor([V - 1, V - 2], device=device)
    assert max(V * D, N * V) > 2**31
    got = run(e, c, targets, **exact(impl))
    want = chunk_oracle(e, c, targets)
    torch.testing.assert_close(got.loss.double(), want.loss, rtol=1e-5, atol=0)
    slack = 8 * 2**-24 * want.max_z * want.sum_d
    assert_gradient("de", got.de, want.de, TOL[BFLOAT16], slack * want.max_c)
    for some in torch.arange(V, device=device).split(1 << 16):  # without another [V, D] in float64
        assert_gradient("dc", got.dc[some], want.dc[some], TOL[BFLOAT16], slack * want.max_e)


@pytest.mark.gpu
@fast_impls
def test_case_12_hidden_states_beyond_31_bits(impl, device):
    """N·D > 2^31: as the tokens repeat, the loss of every block of them is that of the first, and so is its gradient."""
    block, times, V, D = 2_048, 260, 512, 4_096
    assert block * times * D > 2**31
    e, c, targets = problem(block, V, D, BFLOAT16, device)
    want = oracle(e, c, targets)
    got = run(
        e.repeat(times, 1), c, targets.repeat(times), reduction="none", upstream=torch.tensor(1 / block), **exact(impl)
    )
    for i in (0, 1, times // 2, times - 1):
        here = slice(i * block, (i + 1) * block)
        torch.testing.assert_close(got.loss[here].double().mean(), want.loss, rtol=1e-5, atol=0)
        assert_gradient("de", got.de[here], want.de, TOL[BFLOAT16], 8 * 2**-24 * want.max_z * want.sum_d * want.max_c)
    assert_gradient(
        "dc", got.dc, want.dc * times, TOL[BFLOAT16], 8 * 2**-24 * want.max_z * want.sum_d * times * want.max_e
    )


@all_impls
@pytest.mark.parametrize("value", [7, -1])
def test_case_13_target_out_of_range(impl, value, device):
    """A peer returned a plausible loss, or read outside the classifier."""
    e, c, targets = problem(6, 7, 5, FLOAT32, device)
    targets[4] = value
    with pytest.raises(IndexError, match=f"targets: value {value} at flat position 4"):
        linear_cross_entropy(e, c, targets, impl=impl)


@all_impls
def test_case_14_gradient_accumulation(impl, device):
    """Backward twice with retain_graph, and a loss scaled by 1/8: saved gradients are not modified in place."""
    e, c, targets = problem(40, 37, 16, FLOAT32, device)
    want = oracle(e, c, targets)
    e, c = e.requires_grad_(), c.requires_grad_()
    loss = linear_cross_entropy(e, c, targets, **exact(impl)) / 8
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(e.grad.double(), want.de / 4, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(c.grad.double(), want.dc / 4, rtol=1e-5, atol=1e-7)


@all_impls
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_case_15_bias_of_minus_infinity(impl, softcap, device):
    """Over a whole vocabulary tile, and for a few classes that are nobody's target: finite loss, zero gradients there."""
    e, c, _, bias = problem(40, 150, 8, FLOAT32, device, bias=True)
    targets = torch.arange(40, device=device) % 50
    gone = torch.zeros(150, dtype=torch.bool, device=device)
    gone[64:128] = gone[51:55] = gone[149] = True
    bias[gone] = -torch.inf
    got = run(e, c, targets, bias, softcap=softcap, **exact(impl))
    assert_close_to_oracle(got, oracle(e, c, targets, bias, softcap=softcap), FLOAT32)
    assert got.loss.isfinite() and not got.dc[gone].any() and not got.dbias[gone].any()


@all_impls
def test_case_15_all_other_classes_minus_infinity(impl, device):
    """Only the target can be: loss 0, gradient 0, whatever the number of tiles before it."""
    e, c, _, bias = problem(4, 150, 8, FLOAT32, device, bias=True)
    bias[:] = -torch.inf
    bias[140] = 0
    got = run(
        e, c, torch.full((4,), 140, device=device), bias, lse_upstream=torch.zeros(4, device=device), **exact(impl)
    )
    assert got.loss == 0 and not got.de.any() and not got.dc.any() and not got.dbias.any()
    torch.testing.assert_close(got.lse, e @ c[140])


@all_impls
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_case_16_memorised_batch(impl, dtype, device):
    """Every target's probability above 0.999: gradients within the rule, loss never negative."""
    N, V, D = 48, 70, 64
    e, c, targets = problem(N, V, D, dtype, device)
    c *= 8
    e = (c[targets].float() * (14 / c[targets].float().square().sum(1, keepdim=True)) + 0.01 * e.float()).to(dtype)
    if impl in ("naive", "checkpoint") and dtype == BFLOAT16:
        assert (run(e, c, targets, reduction="none", impl=impl).loss >= 0).all()
        return
    got = check(e, c, targets, reduction="none", **exact(impl))
    assert (got.loss >= 0).all() and got.loss.max() < 1e-3


@all_impls
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_case_17_smoothing_with_class_weights(impl, reduction, z_loss, device):
    """Label smoothing 0.05, class weights and ignored tokens, exactly as F.cross_entropy has them; z-loss by hand beside it."""
    e, c, targets = problem(40, 37, 8, FLOAT32, device, ignored=0.3)
    weight = torch.linspace(0.1, 2, 37, device=device)
    got = check(e, c, targets, reduction=reduction, label_smoothing=0.05, weight=weight, z_loss=z_loss, **exact(impl))
    z = e.double() @ c.double().T
    want = F.cross_entropy(z, targets, weight.double(), reduction=reduction, label_smoothing=0.05)
    extra = torch.where(targets == -100, 0, z_loss * z.logsumexp(1) ** 2)
    extra = {"none": extra, "sum": extra.sum(), "mean": extra.sum() / (targets != -100).sum()}[reduction]
    torch.testing.assert_close(got.loss.double(), want + extra, rtol=1e-5, atol=1e-6)


@fast_impls
def test_case_18_common_vector(impl, device):
    """c = a common vector ten times larger than the differences between its rows: S rounded to bfloat16 does not sum to zero
    over a row, and the common vector turns that into 1e-2 of de, unless the residual is given back."""
    N, V, D = 70, 200, 64
    e, c, targets = problem(N, V, D, FLOAT32, device)
    c += 10 * c.std() * torch.nn.functional.normalize(torch.randn(D, device=device), dim=0) * D**0.5
    check(e.bfloat16(), c.bfloat16(), targets, **exact(impl))


@fast_impls
def test_case_19_grad_scaler(impl, device):
    """float16, reduction sum, loss times 65536: S itself is beyond float16, de and dc (classifier and states small) are not."""
    e, c, targets = problem(40, 37, 16, FLOAT16, device)
    e, c = e / 64, c / 64
    got = check(e, c, targets, reduction="sum", upstream=torch.tensor(65536.0, device=device), **exact(impl))
    assert got.de.isfinite().all() and got.dc.isfinite().all() and got.dc.any()


def test_case_19_mean_over_131072_tokens(device):
    """1/131072 is below float16's normal range: S would be subnormal, and its tail 0. de honestly is; dc sums to normal numbers."""
    e, c, targets = problem(131_072, 16, 8, FLOAT16, device)
    check(e, c, targets, impl="chunked")


@fast_impls
def test_case_19_mean_over_many_tokens(impl, device):
    """The same at the kernels' size: the mean's 1/40 times an upstream of 1/3277."""
    e, c, targets = problem(40, 37, 16, FLOAT16, device)
    check(64 * e, c / 64, targets, upstream=torch.tensor(40 / 131_072, device=device), **exact(impl))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cce_exact", "gather"])
def test_case_19_mean_over_131072_tokens_in_kernels(impl, device):
    check(*problem(131_072, 64, 16, FLOAT16, device), **exact(impl))
