"""Vocabulary parallelism: each rank holds the rows start … stop of the classifier, and the loss is that of the whole.

Every rank calls the primitive on its shard; the shards' (z_y, lse_rest) are then combined by two collectives of M floats. Their
backward is the identity, because every rank computes the same loss from the combined numbers and so has the whole upstream gradient
already (torch.distributed.nn's all_reduce would sum it once more, world size times too large). The gradient of e is a sum over shards.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from cce.naive import ELSEWHERE


@dataclasses.dataclass(frozen=True)
class VocabParallelOptions:
    """This rank's classes are start <= v < stop; `c` and `bias` are those rows, targets and `weight` stay whole.

    group: the process group over which the vocabulary is split, None for the default one.
    reduce_e_grad: sum e's gradient over the group; False leaves each rank its share, for callers who reduce later.
    """

    start: int
    stop: int
    group: dist.ProcessGroup | None = None
    reduce_e_grad: bool = True


class Shard:
    """One call's view of the options (duck-typed, so that cut-cross-entropy's own class does as well)."""

    def __init__(self, options, c: Tensor):
        if not all(hasattr(options, name) for name in ("start", "stop", "group")):
            raise TypeError(
                "vocab_parallel_options: expected None or a cce.parallel.VocabParallelOptions, "
                f"got {type(options).__name__}"
            )
        self.start, self.stop = int(options.start), int(options.stop)
        self.group, self.reduce_e_grad = options.group, getattr(options, "reduce_e_grad", True)
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("vocab_parallel_options: expected torch.distributed to be initialised")
        if not 0 <= self.start < self.stop or self.stop - self.start != len(c):
            raise ValueError(
                f"vocab_parallel_options: expected 0 <= start and stop - start = c.shape[0] = {len(c)}, "
                f"got start={options.start}, stop={options.stop}"
            )
        last = torch.tensor(self.stop, device=c.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, self.group)
        self.num_classes = int(last)

    def local(self, targets: Tensor) -> Tensor:
        """Whole-vocabulary targets as rows of this shard, ELSEWHERE where another rank owns them."""
        here = (targets >= self.start) & (targets < self.stop)
        return torch.where(here, targets - self.start, torch.where(targets < 0, targets, ELSEWHERE))

    def shared(self, e: Tensor) -> Tensor:
        return _SumBackward.apply(e, self.group) if self.reduce_e_grad else e

    def combine(self, z_y: Tensor, lse_rest: Tensor, z_bar: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The whole vocabulary's numbers from the shards'."""
        high = lse_rest.detach().clone()
        dist.all_reduce(high, dist.ReduceOp.MAX, self.group)
        shift = high.masked_fill(high == -torch.inf, 0)
        total = _SumForward.apply(torch.exp(lse_rest - shift), self.group)
        nothing = high == -torch.inf
        lse_rest = torch.where(nothing, -torch.inf, shift + torch.where(nothing, 1, total).log())
        z_bar = None if z_bar is None else _SumForward.apply(z_bar, self.group)
        return _SumForward.apply(z_y, self.group), lse_rest, z_bar


class _SumForward(torch.autograd.Function):
    """All-reduce in the forward, identity in the backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


class _SumBackward(torch.autograd.Function):
    """Identity in the forward, all-reduce in the backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        upstream = upstream.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(upstream, group=ctx.group)
        return upstream, None
