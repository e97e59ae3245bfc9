"""Cut Cross-Entropy (arXiv:2411.09009): the kernels of notebooks 04 to 07 behind the primitive (notebook 08).

forward    z_y from the indexed dot product, lse_rest from the tiled log-sum-exp under locks; O(M) memory. (Label smoothing
           takes a float32 copy of e for a moment, here and in the backward.)
backward   with the filter on, the vocabulary is sorted by average logit, so that the classes nobody predicts share tiles. It is
           walked in slabs: a slab's classifier rows are gathered in that order, its dc is summed in float32 (under locks, or
           by the GPU's reductions: kernels.blocks.under_locks) and rounded once. de has one float32 buffer for all slabs.

Memory of the backward beyond the gradients: 4 M D bytes for de, and at most SLAB_SHARE of the gradients for two slabs.
"""

import contextlib
import math
import warnings

import torch
from torch import Tensor

from cce.host import side_stream
from cce.kernels import INTERPRETED
from cce.kernels.backward import backward_slab, new_de_locks
from cce.kernels.blocks import blocks_for
from cce.kernels.descriptors import aligned
from cce.kernels.lse_forward import lse_forward
from cce.kernels.scatter_rows import scatter_rows
from cce.kernels.target_logit import target_logit
from cce.precision import float32_product, ieee_float32, logit_gradient_scale, split_float32, weighted_row_sum

INTERPRETER_WORK = 1 << 29  # N D V from which on the interpreter takes half a minute or more
SLAB_SHARE = 0.16  # of the gradients' bytes: two slabs' float32 dc and their copies of c's rows


def forward(e, c, targets, bias, softcap, mean_weight, block_filter, wanted, begun=None):
    """The primitive's numbers; softcap and mean_weight exclude each other."""
    check_device(e, c)
    targets, bias = dense(targets, bias)
    with two_lanes(e.device) as lanes:  # the few programs of z_y run where the last wave of lse_rest leaves room
        with lanes[0]:
            lse_rest = lse_forward(e, c, targets, bias, softcap)
        with lanes[-1]:
            z_y = target_logit(e, c, targets, bias, softcap)
    hand_over(z_y)
    return (z_y, lse_rest, mean_logit(e, c, bias, mean_weight)), ()


def check_device(e: Tensor, c: Tensor) -> None:
    """Whether the kernels can take these tensors, and a warning where that will be minutes."""
    if not INTERPRETED and not e.is_cuda:
        raise ValueError(
            f'e: the kernels are compiled for this machine\'s GPU and expect CUDA tensors, got one on {e.device}; use impl="chunked", '
            "or set TRITON_INTERPRET=1 before the first import to run them in Triton's interpreter"
        )
    if INTERPRETED and e.numel() * len(c) >= INTERPRETER_WORK:
        warnings.warn(
            "cce: without an NVIDIA GPU the Triton kernels run in Triton's interpreter, which takes a minute or more at this size; "
            'impl="chunked" gives the same result in a fraction of a second',
            RuntimeWarning,
            stacklevel=2,
        )


def mean_logit(e: Tensor, c: Tensor, bias: Tensor | None, mean_weight: Tensor | None) -> Tensor | None:
    """z_bar [M] float32: each token's logits weighted by mean_weight and summed; None without weights."""
    if mean_weight is None:
        return None
    with ieee_float32():
        mean_row = weighted_row_sum(c, mean_weight)
        if e.is_cuda and e.dtype in (torch.float16, torch.bfloat16):
            parts, largest = split_float32(mean_row, e.dtype)
            z_bar = float32_product(e, parts.T).sum(1) * largest
        else:
            z_bar = e.float() @ mean_row
    return z_bar if bias is None else z_bar + (mean_weight.float() * bias.float()).sum()


def dense(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The kernels take strides for e and c only; an upstream gradient may be an expanded scalar."""
    return tuple(None if x is None else x.contiguous() for x in vectors)


def backward(*args):
    """Its gradients, exact where `block_filter.eps` is None."""
    with ieee_float32():
        return _backward(*args)


def _backward(
    e, c, targets, bias, softcap, mean_weight, z_y, lse_rest, state, block_filter, wanted, d_zy, d_rest, d_zbar
):
    targets, bias, d_zy, d_rest = dense(targets, bias, d_zy, d_rest)
    (M, D), V = e.shape, c.shape[0]
    want_e, want_c, want_bias = wanted
    float32 = lambda *shape: torch.zeros(shape, device=e.device)  # noqa: E731
    scale = logit_gradient_scale(e.dtype, d_zy, d_rest, d_zbar)
    if scale is not None:
        d_zy, d_rest, d_zbar = (None if d is None else d / scale for d in (d_zy, d_rest, d_zbar))
    order, position, cutoff = None, targets, None
    if block_filter.eps is not None:
        order, position = sort_vocabulary(e, c, targets, bias)
        cutoff = torch.logaddexp(lse_rest, z_y) + (math.log(block_filter.eps) if block_filter.eps else -math.inf)
    e_rows = aligned(e)
    de = float32(M, D) if want_e else None
    residual = float32(M) if want_e and e.dtype != torch.float32 else None
    dc = torch.empty(V, D, dtype=c.dtype, device=c.device) if want_c else None
    dbias = float32(V) if want_bias else None
    mean_e = None if d_zbar is None or not want_c else d_zbar @ e.float()

    rows, de_locks = slab_rows(e, c, want_e, want_c), new_de_locks(e)
    with two_lanes(e.device) as lanes:
        with lanes[-1]:  # hides behind the first slab
            c_sum = weighted_row_sum(c) if residual is not None else None
        slabs = {}
        for i, first in enumerate(range(0, V, rows)):
            with lanes[i % len(lanes)]:
                here = slice(first, min(first + rows, V))
                if order is not None:
                    here = order[here]
                c_rows, bias_rows, weights = (rows_of(x, here) for x in (c, bias, mean_weight))
                if want_c and i < len(lanes):
                    slabs[i] = float32(rows, D)  # zeroed in its own lane; scatter_rows leaves it zeroed
                slab_dc = slabs[i % len(lanes)][: len(c_rows)] if want_c else None
                slab_dbias = float32(len(c_rows)) if want_bias else None
                backward_slab(
                    e_rows, aligned(c_rows), None if bias is None else bias_rows.float(), position, lse_rest, cutoff,
                    d_zy, d_rest, first, softcap, block_filter.e, block_filter.c, de, slab_dc, slab_dbias, residual, de_locks,
                )  # fmt: skip
                if want_c:
                    if mean_e is not None:
                        slab_dc.addr_(weights.float(), mean_e)
                    scatter_rows(slab_dc, order, first, scale, dc)
                if want_bias:
                    dbias[here] = slab_dbias
    if want_e:
        if residual is not None:  # rounding S left its rows' sums a little off: put that back at the mean of c
            hand_over(c_sum)
            de.addr_(residual, c_sum / V)
        if d_zbar is not None:
            de.addr_(d_zbar, weighted_row_sum(c, mean_weight))
        de = rescale(de, scale).to(e.dtype)
    if want_bias:
        if d_zbar is not None:
            dbias += mean_weight.float() * d_zbar.sum()
        dbias = rescale(dbias, scale).to(bias.dtype)
    return de, dc, dbias


def vocabulary_order(e: Tensor, c: Tensor, bias: Tensor | None = None) -> Tensor:
    """Classes by falling average logit, [V]."""
    average_logit = torch.mv(c, e.mean(0))  # = mean over tokens of e @ c.T
    average_logit = average_logit if bias is None else average_logit + bias
    return average_logit.argsort(descending=True)


def positions(order: Tensor, targets: Tensor) -> Tensor:
    """Where each token's target is in that order, [M]; a negative target stays what it is."""
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return torch.where(targets >= 0, rank[targets.clamp(0, len(order) - 1)], targets)


def sort_vocabulary(e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Classes by falling average logit (order [V]), and where each token's target is in that order ([M])."""
    order = vocabulary_order(e, c, bias)
    return order, positions(order, targets)


@contextlib.contextmanager
def two_lanes(device: torch.device):
    """Two streams for alternate slabs, the current one and another: while the last tiles of a slab run, the next slab
    fills the idle multiprocessors, and gathering and rounding hide behind products. One lane on a CPU."""
    if device.type != "cuda":
        yield [contextlib.nullcontext()]
        return
    current, other = torch.cuda.current_stream(device), side_stream(device)
    other.wait_stream(current)
    try:
        yield [contextlib.nullcontext(), torch.cuda.stream(other)]
    finally:
        current.wait_stream(other)  # whatever the lane read is freed after this, in the current stream's order


def hand_over(x: Tensor) -> None:
    """x was made in the side lane and is used in the current stream: its memory is free when both are done with it."""
    if x.is_cuda:
        x.record_stream(torch.cuda.current_stream(x.device))


def slab_rows(e: Tensor, c: Tensor, want_e: bool, want_c: bool) -> int:
    """Classes per slab: two float32 rows of dc and two gathered rows of c for each take SLAB_SHARE of the gradients."""
    (M, D), V = e.shape, c.shape[0]
    gradients = e.element_size() * D * (M * want_e + V * want_c)
    block = blocks_for("backward", e).BLOCK_V
    rows = int(SLAB_SHARE * gradients) // (2 * D * (4 * want_c + c.element_size()))
    return min(V, max(rows // block, 1) * block)


def rows_of(x: Tensor | None, here: slice | Tensor) -> Tensor | None:
    """x[here]; index_select moves whole rows, 16 bytes a thread, where x[indices] computes an address per element."""
    return None if x is None else x[here] if isinstance(here, slice) else x.index_select(0, here)


def rescale(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x.mul_(scale)
