"""What the autograd.Functions of this package share."""

import functools

import torch
from torch import Tensor


def wanted_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which of the inputs need a gradient; no buffer and no product is spent on the others."""
    return tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors)


class NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, upstream):
        raise RuntimeError(
            'linear_cross_entropy cannot be differentiated twice; only impl="naive" and "checkpoint" can'
        )


def first_derivative_only(backward):
    """A second derivative raises. torch's once_differentiable lets it be silently zero where no upstream gradient requires grad,
    as in the gradient penalty of `grad(loss, e, create_graph=True)`: the saved gradients do depend on e."""

    @functools.wraps(backward)
    def wrapper(ctx, *upstream):
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not torch.is_grad_enabled():  # no create_graph
            return gradients
        guard = lambda g: g if g is None else NoSecondDerivative.apply(g.detach().requires_grad_())  # noqa: E731
        return tuple(map(guard, gradients))

    return wrapper
