"""Two ranks with a shard of the vocabulary each: the loss and gradients of the whole, on every rank."""

import socket

import pytest
import torch
import torch.multiprocessing as mp
from oracle import oracle, problem

from cce import linear_cross_entropy
from cce.parallel import VocabParallelOptions

N, V, D, SPLIT = 40, 37, 8, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # both ranks share it
OPTIONS = [
    {"reduction": "mean"},
    {"reduction": "sum", "softcap": 3.0, "z_loss": 1e-2},
    {"reduction": "none", "label_smoothing": 0.1, "weight": True},
]


def inputs(options):
    options = dict(options)
    e, c, targets, bias = problem(N, V, D, bias=True, ignored=0.3)
    if options.get("weight"):
        options["weight"] = torch.rand(V, generator=torch.Generator().manual_seed(1)) + 0.5
    return e, c, targets, bias, options


def rank_main(rank, port, impl, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    start, stop = ((0, SPLIT), (SPLIT, V))[rank]
    outcomes = []
    for options in OPTIONS:
        e, c, targets, bias, options = inputs(options)
        e, shard, bias = (
            x.detach().to(DEVICE, copy=True).requires_grad_() for x in (e, c[start:stop], bias[start:stop])
        )
        options = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
        loss, lse = linear_cross_entropy(
            e, shard, targets.to(DEVICE), bias, impl=impl, return_lse=True,
            vocab_parallel_options=VocabParallelOptions(start, stop), **options,
        )  # fmt: skip
        (loss.sum() + 0.1 * lse.sum()).backward()
        outcomes.append([x.detach().cpu() for x in (loss, lse, e.grad, shard.grad, bias.grad)])
    results[rank] = outcomes
    torch.distributed.destroy_process_group()


def on_two_ranks(impl):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(rank_main, (port, impl, results), nprocs=2)
        return list(zip(results[0], results[1], strict=True))


@pytest.mark.parametrize("impl", ["chunked", "cce_exact", "gather"])
def test_two_shards_are_the_whole(impl):
    for (first, second), options in zip(on_two_ranks(impl), OPTIONS, strict=True):
        e, c, targets, bias, options = inputs(options)
        want = oracle(e, c, targets, bias, lse_upstream=torch.full((N,), 0.1), **options)
        for mine in (first, second):
            torch.testing.assert_close(mine[0].double(), want.loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine[1].double(), want.lse, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine[2].double(), want.de, rtol=1e-4, atol=1e-6)
        for i, whole in ((3, want.dc), (4, want.dbias)):
            torch.testing.assert_close(torch.cat([first[i], second[i]]).double(), whole, rtol=1e-4, atol=1e-6)


def test_needs_a_process_group():
    e, c, targets = problem(N, V, D)
    with pytest.raises(ValueError, match="vocab_parallel_options: expected torch.distributed to be initialised"):
        linear_cross_entropy(e, c, targets, vocab_parallel_options=VocabParallelOptions(0, V))
