"""The Triton kernels, one a file. Importing this package decides how they run: compiled for an NVIDIA GPU where there is one,
otherwise through Triton's interpreter, which executes each program in NumPy (slow, exact, and enough to learn and test with).
"""

import importlib

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "cce's kernels need Triton, whose wheels exist for Linux only (use WSL2 or a container elsewhere): "
        'pip install triton; or use impl="chunked", which is plain PyTorch'
    ) from error
import torch


def _interpret() -> None:
    """Switches the interpreter on, also when Triton was imported earlier (transformers and torch.compile do that).

    `@triton.jit` asks once, when it decorates. Triton's own `tl.max`, `tl.sum` ... are such functions too, so they
    are decorated anew here and every name that `triton.language` re-exports is bound to the new one.
    """
    triton.knobs.runtime.interpret = True
    if isinstance(tl.standard.sum, triton.runtime.JITFunction):
        old = {name: f for name, f in vars(tl.standard).items() if isinstance(f, triton.runtime.JITFunction)}
        new = importlib.reload(tl.standard)
        for name, function in old.items():
            if getattr(tl, name, None) is function:
                setattr(tl, name, getattr(new, name))


if not torch.cuda.is_available():
    _interpret()

INTERPRETED: bool = triton.knobs.runtime.interpret
