"""The loss as modules: one without parameters, one that owns the classifier."""

import math

import torch
from torch import Tensor, nn

from cce.loss import linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options bound; called as `(e, c, targets, bias=None)`.

    Drop-in for `cut_cross_entropy.LinearCrossEntropy`. Options, shapes, dtypes and errors: see `linear_cross_entropy`.
    """

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None):
        return linear_cross_entropy(e, c, targets, bias, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearCrossEntropyHead(nn.Module):
    """A language-model head and its loss in one module, holding `weight` [V, D] (and `bias` [V]) like an `nn.Linear`.

    FSDP2 gathers the weight when the module is called; tie embeddings with `head.weight = embedding.weight`.

    Args:
        in_features: D, the width of the hidden states.
        num_classes: V, the vocabulary size.
        bias: whether there is a bias [V].
        device, dtype: of the parameters.
        options: of `linear_cross_entropy`; `forward(e [..., D], targets [...])` returns what it returns.
    """

    def __init__(self, in_features: int, num_classes: int, bias: bool = False, device=None, dtype=None, **options):
        super().__init__()
        for name, value in {"in_features": in_features, "num_classes": num_classes}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int >= 1, got {value!r}")
        self.in_features, self.num_classes, self.options = (in_features, num_classes, options)
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """nn.Linear's initialisation: uniform within 1/sqrt(D)."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, e: Tensor, targets: Tensor):
        return linear_cross_entropy(e, self.weight, targets, self.bias, **self.options)

    def logits(self, e: Tensor) -> Tensor:
        """e @ weight.T + bias [..., V], with the softcap if there is one: for generation, where logits are wanted."""
        z = nn.functional.linear(e, self.weight, self.bias)
        softcap = self.options.get("softcap")
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}{options}"
