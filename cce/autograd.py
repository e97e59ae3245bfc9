"""The primitive as PyTorch sees it: one autograd.Function, and one operator for torch.compile, for all algorithms. (Beside it
there is only `cce.chunked.ChunkedLoss`, which makes the gradients of a mean or sum in the forward.)

An algorithm is a module (`cce.chunked`, `cce.cut`, `cce.gather`) with two plain functions that know nothing of autograd:

    forward(e, c, targets, bias, softcap, mean_weight, block_filter, wanted, begun=None) -> (z_y, lse_rest, z_bar), state
    backward(e, c, targets, bias, softcap, mean_weight, z_y, lse_rest, state, block_filter, wanted, d_zy, d_rest, d_zbar) -> de, dc, dbias

with the meaning of `cce.naive.target_and_rest`. `wanted` says which of de, dc, dbias are asked for, the others are None; `state` is a tuple
of tensors that the backward wants to see again, often empty.
"""

import dataclasses
import functools
import importlib

import torch
from torch import Tensor


def target_and_rest(
    algorithm: str,
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    mean_weight: Tensor | None,
    block_filter=None,
    begun=None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`cce.naive.target_and_rest` by the named algorithm. begun: see `begin`."""
    if torch.compiler.is_compiling():
        settings = (None, True, True, None) if block_filter is None else dataclasses.astuple(block_filter)
        wanted = list(wanted_gradients(e, c, bias))
        z_y, lse_rest, z_bar, *_ = _operator(e, c, targets, bias, softcap, mean_weight, algorithm, *settings, wanted)
        return z_y, lse_rest, None if mean_weight is None else z_bar
    settings = algorithm, block_filter, wanted_gradients(e, c, bias), begun
    return Primitive.apply(e, c, bias, targets, softcap, mean_weight, *settings)


def begin(
    algorithm: str, e: Tensor, targets: Tensor, facts: Tensor, *, c: Tensor, bias: Tensor | None, softcap, block_filter
):
    """What the algorithm can set the device to before the host knows of the targets what the device does: facts[0] is the number of
    those that count. None if it does not begin early."""
    if algorithm != "gather":
        return None
    wanted = wanted_gradients(e, c, bias)
    with torch.no_grad():
        return _module(algorithm).begin(e, c, targets, bias, softcap, block_filter, wanted, facts)


def wanted_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Which of the inputs need a gradient; no buffer and no product is spent on the others."""
    return tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors)


def _module(algorithm: str):
    return importlib.import_module(f"cce.{algorithm}")  # when it is called for: Triton exists on Linux only


def first_derivative_only(backward):
    """create_graph=True raises. torch's once_differentiable lets a second derivative be silently zero where no upstream gradient
    requires grad, as in the gradient penalty of `grad(loss, e, create_graph=True)`: the saved gradients do depend on e."""

    @functools.wraps(backward)
    def wrapper(ctx, *upstream):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy cannot be differentiated twice, which create_graph=True prepares for; "
                'only impl="naive" and "checkpoint" can'
            )
        return backward(ctx, *upstream)

    return wrapper


class Primitive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, c, bias, targets, softcap, mean_weight, algorithm, block_filter, wanted, begun):
        outputs, state = _module(algorithm).forward(
            e, c, targets, bias, softcap, mean_weight, block_filter, wanted, begun
        )
        ctx.save_for_backward(e, c, targets, bias, mean_weight, *outputs[:2], *state)
        ctx.settings = softcap, algorithm, block_filter, wanted
        return outputs

    @staticmethod
    @first_derivative_only
    def backward(ctx, *upstream):
        e, c, targets, bias, mean_weight, z_y, lse_rest, *state = ctx.saved_tensors
        softcap, algorithm, block_filter, wanted = ctx.settings
        gradients = _module(algorithm).backward(
            e, c, targets, bias, softcap, mean_weight, z_y, lse_rest, tuple(state), block_filter, wanted, *upstream
        )
        return *gradients, None, None, None, None, None, None, None


# ------------------------------------------------------------------------------------- torch.compile
# Dynamo cannot look into the kernels' launchers, and need not: an operator is a node of its graph. Operators return tensors,
# so what is None elsewhere is empty here.


def _tensors(*xs: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if x is None else x for x in xs)


STATE = 6  # tensors that an operator passes to its backward, empty where the algorithm has fewer


def _padded(state: tuple[Tensor, ...], like: Tensor) -> tuple[Tensor, ...]:
    return (*state, *(like.new_empty(0) for _ in range(STATE - len(state))))


@torch.library.custom_op("cce::target_and_rest", mutates_args=())
def _operator(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None, mean_weight: Tensor | None,
    algorithm: str, eps: float | None, filter_e: bool, filter_c: bool, most: float | None, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    outputs, state = _module(algorithm).forward(
        e, c, targets, bias, softcap, mean_weight, _filter(eps, filter_e, filter_c, most), tuple(wanted)
    )
    return *_tensors(*outputs, like=e), *_padded(state, e)


def _filter(*settings):
    from cce.loss import Filter

    return Filter(*settings)


@_operator.register_fake
def _(e, c, targets, bias, softcap, mean_weight, algorithm, eps, filter_e, filter_c, most, wanted):
    vector = lambda n: e.new_empty(n, dtype=torch.float64 if e.dtype == torch.float64 else torch.float32)  # noqa: E731
    filtered = algorithm == "gather" and eps is not None and any(wanted)
    state = _module(algorithm).empty_state(e, c, softcap) if filtered else ()
    return vector(e.shape[0]), vector(e.shape[0]), vector(0 if mean_weight is None else e.shape[0]), *_padded(state, e)


@torch.library.custom_op("cce::target_and_rest_backward", mutates_args=())
def _operator_backward(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None, mean_weight: Tensor | None,
    algorithm: str, eps: float | None, filter_e: bool, filter_c: bool, most: float | None, z_y: Tensor, lse_rest: Tensor,
    state: list[Tensor], wanted: list[bool], d_zy: Tensor, d_rest: Tensor, d_zbar: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _module(algorithm).backward(
        e, c, targets, bias, softcap, mean_weight, z_y, lse_rest, tuple(state), _filter(eps, filter_e, filter_c, most),
        tuple(wanted), d_zy, d_rest, None if mean_weight is None else d_zbar,
    )  # fmt: skip
    return _tensors(*gradients, like=e)


@_operator_backward.register_fake
def _(
    e, c, targets, bias, softcap, mean_weight, algorithm, eps, filter_e, filter_c, most, z_y, lse_rest, state, wanted,
    *upstream,
):  # fmt: skip
    like = [x.new_empty(x.shape) if want else None for x, want in zip((e, c, bias), wanted, strict=True)]
    return _tensors(*like, like=e)


def _setup_context(ctx, inputs, output):
    e, c, targets, bias, softcap, mean_weight, algorithm, *settings, wanted = inputs
    filtered = algorithm == "gather" and settings[0] is not None and any(wanted)
    ctx.save_for_backward(e, c, targets, bias, mean_weight, *output[:2], *(output[3:] if filtered else ()))
    ctx.settings = softcap, algorithm, settings
    ctx.mark_non_differentiable(*output[3:])


def _operator_autograd(ctx, *upstream):
    e, c, targets, bias, mean_weight, z_y, lse_rest, *state = ctx.saved_tensors
    softcap, algorithm, settings = ctx.settings
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    de, dc, dbias = _operator_backward(
        e, c, targets, bias, softcap, mean_weight, algorithm, *settings, z_y, lse_rest, state, wanted, *upstream[:3]
    )
    keep = lambda x, want: x if want else None  # noqa: E731
    return keep(de, wanted[0]), keep(dc, wanted[1]), None, keep(dbias, wanted[2]), *[None] * 8


_operator.register_autograd(_operator_autograd, setup_context=_setup_context)
