"""The judge of all tests: the naive loss in float64 on the same inputs, and how far from it a result may be.

Let u = 2^-24 and Z = max |z|, z the logits that the softmax sees. A float32 logit is off by a few u Z, so
    nll  is off by a few u Z in absolute terms, beside the 1e-5 relative of its own arithmetic;
    S    (the logit gradient), by a few u Z of d, the token's gradient with respect to (z_y, lse_rest), beside `tol` relative;
    de   = S @ c, by a few u Z |d| max‖c_v‖ per token, so over all tokens at most  8 u Z · Σ|d| · max‖c_v‖;
    dc   = S.T @ e, likewise                                                       8 u Z · Σ|d| · max‖e_n‖;
    dbias = S summed over tokens                                                   8 u Z · Σ|d|.
`tol` holds the rounding of the output and of S in 16 bits. A relative norm alone would mean nothing where the gradient is 0.

bfloat16's tol of 3e-3 is a root mean square: one number's rounding may be off by 2^-8 = 3.9e-3. Where a norm hangs on a few
roundings, there is no mean to speak of and the worst case holds, 2^-8 for the output and 2^-8 for S: below FEW elements, and
for de and dc (each token's gradient hangs on the rounding of S at its target) below FEW tokens. With label smoothing S is rounded
before the exact rank-one part nearly cancels it: its worst case is then 2^-8 (float16: 2^-11) of Σ|d|, not of what is left.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from cce import linear_cross_entropy, naive

U = 2.0**-24  # unit roundoff of float32
# float64 is accumulated in float64 (chunked, naive): 1e-12 is some 1e4 roundings, sums over 1e3 terms included.
TOL = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 3e-3, torch.float64: 1e-12}
FEW, FEW_TOL = 32, 2 * 2.0**-8
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: U, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FLOAT16_NORMAL, FLOAT16_HALF_STEP = 2.0**-14, 2.0**-25  # smallest normal number; half the distance of subnormals


@dataclass
class Outcome:
    """What a call gave. The oracle's also knows the sizes that the error rule needs."""

    loss: Tensor
    lse: Tensor | None
    de: Tensor | None
    dc: Tensor | None
    dbias: Tensor | None
    max_z: float = 0.0
    sum_d: float = 0.0  # Σ |d|
    max_e: float = 0.0  # longest row
    max_c: float = 0.0
    loss_slope: float = 1.0  # how much the loss of one token moves when a logit does
    num_tokens: int = 0
    smoothed: bool = False


def run(e, c, targets, bias=None, *, impl, upstream=None, lse_upstream=None, frozen="", **options) -> Outcome:
    """Loss and gradients of `Σ upstream · loss + Σ lse_upstream · lse` (upstream 1 and no lse term by default)."""
    leaf = lambda name, x: None if x is None else x.detach().requires_grad_(name not in frozen)
    e, c, bias = (leaf("e", e), leaf("c", c), leaf("b", bias))
    result = linear_cross_entropy(e, c, targets, bias, impl=impl, return_lse=lse_upstream is not None, **options)
    loss, lse = result if lse_upstream is not None else (result, None)
    objective = (loss if upstream is None else loss * upstream.to(loss.dtype)).sum()
    if lse is not None:
        objective = objective + (lse * lse_upstream.to(lse.dtype)).sum()
    objective.backward()
    return Outcome(
        loss.detach(), None if lse is None else lse.detach(), e.grad, c.grad, None if bias is None else bias.grad
    )


def oracle(e, c, targets, bias=None, **options) -> Outcome:
    """The same in float64 through the naive loss. impl, filter and frozen inputs make no difference to it."""
    for name in ("impl", "filter_eps", "frozen"):
        options.pop(name, None)
    double = lambda x: None if x is None else x.detach().double()
    if options.get("weight") is not None:
        options["weight"] = double(options["weight"])
    with _recorded() as calls:
        result = run(double(e), double(c), targets, double(bias), impl="naive", **options)
    for z, outputs in calls:
        lse = torch.logaddexp(outputs[0], outputs[1]).detach()
        result.max_z = z[z.isfinite()].abs().max().item()
        result.sum_d = sum(x.grad.abs().sum().item() for x in outputs if x.grad is not None)
        result.num_tokens = len(z)
        weight, reduction = options.get("weight"), options.get("reduction", "mean")
        # In the mean the class weights cancel; in the sum the errors of all tokens add up.
        slope = 1 if weight is None or reduction == "mean" else weight.abs().max().item()
        slope += 2 * abs(options.get("z_loss", 0)) * lse[lse.isfinite()].abs().sum().item() / len(z)
        if reduction == "none":
            slope += 2 * abs(options.get("z_loss", 0)) * lse[lse.isfinite()].abs().max().item()
        result.loss_slope = slope * (len(z) if reduction == "sum" else 1)
    result.smoothed = options.get("label_smoothing", 0) > 0
    if e.numel() and c.numel():
        result.max_e, result.max_c = (x.detach().double().norm(dim=-1).max().item() for x in (e, c))
    return result


@contextmanager
def _recorded():
    """Keeps the primitive's outputs with their gradients: those are the d of the error rule."""
    calls, original = [], naive.target_and_rest

    def recording(e, c, targets, bias=None, softcap=None, mean_weight=None):
        outputs = original(e, c, targets, bias, softcap, mean_weight)
        outputs[0].retain_grad()
        outputs[1].retain_grad()
        z = torch.nn.functional.linear(e, c, bias).detach()
        calls.append((z if softcap is None else softcap * torch.tanh(z / softcap), outputs[:2]))
        return outputs

    with mock.patch.object(naive, "target_and_rest", recording):
        yield calls


def assert_close_to_oracle(got: Outcome, want: Outcome, dtype: torch.dtype, baseline: bool = False) -> None:
    """Every part of `got` within the rule above. dtype: of e and c.

    `baseline`: for `naive` and `checkpoint` in 16 bits, whose logits are rounded to the input dtype: u is that dtype's."""
    u = ROUNDOFF[dtype] if baseline or dtype == torch.float64 else U
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got.loss.dtype == wide and got.loss.shape == want.loss.shape
    relative = min(1e-5, TOL[dtype]) if not baseline else max(1e-5, u)
    per_token = 4 * u * want.max_z * want.loss_slope
    _assert_values("loss", got.loss, want.loss, relative, per_token)
    if want.lse is not None:
        assert got.lse.dtype == wide and got.lse.shape == want.lse.shape
        _assert_values("lse", got.lse, want.lse, relative, 4 * u * want.max_z)
    slack = 8 * u * want.max_z * want.sum_d
    for name, scale in {"de": want.max_c, "dc": want.max_e, "dbias": 1.0}.items():
        x, o = getattr(got, name), getattr(want, name)
        if x is not None:
            few = x.dtype.itemsize == 2 and (x.numel() < FEW or (want.num_tokens < FEW and name != "dbias"))
            tol = FEW_TOL if few and x.dtype == torch.bfloat16 else TOL[x.dtype]
            of_s = ROUNDOFF[x.dtype] * want.sum_d if few and want.smoothed else 0
            assert_gradient(name, x, o, tol, (slack + of_s) * scale)


def _assert_values(name: str, got: Tensor, want: Tensor, relative: float, absolute: float) -> None:
    torch.testing.assert_close(
        got.double(), want, rtol=relative, atol=absolute, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def assert_gradient(name: str, x: Tensor, o: Tensor, tol: float, slack: float) -> None:
    """‖x − o‖ ≤ tol · ‖o‖ + slack, where float16's subnormal numbers may be off by half their distance."""
    assert x.shape == o.shape, f"{name}: shape {tuple(x.shape)}, expected {tuple(o.shape)}"
    error = (x.double() - o).abs()
    if x.dtype == torch.float16:
        error = torch.where(o.abs() < FLOAT16_NORMAL, (error - FLOAT16_HALF_STEP).clamp(min=0), error)
    bound = tol * o.norm() + slack
    assert error.norm() <= bound, (
        f"{name} ({x.dtype}, {tuple(x.shape)}): error {error.norm():.3e} > {tol:g} * {o.norm():.3e} + {slack:.3e}; "
        f"relative {error.norm() / o.norm():.2e}"
    )


def check(e, c, targets, bias=None, *, impl, **options) -> Outcome:
    """Runs `impl` and judges it; returns what it gave."""
    got = run(e, c, targets, bias, impl=impl, **options)
    assert_dtypes(got, e, c, bias)
    baseline = impl in ("naive", "checkpoint", "torch_compile") and e.dtype in (torch.float16, torch.bfloat16)
    assert_close_to_oracle(got, oracle(e, c, targets, bias, **options), e.dtype, baseline)
    return got


def assert_dtypes(got: Outcome, e, c, bias) -> None:
    for gradient, x in ((got.de, e), (got.dc, c), (got.dbias, bias)):
        assert gradient is None or gradient.dtype == x.dtype


def problem(N, V, D, dtype=torch.float32, device="cpu", *, bias=False, ignored=0.0, seed=0, scale=1.0):
    """e [*N, D], c [V, D], targets [*N] and perhaps bias [V] with logits of standard deviation `scale`."""
    shape = (N,) if isinstance(N, int) else tuple(N)
    g = torch.Generator().manual_seed(seed)
    e = torch.randn(*shape, D, generator=g).to(dtype)
    c = (scale * torch.randn(V, D, generator=g) / D**0.5).to(dtype)
    targets = torch.randint(0, V, shape, generator=g)
    targets[torch.rand(shape, generator=g) < ignored] = -100
    b = torch.randn(V, generator=g).to(dtype)
    inputs = (e, c, targets, b) if bias else (e, c, targets)
    return tuple(x.to(device) for x in inputs)
