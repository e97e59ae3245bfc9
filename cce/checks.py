"""What a caller can get wrong: every message names the argument, its value and what was expected."""

import enum
import numbers

import torch
from torch import Tensor

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
    "gather": "gather",
    "auto": "auto",
    "torch_compile": "torch_compile",
    "cce_kahan": "cce",
    "cce_kahan_full_c": "cce_full_c",
    "cce_kahan_full_e": "cce_full_e",
    "cce_kahan_full_c_full_e": "cce_exact",
    "cce_kahan_full": "cce_exact",
}
WITH_SOFTCAPPED_SMOOTHING = ("naive", "checkpoint", "chunked", "torch_compile")


def check_filter_eps(filter_eps) -> None:
    good = filter_eps is None or filter_eps in ("auto", "high") or (_is_number(filter_eps) and filter_eps >= 0)
    _check_number("filter_eps", filter_eps, good, '"auto", "high", None or a number >= 0')


def check(e, c, targets, bias, ignore_index, softcap, reduction, shift, label_smoothing, weight, z_loss, impl) -> str:
    """Raises for the first argument that is wrong; returns the implementation's own name."""
    for name, x in {"e": e, "c": c, "targets": targets, "bias": bias, "weight": weight}.items():
        if x is None and name in ("bias", "weight"):
            continue
        if not isinstance(x, Tensor):
            hint = f"; pass its .{'bias' if name == 'bias' else 'weight'}" if isinstance(x, torch.nn.Module) else ""
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}{hint}")
        if type(x).__name__ == "DTensor":  # of a parameter, too: nn.Parameter keeps such a type
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
        hint = "; is c transposed?" if e.dim() and e.shape[-1] == num_classes else ""
        raise ValueError(f"e: expected [..., D] with D = c.shape[1] = {width}, got shape {tuple(e.shape)}{hint}")
    if num_classes == 0 or width == 0:
        raise ValueError(f"c: expected at least one class and one feature, got shape {tuple(c.shape)}")
    if targets.shape != e.shape[:-1]:
        raise ValueError(f"targets: expected e.shape[:-1] = {tuple(e.shape[:-1])}, got {tuple(targets.shape)}")
    if e.dtype != c.dtype:
        raise TypeError(f"c: expected e's dtype {e.dtype}, got {c.dtype}; cast one, or use torch.autocast")
    if bias is not None:
        check_per_class("bias", bias, num_classes)
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("weight: expected a tensor that does not require grad (class weights are not differentiated)")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
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
    if not isinstance(shift, numbers.Integral) or shift < 0:
        raise ValueError(f"shift: expected False, True or an int >= 0, got {shift!r}")
    if shift and (targets.dim() < 1 or shift > targets.shape[-1]):
        raise ValueError(f"shift: expected at most the sequence length of targets {tuple(targets.shape)}, got {shift}")
    name = impl.name if isinstance(impl, enum.Enum) else impl
    resolved = IMPLEMENTATIONS.get(name.lower()) if isinstance(name, str) else None
    if resolved is None:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if resolved.startswith(("cce", "gather")) and e.dtype == torch.float64:
        raise TypeError(f"e: impl={name!r} takes float32, bfloat16 or float16, got float64; use naive or chunked")
    if label_smoothing and softcap is not None and resolved not in (*WITH_SOFTCAPPED_SMOOTHING, "auto"):
        raise ValueError(
            f"label_smoothing: with softcap the mean logit is not linear, which impl={name!r} needs; "
            f"expected impl to be auto, naive, checkpoint or chunked, or label_smoothing=0, got {label_smoothing}"
        )
    return resolved


def _is_number(x) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _check_number(name: str, value, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_per_class(name: str, x: Tensor, num_classes: int) -> None:
    if x.shape != (num_classes,):
        raise ValueError(f"{name}: expected shape ({num_classes},), one entry per class, got {tuple(x.shape)}")
