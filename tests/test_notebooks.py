"""What `pytest --nbval` does not see: a notebook that was never executed, or whose comparison is switched off.

Each rule is a function `rule(nb) -> problems`, run on every notebook; the second half of this file shows, on notebooks
made for it, that each rule can fail.

A learner who has solved an exercise must not be told that cells were executed out of order or that a solution is too
long: where the cells of an exercise differ from the version staged in git, the rules in OURS_ALONE wait until the
notebook is staged. Solutions, and every notebook under CI, are always checked whole.
"""

import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)

MARKER = "# NBVAL_IGNORE_OUTPUT"
EXERCISE_TAG = "nbval-ignore-output"
MAX_MARKERS = 4
MAX_LINES = 40
MAX_LINES_KERNEL = 65  # the cell that shows a kernel of the package whole
MAX_BYTES = 1_500_000

# The other switches of nbval, as a comment or as a tag. The tag nbval-ignore-output is the exercises' own.
OTHER_MARKER = re.compile(r"#\s*(?:NBVAL_(?!IGNORE_OUTPUT)\w+|PYTEST_VALIDATE_\w+)")
FORBIDDEN_TAGS = {
    "nbval-skip",
    "nbval-raises-exception",
    "nbval-test-listed-output",
    "raises-exception",
    "skip-execution",
}


def code_cells(nb):
    """(place, cell) of each code cell; the place names it in a message: its number among all cells, and its start."""
    for place, cell in all_cells(nb):
        if cell.cell_type == "code":
            yield place, cell


def all_cells(nb):
    for number, cell in enumerate(nb.cells, start=1):
        start = next((line.strip() for line in cell.source.splitlines() if line.strip()), "(empty)")
        yield f"cell {number} of {len(nb.cells)} `{start[:60]}`", cell


def every_code_cell_is_executed(nb):
    return [f"{place} was not executed" for place, cell in code_cells(nb) if cell.execution_count is None]


def execution_counts_are_1_to_n(nb):
    return [
        f"{place} has execution count {cell.execution_count}, expected {expected}"
        for expected, (place, cell) in enumerate(code_cells(nb), start=1)
        if cell.execution_count != expected
    ]


def no_error_is_stored(nb):
    return [
        f"{place} stores {output.ename}: {output.evalue}"
        for place, cell in code_cells(nb)
        for output in cell.outputs
        if output.output_type == "error"
    ]


def no_stderr_is_stored(nb):
    return [
        f"{place} stores stderr {output.text[:80]!r}"
        for place, cell in code_cells(nb)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]


def ignore_marker_is_a_whole_line(nb):
    """With code before it or words after it, nbval does not recognise the marker, and says nothing."""
    return [
        f"{place} has the line {line!r}, expected exactly {MARKER!r}"
        for place, cell in code_cells(nb)
        for line in cell.source.splitlines()
        if "NBVAL_IGNORE_OUTPUT" in line.upper() and line != MARKER
    ]


def ignore_marker_is_rare(nb):
    marked = [place for place, cell in code_cells(nb) if "NBVAL_IGNORE_OUTPUT" in cell.source.upper()]
    if len(marked) <= MAX_MARKERS:
        return []
    return [f"{len(marked)} cells are marked {MARKER}, at most {MAX_MARKERS} may be: {'; '.join(marked)}"]


def no_other_switch_of_nbval_is_used(nb):
    problems = []
    for place, cell in code_cells(nb):
        found = OTHER_MARKER.findall(cell.source) + sorted(FORBIDDEN_TAGS.intersection(cell.metadata.get("tags", [])))
        problems += [f"{place} uses {switch!r}, which hides it from the comparison" for switch in found]
    return problems


def cells_are_short(nb):
    problems = []
    for place, cell in all_cells(nb):
        kernel = cell.cell_type == "code" and "@triton.jit" in cell.source
        limit = MAX_LINES_KERNEL if kernel else MAX_LINES
        lines = len(cell.source.splitlines())
        if lines > limit:
            problems.append(f"{place} has {lines} lines, at most {limit} are allowed")
    return problems


def file_is_small(nb):
    size = len(nbformat.writes(nb).encode())
    return [f"the file has {size:,} bytes, at most {MAX_BYTES:,} are allowed"] if size > MAX_BYTES else []


RULES = [
    every_code_cell_is_executed,
    execution_counts_are_1_to_n,
    no_error_is_stored,
    no_stderr_is_stored,
    ignore_marker_is_a_whole_line,
    ignore_marker_is_rare,
    no_other_switch_of_nbval_is_used,
    cells_are_short,
    file_is_small,
]
# About how we leave a notebook, not about what nbval compares.
OURS_ALONE = {
    every_code_cell_is_executed,
    execution_counts_are_1_to_n,
    no_error_is_stored,
    no_stderr_is_stored,
    cells_are_short,
}
rule_of_each = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


def exercises(nb):
    """Sources of the cells of exercises: each checker, which carries the tag, and the code cell before it."""
    cells = [cell for cell in nb.cells if cell.cell_type == "code"]
    tagged = {i for i, cell in enumerate(cells) if EXERCISE_TAG in cell.metadata.get("tags", [])}
    return [cell.source for i, cell in enumerate(cells) if i in tagged or i + 1 in tagged]


def learner_was_here(path: Path, nb) -> bool:
    if path.parent.name == "solutions" or os.environ.get("CI"):
        return False
    git = ["git", "-C", str(ROOT), "show", f":{path.relative_to(ROOT).as_posix()}"]
    try:
        staged = subprocess.run(git, capture_output=True, check=True).stdout.decode()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return False  # no git, or git does not know the notebook
    return exercises(nbformat.reads(staged, as_version=4)) != exercises(nb)


@rule_of_each
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT / "notebooks").as_posix())
def test_notebook(path, rule):
    nb = nbformat.read(path, as_version=4)
    if rule in OURS_ALONE and learner_was_here(path, nb):
        pytest.skip(f"an exercise of {path.name} has been solved; `git add` it to have it checked")
    problems = rule(nb)
    name = path.relative_to(ROOT).as_posix()
    hint = "\n`make notebooks-update` executes the notebooks and stores their outputs."
    assert not problems, "\n".join(f"{name}: {problem}" for problem in problems) + hint


# Each rule can fail, names the cell, and is silent about a good notebook.


def notebook(*cells):
    """Code cells from sources or cells, executed in order unless they say otherwise."""
    nb = new_notebook(cells=[new_code_cell(c) if isinstance(c, str) else c for c in cells])
    count = 0
    for cell in nb.cells:
        if cell.cell_type == "code":
            count += 1
            if cell.execution_count is None:
                cell.execution_count = count
    return nb


def code(source, **fields):
    return new_code_cell(source, **fields)


def unexecuted():
    nb = notebook("x = 1", "y = 2")
    nb.cells[1].execution_count = None
    return nb


STDERR = new_output("stream", name="stderr", text="UserWarning: no")
ERROR = new_output("error", ename="NameError", evalue="name 'q' is not defined", traceback=[])
PICTURE = new_output("display_data", data={"image/png": "A" * 1_600_000})

GOOD = notebook(
    new_markdown_cell(f"# Title\n\nThe line `{MARKER}` hides an output, `# NBVAL_SKIP` a cell."),
    code("print(1)", outputs=[new_output("stream", name="stdout", text="1\n")]),
    *[f"{MARKER}\nprint({i})" for i in range(4)],
    code("check(answer)", metadata={"tags": [EXERCISE_TAG]}),
    "\n".join(["x = 1"] * 40),
    "@triton.jit\n" + "\n".join(["x = 1"] * 64),
)

BROKEN = [
    (every_code_cell_is_executed, unexecuted(), "cell 2 of 2 `y = 2` was not executed"),
    (every_code_cell_is_executed, new_notebook(cells=[code("")]), "cell 1 of 1 `(empty)` was not executed"),
    (execution_counts_are_1_to_n, notebook("x", code("y", execution_count=7)), "execution count 7, expected 2"),
    (execution_counts_are_1_to_n, notebook(code("x", execution_count=2), "y"), "execution count 2, expected 1"),
    (no_error_is_stored, notebook("x", code("q", outputs=[ERROR])), "cell 2 of 2 `q` stores NameError"),
    (no_stderr_is_stored, notebook(code("w", outputs=[STDERR])), "cell 1 of 1 `w` stores stderr 'UserWarning"),
    (no_stderr_is_stored, notebook(code(f"{MARKER}\nw", outputs=[STDERR])), "stores stderr"),
    (ignore_marker_is_a_whole_line, notebook("t()  " + MARKER), "expected exactly"),
    (ignore_marker_is_a_whole_line, notebook(MARKER + ": timings\nt()"), "expected exactly"),
    (ignore_marker_is_a_whole_line, notebook("#NBVAL_IGNORE_OUTPUT\nt()"), "expected exactly"),
    (ignore_marker_is_a_whole_line, notebook("# nbval_ignore_output\nt()"), "expected exactly"),
    (ignore_marker_is_rare, notebook(*[f"{MARKER}\nprint({i})" for i in range(5)]), "5 cells are marked"),
    (no_other_switch_of_nbval_is_used, notebook("# NBVAL_SKIP\nt()"), "uses '# NBVAL_SKIP'"),
    (no_other_switch_of_nbval_is_used, notebook("#PYTEST_VALIDATE_IGNORE_OUTPUT\nt()"), "PYTEST_VALIDATE"),
    (no_other_switch_of_nbval_is_used, notebook(code("t()", metadata={"tags": ["nbval-skip"]})), "uses 'nbval-skip'"),
    (cells_are_short, notebook("y", "\n".join(["x = 1"] * 41)), "cell 2 of 2 `x = 1` has 41 lines, at most 40"),
    (cells_are_short, notebook(new_markdown_cell("\n".join(["word"] * 41))), "has 41 lines, at most 40"),
    (cells_are_short, notebook("@triton.jit\n" + "\n".join(["x = 1"] * 65)), "has 66 lines, at most 65"),
    (file_is_small, notebook(code("plot()", outputs=[PICTURE])), "bytes, at most 1,500,000"),
]


@rule_of_each
def test_rule_accepts_a_good_notebook(rule):
    assert rule(GOOD) == []


@pytest.mark.parametrize(("rule", "nb", "message"), BROKEN, ids=[rule.__name__ for rule, _, _ in BROKEN])
def test_rule_rejects_a_broken_notebook(rule, nb, message):
    problems = rule(nb)
    assert len(problems) >= 1
    assert message in problems[0]


def test_exercises_are_the_checkers_and_the_cells_before_them():
    checker = code("check()", metadata={"tags": [EXERCISE_TAG]})
    nb = notebook("x = 1", "answer = None", new_markdown_cell("Now check it."), checker, "y = 2")
    assert exercises(nb) == ["answer = None", "check()"]


def test_every_rule_has_a_broken_notebook():
    assert {rule for rule, _, _ in BROKEN} == set(RULES)
