"""Products and sums whose precision does not depend on the user's global switches."""

import contextlib

import torch
from torch import Tensor

ROWS_AT_A_TIME = 16384  # upper bound of the float32 temporaries below, in rows


@contextlib.contextmanager
def ieee_float32():
    """float32 products in full float32 inside, whatever `torch.set_float32_matmul_precision` says.

    Only the `fp32_precision` switches are touched: reading or setting the older `allow_tf32` beside them makes
    later calls raise (torch 2.11).
    """
    switches = [torch.backends.mkldnn.matmul]
    if torch.cuda.is_available():
        switches.append(torch.backends.cuda.matmul)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def float32_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b summed and returned in float32 (float64 for float64). 16-bit operands are taken as they are on CUDA only."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32) if out is None else torch.mm(a, b, out_dtype=torch.float32, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """total += factor * a @ b, total in float32. 16-bit operands are taken as they are on CUDA, and widened elsewhere."""
    if a.dtype != torch.float32 and total.is_cuda:
        torch.addmm(total, a, b, alpha=factor, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float(), alpha=factor)


def weighted_row_sum(c: Tensor, weight: Tensor | None = None) -> Tensor:
    """weight @ c, or the sum of c's rows, in float32 (float64 for float64) without a float32 copy of c. [D]"""
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    if weight is None:
        # On CUDA as a product with ones: sum(0) would need a buffer of a quarter of c.
        return float32_product(c.new_ones(1, len(c)), c)[0] if c.is_cuda else c.sum(0, dtype=wide)
    if c.is_cuda and c.dtype in (torch.float16, torch.bfloat16):
        parts, largest = split_float32(weight, c.dtype)
        return float32_product(parts, c).sum(0) * largest
    parts = zip(weight.to(wide).split(ROWS_AT_A_TIME), c.split(ROWS_AT_A_TIME), strict=True)
    return sum(w @ rows.to(wide) for w, rows in parts)


def split_float32(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """([3, n] in a 16-bit dtype, max |x|) with x = max |x| times the sum of the three, to float32's precision: x for tensor cores."""
    largest = x.float().abs().amax()
    largest = torch.where(largest > 0, largest, 1)
    rest, parts = x.float() / largest, []
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.stack(parts), largest


def logit_gradient_scale(dtype: torch.dtype, *gradients: Tensor | None) -> Tensor | None:
    """max |d|, a scalar on the device: S is stored in 16 bits as S / max |d|, and multiplied back in float32. None for wider dtypes.

    float16 needs it for its range: a mean over 131,072 tokens puts every entry under its normal numbers, GradScaler's 65536 over them.
    bfloat16 gains accuracy: in a mean, d = 1/M is shared by all tokens and so would be its rounding error, up to 2^-8 of the whole
    gradient; divided by itself it is exact.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    largest = torch.stack([d.abs().amax() for d in gradients if d is not None and d.numel()]).amax()
    return torch.where(torch.isfinite(largest) & (largest > 0), largest, 1)
