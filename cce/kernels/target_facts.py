"""What the host must know of the targets before anything uses them, in one launch instead of five: how many count, and their range.

One program reads all of them, 8 bytes a token; the host waits for it anyway.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["N", "ignore_index"])
def target_facts_kernel(targets_ptr, facts_ptr, N, ignore_index, BLOCK_N: tl.constexpr):
    count = tl.zeros((BLOCK_N,), tl.int64)
    low = tl.zeros((BLOCK_N,), tl.int64)  # an ignored target is in range
    high = tl.zeros((BLOCK_N,), tl.int64)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        targets = tl.load(targets_ptr + n, mask=n < N, other=0)
        counts = (n < N) & (targets != ignore_index)
        count += counts.to(tl.int64)
        low = tl.minimum(low, tl.where(counts, targets, 0))
        high = tl.maximum(high, tl.where(counts, targets, 0))
    tl.store(facts_ptr, tl.sum(count))
    tl.store(facts_ptr + 1, tl.min(low))
    tl.store(facts_ptr + 2, tl.max(high))


def target_facts(targets: Tensor, ignore_index: int) -> Tensor:
    """[3] int64: how many of targets [N] int64 are not ignore_index, and the smallest and the largest of those and 0."""
    facts = torch.empty(3, dtype=torch.int64, device=targets.device)
    target_facts_kernel[(1,)](targets.contiguous(), facts, len(targets), ignore_index, BLOCK_N=2048, num_warps=8)
    return facts
