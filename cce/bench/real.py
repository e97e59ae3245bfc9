"""python -m cce.bench.real: what the softmax of a really trained model looks like, and what filtering its gradient costs.

    python -m cce.bench.real                                   # a small model on the text that every Python ships; minutes on a laptop
    python -m cce.bench.real --tokens FILE --seconds 300       # a 131,072-class model; needs a GPU
    python -m cce.bench.real --what gather ...                 # the row-gathered algorithm instead of the paper's filter

FILE is a .npy with token ids, one dimension of any integer dtype, or a .npz that holds one as "tokens". The last 300,000 are held out
(the last tenth, if that is less). Hidden states are kept at initialisation, after 50 steps and at the end, for tokens the model
was trained on and for held-out ones; each is measured beside the two synthetic inputs of `cce.bench.inputs`.
"""

import contextlib
import functools
import re
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from cce import cut, gather, linear_cross_entropy
from cce.bench import exact
from cce.bench.contenders import naive
from cce.bench.inputs import INPUTS
from cce.bench.program import Parser, save
from cce.bench.timing import interleaved
from cce.kernels.blocks import blocks_for

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EARLY = 50  # steps


# ---------------------------------------------------------------------------------------------------------- text and model


def load_tokens(path: str | None, V: int) -> Tensor:
    """Token ids [n] int32: from a file, or the V - 1 most frequent words of pydoc's topics, 0 for all others."""
    if path is not None:
        stored = np.load(path)
        return torch.from_numpy((stored["tokens"] if path.endswith(".npz") else stored).astype(np.int32))
    from pydoc_data.topics import topics

    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)))
    index = {word: i for i, (word, _) in enumerate(Counter(words).most_common(V - 1), 1)}
    return torch.tensor([index.get(word, 0) for word in words], dtype=torch.int32)


class Block(nn.Module):
    """Pre-norm attention with rotary positions, then a gated MLP."""

    def __init__(self, D: int, heads: int):
        super().__init__()
        self.heads, hidden = heads, 64 * round(8 * D / 3 / 64)
        self.norm_in, self.norm_mlp = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate_up, self.down = nn.Linear(D, 2 * hidden, bias=False), nn.Linear(hidden, D, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_in(x)).unflatten(-1, (3, self.heads, -1)).movedim(-2, 1).unbind(-2)
        mixed = F.scaled_dot_product_attention(rotated(q, rotation), rotated(k, rotation), v, is_causal=True)
        x = x + self.out(mixed.movedim(1, -2).flatten(-2))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Pairs of features (i, i + half) turned by their position's angles; rotation [2, T, half] holds cos and sin."""
    a, b = x.chunk(2, -1)
    cos, sin = rotation[:, : x.shape[-2]]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Trunk(nn.Module):
    """Token ids [B, T] -> hidden states [B, T, D]; `head` [V, D] is the classifier."""

    def __init__(self, V: int, D: int, layers: int, context: int):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(V, D), nn.RMSNorm(D)
        self.blocks = nn.ModuleList(Block(D, D // 64) for _ in range(layers))
        self.head = nn.Parameter(torch.empty(V, D))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        angle = torch.outer(torch.arange(context), 10_000.0 ** -(torch.arange(32) / 32))
        self.register_buffer("rotation", torch.stack((angle.cos(), angle.sin())))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.norm(x)


def passages(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random passages and what follows each of their tokens, both [count, length]."""
    start = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    window = tokens[(start + torch.arange(length + 1)).to(tokens.device)].long()
    return window[:, :-1], window[:, 1:]


@torch.no_grad()
def head_problem(trunk, model: Trunk, tokens: Tensor, N: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """(e [N, D], c [V, D], targets [N]) of the model on random passages, in the dtype that a GPU trains in."""
    ids, targets = passages(tokens, N // context, context, torch.Generator().manual_seed(1))
    dtype = torch.bfloat16 if CUDA else torch.float32
    with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
        e = trunk(ids).flatten(0, 1).to(dtype)
    return e, model.head.to(dtype, copy=True), targets.flatten()


def train(model: Trunk, trunk, tokens: Tensor, seconds: float, batch: int, context: int, at_step) -> int:
    """AdamW; the rate rises over 100 steps and falls over the second half. The clock stands still in at_step(step)."""
    matrices, vectors = ([p for p in model.parameters() if (p.dim() == 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=CUDA)
    loss_of = torch.compile(naive) if CUDA else naive
    generator, step, spent = torch.Generator().manual_seed(0), 0, 0.0
    with tqdm(total=round(seconds), unit="s", desc="training") as bar:
        while spent < seconds:
            at_step(step)
            began = time.perf_counter()
            rate = min(1, (step + 1) / 100) * min(1, max(0.02, 2 * (1 - spent / seconds)))
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate
            ids, targets = passages(tokens, batch, context, generator)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
                e = trunk(ids).flatten(0, 1)
                parts = zip(e.split(8192), targets.flatten().split(8192), strict=True)
                loss = sum(loss_of(h, model.head.to(h.dtype), y) * len(h) for h, y in parts) / len(e)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 10 == 0:
                bar.set_postfix(step=step, loss=f"{loss.item():.2f}")
            step, spent = step + 1, spent + time.perf_counter() - began
            bar.n = min(round(spent), bar.total)
    return step


# -------------------------------------------------------------------------------------------------------------- statistics


def probabilities(e: Tensor, c: Tensor, tokens: int) -> Iterator[Tensor]:
    """The softmax in float32, so many tokens at a time: [tokens, V] each."""
    wide = c.float().T
    for rows in e.split(tokens):
        yield torch.softmax(rows.float() @ wide, 1)


@torch.no_grad()
def softmax_statistics(e: Tensor, c: Tensor, targets: Tensor) -> dict:
    """How the probability is spread: by rank, and how much of it lies under each threshold."""
    V = len(c)
    ranks = [2**k for k in range(V.bit_length())]
    thresholds = [2.0**-k for k in range(6, 21)]
    at_rank, entries, mass, small = 0, torch.zeros(len(thresholds)), torch.zeros(len(thresholds)), []
    for p in probabilities(e, c, 256):
        at_rank += p.sort(1, descending=True)[0][:, [r - 1 for r in ranks]].sum(0).cpu()
        for i, eps in enumerate(thresholds):
            below = p < eps
            per_token = torch.where(below, p, 0).sum(1)
            entries[i] += below.sum().item() / (len(e) * V)
            mass[i] += per_token.sum().item() / len(e)
            if eps == 2.0**-12:
                small.append(per_token.cpu())
    quantiles = torch.cat(small).quantile(torch.linspace(0, 1, 11)).tolist()
    triples = zip(thresholds, entries.tolist(), mass.tolist(), strict=True)
    return {
        "loss": linear_cross_entropy(e, c, targets, impl="chunked").item(),
        "ranks": ranks,
        "probability_at_rank": (at_rank / len(e)).tolist(),
        "mass_below": [{"eps": eps, "entries": n, "mass": m} for eps, n, m in triples],
        "tokens_mass_below_2^-12": quantiles,
    }


@torch.no_grad()
def block_maxima(e: Tensor, c: Tensor, targets: Tensor, order: Tensor) -> Tensor:
    """The largest probability in each block of the filter, classes in the given order; 1 where a target is inside."""
    blocks = blocks_for("backward", e)
    maxima = []
    for p, y in zip(probabilities(e, c, blocks.BLOCK_N), targets.split(blocks.BLOCK_N), strict=True):
        largest = p.amax(0)
        largest[y] = 1
        padded = F.pad(largest[order], (0, -len(c) % blocks.BLOCK_V))
        maxima.append(padded.view(-1, blocks.BLOCK_V).amax(1))
    return torch.stack(maxima)


def coarse(live: Tensor, cells: int = 64) -> list[list[float]]:
    """Fractions of live blocks on a grid of at most cells x cells."""
    shape = [min(cells, n) for n in live.shape]
    return F.adaptive_avg_pool2d(live[None].float(), shape)[0].mul(1e3).round().div(1e3).tolist()


@contextlib.contextmanager
def vocabulary_as_is():
    """`cut` without its sorting."""
    sort = cut.sort_vocabulary
    cut.sort_vocabulary = lambda e, c, targets, bias=None: (torch.arange(len(c), device=c.device), targets)
    try:
        yield
    finally:
        cut.sort_vocabulary = sort


def measured(loss, e: Tensor, c: Tensor, targets: Tensor, wanted: tuple[Tensor, Tensor], repeats: int) -> dict:
    """Gradient errors and median milliseconds of forward + backward."""

    def step():
        e.grad = c.grad = None
        loss(e, c, targets).backward()

    step()
    errors = [exact.relative_error(x.grad, want) for x, want in zip((e, c), wanted, strict=True)]
    ms = interleaved({"step": step}, repeats)["step"] if repeats else None
    return {"de_error": errors[0], "dc_error": errors[1], "ms": ms}


def measure(name: str, e: Tensor, c: Tensor, targets: Tensor, thresholds: list[float], repeats: int) -> dict:
    """All that is stored of one input."""
    result = {
        "name": name,
        "N": len(e),
        "D": e.shape[1],
        "V": len(c),
        **softmax_statistics(e, c, targets),
        "filter": [],
    }
    orders = {True: cut.sort_vocabulary(e, c, targets)[0], False: torch.arange(len(c), device=c.device)}
    wanted = exact.gradients(e, c, targets)
    e.requires_grad_(), c.requires_grad_()
    for is_sorted, order in orders.items():
        maxima = block_maxima(e, c, targets, order)
        result["map_sorted" if is_sorted else "map_unsorted"] = coarse(maxima >= 2.0**-12)
        with contextlib.nullcontext() if is_sorted else vocabulary_as_is():
            for eps in thresholds:
                loss = lambda *x, eps=eps: linear_cross_entropy(*x, impl="cce", filter_eps=eps)  # noqa: E731
                row = {"eps": eps, "sorted": is_sorted, "live_blocks": (maxima >= eps).float().mean().item()}
                result["filter"].append(row | measured(loss, e, c, targets, wanted, repeats))
    baselines = {"naive": naive, "cce_exact": lambda *x: linear_cross_entropy(*x, impl="cce_exact")}
    if CUDA:
        baselines["torch.compile"] = torch.compile(naive)
    result["baseline"] = {k: measured(loss, e, c, targets, wanted, repeats) for k, loss in baselines.items()}
    (below,) = (row["mass"] for row in result["mass_below"] if row["eps"] == 2.0**-12)
    print(f"{name:26} loss {result['loss']:.2f}  mass below 2^-12: {below:.3f}", flush=True)
    for row in result["filter"]:
        print("   ", {k: v if isinstance(v, bool) else f"{v:.3g}" for k, v in row.items() if v is not None})
    return result


def step_of(options: dict, e: Tensor, c: Tensor, targets: Tensor, weights: Tensor | None):
    """A function that leaves the gradients of the (weighted) mean loss in e.grad and c.grad."""
    loss = options.pop("loss", None) or functools.partial(linear_cross_entropy, **options)

    def step():
        e.grad = c.grad = None
        if weights is None:
            loss(e, c, targets).backward()
        else:
            per_token = functools.partial(F.cross_entropy, reduction="none") if loss is naive else None
            nll = per_token((e @ c.T).float(), targets) if per_token else loss(e, c, targets, reduction="none")
            (nll * weights / len(e)).sum().backward()

    return step


def measure_gather(
    name: str, e: Tensor, c: Tensor, targets: Tensor, repeats: int, weights: Tensor | None = None
) -> dict:
    """The row-gathered algorithm on one input: its default, thresholds and shares to drop beside it, and what it is judged by."""
    wanted = exact.gradients(e, c, targets, weights=weights)
    e.requires_grad_(), c.requires_grad_()
    contenders = {"naive": {"loss": naive}, "gather": {"impl": "gather"}}
    contenders["gather, exact"] = {"impl": "gather", "filter_eps": None}
    if CUDA and weights is None:
        contenders |= {"torch.compile": {"loss": torch.compile(naive)}, "cce": {"impl": "cce"}}
    contenders |= {f"eps 2^-{k}": {"impl": "gather", "filter_eps": 2.0**-k} for k in (10, 11, 12, 13, 14)}
    steps = {k: step_of(dict(options), e, c, targets, weights) for k, options in contenders.items()}
    rows = {}
    for k, step in steps.items():
        with gather.observed() as plans:
            step()
        rows[k] = {
            "de_error": exact.relative_error(e.grad, wanted[0]),
            "dc_error": exact.relative_error(c.grad, wanted[1]),
        }
        rows[k] |= plans[0] if plans else {}
    if repeats:
        gemm = torch.empty(len(e), len(c), dtype=e.dtype, device=e.device)
        steps["GEMM"] = lambda: torch.mm(e.detach(), c.detach().T, out=gemm)
        times = interleaved(steps, repeats)
        for k, ms in times.items():
            rows.setdefault(k, {})["ms"] = ms
    e.grad = c.grad = None
    loss = linear_cross_entropy(e, c, targets, impl="chunked").item()
    print(f"{name:30} N={len(e)} D={e.shape[1]} V={len(c)} loss {loss:.3f}")
    for k, row in rows.items():
        print(f"    {k:16}", {i: float(f"{v:.3g}") for i, v in row.items()}, flush=True)
    target_logit = (e.detach().float() * c.detach()[targets].float()).sum(1).square().mean().sqrt().item()
    result = {"name": name, "N": len(e), "D": e.shape[1], "V": len(c), "loss": loss, "rms_target_logit": target_logit}
    return result | {"contenders": rows}


def memorised(e: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same hidden states, four times as long, and their likeliest classes as targets: what a batch learnt by heart looks like."""
    e = (4 * e.float()).to(e.dtype)
    return e, c, torch.cat([(rows @ c.T).argmax(1) for rows in e.split(256)])


def main() -> None:
    parser = Parser("cce.bench.real", __doc__)
    parser.add_argument("--tokens", metavar="FILE", help="token ids (.npy or .npz); without it the small mode")
    parser.add_argument("--seconds", type=float, help="of training; 300, or 20 in the small mode")
    parser.add_argument("--what", choices=("filter", "gather"), default="filter", help="what is measured")
    options = parser.parse(needs_gpu=False)
    if options.tokens and not CUDA:
        parser.error("--tokens needs a GPU; without it, the small mode runs on any machine")
    full = options.tokens is not None
    V, D, layers, context, batch, N = (131072, 1024, 8, 1024, 32, 8192) if full else (4000, 64, 2, 64, 8, 64)
    seconds = options.seconds or (300 if full else 20)
    thresholds = [2.0**-k for k in (8, 9, 10, 11, 12, 13, 14, 16)] + [0.0] if full else [2.0**-8, 2.0**-12]
    repeats = 5 if CUDA else 0  # the interpreter's times say nothing
    torch.manual_seed(0)
    tokens = load_tokens(options.tokens, V).to(DEVICE)
    held_out = min(300_000, len(tokens) // 10)
    splits = {"train": tokens[:-held_out], "held-out": tokens[-held_out:]}
    model = Trunk(V, D, layers, context).to(DEVICE)
    trunk = torch.compile(model) if CUDA else model
    inputs = []

    def run(name: str, *problem: Tensor, **more) -> None:
        if options.what == "filter":
            inputs.append(measure(name, *problem, thresholds, repeats))
        else:
            inputs.append(measure_gather(name, *problem, repeats, **more))

    def keep(what: str, split: str) -> None:
        run(f"real, {what}", *head_problem(trunk, model, splits[split], N, context))

    stages = {0: "at initialisation", EARLY: f"after {EARLY} steps"}
    steps = train(
        model, trunk, splits["train"], seconds, batch, context,
        lambda step: keep(stages[step], "train") if step in stages else None,
    )  # fmt: skip
    for split in splits:
        keep(f"{split} tokens", split)
    if options.what == "gather":
        problem = [x.detach() for x in head_problem(trunk, model, splits["train"], N, context)]
        weights = torch.tensor([0.0, 1.0, 100.0], device=DEVICE)[torch.arange(N, device=DEVICE) % 3]
        run("real, weights 0, 1, 100", *problem, weights=weights)
        run("real, memorised", *memorised(*(x.detach() for x in problem[:2])))
    for name, make in INPUTS.items():
        run(
            name,
            *make(N, 2304 if full else D, 256000 if full else V, DEVICE, torch.bfloat16 if CUDA else torch.float32),
        )
    if options.save:
        described = {
            "text": "documentation packages, BPE tokens" if full else "pydoc topics, words", "tokens": len(tokens), "V": V, "D": D,
            "layers": layers, "context": context, "batch": batch, "seconds": seconds, "steps": steps,
        }  # fmt: skip
        save(options.save, model=described, inputs=inputs)


if __name__ == "__main__":
    main()
