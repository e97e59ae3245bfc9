"""The public call: checks, shift, ignored tokens, the terms of the loss, reductions; then one implementation.

An implementation is a primitive `(e, c, targets, bias, softcap, mean_weight) -> (z_y, lse_rest, z_bar)` (specified in
`cce.naive.target_and_rest`). Everything else about the loss is the ordinary PyTorch of `TokenLoss` on those vectors, written once:

    nll = softplus(lse_rest - z_y)          lse = logaddexp(lse_rest, z_y)

`softplus` instead of `lse - z_y`: it cannot be negative, and it does not cancel for confident tokens.
"""

import dataclasses
import enum
import functools
import importlib
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from cce import chunked, naive

REDUCTIONS = ("mean", "sum", "none")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))

# name -> what it stands for. The second half are the names of cut-cross-entropy; its Kahan-compensated variants are
# covered by `cce`, whose sums are float32, with the filter off where the name says "full".
IMPLEMENTATIONS = {
    "naive": "naive",
    "checkpoint": "checkpoint",
    "chunked": "chunked",
    "cce": "cce",
    "cce_exact": "cce_exact",
    "auto": "auto",
    "torch_compile": "torch_compile",
    "cce_kahan": "cce",
    "cce_kahan_full_c": "cce_full_c",
    "cce_kahan_full_e": "cce_full_e",
    "cce_kahan_full_c_full_e": "cce_exact",
    "cce_kahan_full": "cce_exact",
}
WITH_SOFTCAPPED_SMOOTHING = ("naive", "checkpoint", "chunked", "torch_compile")


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = True,
    accum_c_fp32: bool = True,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str = "auto",
    vocab_parallel_options: None = None,
    *,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    z_loss: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of `softmax(e @ c.T + bias)` against `targets`, without storing the logits.

    Values and gradients follow `torch.nn.functional.cross_entropy(e @ c.T + bias, targets, ...)`. Calls written for
    `cut_cross_entropy.linear_cross_entropy` run unchanged.

    Args:
        e: hidden states [..., D]; float32, bfloat16 or float16 (float64 for naive, checkpoint, chunked), any strides.
        c: classifier [V, D] (`lm_head.weight`), same dtype and device. Under `torch.autocast` both are cast first.
        targets: class ids [...], any integer dtype; values in [0, V) or `ignore_index`.
        bias: [V], floating point, or None.
        ignore_index: targets with this value count for nothing, and nothing is computed for them.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        reduction: "mean" (over the tokens that count, by class weight if there is one), "sum" or "none".
        shift: score `e[..., t, :]` against `targets[..., t + shift]`; True is 1. Needs at least [B, T, D] or [T, D].
        return_lse: also return the log-sum-exp of each token's logits; differentiable.
        filter_eps: `impl="cce"` only. Blocks of the logit gradient without a target whose softmax is everywhere under
            this are skipped. "auto" (or "high") is `finfo(e.dtype).eps / 32`, 2^-12 in bfloat16; None: no filter.
        accum_e_fp32, accum_c_fp32: accepted for compatibility; sums are always float32.
        filter_e_grad, filter_c_grad: False keeps the filter away from de or dc.
        impl: "naive", "checkpoint", "chunked", "cce" (the paper, arXiv:2411.09009), "cce_exact" (without its filter),
            "auto", or a name of cut-cross-entropy. "auto" is "cce_exact" on NVIDIA GPUs of compute capability 8.0 and
            up, and "chunked" elsewhere, for float64, and for label smoothing with softcap.
        label_smoothing: in [0, 1], as in `F.cross_entropy`. With softcap: naive, checkpoint, chunked only.
        weight: class weights [V], as in `F.cross_entropy`.
        z_loss: adds `z_loss * lse**2` per token ("mean" divides by the number of tokens that count).

    Returns:
        The loss, float32 (float64 for float64): a scalar, or for "none" the shape of `targets` (less its first `shift`
        columns) with zeros at ignored tokens. With return_lse, the pair (loss, lse), lse shaped like "none".

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, shape or range; the message names it.
        IndexError: a target is neither in [0, V) nor ignore_index. Not under CUDA graph capture or torch.compile,
            where nothing can be raised: there such a token's loss is NaN.
        ImportError: the implementation needs Triton and it is not there.
    """
    if isinstance(bias, int) and not isinstance(bias, bool):  # cut-cross-entropy 25.1.1: the fourth positional
        bias, ignore_index = None, bias
    del accum_e_fp32, accum_c_fp32
    e, c, bias = _cast_for_autocast(e, c, bias)
    impl = _check(e, c, targets, bias, ignore_index, softcap, reduction, shift, label_smoothing, weight, z_loss, impl)
    if vocab_parallel_options is not None:
        raise ValueError("vocab_parallel_options is not supported yet: expected None")
    filter_eps = _check_filter_eps(filter_eps, e.dtype)
    if int(shift):
        e, targets = e[..., : -int(shift), :], targets[..., int(shift) :]
    with torch.autocast(e.device.type, enabled=False):
        tokens = _select_tokens(e, targets, ignore_index, len(c), int(shift))
        mean_weight = None
        if label_smoothing > 0:
            mean_weight = torch.ones(len(c), device=e.device) if weight is None else weight
        terms = TokenLoss(reduction, label_smoothing, z_loss, weight, len(c), tokens)
        if impl == "auto":
            impl = _choose(e, c, softcap if label_smoothing else None)
        if not tokens.captured and tokens.count == 0:
            return _nothing_counts(e, c, bias, targets.shape, reduction, return_lse)
        problem = (tokens.e, c, tokens.targets, bias, softcap, mean_weight)
        if impl == "chunked" and reduction != "none" and not return_lse and not tokens.captured:
            return chunked.chunked_loss(*problem, terms)
        if impl in ("cce", "cce_full_c", "cce_full_e", "cce_exact"):
            problem += (Filter.of(impl, filter_eps, filter_e_grad, filter_c_grad, label_smoothing),)
        z_y, lse_rest, z_bar = tokens.blank(*_primitive(impl)(*problem))
        per_token = tokens.blank(terms(z_y, lse_rest, z_bar, tokens.targets))[0]
        loss = tokens.scatter(per_token, targets.shape) if reduction == "none" else per_token.sum()
        if tokens.captured and reduction == "mean":
            loss = torch.where(tokens.count == 0, torch.nan, loss)
        if not return_lse:
            return loss
        return loss, tokens.scatter(torch.logaddexp(lse_rest, z_y), targets.shape)


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which blocks of the logit gradient `impl="cce"` skips: softmax everywhere below eps and no target inside."""

    eps: float | None
    e: bool = True  # whether the filter applies to de
    c: bool = True  # and to dc

    @classmethod
    def of(cls, impl, eps, filter_e_grad, filter_c_grad, label_smoothing) -> "Filter":
        # Label smoothing spreads a part of the gradient evenly over V: below any threshold, and not negligible.
        if impl == "cce_exact" or label_smoothing > 0:
            return cls(None)
        return cls(eps, filter_e_grad and impl != "cce_full_e", filter_c_grad and impl != "cce_full_c")


class Tokens:
    """The tokens that count: their rows of e, their targets, and the way back to the caller's shape."""

    def __init__(self, e: Tensor, targets: Tensor, counted: Tensor | None, kept: Tensor | None):
        self.captured = counted is not None
        self.counted, self.kept, self.e, self.targets = counted, kept, e, targets
        self.count = counted.sum() if self.captured else len(targets)
        if self.captured:  # no compaction: all rows run, and those that do not count must leave no trace, NaN or not
            self.e = torch.where(counted[:, None], e, 0)

    def blank(self, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Under capture, 0 with gradient exactly 0 (through `where`, not a product) where a token does not count."""
        if not self.captured:
            return vectors
        return tuple(None if x is None else torch.where(self.counted, x, 0) for x in vectors)

    def scatter(self, per_token: Tensor, shape: torch.Size) -> Tensor:
        if self.kept is None:
            return self.blank(per_token)[0].view(shape)
        full = per_token.new_zeros(shape.numel())
        return full.index_copy(0, self.kept, per_token).view(shape)


def _select_tokens(e: Tensor, targets: Tensor, ignore_index: int, num_classes: int, shift: int) -> Tokens:
    """Flattens, checks the targets' range and drops ignored tokens, with one host synchronisation."""
    length = targets.shape[-1] if targets.dim() else 1
    e, targets = e.reshape(-1, e.shape[-1]), targets.reshape(-1).long()
    counted = targets != ignore_index
    if torch.compiler.is_compiling() or (e.is_cuda and torch.cuda.is_current_stream_capturing()):
        bad = (targets < 0) | (targets >= num_classes)
        targets = torch.where(counted, torch.where(bad, naive.NOWHERE, targets), naive.ELSEWHERE)
        return Tokens(e, targets, counted, None)
    if len(targets) == 0:
        return Tokens(e, targets, None, None)
    in_range = torch.where(counted, targets, 0)
    count, low, high = torch.stack([counted.sum(), *in_range.aminmax()]).tolist()
    if low < 0 or high >= num_classes:
        where = ((in_range < 0) | (in_range >= num_classes)).nonzero()[0].item()
        raise IndexError(
            f"targets: value {int(targets[where])} at flat position {where + (where // length + 1) * shift} is out of range: "
            f"expected 0 <= target < {num_classes} (the rows of c) or ignore_index={ignore_index}"
        )
    if count == len(targets):
        return Tokens(e, targets, None, None)
    kept = torch.nonzero_static(counted, size=count)[:, 0]
    return Tokens(e.index_select(0, kept), targets.index_select(0, kept), None, kept)


class TokenLoss:
    """(z_y, lse_rest, z_bar, targets) -> what each token adds to the loss. All terms of the loss live here.

    Label smoothing α with class weights w and W = Σ_v w_v, as in F.cross_entropy:
        (1 - α) w_y nll + α/V (W lse - z_bar),   z_bar = Σ_v w_v z_v;
    "mean" divides both by Σ_n w_{y_n}, and the z-loss, which class weights do not touch, by the number of tokens.
    """

    def __init__(self, reduction, label_smoothing, z_loss, weight, num_classes, tokens: Tokens):
        self.smoothing, self.z_loss, self.num_classes = (label_smoothing, z_loss, num_classes)
        wide = torch.float64 if tokens.e.dtype == torch.float64 else torch.float32
        self.weight = None if weight is None else weight.to(wide)
        self.total_weight = num_classes if weight is None else self.weight.sum()
        self.divisor = self.z_divisor = 1
        if reduction == "mean":
            self.divisor = self.z_divisor = tokens.count
            if weight is not None:
                self.divisor = tokens.blank(self._token_weight(tokens.targets))[0].sum()

    def _token_weight(self, targets: Tensor) -> Tensor:
        return self.weight[targets.clamp(0, self.num_classes - 1)]

    def __call__(self, z_y: Tensor, lse_rest: Tensor, z_bar: Tensor | None, targets: Tensor) -> Tensor:
        # From 40 on log(1 + exp(x)) is x even in float64; torch's default of 20 is off by 1e-10.
        loss = F.softplus(lse_rest - z_y, threshold=40)
        if self.weight is not None:
            loss = self._token_weight(targets) * loss
        lse = torch.logaddexp(lse_rest, z_y) if z_bar is not None or self.z_loss else None
        if z_bar is not None:
            spread = (self.total_weight * lse - z_bar) / self.num_classes
            loss = (1 - self.smoothing) * loss + self.smoothing * spread
        loss = loss / self.divisor
        return loss + (self.z_loss / self.z_divisor) * lse.square() if self.z_loss else loss


def _nothing_counts(e, c, bias, shape, reduction, return_lse):
    """Every target is ignored: PyTorch's values (0/0 for the mean), zero gradients, still connected to autograd."""
    wide = torch.float64 if e.dtype == torch.float64 else torch.float32
    nothing = sum(x.reshape(-1)[:0].to(wide).sum() for x in (e, c, bias) if x is not None)
    zeros = torch.zeros(shape, dtype=wide, device=e.device) + nothing
    loss = {"mean": nothing + torch.nan, "sum": nothing, "none": zeros}[reduction]
    return (loss, zeros.clone()) if return_lse else loss


# ---------------------------------------------------------------------------------------------- choosing


def _primitive(impl: str):
    if impl in ("naive", "checkpoint", "chunked"):
        return {
            "naive": naive.target_and_rest,
            "checkpoint": naive.checkpointed_target_and_rest,
            "chunked": chunked.target_and_rest,
        }[impl]
    if impl == "torch_compile":
        return naive.compiled_target_and_rest()
    return importlib.import_module("cce.cut").target_and_rest  # imported here: Triton exists on Linux only


def _choose(e: Tensor, c: Tensor, smoothed_softcap: float | None) -> str:
    """What impl="auto" means for these inputs."""
    if e.dtype == torch.float64 or smoothed_softcap is not None or not e.is_cuda or torch.version.hip:
        return "chunked"
    if torch.cuda.get_device_capability(e.device) < (8, 0) or not (
        torch.cuda.is_current_stream_capturing() or _kernels_run(e.device, e.dtype)
    ):
        return "chunked"
    return "cce_exact"


@functools.cache
def _kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Tries the kernels once per device and dtype, so that a machine without, say, a C compiler still trains."""
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            e, c = (torch.zeros(16, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
            targets = torch.zeros(16, device=device, dtype=torch.int64)
            linear_cross_entropy(e, c, targets, impl="cce_exact").backward()
        return True
    except Exception as error:  # anything at all: the point is to go on without them
        warnings.warn(
            f'cce: the Triton kernels do not run on {device} ({type(error).__name__}: {error}); impl="auto" uses '
            '"chunked" instead',
            RuntimeWarning,
            stacklevel=4,
        )
        return False


# ---------------------------------------------------------------------------------------------- checks


def _cast_for_autocast(e, c, bias):
    """Under autocast a linear layer casts its operands, and so does this one; gradients come back in their dtypes."""
    if not (isinstance(e, Tensor) and isinstance(c, Tensor)) or not torch.amp.is_autocast_available(e.device.type):
        return e, c, bias
    if not torch.is_autocast_enabled(e.device.type):
        return e, c, bias
    dtype = torch.get_autocast_dtype(e.device.type)
    cast = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x  # noqa: E731
    return cast(e), cast(c), cast(bias)


def _check_filter_eps(filter_eps, dtype: torch.dtype) -> float | None:
    if filter_eps is None:
        return None
    if filter_eps in ("auto", "high"):
        return torch.finfo(dtype).eps / 32
    if isinstance(filter_eps, (int, float)) and not isinstance(filter_eps, bool) and filter_eps >= 0:
        return float(filter_eps)
    raise ValueError(f'filter_eps: expected "auto", None or a number >= 0, got {filter_eps!r}')


def _check(e, c, targets, bias, ignore_index, softcap, reduction, shift, label_smoothing, weight, z_loss, impl) -> str:
    """Raises for the first argument that is wrong; returns the implementation's own name."""
    for name, x in {"e": e, "c": c, "targets": targets, "bias": bias, "weight": weight}.items():
        if x is None and name in ("bias", "weight"):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if type(x).__name__ == "DTensor" or type(getattr(x, "data", None)).__name__ == "DTensor":
            raise TypeError(
                f"{name}: expected a plain torch.Tensor, got a DTensor. Pass {name}.full_tensor(), or let FSDP gather "
                "the weight by holding it in a cce.LinearCrossEntropyHead and calling that module"
            )
        if x.device != e.device:
            raise ValueError(f"{name}: expected on {e.device} like e, got {x.device}")
    for name, x in {"e": e, "c": c, "bias": bias, "weight": weight}.items():
        if x is not None and x.dtype not in FLOATS:
            raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {x.dtype}")
    if targets.dtype not in INTEGERS:
        raise TypeError(f"targets: expected an integer dtype, got {targets.dtype}")
    if c.dim() != 2:
        raise ValueError(f"c: expected 2 dimensions [V, D], got shape {tuple(c.shape)}")
    num_classes, width = c.shape
    if e.dim() < 1 or e.shape[-1] != width:
        raise ValueError(f"e: expected [..., D] with D = c.shape[1] = {width}, got shape {tuple(e.shape)}")
    if num_classes == 0 or width == 0:
        raise ValueError(f"c: expected at least one class and one feature, got shape {tuple(c.shape)}")
    if targets.shape != e.shape[:-1]:
        raise ValueError(f"targets: expected e.shape[:-1] = {tuple(e.shape[:-1])}, got {tuple(targets.shape)}")
    if e.dtype != c.dtype:
        raise TypeError(f"c: expected e's dtype {e.dtype}, got {c.dtype}; cast one, or use torch.autocast")
    for name, x in {"bias": bias, "weight": weight}.items():
        if x is not None and x.shape != (num_classes,):
            raise ValueError(f"{name}: expected shape ({num_classes},), one entry per row of c, got {tuple(x.shape)}")
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("weight: expected a tensor that does not require grad (class weights are not differentiated)")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {ignore_index!r}")
    _check_number(
        "softcap",
        softcap,
        softcap is None or _is_number(softcap) and 0 < softcap < float("inf"),
        "None or a finite number > 0",
    )
    _check_number(
        "label_smoothing",
        label_smoothing,
        _is_number(label_smoothing) and 0 <= label_smoothing <= 1,
        "a number in [0, 1]",
    )
    _check_number("z_loss", z_loss, _is_number(z_loss) and abs(z_loss) < float("inf"), "a finite number")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if not isinstance(shift, int) or shift < 0:
        raise ValueError(f"shift: expected False, True or an int >= 0, got {shift!r}")
    if shift and (targets.dim() < 1 or shift > targets.shape[-1]):
        raise ValueError(f"shift: expected at most the sequence length of targets {tuple(targets.shape)}, got {shift}")
    name = impl.name if isinstance(impl, enum.Enum) else impl
    resolved = IMPLEMENTATIONS.get(name.lower()) if isinstance(name, str) else None
    if resolved is None:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if resolved.startswith("cce") and e.dtype == torch.float64:
        raise TypeError(f"e: impl={name!r} takes float32, bfloat16 or float16, got float64; use naive or chunked")
    if label_smoothing and softcap is not None and resolved not in (*WITH_SOFTCAPPED_SMOOTHING, "auto"):
        raise ValueError(
            f"label_smoothing: with softcap the mean logit is not linear, which impl={name!r} needs; "
            f"expected impl to be auto, naive, checkpoint or chunked, or label_smoothing=0, got {label_smoothing}"
        )
    return resolved


def _is_number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _check_number(name: str, value, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
