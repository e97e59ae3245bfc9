"""Runs every kernel once on a small ragged shape, for `compute-sanitizer --tool memcheck python tests/sanitizer_program.py`.

memcheck reports accesses outside an allocation, so PyTorch must not pool them: PYTORCH_NO_CUDA_MEMORY_CACHING=1.
"""

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch  # noqa: E402

from cce import linear_cross_entropy  # noqa: E402
from cce.kernels import backward  # noqa: E402

for locked in (True, False):
    backward.under_locks = lambda device, locked=locked: locked
    for dtype, D in ((torch.bfloat16, 72), (torch.float32, 33), (torch.float16, 129)):
        for V in (500, 1):
            e = torch.randn(203, D, device="cuda", dtype=dtype, requires_grad=True)
            c = torch.randn(V, D, device="cuda", dtype=dtype, requires_grad=True)
            bias = torch.randn(V, device="cuda", dtype=dtype, requires_grad=True)
            targets = torch.randint(V, (203,), device="cuda")
            targets[::3] = -100
            for impl, softcap in (("cce", None), ("cce_exact", 5.0)):
                loss = linear_cross_entropy(e, c, targets, bias, softcap=softcap, impl=impl)
                loss.backward()
torch.cuda.synchronize()
print("ran every kernel")
