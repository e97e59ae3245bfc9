"""Gradients to judge by at sizes where float64 logits do not fit: float32 logits of the 16-bit inputs, a few tokens at a time."""

import torch
from torch import Tensor

from cce.precision import float32_product, ieee_float32


def gradients(
    e: Tensor, c: Tensor, targets: Tensor, tokens: int = 512, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(de, dc) of the mean cross-entropy, float32: softmax - onehot with the softmax in float64, products in IEEE float32.

    weights [N]: of Σ_n weights[n] · nll[n] / N instead.
    """
    de, dc = torch.empty(e.shape, device=e.device), torch.zeros(c.shape, device=c.device)
    wide_c = c.float()
    with ieee_float32():
        for rows in torch.arange(len(e), device=e.device).split(tokens):
            z = float32_product(e[rows], c.T) if e.is_cuda or e.dtype == torch.float32 else e[rows].float() @ wide_c.T
            s = torch.softmax(z.double(), 1)
            s[torch.arange(len(rows), device=e.device), targets[rows]] -= 1
            s = (s / len(e)).float() if weights is None else (s * (weights[rows, None].double() / len(e))).float()
            de[rows] = s @ wide_c
            dc.addmm_(s.T, e[rows].float())
    return de, dc


def relative_error(x: Tensor, exact: Tensor) -> float:
    """‖x - exact‖ / ‖exact‖."""
    return ((x.float() - exact).norm() / exact.norm()).item()
