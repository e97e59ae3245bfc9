"""Without a GPU: the kernels run through Triton's interpreter, whatever was imported before; without Triton the rest runs.

Each case is a process of its own, since what is tested happens at import.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[1]

KERNELS_AGREE = """
import torch
from cce import linear_cross_entropy

def gradients(impl, V, D=24, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    e, c = (torch.randn(n, D, generator=generator).to(dtype).requires_grad_() for n in (6, V))
    targets = torch.randint(V, (6,), generator=generator)
    loss = linear_cross_entropy(e, c, targets, impl=impl, **options)
    loss.backward()
    return loss.detach().float(), e.grad.float(), c.grad.float()

def check(V, tolerance=1e-4, **options):
    for impl in IMPLS:
        for x, o in zip(gradients(impl, V, **options), gradients("naive", V, **options)):
            assert (x - o).norm() <= tolerance * o.norm() + 1e-5, (impl, V, options, x, o)
"""


def run(code, *flags, env=None, impls=("cce_exact", "cce", "gather")):
    """What the process printed, both streams; fails if it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | (env or {})
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")  # Triton reads the source of a kernel, so there must be one
        script.write_text(f"IMPLS = {impls!r}\n{code}")
        process = subprocess.run(
            [sys.executable, *flags, str(script)], env=environment, capture_output=True, text=True, timeout=300
        )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout, process.stderr


def interpreter_works():
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return not (old and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4))


needs_interpreter = pytest.mark.skipif(
    not interpreter_works(), reason="needs Triton, and triton 3.6 and older cannot interpret with numpy 2.4 or newer"
)

COMPILER = 'backend="inductor"' if shutil.which("g++") else 'backend="aot_eager"'

EARLIER = {
    "nothing": "",
    "triton": "import triton, triton.language",
    "triton, by name": "from triton.language import sum, max; import triton.language.standard; from triton import jit",
    "torch._dynamo": "import torch._dynamo",
    "torch.compile": f"""
import torch
f = torch.compile(lambda x: torch.relu(x).sum(), {COMPILER})
assert f(torch.ones(3)) == 3
""",
    "a kernel of somebody else": """
import triton, triton.language as tl
@triton.jit
def theirs(x_ptr):
    tl.store(x_ptr, tl.max(tl.load(x_ptr + tl.arange(0, 4)), 0))
""",
    "transformers": "import transformers; from transformers import PreTrainedModel, LlamaForCausalLM",
}


@needs_interpreter
@pytest.mark.parametrize("earlier", EARLIER)
def test_kernels_run_whatever_was_imported_earlier(earlier):
    if earlier == "transformers" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    run(EARLIER[earlier] + KERNELS_AGREE + "check(70)\nprint('same')")


@needs_interpreter
@pytest.mark.parametrize("earlier", ["nothing", "triton"])
def test_kernels_run_when_the_user_switched_the_interpreter_on(earlier):
    out, _ = run(
        EARLIER[earlier] + KERNELS_AGREE + "check(70)\nimport cce.kernels\nprint(cce.kernels.INTERPRETED)",
        env={"TRITON_INTERPRET": "1"},
    )
    assert out.split() == ["True"]


def test_importing_the_package_imports_no_triton():
    run("import sys, cce\nassert not {'cce.kernels', 'cce.cut', 'cce.gather'} & set(sys.modules)")


@needs_interpreter
def test_no_warning_of_numpy_reaches_the_user():
    out, err = run(
        KERNELS_AGREE
        + """
import warnings
check(70)
check(70, softcap=5.0)
check(70, z_loss=1e-3)
check(1)
check(70, tolerance=2e-2, dtype=torch.bfloat16)
check(70, tolerance=2e-3, dtype=torch.float16)
check(1, tolerance=2e-2, dtype=torch.bfloat16)
""",
        "-W",
        "error::RuntimeWarning",
    )
    assert (out, err) == ("", "")


@needs_interpreter
def test_numpys_own_warnings_are_left_as_they_were():
    code = """
import warnings
import numpy as np
before = np.geterr(), list(warnings.filters)
check(70)
assert (np.geterr(), list(warnings.filters)) == before
"""
    run(KERNELS_AGREE + code)


@needs_interpreter
@pytest.mark.parametrize("impl", ["cce", "gather", "chunked"])
def test_a_large_problem_in_the_interpreter_is_warned_of(impl):
    """With the limit lowered: a real one would take minutes. `chunked` is what the warning recommends."""
    code = """
import warnings
from cce import cut
cut.INTERPRETER_WORK = 6 * 24 * 40
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    gradients(IMPLS[0], 39)
    assert not caught, caught
    gradients(IMPLS[0], 40)
assert len(caught) == (IMPLS[0] != "chunked"), caught
assert all(w.category is RuntimeWarning and 'impl="chunked"' in str(w.message) for w in caught)
"""
    run(KERNELS_AGREE + code, impls=(impl,))


# ---------------------------------------------------------------------------------------------- no Triton

NO_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
"""


def test_without_triton_the_plain_implementations_work():
    code = "check(70)\ncheck(70, softcap=5.0)\nassert 'triton' not in sys.modules"
    run(NO_TRITON + KERNELS_AGREE + code, impls=("naive", "checkpoint", "chunked", "auto"))


@pytest.mark.parametrize("impl", ["cce", "cce_exact", "gather"])
def test_without_triton_the_kernels_say_what_to_do(impl):
    code = f"""
for attempt in range(2):  # a failed import must not leave half a package behind
    try:
        gradients({impl!r}, 70)
    except ImportError as error:
        message = str(error)
        assert "pip install triton" in message and 'impl="chunked"' in message and "Linux" in message, message
        assert "\\n" not in message
    else:
        raise AssertionError("no error")
check(70)
"""
    run(NO_TRITON + KERNELS_AGREE + code, impls=("chunked",))
