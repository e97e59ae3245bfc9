"""What the row-gathered backward asks of its upstream gradients before it starts, in one launch instead of thirty (notebook 09).

    scale       a power of two near max |d|, so that d / scale is exact. S is stored in 16 bits as S / scale (see
                cce.precision.logit_gradient_scale), and no square overflows; 1 where a gradient is infinite
    R           rms over tokens of |d_zy| + |d_rest| + W |d_zbar|, and the thresholds eps · R / sqrt(2)^k; NaN, and nothing is under
                that, where R is not finite
    total       Σ |d_rest|, the whole gradient mass

One program walks over the tokens twice, always in the same order: 8 to 24 bytes each.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cce.kernels import INTERPRETED
from cce.kernels.blocks import power_of_2

BLOCK_M = 64 if INTERPRETED else 2048


@triton.jit(do_not_specialize=["M"])
def upstream_kernel(
    d_zy_ptr, d_rest_ptr, d_zbar_ptr, total_weight_ptr, out_ptr, facts_ptr, M, K, eps,
    HAS_MEAN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    high = tl.full((BLOCK_M,), 0.0, tl.float32)
    for start in range(0, M, BLOCK_M):
        n = start + tl.arange(0, BLOCK_M)
        high = tl.maximum(high, tl.abs(tl.load(d_zy_ptr + n, mask=n < M, other=0.0)))
        high = tl.maximum(high, tl.abs(tl.load(d_rest_ptr + n, mask=n < M, other=0.0)))
        if HAS_MEAN:
            high = tl.maximum(high, tl.abs(tl.load(d_zbar_ptr + n, mask=n < M, other=0.0)))
    largest = tl.max(high, 0)
    exponent = tl.minimum(
        tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253
    )  # 1 / scale must be a normal number
    exponent = tl.where((largest > 0) & (largest < float("inf")), exponent, 127)
    one_over = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, M, BLOCK_M):
        n = start + tl.arange(0, BLOCK_M)
        d_zy = tl.load(d_zy_ptr + n, mask=n < M, other=0.0) * one_over
        d_rest = tl.load(d_rest_ptr + n, mask=n < M, other=0.0) * one_over
        tl.store(out_ptr + n, d_zy, mask=n < M)
        tl.store(out_ptr + M + n, d_rest, mask=n < M)
        size = tl.abs(d_zy) + tl.abs(d_rest)
        total += tl.abs(d_rest)
        if HAS_MEAN:
            d_zbar = tl.load(d_zbar_ptr + n, mask=n < M, other=0.0) * one_over
            tl.store(out_ptr + 2 * M + n, d_zbar, mask=n < M)
            size += tl.abs(d_zbar) * tl.load(total_weight_ptr)
        squares += size * size
    tl.store(facts_ptr, (exponent << 23).to(tl.float32, bitcast=True))
    tl.store(facts_ptr + 1, tl.sum(total, 0))
    k = tl.arange(0, BLOCK_K)
    top = eps * tl.sqrt(tl.sum(squares, 0) / M)
    top = tl.where(top < float("inf"), top, float("nan"))
    tl.store(facts_ptr + 2 + k, top * tl.exp2(-0.5 * k.to(tl.float32)), mask=k < K)


class Upstream(NamedTuple):
    """Upstream gradients [M], divided by scale."""

    d_zy: Tensor
    d_rest: Tensor
    d_zbar: Tensor | None
    scale: Tensor  # a float32 scalar
    total: Tensor  # a float32 scalar
    thresholds: Tensor  # [K] float32


def upstream(
    d_zy: Tensor, d_rest: Tensor, d_zbar: Tensor | None, total_weight: Tensor | None, eps: float, K: int
) -> Upstream:
    """d_zy, d_rest, d_zbar [M] float32, contiguous; total_weight, W, a float32 scalar, with d_zbar. Everything stays on the device."""
    M, has_mean = len(d_zy), d_zbar is not None
    out, facts = d_zy.new_empty(2 + has_mean, M), d_zy.new_empty(2 + K)
    upstream_kernel[(1,)](
        d_zy, d_rest, d_zbar, total_weight, out, facts, M, K, eps,
        HAS_MEAN=has_mean, BLOCK_K=power_of_2(K), BLOCK_M=BLOCK_M, num_warps=8,
    )  # fmt: skip
    return Upstream(out[0], out[1], out[2] if has_mean else None, facts[0], facts[1], facts[2:])
