"""Write the notebooks' figures that carry the story to figures/NAME.svg: those of the cells tagged `figure-NAME`.

    python tools/export_figures.py            # executes the notebooks that have such cells, at CPU size; changes no notebook

A figure has one home, the notebook that explains it.
"""

import os
import sys

import nbformat
from run_notebooks import BUILD, ROOT, Progress, execute, find_notebooks

TAG = "figure-"
AS_SVG = (
    "%config InlineBackend.figure_formats = ['svg']\nimport matplotlib\n\nmatplotlib.rcParams['svg.hashsalt'] = 'cce'"
)


def tagged(cell) -> list[str]:
    """The names of the figures that a cell draws."""
    return [tag.removeprefix(TAG) for tag in cell.metadata.get("tags", []) if tag.startswith(TAG)]


def svg_of(cell) -> str:
    (figure,) = [o.data["image/svg+xml"] for o in cell.outputs if "image/svg+xml" in o.get("data", {})]
    return "\n".join(line.rstrip() for line in figure.splitlines()) + "\n"


def main() -> int:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "SOURCE_DATE_EPOCH": "0"}  # the same file on every day
    BUILD.mkdir(parents=True, exist_ok=True)
    failures = 0
    for path in find_notebooks():
        nb = nbformat.read(path, as_version=4)
        names = [name for cell in nb.cells for name in tagged(cell)]
        if not names:
            continue
        nb.cells.insert(0, nbformat.v4.new_code_cell(AS_SVG))
        progress = Progress(path.name, len(nb.cells), 40)
        problem = execute(path, nb, progress)
        for cell in nb.cells if problem is None else ():
            for name in tagged(cell):
                (ROOT / "figures" / f"{name}.svg").write_text(svg_of(cell), encoding="utf-8")
        progress.close(", ".join(names) if problem is None else f"FAILED in {problem}")
        failures += problem is not None
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
