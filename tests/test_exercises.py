"""Every exercise's checker tells the solution from the unsolved cell and from wrong answers.

Notebooks are too slow to be executed whole. `slice_of` takes the statements that bind a name the exercises need, directly or
through each other; plots, tables and measurements bind none. One process per notebook runs them once, then each exercise
solved, as it is, and with wrong answers: the solution after one small change. Some changes do no harm; one of six has to be rejected.
"""

import ast
import contextlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import symtable
import sys
import tempfile
import types
from itertools import chain, zip_longest

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from test_notebooks import EXERCISE_TAG, NOTEBOOKS, ROOT, learner_was_here

WITH_EXERCISES = [ROOT / "notebooks" / path.name for path in NOTEBOOKS if path.parent.name == "solutions"]
SHORTER = {"07_gradient_filtering": ("(240, 3000)", "(1, 3000)")}  # training steps of the model no exercise looks at
SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr}
SWAPPED |= {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="an answer runs in a forked process")


def statements(source):
    return ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", source)).body  # without magics


def names(statement):
    """The names a statement binds or changes (x = 1, x[0] = 1, x.y = 1, x += 1, x.zero_()), and the global ones it reads."""
    tables, used = [symtable.symtable(ast.unparse(statement), "cell", "exec")], set()
    bound = {s.get_name() for s in tables[0].get_symbols() if s.is_assigned() or s.is_imported()}
    for table in tables:
        tables += table.get_children()
        used |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
    nodes = [] if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else list(ast.walk(statement))
    changed = [n for n in nodes if isinstance(n, (ast.Attribute, ast.Subscript)) and isinstance(n.ctx, ast.Store)]
    if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "func", None), ast.Attribute):
        changed.append(statement.value.func)
    for node in changed:
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        bound |= {node.id} if isinstance(node, ast.Name) else set()
    if isinstance(statement, (ast.Import, ast.ImportFrom)) and "cce.kernels" in ast.unparse(statement):
        bound.add("attempt")  # which everybody needs: this import decides how kernels run, if it comes before triton's
    return bound, used


def slice_of(cells, needed):
    """The statements of the cells, in order, that the names in `needed` depend on."""
    found, chosen = [(s, *names(s)) for cell in cells for s in statements(cell)], None
    while chosen != (chosen := [(s, used) for s, bound, used in found if bound & needed]):
        needed = needed.union(*(used for _, used in chosen))
    return "\n".join(ast.unparse(s) for s, _ in chosen)


def change(node):
    """Makes a small change to a node of a syntax tree, if it knows one; returns its kind."""
    match node:
        case ast.Compare() if type(node.ops[0]) in SWAPPED:
            node.ops[0] = SWAPPED[type(node.ops[0])]()
            return "comparison"
        case ast.BinOp() | ast.AugAssign() if type(node.op) in SWAPPED:
            node.op = SWAPPED[type(node.op)]()
            return "operator"
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            node.value += 1
            return "number"
        case ast.Assign() | ast.Expr(value=ast.Call()) if node.col_offset:  # a line of a function
            node.__class__ = ast.Pass
            return "line"


def wrong_answers(source):
    """All answers one change away from a solution, kinds in turn. A condition of `while` stays: it would hang."""
    kinds = {"comparison": [], "operator": [], "number": [], "line": []}
    for i, _ in enumerate(ast.walk(ast.parse(source))):
        nodes = list(ast.walk(tree := ast.parse(source)))
        waits = [id(n) for loop in nodes if isinstance(loop, ast.While) for n in ast.walk(loop.test)]
        if id(nodes[i]) not in waits and (kind := change(nodes[i])):
            kinds[kind].append(ast.unparse(tree))
    return [answer for answer in chain(*zip_longest(*kinds.values())) if answer]


def exercises(nb, solved):
    """The cells before the first exercise, and the exercises; checkers carry a tag, and are the same in the solutions."""
    cells, theirs = ([cell for cell in x.cells if cell.cell_type == "code"] for x in (nb, solved))
    sources, solutions = [cell.source for cell in cells], [cell.source for cell in theirs]
    checkers = [i for i, cell in enumerate(cells) if EXERCISE_TAG in cell.metadata.get("tags", [])]
    found = [{"checker": sources[i], "unsolved": sources[i - 1]} for i in checkers]
    for exercise in found:
        exercise["solution"] = solutions[solutions.index(exercise["checker"]) - 1]
        exercise["wrong"] = wrong_answers(exercise["solution"])[:6]
    return sources[: checkers[0] - 1], found


def rejected(message):
    """A checker has found a fault by itself: that a name is missing is no merit of its own."""
    return not message.startswith(("passed", "not solved yet", "your code raised", "raised", "stopped"))


def answers():
    """The program of the process: a plan in, what the checkers say out, as JSON."""

    def execute(*sources):
        for number, source in enumerate(sources):
            path = pathlib.Path(folder, f"{os.getpid()}_{number}.py")  # Triton reads the source of a kernel
            path.write_text(source, encoding="utf-8")
            exec(compile(source, path, "exec"), vars(module))

    def say(*sources):
        """What the cells print after "Exercise 1: ". In a child of its own: a wrong answer may hang or spoil memory."""
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            signal.alarm(plan["seconds"])  # ends the child
            with open(write, "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
                try:
                    execute(*sources)
                except Exception as error:
                    print(f"Exercise: raised {type(error).__name__}: {error}")
            os._exit(0)
        os.close(write)
        with open(read, encoding="utf-8") as printed:
            message = printed.read().rpartition("Exercise")[2].partition(": ")[2].strip()
        os.waitpid(child, 0)
        return message or "stopped"

    module = sys.modules["exercise"] = types.ModuleType("exercise")  # a checker patches a name of its own module
    plan = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        execute(plan["slice"])
        if "peak_memory" in vars(module):
            module.peak_memory(int)  # the first call imports for two seconds: here, not in every child
        for e in plan["exercises"]:
            e["said"] = {name: say(e[name], e["checker"]) for name in ("solution", "unsolved")} | {"wrong": []}
            while e["wrong"] and not any(map(rejected, e["said"]["wrong"])):
                e["said"]["wrong"].append(say(e["wrong"].pop(0), e["checker"]))
    print(json.dumps([e["said"] for e in plan["exercises"]]))


PROGRAM = "import contextlib, json, os, pathlib, signal, sys, tempfile, types\n\n"
PROGRAM += f"{inspect.getsource(rejected)}\n{inspect.getsource(answers)}\nanswers()"


def problems(nb, solved, seconds=20):
    """What is wrong with the checkers of a notebook. An answer has so many seconds."""
    cells, plan = exercises(nb, solved)
    theirs = [s for e in plan for name in ("checker", "unsolved", "solution") for s in statements(e[name])]
    needed = set().union(*(names(s)[1] for s in theirs))
    plan = {"slice": slice_of(cells, needed), "exercises": plan, "seconds": seconds}
    env = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.run(command, input=json.dumps(plan), env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-4000:]
    found = []
    for number, said in enumerate(json.loads(process.stdout), start=1):
        solution, unsolved, wrong = said["solution"], said["unsolved"], said["wrong"]
        found += [] if solution.startswith("passed") else [f"exercise {number}: the solution is told {solution!r}"]
        found += [] if unsolved == "not solved yet" else [f"exercise {number}: the unsolved cell is told {unsolved!r}"]
        found += [] if any(map(rejected, wrong)) else [f"exercise {number}: no wrong answer is rejected: {wrong}"]
        found += [f"exercise {number}: a wrong answer {w}" for w in wrong if w.startswith("raised")]
    return found


@pytest.mark.parametrize("path", WITH_EXERCISES, ids=lambda path: path.stem)
def test_checkers(path):
    text, (old, new) = path.read_text(encoding="utf-8"), SHORTER.get(path.stem, ("", ""))
    if "cce.kernels" in text and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton's wheels exist for Linux only")
    if learner_was_here(path, nbformat.reads(text, as_version=4)):
        pytest.skip(f"an exercise of {path.name} has been solved; `git add` it to have it checked")
    assert old in text
    solved = nbformat.read(path.parent / "solutions" / path.name, as_version=4)
    assert problems(nbformat.reads(text.replace(old, new), as_version=4), solved) == []


# Faulty checkers are found, in made-up notebooks whose exercise is to double a number.

CELLS = ["%matplotlib inline\nEMPTY, last = [], 4\nEMPTY.append(1)", "DOUBLES = [2, 4]", "DOUBLES += [6, last * 2]"]
CELLS += ["EMPTY.clear()\n1 / 0", "from matplotlib import pyplot\nunused = 1 / 0"]
ANSWER = "def double(n):\n    return "
CHECK = """assert EMPTY == []
if double(2) is None: answer = "not solved yet"
else: answer = "passed" if [double(n) for n in range(1, 5)] == DOUBLES else "not the double"
print("Exercise 1:", answer)"""
FAULTS = [
    ("", "", ""),
    ('"not the double"', '"passed"', "no wrong answer is rejected: ['passed',"),
    ('"not the double"', "1 / 0", "no wrong answer is rejected: ['raised ZeroDivisionError"),
    ('"not the double"', "[n for n in iter(int, 1)]", "no wrong answer is rejected: ['stopped',"),
    ("== DOUBLES", "is DOUBLES", "the solution is told 'not the double'"),
    ("not solved yet", "passed", "the unsolved cell is told 'passed'"),
    ("is None", "is None and 1 / 0", "the unsolved cell is told 'raised ZeroDivisionError"),
]


@pytest.mark.parametrize(("old", "new", "expected"), FAULTS)
def test_a_faulty_checker_is_found(old, new, expected):
    checker = new_code_cell(CHECK.replace(old, new), metadata={"tags": [EXERCISE_TAG]})
    cells = [new_code_cell(cell) for cell in CELLS]
    nb, solved = (new_notebook(cells=[*cells, new_code_cell(ANSWER + x), checker]) for x in ("None", "n * 2"))
    found = problems(nb, solved, seconds=1)
    assert [expected in problem for problem in found[:1]] == [True] * bool(expected), found
