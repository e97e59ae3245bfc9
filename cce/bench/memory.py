"""How much memory a call needs at its worst moment, beyond what was there before it.

On a GPU the CUDA allocator keeps that statistic. A CPU allocator keeps none that could be compared between machines,
so there the tensors themselves are counted: every operation that PyTorch dispatches shows its arguments and results
to a `TorchDispatchMode`, a storage that appears for the first time adds its bytes, and a weak reference takes them
off again when the storage dies. The count is a function of the program alone: the same on every computer.
"""

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch.tensor() builds its result out of sight and passes it through this one: its argument is new, not the caller's.
LIFT_FRESH = torch.ops.aten.lift_fresh.default


def peak_memory(fn: Callable[[], object], device: str | torch.device | None = None) -> int:
    """Bytes alive at the worst moment of `fn()`, beyond what was alive before it.

    Results that `fn` leaves behind (its return value, the `.grad` of a leaf) count; a `.grad` that was there before
    does not, and is added to in place: set gradients to None first to see a whole backward.

    CUDA: the peak of the caching allocator, in its blocks of 512 bytes. Libraries allocate workspaces on first use:
    call `fn` once before.

    CPU: the peak of the bytes of all tensor storages, each counted once however many views it has, at the end of each
    operation. `backward()` inside `fn` is seen, and so are an `autograd.Function`'s two passes and in-place growth
    (`resize_`, `out=`). Not seen: temporaries inside one ATen operation (a matrix product's packing buffers, a
    float32 copy within a bfloat16 kernel), compiled graphs, what other threads allocate, and memory that PyTorch does
    not allocate, such as the NumPy arrays in which Triton's interpreter runs a kernel. Cyclic garbage counts as alive
    until the end, because when Python would collect it differs from run to run.

    Args:
        fn: called once, without arguments; its exceptions pass through.
        device: "cpu" or "cuda" (or "cuda:1"); by default CUDA where there is one. Only this device's memory counts.

    Raises:
        ValueError: device is neither a CPU nor a CUDA device.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "cpu" or "cuda", got {str(device)!r}')
    gc.collect()
    return _cuda_peak(fn, device) if device.type == "cuda" else _cpu_peak(fn)


def _cuda_peak(fn: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(fn: Callable[[], object]) -> int:
    # PyTorch imports this on the first use of an autograd.Function under a mode; imported inside, with the collector off,
    # its cycles would keep tensors of the first measurement alive.
    import torch._dynamo  # noqa: F401

    collecting = gc.isenabled()
    gc.disable()
    try:
        with LiveBytes() as live:
            fn()
        return live.peak
    finally:
        live.forget()
        if collecting:
            gc.enable()


class LiveBytes(TorchDispatchMode):
    """Counts CPU storages as they come, grow and go. Storages older than the mode count only by what they grow or,
    negatively, when they die: the balance is always "beyond what was alive before"."""

    def __init__(self):
        super().__init__()
        self.balance = self.peak = 0
        # id of a storage's Python object, which lives as long as the storage -> (weak reference, bytes counted so far)
        self.known: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = [] if func is LIFT_FRESH else _storages((args, kwargs))
        for storage in arguments:
            if id(storage) not in self.known:
                self._record(storage)
        results = func(*args, **kwargs)
        for storage in (*arguments, *_storages(results)):
            before = self.known[id(storage)][1] if id(storage) in self.known else 0
            self.balance += self._record(storage) - before
        self.peak = max(self.peak, self.balance)
        return results

    def _record(self, storage: torch.UntypedStorage) -> int:
        key, nbytes = id(storage), storage.nbytes()
        if key in self.known:
            reference = self.known[key][0]
        else:
            reference = weakref.ref(storage, lambda _: self._gone(key))
        self.known[key] = (reference, nbytes)
        return nbytes

    def _gone(self, key: int) -> None:
        self.balance -= self.known.pop(key)[1]

    def forget(self) -> None:
        """Drops the weak references, so that what outlives the measurement no longer reports to it."""
        self.known.clear()


def _storages(tree: object) -> list[torch.UntypedStorage]:
    """The distinct CPU storages of the dense tensors in a nest of arguments or results."""
    dense = [
        x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.device.type == "cpu" and x.layout == torch.strided
    ]
    return list({id(s): s for s in (x.untyped_storage() for x in dense)}.values())
