"""The locks: sums under them are exact whatever the order, without them they are not, and a release waits for every store.

A missing barrier or a wrong lock shows as a rare lost update, so the GPU tests add integers (float32 sums of integers are exact in any
order) from thousands of programs, often; and each has a twin without the lock that must fail, or it would prove nothing.
"""

import ast
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton's wheels exist for Linux only")

import triton
import triton.language as tl
from compiling import compiled

import cce.kernels
from cce import cut, linear_cross_entropy
from cce.kernels import backward, blocks
from cce.kernels.common import grouped_tile, lock, locked_add, unlock

KERNEL_FILES = sorted(Path(cce.kernels.__file__).parent.glob("*.py"))


@triton.jit
def plain_add(ptrs, value, mask, lock_ptr):
    """locked_add without its lock."""
    old = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(ptrs, old + value, mask=mask, cache_modifier=".cg")


@triton.jit
def one_place_kernel(sum_ptr, lock_ptr, LOCKED: tl.constexpr, SIZE: tl.constexpr):
    """Each program adds 1 + pid % 7 to the same SIZE numbers."""
    i = tl.arange(0, SIZE)
    value = (tl.zeros((SIZE,), tl.int32) + (1 + tl.program_id(0) % 7)).to(tl.float32)
    if LOCKED:
        locked_add(sum_ptr + i, value, i < SIZE, lock_ptr)
    else:
        plain_add(sum_ptr + i, value, i < SIZE, lock_ptr)


def one_place(programs, locked, device):
    size = 2048  # several stores per thread, so that a release before the last of them would lose some
    total, locks = torch.zeros(size, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    one_place_kernel[(programs,)](total, locks, LOCKED=locked, SIZE=size)
    assert locks.item() == 0  # released
    return total


def one_place_sum(programs):
    return float(sum(1 + pid % 7 for pid in range(programs)))


@triton.jit
def table_kernel(
    de_ptr, dc_ptr, de_locks, dc_locks, num_n, num_v, num_d,
    LOCKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The backward's walk over its blocks of de and dc and its tables of locks, with small integers in place of the products."""
    block_n, block_v = grouped_tile(tl.program_id(0), num_n, num_v, GROUP)
    n, v = block_n * BLOCK_N + tl.arange(0, BLOCK_N), block_v * BLOCK_V + tl.arange(0, BLOCK_V)
    D = num_d * BLOCK_D
    for i in range(num_d):
        block_d = (i + block_n + block_v) % num_d
        d = block_d * BLOCK_D + tl.arange(0, BLOCK_D)
        de = (n[:, None] * 0 + d[None, :] * 0 + (1 + block_v % 5)).to(tl.float32)
        dc = (v[:, None] * 0 + d[None, :] * 0 + (1 + block_n % 5)).to(tl.float32)
        de_ptrs, dc_ptrs = de_ptr + n[:, None] * D + d[None, :], dc_ptr + v[:, None] * D + d[None, :]
        if LOCKED:
            locked_add(de_ptrs, de, d[None, :] < D, de_locks + block_n * num_d + block_d)
            locked_add(dc_ptrs, dc, d[None, :] < D, dc_locks + block_v * num_d + block_d)
        else:
            plain_add(de_ptrs, de, d[None, :] < D, de_locks)
            plain_add(dc_ptrs, dc, d[None, :] < D, dc_locks)


def table_is_exact(num_n, num_v, num_d, locked, device, block=64):
    de = torch.zeros(num_n * block, num_d * block, device=device)
    dc = torch.zeros(num_v * block, num_d * block, device=device)
    de_locks, dc_locks = (torch.zeros(n * num_d, dtype=torch.int32, device=device) for n in (num_n, num_v))
    table_kernel[(num_n * num_v,)](
        de, dc, de_locks, dc_locks, num_n, num_v, num_d,
        LOCKED=locked, BLOCK_N=block, BLOCK_V=block, BLOCK_D=block, GROUP=backward.GROUP,
    )  # fmt: skip
    assert (de_locks == 0).all() and (dc_locks == 0).all()
    total = lambda number: sum(1 + i % 5 for i in range(number))
    return bool((de == total(num_v)).all() and (dc == total(num_n)).all())


# ---------------------------------------------------------------------------------------------- the protocol


@triton.jit
def take_kernel(lock_ptr):
    lock(lock_ptr)


@triton.jit
def release_kernel(lock_ptr):
    unlock(lock_ptr)


def test_lock_takes_and_unlock_releases(device):
    locks = torch.zeros(3, dtype=torch.int32, device=device)
    take_kernel[(1,)](locks[1:])
    assert locks.tolist() == [0, 1, 0]
    release_kernel[(1,)](locks[1:])
    assert locks.tolist() == [0, 0, 0]


def test_sums_under_a_lock(device):
    assert (one_place(5, True, device) == one_place_sum(5)).all()
    assert table_is_exact(3, 2, 2, True, device)


def functions(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def calls(node):
    """Names of the functions called in node, in order."""
    found = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    found.sort(key=lambda call: (call.lineno, call.col_offset))
    return [ast.unparse(call.func).removeprefix("tl.") for call in found]


def test_a_lock_is_released_in_one_place_and_after_a_barrier():
    owners = {f.name: calls(f) for path in KERNEL_FILES for f in functions(path) if "atomic_xchg" in calls(f)}
    assert owners == {"unlock": ["debug_barrier", "atomic_xchg"]}
    takers = [f.name for path in KERNEL_FILES for f in functions(path) if "atomic_cas" in calls(f)]
    assert takers == ["lock"]


def test_a_holder_releases_what_it_took_and_takes_nothing_else_meanwhile():
    """Then it waits for nobody, and nothing can hang."""
    holders = 0
    for path in KERNEL_FILES:
        for function in functions(path):
            taking = [name for name in calls(function) if name in ("lock", "unlock", "locked_add", "accumulate")]
            taking = [name for name in taking if name in ("lock", "unlock")]
            assert taking == ["lock", "unlock"] * (len(taking) // 2), f"{path.name}: {function.name}"
            if not taking:
                continue
            holders += 1
            statements = [ast.unparse(node) for node in function.body]  # both at the top level: no branch, no loop
            start = next(i for i, line in enumerate(statements) if line.startswith("lock("))
            end = next(i for i, line in enumerate(statements) if line.startswith("unlock("))
            assert statements[start].removeprefix("lock") == statements[end].removeprefix("unlock")  # the same one
            held = [name for node in function.body[start + 1 : end] for name in calls(node)]
            assert not {"locked_add", "accumulate", "atomic_cas"} & set(held)
            simple = (ast.Assign, ast.Expr)
            assert all(isinstance(node, simple) for node in function.body[start : end + 1])  # nothing that could return
    assert holders >= 2  # the forward's merge and locked_add


# ---------------------------------------------------------------------------------------------- the machine code


def critical_sections(ptx):
    """The lines between each taking (the compare-and-swap) and the release (the exchange) that follows it."""
    sections, open_section = [], None
    for line in ptx.splitlines():
        if re.search(r"\batom\.\S*\bcas\b", line):
            assert open_section is None, "a second lock is taken while one is held"
            open_section = []
        elif re.search(r"\batom\.\S*\bexch\b", line):
            assert open_section is not None, "a release without a taking"
            sections.append(open_section)
            open_section = None
        elif open_section is not None:
            open_section.append(line)
    assert open_section is None, "a lock that is not released"
    return sections


def waits_for_its_stores(section):
    """A barrier after the last store, and one between the taking, by one thread, and the first load."""
    where = lambda pattern: [i for i, line in enumerate(section) if re.search(pattern, line)]
    barriers, stores, loads = where(r"\b(bar|barrier)(\.cta)?\.sync\b"), where(r"\bst\.global"), where(r"\bld\.global")
    return bool(barriers and stores and loads) and barriers[-1] > stores[-1] and barriers[0] < loads[0]


LOCKED_KERNELS = {"lse_forward": 1, "backward_exact": 2}  # and how many critical sections each has


@pytest.fixture(scope="module")
def ptx_of():
    return compiled([80, 90], ["bfloat16"], [*LOCKED_KERNELS, "backward_atomics"], ptx=True)


@pytest.fixture(scope="module")
def ptx_without_barriers():
    return compiled([80, 90], ["bfloat16"], ["lse_forward"], ptx=True, without_barriers=True)


@pytest.mark.parametrize("chip", [80, 90])
@pytest.mark.parametrize("kernel", LOCKED_KERNELS)
def test_compiled_kernels_release_after_a_barrier(ptx_of, kernel, chip):
    ptx = ptx_of[chip, "bfloat16", kernel]["ptx"]
    sections = critical_sections(ptx)
    assert len(sections) == LOCKED_KERNELS[kernel]
    assert all(waits_for_its_stores(section) for section in sections)


@pytest.mark.parametrize("chip", [80, 90])
def test_the_barrier_is_ours(chip, ptx_without_barriers):
    """Triton puts none there: with `tl.debug_barrier` gone from `unlock` the stores are not waited for."""
    sections = critical_sections(ptx_without_barriers[chip, "bfloat16", "lse_forward"]["ptx"])
    assert len(sections) == 1 and not waits_for_its_stores(sections[0])


@pytest.mark.parametrize("chip", [80, 90])
@pytest.mark.parametrize("kernel", LOCKED_KERNELS)
def test_compiled_kernels_take_with_acquire_release_and_read_past_the_first_cache(ptx_of, kernel, chip):
    ptx = ptx_of[chip, "bfloat16", kernel]["ptx"]
    for operation in ("cas", "exch"):
        lines = [line for line in ptx.splitlines() if re.search(rf"\batom\.\S*\b{operation}\b", line)]
        assert lines and all("acq_rel" in line and "gpu" in line for line in lines)
    for section in critical_sections(ptx):
        memory = [line for line in section if re.search(r"\b(ld|st)\.global", line)]
        assert memory and all(".cg" in line for line in memory)


@pytest.mark.parametrize("chip", [80, 90])
def test_compiled_reductions_need_no_lock(ptx_of, chip):
    ptx = ptx_of[chip, "bfloat16", "backward_atomics"]["ptx"]
    assert critical_sections(ptx) == []
    assert not re.search(r"\bst\.global", ptx)
    if chip == 90:
        assert re.search(r"\b(red|atom)\.\S*\.v4\.f32\b", ptx) or "cp.reduce" in ptx  # four floats at a time


# ---------------------------------------------------------------------------------------------- on a GPU

PROGRAMS, REPEATS, TRIES = 10_000, 100, 20


@pytest.mark.gpu
def test_ten_thousand_programs_add_to_one_place(device):
    for repeat in range(REPEATS):
        assert (one_place(PROGRAMS, True, device) == one_place_sum(PROGRAMS)).all(), f"repeat {repeat}"


@pytest.mark.gpu
def test_without_the_lock_one_place_loses_updates(device):
    wrong = [(one_place(PROGRAMS, False, device) != one_place_sum(PROGRAMS)).any().item() for _ in range(TRIES)]
    assert any(wrong), "no update was lost without the lock: the test with it proves nothing"


@pytest.mark.gpu
@pytest.mark.parametrize(("num_n", "num_v", "num_d"), [(100, 100, 2), (1, PROGRAMS, 1), (PROGRAMS, 1, 1)])
def test_ten_thousand_programs_add_through_the_table_of_locks(device, num_n, num_v, num_d):
    for repeat in range(REPEATS):
        assert table_is_exact(num_n, num_v, num_d, True, device), f"repeat {repeat}"


@pytest.mark.gpu
@pytest.mark.parametrize(("num_n", "num_v", "num_d"), [(100, 100, 2), (1, PROGRAMS, 1), (PROGRAMS, 1, 1)])
def test_without_locks_the_table_loses_updates(device, num_n, num_v, num_d):
    exact = [table_is_exact(num_n, num_v, num_d, False, device) for _ in range(TRIES)]
    assert not all(exact), "no update was lost without the locks: the test with them proves nothing"


class IntegerBackward:
    """backward_slab on numbers whose gradients are integers below 2^24: exact in any order, and known.

    z = 0 everywhere, since the two halves of e cancel; with lse_rest = 0, S[n, v] = d_rest[n].
    """

    def __init__(self, tiles_n, tiles_v, device):
        shape = blocks.blocks_for("backward", torch.empty(1, dtype=torch.bfloat16, device=device))
        D = 2 * shape.BLOCK_D
        M, V = tiles_n * shape.BLOCK_N - 1, tiles_v * shape.BLOCK_V - 1
        self.e = torch.ones(M, D, dtype=torch.bfloat16, device=device)
        self.e[:, D // 2 :] = -1
        self.c = torch.ones(V, D, dtype=torch.bfloat16, device=device)
        self.d_rest = (1 + torch.arange(M, device=device) % 3).float()
        self.total = self.d_rest.sum()
        assert max(3 * V, self.total.item()) < 2**24
        self.targets, self.zeros = torch.full((M,), -1, device=device), torch.zeros(M, device=device)
        self.out = [torch.zeros(*size, device=device) for size in ((M, D), (V, D), (V,), (M,))]

    def is_exact(self):
        for x in self.out:
            x.zero_()
        backward.backward_slab(
            self.e, self.c, None, self.targets, self.zeros, None, self.zeros, self.d_rest, 0, None, False, False, *self.out
        )  # fmt: skip
        de, dc, dbias, residual = self.out
        expected_de, expected_dc = len(self.c) * self.d_rest[:, None], self.total * self.e[0].float()
        pairs = ((de, expected_de), (dc, expected_dc), (dbias, self.total), (residual, self.zeros))
        return all(bool((x == expected).all()) for x, expected in pairs)


@pytest.mark.parametrize("locked", [True, False])
def test_backward_sums_integers_exactly(monkeypatch, device, locked):
    monkeypatch.setattr("cce.kernels.backward.under_locks", lambda device: locked)
    assert IntegerBackward(2, 3, device).is_exact()


@pytest.mark.gpu
@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize(("tiles_n", "tiles_v"), [(100, 100), (1, PROGRAMS), (PROGRAMS, 1)])
def test_ten_thousand_tiles_of_the_backward_sum_exactly(monkeypatch, device, locked, tiles_n, tiles_v):
    monkeypatch.setattr("cce.kernels.backward.under_locks", lambda device: locked)
    problem = IntegerBackward(tiles_n, tiles_v, device)
    for repeat in range(REPEATS):
        assert problem.is_exact(), f"repeat {repeat}"


def slabs_in_two_lanes_are_exact(problem, device, shared_locks):
    """Eight slabs, two at a time as in cce.cut, all adding to the same de."""
    de, dc, _, _ = problem.out
    dcs = dc, torch.zeros_like(dc)
    for x in (de, *dcs):
        x.zero_()
    de_locks = backward.new_de_locks(problem.e) if shared_locks else None
    with cut.two_lanes(device) as lanes:
        for i in range(8):
            with lanes[i % len(lanes)]:
                backward.backward_slab(
                    problem.e, problem.c, None, problem.targets, problem.zeros, None, problem.zeros, problem.d_rest, 0,
                    None, False, False, de, dcs[i % 2], None, None, de_locks,
                )  # fmt: skip
    expected_dc = 4 * problem.total * problem.e[0].float()
    return bool(
        (de == 8 * len(problem.c) * problem.d_rest[:, None]).all() and all((x == expected_dc).all() for x in dcs)
    )


@pytest.mark.parametrize("locked", [True, False])
def test_slabs_add_to_one_de(monkeypatch, device, locked):
    monkeypatch.setattr("cce.kernels.backward.under_locks", lambda device: locked)
    assert slabs_in_two_lanes_are_exact(IntegerBackward(1, 2, device), device, True)


@pytest.mark.gpu
@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize(("tiles_n", "tiles_v"), [(1, 100), (4, 16), (8, 100)])
def test_slabs_that_run_together_share_the_locks_of_de(monkeypatch, device, locked, tiles_n, tiles_v):
    monkeypatch.setattr("cce.kernels.backward.under_locks", lambda device: locked)
    problem = IntegerBackward(tiles_n, tiles_v, device)
    for repeat in range(REPEATS):
        assert slabs_in_two_lanes_are_exact(problem, device, True), f"repeat {repeat}"


@pytest.mark.gpu
def test_slabs_that_run_together_with_locks_of_their_own_lose_updates(monkeypatch, device):
    monkeypatch.setattr("cce.kernels.backward.under_locks", lambda device: True)
    problem = IntegerBackward(
        1, 100, device
    )  # fewer tiles than multiprocessors: the second slab starts beside the first
    exact = [slabs_in_two_lanes_are_exact(problem, device, False) for _ in range(TRIES)]
    assert not all(exact), "no update was lost without shared locks: the test with them proves nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("locked", [True, False])
def test_gradients_under_maximal_contention(monkeypatch, device, locked):
    """64 tokens and 256,000 classes: every tile adds to the same rows of de. 100 times the oracle's gradients."""
    monkeypatch.setattr("cce.kernels.backward.under_locks", lambda device: locked)
    N, D, V = 64, 64, 256_000
    generator = torch.Generator(device).manual_seed(0)
    e = torch.randn(N, D, generator=generator, device=device).bfloat16().requires_grad_()
    c = (torch.randn(V, D, generator=generator, device=device) / 4).bfloat16().requires_grad_()
    targets = torch.randint(V, (N,), generator=generator, device=device)

    e64, c64 = (x.detach().double().requires_grad_() for x in (e, c))
    z = e64 @ c64.T
    loss64 = torch.nn.functional.cross_entropy(z, targets)
    loss64.backward()
    largest = z.detach().abs().max()
    z.detach_()

    for repeat in range(REPEATS):
        e.grad = c.grad = None
        loss = linear_cross_entropy(e, c, targets, impl="cce_exact")
        loss.backward()
        assert abs(loss.double() - loss64) <= 1e-5 * loss64 + 4 * 2**-24 * largest
        for x, o, partner in ((e.grad, e64.grad, c), (c.grad, c64.grad, e)):
            # Σ|d| = 1: a mean over tokens gives each the weight 1 / N
            floor = 8 * 2**-24 * largest * partner.detach().norm(dim=1).max()
            assert (x.double() - o).norm() <= 3e-3 * o.norm() + floor, f"repeat {repeat}"
