"""Who is measured. Each is a function (e, c, targets) -> mean loss; one that cannot run says why."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cce import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
    """What everybody writes first."""
    return F.cross_entropy((e @ c.T).float(), targets)


def _ours(impl: str, **options) -> Loss:
    return lambda e, c, targets: linear_cross_entropy(e, c, targets, impl=impl, **options)


def _cut_cross_entropy() -> Loss:
    from cut_cross_entropy import linear_cross_entropy as apple

    return lambda e, c, targets: apple(e, c, targets)


def _liger_triton() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as liger

    return lambda e, c, targets: liger.apply(e, c, targets)[0]


def _liger_sm90() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function as liger,
    )

    first = lambda x: x[0] if isinstance(x, tuple) else x  # noqa: E731
    return lambda e, c, targets: first(liger.apply(e, c, targets, -100, "mean"))


def _quack() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack

    return lambda e, c, targets: quack(e, c, targets, chunk_size=4096)


def _torch_linear() -> Loss:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda e, c, targets: F.linear_cross_entropy(e, c, targets, options=options)


FACTORIES: dict[str, Callable[[], Loss]] = {
    "naive": lambda: naive,
    "torch.compile": lambda: torch.compile(naive),
    "torch.compile, max-autotune": lambda: torch.compile(naive, mode="max-autotune-no-cudagraphs"),
    "torch.linear_cross_entropy": _torch_linear,
    "cut-cross-entropy": _cut_cross_entropy,
    "Liger, Triton": _liger_triton,
    "Liger, SM90": _liger_sm90,
    "QuACK": _quack,
    "chunked": lambda: _ours("chunked"),
    "cce": lambda: _ours("cce"),
    "cce_exact": lambda: _ours("cce_exact"),
    "gather": lambda: _ours("gather"),
    "gather, exact": lambda: _ours("gather", filter_eps=None),
}


def load(names: list[str]) -> tuple[dict[str, Loss], dict[str, str]]:
    """(those that can be had, why the others cannot)."""
    loaded, missing = {}, {}
    for name in names:
        try:
            loaded[name] = FACTORIES[name]()
        except (ImportError, AttributeError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return loaded, missing
