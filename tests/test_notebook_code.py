"""The last step of a kernel notebook is the package's code: compared as syntax trees, so that neither can drift.

Comments, white space and docstrings may differ (the notebook explains more); decorators, signatures and every line of the
body may not. Nothing is imported: this runs where there is no Triton, too.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent

# (notebook, names of its functions, the module they live in). A function may have several steps; the last cell counts.
LAST_STEPS = [
    ("04_target_logit_kernel", ["target_logit_kernel"], "cce.kernels.target_logit"),
    ("05_lse_forward_spin_lock", ["lse_forward_kernel"], "cce.kernels.lse_forward"),
    ("06_backward_kernel", ["backward_kernel"], "cce.kernels.backward"),
    ("07_gradient_filtering", ["vocabulary_order", "positions", "sort_vocabulary"], "cce.cut"),
    ("08_assembling_cce", ["Primitive"], "cce.autograd"),
    ("08_assembling_cce", ["TokenLoss"], "cce.loss"),
    ("09_row_gathered_backward", ["pair_gradient_kernel"], "cce.kernels.gather_backward"),
]
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def functions(source: str, name: str) -> list[ast.FunctionDef]:
    """The top-level functions of that name, in order; a class counts as one, with all its methods."""
    return [node for node in ast.parse(source).body if isinstance(node, DEFINITIONS) and node.name == name]


def in_module(module: str, name: str) -> ast.FunctionDef:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    found = functions(path.read_text(encoding="utf-8"), name)
    assert len(found) == 1, f"{module} defines {name} {len(found)} times, expected once"
    return found[0]


def last_step(nb, name: str) -> ast.FunctionDef:
    """Only cells that hold the function are parsed: another may have a magic in it."""
    start = re.compile(rf"(def|class) {name}\b")
    sources = [cell.source for cell in nb.cells if cell.cell_type == "code" and start.search(cell.source)]
    found = [function for source in sources for function in functions(source, name)]
    assert found, f"no code cell of the notebook defines {name}"
    return found[-1]


def without_docstrings(function: ast.FunctionDef) -> ast.FunctionDef:
    for node in ast.walk(function):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return function


def code_of(function: ast.FunctionDef) -> str:
    """The function in a canonical layout, decorators included."""
    return ast.unparse(without_docstrings(function))


@pytest.mark.parametrize(
    ("notebook", "name", "module"),
    [(notebook, name, module) for notebook, names, module in LAST_STEPS for name in names],
)
def test_the_last_step_is_the_package_code(notebook, name, module):
    nb = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", as_version=4)
    shown, shipped = code_of(last_step(nb, name)), code_of(in_module(module, name))
    assert shown == shipped, f"{name} of {notebook}.ipynb is not the one of {module}"


# The comparison sees what it should and nothing else, shown on the package's kernels and changed copies of them.

KERNEL = '''
@triton.jit(do_not_specialize=["M"])
def kernel(x_ptr, M, BLOCK: tl.constexpr):
    """Doubles x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # this program's
    tl.store(x_ptr + i, 2.0 * tl.load(x_ptr + i, mask=i < M), mask=i < M)
'''

SAME = {
    "itself": KERNEL,
    "other comments": KERNEL.replace("# this program's", "# elements"),
    "no docstring": KERNEL.replace('    """Doubles x."""\n', ""),
    "decorator in other white space": KERNEL.replace(
        '(do_not_specialize=["M"])', '(\n    do_not_specialize=["M",],\n)'
    ),
    "signature on several lines": KERNEL.replace("x_ptr, M, ", "\n    x_ptr,\n    M,\n    "),
}
DIFFERENT = {
    "a changed constant": KERNEL.replace("2.0", "2.5"),
    "another type of constant": KERNEL.replace("2.0", "2"),
    "a changed operator": KERNEL.replace("mask=i < M), mask", "mask=i <= M), mask"),
    "a mask less": KERNEL.replace("), mask=i < M)", "))"),
    "another decorator": KERNEL.replace('(do_not_specialize=["M"])', ""),
    "another decorator's argument": KERNEL.replace('["M"]', '["N"]'),
    "another signature": KERNEL.replace("BLOCK: tl.constexpr", "BLOCK"),
    "a line more": KERNEL + "    tl.debug_barrier()\n",
}


def notebook_of(*sources):
    return new_notebook(cells=[new_markdown_cell("def kernel(): prose")] + [new_code_cell(s) for s in sources])


def the_same(shown: str) -> bool:
    return code_of(last_step(notebook_of(shown), "kernel")) == code_of(functions(KERNEL, "kernel")[0])


@pytest.mark.parametrize("shown", SAME.values(), ids=SAME)
def test_comments_docstrings_and_white_space_may_differ(shown):
    assert the_same(shown)


@pytest.mark.parametrize("shown", DIFFERENT.values(), ids=DIFFERENT)
def test_code_may_not_differ(shown):
    assert shown != KERNEL and not the_same(shown)


CLASS = '''
class Loss(torch.autograd.Function):
    """Twice x."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x
'''


def test_a_class_is_compared_with_bases_methods_and_decorators():
    shipped = code_of(functions(CLASS, "Loss")[0])
    shown = lambda source: code_of(last_step(notebook_of(source), "Loss"))
    assert shown(CLASS.replace('    """Twice x."""\n', "    # twice x\n")) == shipped
    for old, new in (
        ("2 * x", "3 * x"),
        ("    @staticmethod\n", ""),
        ("(torch.autograd.Function)", ""),
        ("ctx, x", "ctx, y"),
    ):
        assert shown(CLASS.replace(old, new)) != shipped


def test_only_the_last_step_counts():
    nb = notebook_of("%matplotlib inline", DIFFERENT["a changed constant"], KERNEL, "kernel[(1,)](x, 3, BLOCK=4)")
    assert code_of(last_step(nb, "kernel")) == code_of(functions(KERNEL, "kernel")[0])


@pytest.mark.parametrize(("notebook", "names", "module"), LAST_STEPS)
def test_a_changed_constant_in_a_listed_notebook_is_seen(notebook, names, module):
    """-1 becomes 0, 0.0 becomes 1.0: each constant of each listed function, one at a time."""
    nb, changed = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", as_version=4), 0
    for name in names:
        shipped = code_of(in_module(module, name))
        step = without_docstrings(last_step(nb, name))
        constants = [n for n in ast.walk(step) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
        for constant in constants:
            constant.value += 1
            assert ast.unparse(step) != shipped
            constant.value -= 1
        changed += len(constants)
    assert changed


def test_a_missing_function_is_named():
    with pytest.raises(AssertionError, match="no code cell of the notebook defines kernel"):
        last_step(notebook_of("x = 1"), "kernel")
