"""Tensor descriptors: how a kernel asks Hopper's copy engine for a block. Older GPUs get ordinary loads from the same source."""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def descriptors_supported(x: Tensor) -> bool:
    """Whether x [rows, columns] can be read through a descriptor: 16-byte aligned base and rows, columns contiguous."""
    return (
        x.numel() > 0
        and x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and x.stride(0) * x.element_size() % 16 == 0
        and x.stride(0) >= x.shape[1]
    )


def aligned(x: Tensor) -> Tensor:
    """x itself where descriptors can read it, else a copy whose rows are padded to 16 bytes (a view of x's width)."""
    if descriptors_supported(x):
        return x
    rows, columns = x.shape
    per_16_bytes = 16 // x.element_size()
    return x.new_empty(rows, -(-columns // per_16_bytes) * per_16_bytes)[:, :columns].copy_(x)


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Blocks of [rows, columns] of x; what lies outside x reads as 0."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
