"""Compiles the package's kernels for GPUs that are not there. `compiled(...)` runs this file as a process of its own, because the
tests' process may have the interpreter on; there the launchers run unchanged, on CPU tensors, up to the launch itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

# compute capability -> KiB of shared memory a program may use (CUDA C++ programming guide, "technical specifications")
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
DTYPES = ("bfloat16", "float16", "float32")
BACKWARD = ("backward", "backward_plain", "backward_exact", "backward_atomics")
GATHER = (
    "target_facts", "sort_rows", "tile_lse", "upstream", "count_pairs", "plan_tiles", "tail_mass", "list_pairs",
    "logit_gradient", "pair_gradient", "tile_gradient", "slab_gradient",
)  # fmt: skip
KERNELS = ("target_logit", "lse_forward", "lse_forward_pointers", "scatter_rows", *BACKWARD, *GATHER)


def compiled(
    chips, dtypes=DTYPES, kernels=KERNELS, ptx: bool = False, without_barriers: bool = False
) -> dict[tuple, dict]:
    """(chip, dtype, kernel) -> {"shared": bytes, "num_warps": int, "ptx": str} or {"error": str}."""
    request = {"chips": list(chips), "dtypes": list(dtypes), "kernels": list(kernels), "ptx": ptx}
    request = json.dumps({**request, "without_barriers": without_barriers})
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    process = subprocess.run(
        [sys.executable, __file__, request], env=environment, capture_output=True, text=True, timeout=900
    )
    lines = [line[len(MARK) :] for line in process.stdout.splitlines() if line.startswith(MARK)]
    if process.returncode:
        raise RuntimeError(f"compiling ended with {process.returncode} after {len(lines)} kernels: {process.stderr}")
    return {(chip, dtype, kernel): result for chip, dtype, kernel, result in map(json.loads, lines)}


MARK = "compiled: "


def _launch(kernel: str, dtype) -> None:
    """Calls the kernel's launcher with the arguments of a training step: everything divisible by 16, every option on."""
    import torch

    from cce.kernels import backward, lse_forward, scatter_rows, target_logit

    M, D, V = 256, 512, 1024
    e, c, targets = (torch.zeros(M, D, dtype=dtype), torch.zeros(V, D, dtype=dtype), torch.zeros(M, dtype=torch.int64))
    bias, floats = torch.zeros(V, dtype=dtype), [torch.zeros(M) for _ in range(5)]
    if kernel == "target_logit":
        target_logit.target_logit(e, c, targets, bias, 30.0)
    elif kernel == "lse_forward":
        lse_forward.lse_forward(e, c, targets, bias, 30.0)
    elif kernel == "lse_forward_pointers":
        lse_forward.lse_forward(e, torch.zeros(D, V, dtype=dtype).T, targets, bias, 30.0)
    elif kernel == "scatter_rows":
        scatter_rows.scatter_rows(torch.zeros(V, D), torch.arange(V), 0, torch.ones(()), c)
    elif kernel in BACKWARD:
        backward.under_locks = lambda device: kernel != "backward_atomics"
        options = kernel == "backward"
        lse, cutoff, d_zy, d_rest, residual = floats
        backward.backward_slab(
            e, c, bias.float() if options else None, targets, lse, None if kernel == "backward_exact" else cutoff,
            d_zy, d_rest, 0, 30.0 if options else None, True, True,
            torch.zeros(M, D), torch.zeros(V, D), torch.zeros(V) if options else None,
            residual if dtype != torch.float32 else None,
        )  # fmt: skip
    elif kernel in GATHER:
        _launch_gather(kernel, e, c, targets, bias)
    else:
        raise ValueError(kernel)


def _launch_gather(kernel: str, e, c, targets, bias) -> None:
    import torch

    from cce.kernels import (
        gather_backward,
        logit_gradient,
        pair_plan,
        slab_gradient,
        sort_rows,
        target_facts,
        tile_lse,
        upstream,
    )

    (M, D), V = e.shape, len(c)
    T, order, ints = V // tile_lse.TILE, torch.arange(V), torch.zeros(64, dtype=torch.int32)
    share, d, tail = torch.zeros(T, M, dtype=torch.float16), torch.zeros(M), torch.zeros(T, M, dtype=e.dtype)
    scalar = torch.zeros(1)
    if kernel == "target_facts":
        target_facts.target_facts(targets, -100)
    elif kernel == "tile_lse":
        tile_lse.tile_lse(e, c, targets, bias, 30.0, True, order)
    elif kernel == "sort_rows":
        sort_rows.sort_rows(c, order)
    elif kernel == "upstream":
        upstream.upstream(d, d, d, scalar, 0.1, 8)
    elif kernel == "plan_tiles":
        count, mass = torch.zeros(8, T, dtype=torch.int32), torch.zeros(8, T)
        pair_plan.plan_tiles(count, mass, torch.zeros(8), scalar, 0.03, M, 100, 1000, 64)
    elif kernel == "count_pairs":
        pair_plan.count_pairs(share, d, targets, torch.zeros(12))
    elif kernel == "tail_mass":
        pair_plan.tail_mass(share, share, d, targets, scalar, ints, 1024.0, e.dtype)
    elif kernel == "list_pairs":
        pair_plan.list_pairs(share, d, targets, scalar, ints, ints, range(T), 64, 64)
    elif kernel == "logit_gradient":
        logit_gradient.logit_gradient(e, c, bias, targets, 30.0, d, d, d, e.dtype != torch.float32, True)
    elif kernel == "slab_gradient":
        s = torch.zeros(M, V, dtype=e.dtype)
        slab_gradient.slab_gradient(s, e, order, 0, torch.zeros(V), torch.zeros(D), scalar, c)
    else:
        out = gather_backward.Outputs(
            torch.zeros(M, D), c, torch.zeros(V), tail, torch.zeros(T, D), torch.zeros(V), torch.zeros(D), scalar
        )
        pairs = gather_backward.Pairs(range(T), ints, ints[:4], ints, ints, ints)
        if kernel == "pair_gradient":
            gather_backward.pair_gradient(e, c, bias, order, targets, 30.0, d, d, d, c[0], pairs, 1024.0, out)
        else:
            gather_backward.tile_gradient(e, torch.zeros(64, tile_lse.TILE, dtype=e.dtype), order, pairs, out)


def _worker(chips, dtypes, kernels, ptx, without_barriers) -> None:
    from types import SimpleNamespace

    import torch

    torch.cuda.is_available = lambda: True  # or importing cce.kernels would switch the interpreter on

    import triton
    from triton.backends.compiler import GPUTarget

    if without_barriers:
        from cce.kernels import common

        assert common.unlock.src.count("tl.debug_barrier()") == 1
        common.unlock._unsafe_update_src(common.unlock.src.replace("tl.debug_barrier()", "pass"))

    chip = None
    torch.cuda.get_device_capability = lambda device=None: divmod(chip, 10)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        shared_memory_per_block_optin=SHARED_KIB[chip] << 10
    )
    driver = SimpleNamespace(
        get_current_device=lambda: chip,  # Triton keeps what it compiled per device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", chip, 32),
    )
    triton.runtime.driver.set_active(driver)
    results = []
    run = triton.runtime.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        results.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    triton.runtime.JITFunction.run = compile_only
    from cce.kernels import blocks

    for chip in chips:
        blocks.shared_memory_kib.cache_clear()
        blocks.under_locks.cache_clear()
        for dtype in dtypes:
            for kernel in kernels:
                results.clear()
                try:
                    _launch(kernel, getattr(torch, dtype))
                    made = results[0]  # tile_lse's launcher has a small second one
                    result = {"shared": made.metadata.shared, "num_warps": made.metadata.num_warps}
                    if ptx:
                        result["ptx"] = made.asm["ptx"]
                except Exception as error:
                    result = {"error": f"{type(error).__name__}: {error}"[:2000]}
                print(MARK + json.dumps([chip, dtype, kernel, result]), flush=True)


if __name__ == "__main__":
    _worker(**json.loads(sys.argv[1]))
