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


def _ours(impl: str) -> Loss:
    return lambda e, c, targets: linear_cross_entropy(e, c, targets, impl=impl)


def _cut_cross_entropy() -> Loss:
    from cut_cross_entropy import linear_cross_entropy as apple

    return lambda e, c, targets: apple(e, c, targets)


def _torch_linear() -> Loss:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda e, c, targets: F.linear_cross_entropy(e, c, targets, options=options)


FACTORIES: dict[str, Callable[[], Loss]] = {
    "naive": lambda: naive,
    "torch.compile": lambda: torch.compile(naive),
    "torch.linear_cross_entropy": _torch_linear,
    "cut-cross-entropy": _cut_cross_entropy,
    "chunked": lambda: _ours("chunked"),
    "cce": lambda: _ours("cce"),
    "cce_exact": lambda: _ours("cce_exact"),
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
