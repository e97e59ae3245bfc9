"""Inputs to measure on: hidden states e [N, D], classifier c [V, D], targets [N].

random        what a model at initialisation gives: logits of unit variance, a softmax that is nearly flat.
trained_like  a peaked softmax like a trained model's: per token about two dozen plausible classes with probabilities that fall like
              a power of their rank, over a unigram prior; targets are drawn from the softmax itself, so the loss is its entropy.
"""

import math

import torch
from torch import Tensor

Problem = tuple[Tensor, Tensor, Tensor]
SHAPES = ["4096,4096,128256", "8192,2304,256000"]  # N, D, V: Llama 3 8B, Gemma 2 2B


def random(N: int, D: int, V: int, device="cuda", dtype=torch.bfloat16, seed: int = 0) -> Problem:
    g = torch.Generator(device).manual_seed(seed)
    e = torch.randn(N, D, device=device, generator=g)
    c = torch.randn(V, D, device=device, generator=g) / math.sqrt(D)
    return e.to(dtype), c.to(dtype), torch.randint(V, (N,), device=device, generator=g)


def trained_like(N: int, D: int, V: int, device="cuda", dtype=torch.bfloat16, seed: int = 0) -> Problem:
    """Class r of the frequency order has prior 1 / (r + 10); ids are the frequency order blurred by e^±1.5, as BPE ids are."""
    plausible, prior_channel = 24, 4.0
    g = torch.Generator(device).manual_seed(seed)
    rank = torch.arange(V, device=device, dtype=torch.float32)
    prior = -torch.log(rank + 10)
    c = torch.randn(V, D, device=device, generator=g) / math.sqrt(D)
    c[:, 0] = (prior - prior.mean()) / prior_channel
    classes = (V ** torch.rand(N, plausible, device=device, generator=g)).long().clamp(1, V) - 1  # log-uniform in rank
    slope = 1.5 + 1.5 * torch.rand(N, 1, device=device, generator=g)
    log_weight = math.log(300) - slope * torch.log(torch.arange(1, plausible + 1, device=device))
    boost = log_weight - prior[classes]
    e = torch.zeros(N, D, device=device)
    for k in range(plausible):  # e · c_v is boost for the plausible v, by near-orthogonality of random directions
        e += boost[:, k : k + 1] * c[classes[:, k]]
    e[:, 0] = prior_channel
    order = torch.argsort(torch.log(rank + 1) + 1.5 * torch.randn(V, device=device, generator=g))
    e, c = e.to(dtype), c[order].to(dtype)
    targets = torch.empty(N, dtype=torch.int64, device=device)
    for rows in torch.arange(N, device=device).split(512):
        gumbel = -torch.log(-torch.log(torch.rand(len(rows), V, device=device, generator=g).clamp(1e-20, 1 - 1e-7)))
        targets[rows] = ((e[rows] @ c.T).float() + gumbel).argmax(1)
    return e, c, targets


INPUTS = {"random": random, "trained_like": trained_like}
