"""Block shapes per GPU: measured on sm_90, compiled and checked against the chip's shared memory for the others.

Nothing is tuned at run time: a first call costs one compilation, and a training run is the same every time.
"""

import functools
from typing import NamedTuple

import torch

from cce.kernels import INTERPRETED


class Blocks(NamedTuple):
    """BLOCK_N tokens x BLOCK_V classes of logits, summed BLOCK_D features at a time."""

    BLOCK_N: int
    BLOCK_V: int
    BLOCK_D: int
    num_warps: int
    num_stages: int


# (kernel, bytes per element) -> [(shared memory needed, in KiB, shape)], largest first. An SM has 227 KiB on sm_90 and
# sm_100, 163 on sm_80, 99 on sm_86, sm_89 and sm_120, 64 on sm_75.
TABLE = {
    ("target_logit", 2): [(64, Blocks(64, 64, 64, 4, 3))],
    ("target_logit", 4): [(64, Blocks(64, 64, 32, 4, 3))],
    ("lse_forward", 2): [(200, Blocks(128, 256, 64, 8, 3)), (99, Blocks(128, 128, 64, 8, 2)), (64, Blocks(128, 64, 32, 4, 2))],
    ("lse_forward", 4): [(99, Blocks(128, 128, 32, 8, 2)), (64, Blocks(64, 64, 32, 4, 2))],
    ("backward", 2): [(200, Blocks(128, 128, 64, 8, 4)), (99, Blocks(64, 64, 64, 4, 2)), (64, Blocks(64, 64, 32, 4, 2))],
    ("backward", 4): [(99, Blocks(64, 64, 32, 4, 2)), (64, Blocks(32, 32, 32, 4, 2))],
    # tiles of 128 classes (kernels.tile_lse.TILE) must fit BLOCK_V; also for logit_gradient
    ("tile_lse", 2): [(200, Blocks(128, 256, 64, 8, 3)), (99, Blocks(128, 128, 64, 8, 2)), (64, Blocks(64, 128, 32, 4, 2))],
    ("tile_lse", 4): [(99, Blocks(128, 128, 32, 8, 2)), (64, Blocks(64, 128, 32, 4, 2))],
    # BLOCK_N pairs at a time; BLOCK_V features of de at a time
    ("pair_gradient", 2): [(160, Blocks(64, 64, 64, 4, 4)), (64, Blocks(64, 64, 32, 4, 2))],
    ("pair_gradient", 4): [(99, Blocks(32, 64, 32, 4, 2)), (64, Blocks(16, 32, 32, 4, 2))],
    ("tile_gradient", 2): [(99, Blocks(32, 0, 64, 4, 2)), (64, Blocks(32, 0, 64, 4, 2))],
    ("slab_gradient", 2): [(200, Blocks(64, 128, 256, 8, 3)), (99, Blocks(64, 128, 128, 8, 2)), (64, Blocks(32, 128, 64, 4, 2))],
    ("slab_gradient", 4): [(99, Blocks(32, 128, 64, 8, 2)), (64, Blocks(32, 64, 64, 4, 2))],
    ("tile_gradient", 4): [(99, Blocks(32, 0, 64, 4, 2)), (64, Blocks(32, 0, 32, 4, 2))],
}  # fmt: skip
INTERPRETED_BLOCKS = Blocks(32, 64, 64, 4, 1)


def cdiv(a: int, b: int) -> int:
    """ceil(a / b). (Triton has both of these, but made for kernels: on the host they take 14 microseconds.)"""
    return -(-a // b)


def power_of_2(a: int) -> int:
    """The next one from a >= 1 on."""
    return 1 << (a - 1).bit_length()


def blocks_for(kernel: str, x: torch.Tensor) -> Blocks:
    """The shape for x's dtype on x's device; on a CPU a small one, since an interpreted program costs milliseconds."""
    if INTERPRETED:
        return INTERPRETED_BLOCKS
    return blocks_within(kernel, x.element_size(), shared_memory_kib(x.device))


def blocks_within(kernel: str, element_size: int, kib: int) -> Blocks:
    """The first shape of the table that fits; RuntimeError on a chip too small for any."""
    for needed, shape in TABLE[kernel, element_size]:
        if needed <= kib:
            return shape
    raise RuntimeError(f"{kernel}: needs {needed} KiB of shared memory per program, this GPU has {kib}")


@functools.cache
def shared_memory_kib(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >> 10


@functools.cache
def under_locks(device: torch.device) -> bool:
    """Whether the backward adds to de and dc under the paper's locks, or by float32 reductions in L2 (the GPU's atomics).

    On an H200 the reductions are 1.4 to 2.5 times as fast (figures/data/accumulation.json): they need no round trip to read the old
    value, and Hopper's are four floats wide. Older GPUs and the interpreter, where that was not measured, keep the locks.
    """
    return INTERPRETED or torch.cuda.get_device_capability(device) < (9, 0)
