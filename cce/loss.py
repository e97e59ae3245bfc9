"""The public call: checks, shift, ignored tokens, the terms of the loss, reductions; then one implementation.

An implementation is a primitive `(e, c, targets, bias, softcap, mean_weight) -> (z_y, lse_rest, z_bar)` (specified in
`cce.naive.target_and_rest`). Everything else about the loss is the ordinary PyTorch of `TokenLoss` on those vectors, written once:

    nll = softplus(lse_rest - z_y)          lse = logaddexp(lse_rest, z_y)

`softplus` instead of `lse - z_y`: it cannot be negative, and it does not cancel for confident tokens.
"""

import dataclasses
import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from cce import autograd, checks, chunked, naive, parallel
from cce.host import HostCopy

# The share of the gradient's mass that gather's default filter drops at most. At 0.038 a model after 50 steps is further from exact than
# PyTorch in bfloat16 ("eps 2^-13" in figures/data/real_gather.json).
MOST_DROPPED = 0.03


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = True,
    accum_c_fp32: bool = True,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str = "auto",
    vocab_parallel_options: parallel.VocabParallelOptions | None = None,
    *,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    z_loss: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of `softmax(e @ c.T + bias)` against `targets`, without storing the logits.

    Values and gradients follow `torch.nn.functional.cross_entropy(e @ c.T + bias, targets, ...)`. Calls written for
    `cut_cross_entropy.linear_cross_entropy` run unchanged.

    Args:
        e: hidden states [..., D]; float32, bfloat16 or float16 (float64 for naive, checkpoint, chunked), any strides.
        c: classifier [V, D] (`lm_head.weight`), same dtype and device. Under `torch.autocast` both are cast first.
        targets: class ids [...], any integer dtype; values in [0, V) or `ignore_index`.
        bias: [V], floating point, or None.
        ignore_index: targets with this value count for nothing, and nothing is computed for them.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2), to an absolute 2^-24 of softcap in the kernels.
        reduction: "mean" (over the tokens that count, by class weight if there is one), "sum" or "none".
        shift: score `e[..., t, :]` against `targets[..., t + shift]`; True is 1. Needs at least [B, T, D] or [T, D].
        return_lse: also return the log-sum-exp of each token's logits; differentiable.
        filter_eps: what of the logit gradient is too small to compute; "auto" (or "high"), None (nothing: exact) or a number.
            `gather` drops (token, tile of 128 classes) pairs without the token's target, and puts their mass back at the tile's mean
            class. With a number, those whose mass is at most filter_eps times the root mean square of the tokens' gradients: what
            is wrong in a token's row of the logit gradient sums to 0 in each tile and is at most filter_eps of a typical token's there.
            (Classes that a bias of -inf switches off get a share where they are in one tile with others.)
            "auto" is eps / 32 of the dtype (2^-12 in bfloat16), or less, so that at most 3 % of the gradient's mass is dropped; in
            float32 it is None. `with cce.gather.observed() as plans` tells the share that was dropped. Under CUDA graph capture
            nothing is.
            `cce`, and the names that stand for it: blocks without a target whose softmax is everywhere under this are skipped and
            lost. "auto" is eps / 32; label smoothing turns it off. What it costs depends on how flat the softmax is. Relative error of
            de / dc in bfloat16 on an H200, with the filter and without: synthetic and peaked, 2.7e-3 / 2.2e-3 both ways;
            random and nearly flat, up to 2.0e-2 / 4.6e-3 against 1.7e-3 / 0.8e-3 (figures/data/cut.json); a model of
            131,072 classes trained for minutes, 7.0e-2 / 2.6e-3 against 2.7e-3 / 1.9e-3 (figures/data/real_softmax.json).
        accum_e_fp32, accum_c_fp32: accepted for compatibility; sums are always float32.
        filter_e_grad, filter_c_grad: False keeps `cce`'s filter away from de or dc (both products are then made for every
            block), and turns `gather`'s off.
        impl: "naive", "checkpoint", "chunked", "torch_compile", "cce" (the paper, arXiv:2411.09009), "cce_exact" (without its filter),
            "gather" (the row-gathered algorithm of notebook 09: the same bits every time, the fastest on a sharp softmax; on a flat
            one, as at the start of a training, torch_compile is up to 1.4 times as fast, in several times the memory), "auto", or a
            name of cut-cross-entropy. "auto" on an NVIDIA GPU of compute capability 8.0 and up is "gather" in 16 bits and "cce_exact"
            in float32; it is "chunked" elsewhere, for float64, and for label smoothing with softcap. The kernels behind "cce",
            "cce_exact" and "gather" run without a GPU too, in Triton's interpreter: to learn and test with, minutes at real sizes.
        label_smoothing: in [0, 1], as in `F.cross_entropy`. With softcap: naive, checkpoint, chunked, torch_compile, auto.
        weight: class weights [V], as in `F.cross_entropy`.
        vocab_parallel_options: `cce.parallel.VocabParallelOptions`: c and bias are this rank's rows of the classifier,
            targets and weight those of the whole vocabulary; every rank gets the whole loss.
        z_loss: adds `z_loss * lse**2` per token ("mean" divides by the number of tokens that count).

    Returns:
        The loss, float32 (float64 for float64): a scalar, or for "none" the shape of `targets` (less its first `shift`
        columns) with zeros at ignored tokens. With return_lse, the pair (loss, lse), lse shaped like "none".

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, shape or range; the message names it.
        IndexError: a target is neither in [0, V) nor ignore_index. Not under CUDA graph capture or torch.compile,
            where nothing can be raised: there such a token's loss is NaN.
        ImportError: the implementation needs Triton and it is not there.
    """
    if isinstance(bias, int) and not isinstance(bias, bool):  # cut-cross-entropy 25.1.1: the fourth positional
        bias, ignore_index = None, bias
    del accum_e_fp32, accum_c_fp32
    e, c, bias = _cast_for_autocast(e, c, bias)
    impl = checks.check(
        e, c, targets, bias, ignore_index, softcap, reduction, shift, label_smoothing, weight, z_loss, impl
    )
    shard = None if vocab_parallel_options is None else parallel.Shard(vocab_parallel_options, c)
    num_classes = len(c) if shard is None else shard.num_classes
    if weight is not None:
        checks.check_per_class("weight", weight, num_classes)
    # NumPy's scalars are numbers, too, but would take over a product with a tensor.
    softcap = None if softcap is None else float(softcap)
    ignore_index, shift, label_smoothing, z_loss = int(ignore_index), int(shift), float(label_smoothing), float(z_loss)
    checks.check_filter_eps(filter_eps)
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
    with torch.autocast(e.device.type, enabled=False):
        impl = _choose(e, c, softcap if label_smoothing else None) if impl == "auto" else impl
        settings = ()
        if impl in KERNELS:
            settings = (Filter.of(impl, filter_eps, filter_e_grad, filter_c_grad, label_smoothing, e.dtype),)
        early = None
        if settings and shard is None:
            early = functools.partial(
                autograd.begin, KERNELS[impl], c=c, bias=bias, softcap=softcap, block_filter=settings[0]
            )
        tokens = _select_tokens(e, targets, ignore_index, num_classes, shift, early)
        terms = TokenLoss(reduction, label_smoothing, z_loss, weight, num_classes, tokens)
        if not tokens.captured and tokens.count == 0:
            return _nothing_counts(e, c, bias, targets.shape, reduction, return_lse)
        mean_weight = None
        if label_smoothing > 0:
            mean_weight = torch.ones(num_classes, device=e.device) if weight is None else weight
        if shard is None:
            problem = (tokens.e, c, tokens.targets, bias, softcap, mean_weight)
        else:
            mine = None if mean_weight is None else mean_weight[shard.start : shard.stop]
            problem = (shard.shared(tokens.e), c, shard.local(tokens.targets), bias, softcap, mine)
        # Under capture, in a shard, or for per-token results, what is asked of a token is known only in the backward.
        if impl == "chunked" and reduction != "none" and not (return_lse or tokens.captured or shard):
            return chunked.chunked_loss(*problem, terms)
        if settings:
            settings += (tokens.begun,)
        outputs = _primitive(impl)(*problem, *settings)
        z_y, lse_rest, z_bar = tokens.blank(*(outputs if shard is None else shard.combine(*outputs)))
        per_token = tokens.blank(terms(z_y, lse_rest, z_bar, tokens.targets))[0]
        loss = tokens.scatter(per_token, targets.shape) if reduction == "none" else per_token.sum()
        if tokens.captured and reduction == "mean":
            loss = torch.where(tokens.count == 0, torch.nan, loss)
        if not return_lse:
            return loss
        return loss, tokens.scatter(torch.logaddexp(lse_rest, z_y), targets.shape)


KERNELS = {"cce": "cut", "cce_full_c": "cut", "cce_full_e": "cut", "cce_exact": "cut", "gather": "gather"}


@dataclasses.dataclass(frozen=True)
class Filter:
    """What of the logit gradient is too small to compute.

    `cce`: blocks without a target whose softmax is everywhere below eps. `gather`: (token, tile) pairs without a target whose gradient
    mass is at most eps times that of a typical token, as long as no more than the share `most` of the whole mass is dropped.
    """

    eps: float | None
    e: bool = True  # whether the filter applies to de
    c: bool = True  # and to dc
    most: float | None = None

    @classmethod
    def of(cls, impl, filter_eps, filter_e_grad, filter_c_grad, label_smoothing, dtype) -> "Filter":
        eps = torch.finfo(dtype).eps / 32 if filter_eps in ("auto", "high") else filter_eps
        if impl == "gather":
            automatic = filter_eps in ("auto", "high")
            if eps is None or not (filter_e_grad and filter_c_grad) or (automatic and dtype == torch.float32):
                return cls(None)
            return cls(float(eps), most=MOST_DROPPED if automatic else None)
        # Label smoothing spreads a part of the gradient evenly over V: below any threshold, and not negligible to cce.
        if impl == "cce_exact" or label_smoothing > 0 or eps is None:
            return cls(None)
        return cls(float(eps), filter_e_grad and impl != "cce_full_e", filter_c_grad and impl != "cce_full_c")


class Tokens:
    """The tokens that count: their rows of e, their targets, and the way back to the caller's shape."""

    def __init__(self, e: Tensor, targets: Tensor, counted: Tensor | None, kept: Tensor | None, begun=None):
        self.captured = counted is not None
        self.counted, self.kept, self.e, self.targets, self.begun = counted, kept, e, targets, begun
        self.count = counted.sum() if self.captured else len(targets)
        if self.captured:  # no compaction: all rows run, and those that do not count must leave no trace, NaN or not
            self.e = torch.where(counted[:, None], e, 0)

    def blank(self, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Under capture, 0 with gradient exactly 0 (through `where`, not a product) where a token does not count."""
        if not self.captured:
            return vectors
        return tuple(None if x is None else torch.where(self.counted, x, 0) for x in vectors)

    def scatter(self, per_token: Tensor, shape: torch.Size) -> Tensor:
        if self.kept is None:
            return self.blank(per_token)[0].view(shape)
        full = per_token.new_zeros(shape.numel())
        return full.index_copy(0, self.kept, per_token).view(shape)


def _select_tokens(e: Tensor, targets: Tensor, ignore_index: int, num_classes: int, shift: int, early=None) -> Tokens:
    """Flattens, checks the targets' range and drops ignored tokens, with one host synchronisation.

    early(e, targets, facts), if given, launches what it can before the host knows the facts, and the device never idles.
    """
    length = targets.shape[-1] if targets.dim() else 1
    e, targets = e.reshape(-1, e.shape[-1]), targets.reshape(-1).long()
    if len(targets) == 0:
        return Tokens(e, targets, None, None)
    if torch.compiler.is_compiling() or (e.is_cuda and torch.cuda.is_current_stream_capturing()):
        counted, bad = targets != ignore_index, (targets < 0) | (targets >= num_classes)
        targets = torch.where(counted, torch.where(bad, naive.NOWHERE, targets), naive.ELSEWHERE)
        return Tokens(e, targets, counted, None)
    facts = _target_facts(targets, ignore_index, by_kernel=e.is_cuda and early is not None)
    on_the_way = HostCopy(facts)
    begun = None if early is None else early(e, targets, facts)
    count, low, high = on_the_way.wait().tolist()
    if low < 0 or high >= num_classes:
        where = ((targets != ignore_index) & ((targets < 0) | (targets >= num_classes))).nonzero()[0].item()
        raise IndexError(
            f"targets: value {int(targets[where])} at flat position {where + (where // length + 1) * shift} is out of range: "
            f"expected 0 <= target < {num_classes} (the rows of c) or ignore_index={ignore_index}"
        )
    if count == len(targets):
        return Tokens(e, targets, None, None, begun)
    if begun is not None:
        begun.numbers = None  # they were for all tokens
    kept = torch.nonzero_static(targets != ignore_index, size=count)[:, 0]
    return Tokens(e.index_select(0, kept), targets.index_select(0, kept), None, kept, begun)


def _target_facts(targets: Tensor, ignore_index: int, by_kernel: bool) -> Tensor:
    """[3]: how many targets count, and the smallest and the largest of those and 0."""
    if by_kernel:
        from cce.kernels.target_facts import target_facts

        return target_facts(targets, ignore_index)
    counted = targets != ignore_index
    return torch.stack([counted.sum(), *torch.where(counted, targets, 0).aminmax()])


class TokenLoss:
    """(z_y, lse_rest, z_bar, targets) -> what each token adds to the loss. All terms of the loss live here.

    Label smoothing α with class weights w and W = Σ_v w_v, as in F.cross_entropy:
        (1 - α) w_y nll + α/V (W lse - z_bar),   z_bar = Σ_v w_v z_v;
    "mean" divides both by Σ_n w_{y_n}, and the z-loss, which class weights do not touch, by the number of tokens.
    """

    def __init__(self, reduction, label_smoothing, z_loss, weight, num_classes, tokens: Tokens):
        self.smoothing, self.z_loss, self.num_classes = (label_smoothing, z_loss, num_classes)
        wide = torch.float64 if tokens.e.dtype == torch.float64 else torch.float32
        self.weight = None if weight is None else weight.to(wide)
        self.total_weight = num_classes if weight is None else self.weight.sum()
        self.divisor = self.z_divisor = 1
        if reduction == "mean":
            self.divisor = self.z_divisor = tokens.count
            if weight is not None:
                self.divisor = tokens.blank(self._token_weight(tokens.targets))[0].sum()

    def _token_weight(self, targets: Tensor) -> Tensor:
        return self.weight[targets.clamp(0, self.num_classes - 1)]

    def __call__(self, z_y: Tensor, lse_rest: Tensor, z_bar: Tensor | None, targets: Tensor) -> Tensor:
        # From 40 on log(1 + exp(x)) is x even in float64; torch's default of 20 is off by 1e-10.
        loss = F.softplus(lse_rest - z_y, threshold=40)
        if self.weight is not None:
            loss = self._token_weight(targets) * loss
        lse = torch.logaddexp(lse_rest, z_y) if z_bar is not None or self.z_loss else None
        if z_bar is not None:
            spread = (self.total_weight * lse - z_bar) / self.num_classes
            loss = (1 - self.smoothing) * loss + self.smoothing * spread
        loss = loss / self.divisor
        return loss + (self.z_loss / self.z_divisor) * lse.square() if self.z_loss else loss


def _nothing_counts(e, c, bias, shape, reduction, return_lse):
    """Every target is ignored: PyTorch's values (0/0 for the mean), zero gradients, still connected to autograd."""
    wide = torch.float64 if e.dtype == torch.float64 else torch.float32
    nothing = sum(x.reshape(-1)[:0].to(wide).sum() for x in (e, c, bias) if x is not None)
    zeros = torch.zeros(shape, dtype=wide, device=e.device) + nothing
    loss = {"mean": nothing + torch.nan, "sum": nothing, "none": zeros}[reduction]
    return (loss, zeros.clone()) if return_lse else loss


# ---------------------------------------------------------------------------------------------- choosing


def _primitive(impl: str):
    if impl in ("naive", "checkpoint"):
        return naive.target_and_rest if impl == "naive" else naive.checkpointed_target_and_rest
    if impl == "torch_compile":
        return naive.compiled_target_and_rest()
    return functools.partial(autograd.target_and_rest, KERNELS.get(impl, impl))


def _choose(e: Tensor, c: Tensor, smoothed_softcap: float | None) -> str:
    """What impl="auto" means for these inputs."""
    if e.dtype == torch.float64 or smoothed_softcap is not None or not e.is_cuda or torch.version.hip:
        return "chunked"
    impl = "cce_exact" if e.dtype == torch.float32 else "gather"  # gather's products are cuBLAS's, slow in full float32
    if torch.cuda.get_device_capability(e.device) < (8, 0) or not (
        torch.cuda.is_current_stream_capturing() or _kernels_run(e.device, e.dtype, impl)
    ):
        return "chunked"
    return impl


@functools.cache
def _kernels_run(device: torch.device, dtype: torch.dtype, impl: str) -> bool:
    """Tries the kernels once per device and dtype, so that a machine without, say, a C compiler still trains."""
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            e, c = (torch.zeros(16, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
            targets = torch.zeros(16, device=device, dtype=torch.int64)
            linear_cross_entropy(e, c, targets, impl=impl).backward()
        return True
    except Exception as error:  # anything at all: the point is to go on without them
        warnings.warn(
            f'cce: the Triton kernels do not run on {device} ({type(error).__name__}: {error}); impl="auto" uses '
            '"chunked" instead',
            RuntimeWarning,
            stacklevel=4,
        )
        return False


def _cast_for_autocast(e, c, bias):
    """Under autocast a linear layer casts its operands, and so does this one; gradients come back in their dtypes."""
    if not (isinstance(e, Tensor) and isinstance(c, Tensor)):
        return e, c, bias
    # Dynamo of torch 2.11 cannot trace the first question, which only exotic devices need.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(e.device.type)
    if not known or not torch.is_autocast_enabled(e.device.type):
        return e, c, bias
    dtype = torch.get_autocast_dtype(e.device.type)
    cast = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x  # noqa: E731
    return cast(e), cast(c), cast(bias)
