"""Every kernel compiles for every chip it is meant for, in the block shapes of cce/kernels/blocks.py, and fits its shared memory."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton's wheels exist for Linux only")

from compiling import DTYPES, GATHER, KERNELS, SHARED_KIB, compiled

from cce.kernels import blocks


def check(results, number):
    assert len(results) == number
    errors = {case: result["error"] for case, result in results.items() if "error" in result}
    assert not errors, "\n".join(f"sm_{chip} {dtype} {kernel}: {e}" for (chip, dtype, kernel), e in errors.items())
    too_large = {
        case: result["shared"] for case, result in results.items() if result["shared"] > SHARED_KIB[case[0]] << 10
    }
    assert not too_large
    for (chip, dtype, kernel), result in results.items():
        size = getattr(torch, dtype).itemsize
        names = sorted({name for name, _ in blocks.TABLE}, key=len, reverse=True)
        name = next((name for name in names if kernel.startswith(name)), None)
        name = "tile_lse" if kernel == "logit_gradient" else name
        if (name, size) in blocks.TABLE:
            shape = blocks.blocks_within(name, size, SHARED_KIB[chip])
            needed = next(kib for kib, other in blocks.TABLE[name, size] if other == shape)
            assert result["shared"] <= needed << 10, f"blocks.TABLE: sm_{chip} {dtype} {kernel} needs more than it says"


def test_the_largest_kernels_compile_and_fit():
    chips = [chip for chip in SHARED_KIB if chip != 89]  # sm_89 has sm_86's shared memory: it is in the slow test
    check(compiled(chips, ["bfloat16"], ["lse_forward", "backward"]), 2 * len(chips))


def test_float32_kernels_fit_where_they_are_tightest():
    check(compiled([86], ["float32"], ["lse_forward", "backward_exact"]), 2)


def test_the_other_kernels_compile_for_the_oldest_chip():
    check(compiled([75], ["float16"], ["target_logit", "lse_forward_pointers", "scatter_rows", "backward_atomics"]), 4)


def test_the_row_gathered_kernels_compile_for_the_oldest_chip():
    check(compiled([75], ["float16"], GATHER), len(GATHER))


@pytest.mark.slow
@pytest.mark.parametrize("chip", SHARED_KIB)
def test_every_kernel_compiles_and_fits_in_every_dtype(chip):
    check(compiled([chip]), len(DTYPES) * len(KERNELS))
