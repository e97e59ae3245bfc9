"""cce.bench.peak_memory: exact byte counts of known programs on the CPU; the allocator's on a GPU."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cce import linear_cross_entropy
from cce.bench import peak_memory

K = 1000  # elements; float32 tensors of this size are 4000 bytes


def cpu_peak(fn):
    return peak_memory(fn, device="cpu")


def test_nothing():
    assert cpu_peak(lambda: None) == 0


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.bool, 1)]
)
def test_one_tensor(dtype, nbytes):
    assert cpu_peak(lambda: torch.empty(K, dtype=dtype)) == nbytes * K


def test_from_python_data():
    assert cpu_peak(lambda: torch.tensor([1.0, 2.0, 3.0])) == 12


def test_kept_together():
    assert cpu_peak(lambda: [torch.zeros(K) for _ in range(3)]) == 3 * 4 * K


def test_freed_by_del():
    def fn():
        a = torch.zeros(3 * K)
        del a
        return torch.zeros(2 * K)

    assert cpu_peak(fn) == 3 * 4 * K


def test_freed_by_rebinding():
    def fn():
        a = torch.zeros(K)
        for _ in range(10):
            a = a + 1  # the old and the new one are alive together, never more

    assert cpu_peak(fn) == 2 * 4 * K


def test_chained_temporaries():
    x = torch.zeros(K)
    assert cpu_peak(lambda: (((x + 1) + 1) + 1) + 1) == 2 * 4 * K


def test_views_are_free_and_keep_their_base():
    def fn():
        view = torch.zeros(4, K)[0].view(10, -1).T
        del_me = torch.zeros(K)
        return view, del_me

    assert cpu_peak(fn) == (4 + 1) * 4 * K


def test_views_of_older_tensors_are_free():
    old = torch.zeros(4, K)
    assert cpu_peak(lambda: [old[0], old.T, old.view(-1), old.detach(), old.expand(2, 4, K)]) == 0
    assert cpu_peak(lambda: old.T.contiguous()) == 4 * 4 * K


def test_in_place_is_free():
    old = torch.zeros(K)

    def fn():
        new = torch.zeros(K)
        new.add_(1).mul_(2)
        old.sub_(new)
        torch.exp(old, out=new)

    assert cpu_peak(fn) == 4 * K


def test_growth_in_place():
    def fn():
        x = torch.empty(K)
        x.resize_(5 * K)

    assert cpu_peak(fn) == 5 * 4 * K
    out = torch.empty(0)
    assert cpu_peak(lambda: torch.add(torch.zeros(1), torch.zeros(K), out=out)) == 4 + 4 * K + 4 * K


def test_an_older_tensor_grows():
    old = torch.empty(K)
    assert cpu_peak(lambda: old.resize_(3 * K)) == 2 * 4 * K


def test_an_older_tensor_dies():
    holder = [torch.zeros(4 * K)]

    def fn():
        small = holder[0][:K].clone()
        holder.clear()
        return small, torch.zeros(2 * K)  # 3 K in all, less the 4 K that went

    assert cpu_peak(fn) == 4 * K


def test_backward():
    x = torch.ones(K, requires_grad=True)

    def fn():
        y = x.exp()  # saved for the backward
        y.sum().backward()

    # y, the sum, its gradient of one; the expanded ones are a view of it; then y's gradient, which becomes x.grad.
    assert cpu_peak(fn) == 2 * 4 * K + 2 * 4
    assert x.grad.shape == (K,)


def test_backward_into_an_older_gradient():
    x = torch.ones(K, requires_grad=True)
    x.grad = torch.zeros(K)
    # the product is consumed by sum, which saves nothing; the new gradient is added in place and dropped
    assert cpu_peak(lambda: (x * 2.0).sum().backward()) == 4 * K + 2 * 4


class Noisy(torch.autograd.Function):
    """Allocates 3 K elements in the forward, saves K of them, and 5 K in the backward."""

    @staticmethod
    def forward(ctx, x):
        scratch = torch.zeros(2 * K)
        ctx.save_for_backward(x + scratch[:K])
        return x.sum()

    @staticmethod
    def backward(ctx, upstream):
        (saved,) = ctx.saved_tensors
        scratch = torch.zeros(4 * K)
        return saved + scratch[:K]


def test_autograd_function():
    x = torch.ones(K, requires_grad=True)
    assert cpu_peak(lambda: Noisy.apply(x)) == 3 * 4 * K + 4
    # saved (K), the loss, upstream, scratch (4 K), the gradient (K)
    assert cpu_peak(lambda: Noisy.apply(x).backward()) == 6 * 4 * K + 2 * 4


def test_checkpoint_recomputes():
    x = torch.ones(K, requires_grad=True)

    def body(x):
        return x.exp().sin().sum()

    def recomputed():
        checkpoint(body, x, use_reentrant=False).backward()

    # in the backward: exp(x), its cosine and the product of that with the gradient; the loss and its gradient
    assert cpu_peak(lambda: body(x).backward()) == 3 * 4 * K + 2 * 4
    x.grad = None
    assert cpu_peak(recomputed) == 3 * 4 * K + 2 * 4
    # before the backward the checkpointed forward keeps nothing, and lets go of exp(x) before the sum
    assert cpu_peak(lambda: body(x)) == 2 * 4 * K + 4
    assert cpu_peak(lambda: checkpoint(body, x, use_reentrant=False)) == 2 * 4 * K


def test_what_outlives_the_call_does_not_report_to_it():
    kept = []
    assert cpu_peak(lambda: kept.append(torch.zeros(K))) == 4 * K
    kept.clear()
    assert cpu_peak(lambda: torch.zeros(K)) == 4 * K


def test_reference_cycles_count_until_the_end():
    def fn():
        for _ in range(5):
            cycle = [torch.zeros(K)]
            cycle.append(cycle)

    assert cpu_peak(fn) == 5 * 4 * K
    assert gc.isenabled()


def test_exceptions_pass_through():
    def fn():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cpu_peak(fn)
    assert gc.isenabled()


def test_unknown_device():
    with pytest.raises(ValueError, match="device"):
        peak_memory(lambda: None, device="meta")


@pytest.mark.parametrize(("dtype", "forward", "both"), [(torch.bfloat16, 10, 12), (torch.float32, 8, 12)])
def test_the_usual_loss(dtype, forward, both):
    """The numbers of notebook 01: bytes per logit; everything that is not [N, V] is small here."""
    n, d, v = 256, 2, 2048
    e, c = (torch.randn(rows, d).to(dtype).requires_grad_() for rows in (n, v))
    targets = torch.randint(v, (n,))

    def loss():
        z = e @ c.T
        z32 = z.float()
        return F.cross_entropy(z32, targets)

    assert cpu_peak(loss) / (n * v) == pytest.approx(forward, rel=1e-3)
    assert cpu_peak(lambda: loss().backward()) / (n * v) == pytest.approx(both, rel=1e-3)


def test_chunked_does_not_grow_with_the_logits():
    d, v = 8, 8192  # chunks of 1024 tokens

    def peak(n):
        e, c = (torch.randn(rows, d).requires_grad_() for rows in (n, v))
        targets = torch.randint(v, (n,))
        return cpu_peak(lambda: linear_cross_entropy(e, c, targets, impl="chunked").backward())

    few, many = peak(1024), peak(4096)
    assert many - few < 3072 * 4 * (4 * d)  # a few vectors of length D per token
    assert many < 1.2 * 1024 * v * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda():
    block = 1 << 20  # a multiple of every rounding the allocator does

    def fn():
        a = torch.empty(3 * block, dtype=torch.uint8, device="cuda")
        del a
        return torch.empty(2 * block, dtype=torch.uint8, device="cuda")

    before = torch.empty(5 * block, dtype=torch.uint8, device="cuda")
    assert peak_memory(fn) == 3 * block
    assert peak_memory(fn, device="cpu") == 0
    del before
