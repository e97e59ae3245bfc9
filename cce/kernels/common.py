"""Small jitted pieces that every kernel shares."""

import triton
import triton.language as tl

from cce.kernels import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)  # the GPU has exp2 and log2; exp(x) = exp2(x * LOG2E)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def grouped_tile(pid, num_rows, num_columns, GROUP: tl.constexpr):
    """(row, column) of the pid-th tile, GROUP rows at a time: programs that run together share blocks in L2."""
    width = GROUP * num_columns
    first = pid // width * GROUP
    rows = min(num_rows - first, GROUP)
    return first + pid % width % rows, pid % width // rows


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32. float32 operands are split into three TF32 products (a GPU's default is one, 1e-3)."""
    if INTERPRETED:  # its dot multiplies bfloat16's bit patterns
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def capped(z, softcap):
    """softcap * tanh(z / softcap); tanh(x) = 2 sigmoid(2x) - 1 needs no libdevice."""
    return softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)


@triton.jit
def capped_slope(z, softcap):
    """d capped / d z as a function of the capped logit."""
    return 1 - (z / softcap) * (z / softcap)


@triton.jit
def logaddexp(a, b):
    """log(exp(a) + exp(b)); -inf where both are, NaN where one is (tl.maximum would drop it, the sum does not)."""
    high = tl.maximum(a, b)
    shift = tl.where(high == float("-inf"), 0.0, high)
    total = tl.exp2((a - shift) * LOG2E) + tl.exp2((b - shift) * LOG2E)
    nothing = total == 0
    return tl.where(nothing, float("-inf"), shift + LN2 * tl.log2(tl.where(nothing, 1.0, total)))


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 x in dtype, to nearest even. (The interpreter truncates to bfloat16, which would bias every sum.)"""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def store_gradient(
    dc, dc_ptr, stride, row, live, d, live_d, weight_ptr, mean_e_ptr, scale_ptr, HAS_MEAN: tl.constexpr
):  # fmt: skip
    """Finished rows of dc go home: + weight[row] * mean_e (label smoothing), times scale, rounded once."""
    if HAS_MEAN:
        weight = tl.load(weight_ptr + row, mask=live, other=0.0)
        dc += weight[:, None] * tl.load(mean_e_ptr + d, mask=live_d, other=0.0)[None, :]
    dc *= tl.load(scale_ptr)
    places = dc_ptr + row[:, None] * stride + d[None, :]
    tl.store(places, round_to(dc, dc_ptr.dtype.element_ty), mask=live[:, None] & live_d[None, :])


@triton.jit
def lock(ptr):
    """Spins until *ptr goes from 0 to 1. Thread 0 does it; the barrier that hands its result around holds the others.

    It cannot hang: a program holds one lock at a time and waits for nothing while it does, so whoever holds this one is
    running and will release it, however many programs there are that have not started yet.
    """
    while tl.atomic_cas(ptr, 0, 1) == 1:
        pass


@triton.jit
def unlock(ptr):
    """Releases *ptr. Without the barrier thread 0 could release while other warps still have stores to make."""
    tl.debug_barrier()
    tl.atomic_xchg(ptr, 0)


@triton.jit
def locked_add(ptrs, value, mask, lock_ptr):
    """*ptrs += value while holding the lock. `.cg` reads from L2: another program may just have written there."""
    lock(lock_ptr)
    old = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(ptrs, old + value, mask=mask, cache_modifier=".cg")
    unlock(lock_ptr)


@triton.jit
def accumulate(ptrs, value, mask, lock_ptr, LOCKED: tl.constexpr):
    """*ptrs += value in float32, among programs that add to the same place: under a lock, or by the L2's own reductions."""
    if LOCKED:
        locked_add(ptrs, value, mask, lock_ptr)
    else:
        tl.atomic_add(ptrs, value, mask=mask, sem="relaxed")
