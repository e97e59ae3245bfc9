"""Chunks of tokens, in plain PyTorch (notebook 02): never more than [chunk, V] logits alive.

Two ways through the same chunk:
- mean and sum: the chunk's loss *and* gradients are made in the forward while its logits live (Liger Kernel's
  idea, arXiv:2410.10989). Three products, and no logit is computed twice.
- per-token results (`reduction="none"`, `return_lse`): what will be asked of each token is known only in the
  backward, so each chunk is recomputed there. Four products.

Numerics. A chunk keeps P = exp(z - m), m the row's maximum over the classes that are not its target, and turns it in
place into the logit gradient: `P * d_rest / sum(P)` off the target, `d_zy` on it. Sums over chunks are float32. On
CUDA 16-bit products take 16-bit operands and give float32; on a CPU they are computed in float32 from upcast inputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cce.autograd import first_derivative_only, wanted_gradients
from cce.naive import ELSEWHERE
from cce.precision import ROWS_AT_A_TIME, float32_product, ieee_float32, logit_gradient_scale, weighted_row_sum

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}  # of float32 logits alive at a time

# (z_y, lse_rest, z_bar, targets) -> what each token adds to the loss
TokenLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def chunk_size(num_classes: int, device: torch.device) -> int:
    """Tokens per chunk so that its float32 logits fit the device's budget; a multiple of 64 where there is room."""
    tokens = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]) // (4 * num_classes)
    return max(1, tokens // 64 * 64 if tokens >= 64 else tokens)


class Head(NamedTuple):
    """What every chunk reads, in the dtype of the products."""

    e: Tensor
    c: Tensor
    bias: Tensor | None
    targets: Tensor
    softcap: float | None
    mean_weight: Tensor | None

    @classmethod
    def prepare(cls, e, c, targets, bias, softcap, mean_weight) -> "Head":
        if e.device.type == "cpu" and e.dtype in (torch.float16, torch.bfloat16):
            e, c = e.float(), c.float()
        wide = torch.float64 if e.dtype == torch.float64 else torch.float32
        widen = lambda x: None if x is None else x.to(wide)  # noqa: E731
        return cls(e, c, widen(bias), targets, softcap, widen(mean_weight))

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.e.dtype == torch.float64 else torch.float32

    def chunks(self):
        size = chunk_size(self.c.shape[0], self.e.device)
        return [slice(i, i + size) for i in range(0, len(self.e), size)]

    def buffer(self) -> Tensor:
        rows = min(chunk_size(self.c.shape[0], self.e.device), len(self.e))
        return torch.empty(rows, self.c.shape[0], dtype=self.wide, device=self.e.device)


class Chunk:
    """One chunk's logits, turned in place into probabilities and then into the logit gradient."""

    def __init__(self, head: Head, rows: slice, buffer: Tensor):
        self.head, self.rows, self.e = head, rows, head.e[rows]
        targets = head.targets[rows]
        self.here, self.column = targets >= 0, targets.clamp(min=0)[:, None]
        z = float32_product(self.e, head.c.T, out=buffer[: len(targets)])
        if head.bias is not None:
            z.add_(head.bias)
        self.slope = None
        if head.softcap is not None:
            z.div_(head.softcap).tanh_()
            self.slope = 1 - z * z  # the chain rule's factor, kept because z is about to be overwritten
            z.mul_(head.softcap)
        self.z_bar = None if head.mean_weight is None else z @ head.mean_weight
        z_y = z.gather(1, self.column)
        z.scatter_(1, self.column, z_y.masked_fill(self.here[:, None], -torch.inf))
        self.z_y = torch.where(self.here, z_y[:, 0], torch.where(targets == ELSEWHERE, 0, torch.nan))
        m = z.amax(1, keepdim=True)
        m.masked_fill_(m == -torch.inf, 0)
        self.p = z.sub_(m).exp_()
        self.rest = self.p.sum(1)
        self.lse_rest = m[:, 0] + self.rest.log()

    def logit_gradient(self, d_zy: Tensor, d_rest: Tensor, d_zbar: Tensor | None) -> Tensor:
        """[chunk, V], in place of the probabilities."""
        s = self.p.mul_((d_rest / self.rest).masked_fill(self.rest == 0, 0)[:, None])
        on_target = torch.where(self.here, d_zy, s.gather(1, self.column)[:, 0])
        s.scatter_(1, self.column, on_target[:, None])
        if self.slope is not None:
            if d_zbar is not None:
                s.addr_(d_zbar, self.head.mean_weight)
            s.mul_(self.slope)
        return s


class Gradients:
    """Sums over chunks of de, dc, dbias; only those that somebody asked for exist.

    Without softcap z_bar is linear, so its gradient has rank one and never enters the [chunk, V] matrix, where 16 bits could not
    hold its entries of 1/V: de += d_zbar ⊗ (w @ c), dc += w ⊗ Σ d_zbar e, dbias += w Σ d_zbar.
    """

    def __init__(self, head: Head, wanted: tuple[bool, bool, bool]):
        new = lambda like: torch.zeros(like.shape, dtype=head.wide, device=like.device)  # noqa: E731
        self.head = head
        self.de = torch.empty(head.e.shape, dtype=head.wide, device=head.e.device) if wanted[0] else None
        self.dc = new(head.c) if wanted[1] else None
        self.dbias = new(head.bias) if wanted[2] else None
        self.mean_c = self.mean_row = None
        if wanted[0] and head.e.dtype != head.wide:
            self.mean_c = weighted_row_sum(head.c) / len(head.c)
        if head.mean_weight is not None and head.softcap is None:
            self.mean_row = weighted_row_sum(head.c, head.mean_weight)
            self.mean_e = torch.zeros(head.e.shape[1], dtype=head.wide, device=head.e.device)
            self.mean_total = torch.zeros((), dtype=head.wide, device=head.e.device)

    def add(self, chunk: Chunk, d_zy: Tensor, d_rest: Tensor, d_zbar: Tensor | None) -> None:
        s = chunk.logit_gradient(d_zy, d_rest, d_zbar)
        if self.dbias is not None:
            self.dbias += s.sum(0)
        dtype = chunk.e.dtype
        scale = logit_gradient_scale(dtype, d_zy, d_rest, d_zbar)
        s_rounded = s.to(dtype) if scale is None else s.div_(scale).to(dtype)
        if self.de is not None:
            de = float32_product(s_rounded, self.head.c, out=self.de[chunk.rows])
            if self.mean_c is not None:  # rounding left the rows' sums off zero; give that back at mean(c)
                de.addr_(s.sum(1) - s_rounded.sum(1, dtype=s.dtype), self.mean_c)
            if scale is not None:
                de.mul_(scale)
        if self.dc is not None:
            if s_rounded.dtype == self.dc.dtype:
                self.dc.addmm_(s_rounded.T, chunk.e)
            else:
                dc = float32_product(s_rounded.T, chunk.e)
                self.dc.add_(dc) if scale is None else self.dc.addcmul_(dc, scale)
        if self.mean_row is not None and d_zbar is not None:
            self.mean_e += d_zbar @ chunk.e.to(d_zbar.dtype)
            self.mean_total += d_zbar.sum()
            if self.de is not None:
                self.de[chunk.rows].addr_(d_zbar, self.mean_row)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.mean_row is not None:
            if self.dc is not None:
                self.dc.addr_(self.head.mean_weight, self.mean_e)
            if self.dbias is not None:
                self.dbias += self.head.mean_weight * self.mean_total
        return self.de, self.dc, self.dbias


class ChunkedLoss(torch.autograd.Function):
    """Sum over tokens of `token_loss`; gradients made in the forward and multiplied in the backward, never modified."""

    @staticmethod
    def forward(ctx, e, c, bias, targets, softcap, mean_weight, token_loss: TokenLoss, wanted):
        head = Head.prepare(e, c, targets, bias, softcap, mean_weight)
        total = torch.zeros((), dtype=head.wide, device=e.device)
        with ieee_float32():
            sums, buffer = Gradients(head, wanted), head.buffer()
            for rows in head.chunks():
                chunk = Chunk(head, rows, buffer)
                outputs = [x for x in (chunk.z_y, chunk.lse_rest, chunk.z_bar) if x is not None]
                with torch.enable_grad():
                    leaves = [x.detach().requires_grad_(any(wanted)) for x in outputs]
                    z_y, lse_rest, z_bar = leaves if len(leaves) == 3 else (*leaves, None)
                    loss = token_loss(z_y, lse_rest, z_bar, targets[rows]).sum()
                total += loss.detach()
                if any(wanted):
                    d = torch.autograd.grad(loss, leaves, materialize_grads=True)
                    sums.add(chunk, d[0], d[1], d[2] if len(d) == 3 else None)
            del buffer
        # float16 cannot hold gradients whose upstream factor is not known yet (GradScaler): they stay float32 there.
        keep = lambda x, like: x if x is None or like.dtype == torch.float16 else x.to(like.dtype)  # noqa: E731
        ctx.save_for_backward(*map(keep, sums.finish(), (e, c, bias)))
        ctx.dtypes = (e.dtype, c.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    @first_derivative_only
    def backward(ctx, upstream):
        gradients = [
            None if g is None else _times(g, upstream, dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None, None, None, None


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor with the product in float32, a slab of rows at a time, rounded to dtype; a new tensor."""
    if gradient.dtype == factor.dtype == dtype:
        return gradient * factor
    out = torch.empty_like(gradient, dtype=dtype)
    for source, target in zip(gradient.split(ROWS_AT_A_TIME), out.split(ROWS_AT_A_TIME), strict=True):
        target.copy_(source.to(factor.dtype) * factor)
    return out


def forward(e, c, targets, bias, softcap, mean_weight, block_filter, wanted, prepared=None):
    """The primitive's numbers, a chunk at a time."""
    head = Head.prepare(e, c, targets, bias, softcap, mean_weight)
    new = lambda: torch.empty(len(e), dtype=head.wide, device=e.device)  # noqa: E731
    z_y, lse_rest, z_bar = new(), new(), None if mean_weight is None else new()
    with ieee_float32():
        buffer = head.buffer()
        for rows in head.chunks():
            chunk = Chunk(head, rows, buffer)
            z_y[rows], lse_rest[rows] = chunk.z_y, chunk.lse_rest
            if z_bar is not None:
                z_bar[rows] = chunk.z_bar
    return (z_y, lse_rest, z_bar), ()


def backward(
    e, c, targets, bias, softcap, mean_weight, z_y, lse_rest, state, block_filter, wanted, d_zy, d_rest, d_zbar
):
    """Its gradients; each chunk is computed again."""
    head = Head.prepare(e, c, targets, bias, softcap, mean_weight)
    with ieee_float32():
        sums, buffer = Gradients(head, wanted), head.buffer()
        for rows in head.chunks():
            chunk = Chunk(head, rows, buffer)
            sums.add(chunk, d_zy[rows], d_rest[rows], None if d_zbar is None else d_zbar[rows])
    cast = lambda x, like: x if x is None else x.to(like.dtype)  # noqa: E731
    return tuple(map(cast, sums.finish(), (e, c, bias)))


def chunked_loss(e, c, targets, bias, softcap, mean_weight, token_loss: TokenLoss) -> Tensor:
    """Σ_n token_loss(z_y, lse_rest, z_bar, targets)[n] with the gradients made in the forward."""
    return ChunkedLoss.apply(e, c, bias, targets, softcap, mean_weight, token_loss, wanted_gradients(e, c, bias))
