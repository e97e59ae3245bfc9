"""Execute the notebooks, each in a fresh kernel of this very interpreter.

    python tools/run_notebooks.py                 # into build/notebooks/, as .ipynb and .html; changes no tracked file
    python tools/run_notebooks.py --update        # at CPU size, and rewrite the stored outputs in place
    python tools/run_notebooks.py --only 05       # those whose path contains 05, or matches it as a pattern
    python tools/run_notebooks.py --list          # print the notebooks that this platform can run, execute nothing

The exit code is 1 if any notebook failed; the others are executed all the same.

Notable:
- No installed kernelspec is used: one of another environment with the name `python3` would be found first, and import
  another torch.
- `--update` hides the GPU, as `make test` does when it compares, and drops all that changes from run to run.
"""

import argparse
import fnmatch
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build" / "notebooks"
KERNEL_LOG = BUILD / "kernels.log"
CELL_TIMEOUT = 900  # seconds: a dead lock in a kernel must end some time

# Triton's wheels are for Linux only, and these notebooks are about kernels.
NEEDS_TRITON = re.compile(r"0[4-9]")

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE_INFO = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}
IGNORE_MARKER = "# NBVAL_IGNORE_OUTPUT"
IGNORE_TAG = "nbval-ignore-output"
VOLATILE_CELL_METADATA = ("execution", "ExecuteTime", "collapsed", "scrolled")


def find_notebooks(pattern: str | None = None) -> list[Path]:
    """All notebooks in reading order, the solutions last; `pattern` as in --only."""
    paths = [p for p in NOTEBOOKS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    paths.sort(key=lambda p: (len(p.relative_to(NOTEBOOKS).parts), p))
    if pattern is not None:
        names = {p: p.relative_to(NOTEBOOKS).as_posix() for p in paths}
        paths = [p for p in paths if pattern in names[p] or fnmatch.fnmatch(names[p], pattern)]
    return paths


def runnable_here(paths: list[Path], platform: str = sys.platform) -> list[Path]:
    """`paths` without those that need Triton where it does not exist; each one left out is named on stderr."""
    kept = []
    for path in paths:
        if platform != "linux" and NEEDS_TRITON.match(path.name):
            name = path.relative_to(NOTEBOOKS).as_posix()
            print(f"skipped {name}: it needs Triton, which is Linux only (use WSL2 or a container)", file=sys.stderr)
        else:
            kept.append(path)
    return kept


def make_kernel_manager():
    """A kernel manager whose only kernel is the interpreter that runs this file."""
    import ipykernel.kernelspec
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name):
            spec = ipykernel.kernelspec.get_kernel_dict()
            return self.kernel_spec_class(resource_dir=ipykernel.kernelspec.RESOURCES, **spec)

    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter())


class Progress:
    """`name  cell i/n  seconds`, rewritten in place on a terminal; elsewhere only the closing line of each notebook."""

    def __init__(self, name: str, n_cells: int, width: int):
        self.name, self.n_cells, self.width = name, n_cells, width
        self.index = 0  # of the cell that runs now
        self.start = time.perf_counter()
        self.live = sys.stdout.isatty()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def cell(self, cell, cell_index: int) -> None:
        self.index = cell_index
        if self.live:
            line = f"{self.name:<{self.width}}  cell {cell_index + 1}/{self.n_cells}  {self.seconds:5.1f} s"
            print(f"\r\033[K{line}", end="", flush=True)

    def close(self, verdict: str) -> None:
        clear = "\r\033[K" if self.live else ""
        print(f"{clear}{self.name:<{self.width}}  {self.seconds:6.1f} s  {verdict}", flush=True)


def first_line(source: str) -> str:
    return next((line.strip() for line in source.splitlines() if line.strip()), "(empty)")


def execute(path: Path, nb, progress: Progress) -> str | None:
    """Execute `nb` in place, in the folder of `path`. Returns None, or what went wrong and in which cell."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    client = NotebookClient(
        nb,
        km=make_kernel_manager(),
        timeout=CELL_TIMEOUT,
        record_timing=False,  # no timestamps in the metadata
        coalesce_streams=True,  # two prints are one output, however the kernel happened to flush them
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=progress.cell,
    )
    try:
        # A kernel's own stderr (not its cells') is about ports, or about a crash: kept, but not in the terminal.
        # cleanup_kc: nbclient leaves a kernel running whose manager it was given.
        with open(KERNEL_LOG, "a", encoding="utf-8") as log:
            client.execute(cleanup_kc=True, stderr=log)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        if isinstance(error, CellExecutionError):
            reason = f"{error.ename}: {error.evalue}"
        elif isinstance(error, CellTimeoutError):
            reason = f"ran longer than {CELL_TIMEOUT} s"
        else:
            reason = f"the kernel died (out of memory?); see {KERNEL_LOG.relative_to(ROOT).as_posix()}"
        source = nb.cells[progress.index].source
        return f"cell {progress.index + 1} of {progress.n_cells}, `{first_line(source)}`: {reason}"
    return None


def ignored_by_nbval(cell) -> bool:
    return IGNORE_TAG in cell.metadata.get("tags", []) or IGNORE_MARKER in map(str.strip, cell.source.splitlines())


def make_stable(nb) -> None:
    """Drop what differs between two runs, two Pythons or two editors, in place."""
    nb.metadata = type(nb.metadata)(kernelspec=dict(KERNELSPEC), language_info=dict(LANGUAGE_INFO))
    for cell in nb.cells:
        for key in VOLATILE_CELL_METADATA:
            cell.metadata.pop(key, None)
        # Progress bars write to stderr. Where nbval looks, stored stderr stays, and tests/test_notebooks.py rejects it.
        if cell.cell_type == "code" and ignored_by_nbval(cell):
            cell.outputs = [o for o in cell.outputs if not (o.output_type == "stream" and o.name == "stderr")]


def store(path: Path, nb, failed: bool, update: bool) -> None:
    """Write the executed notebook: in place with --update unless it failed, else under build/notebooks/."""
    import nbformat

    if update and not failed:
        make_stable(nb)
        nbformat.write(nb, path)
        return
    from nbconvert import HTMLExporter

    target = BUILD / path.relative_to(NOTEBOOKS)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, target)
    html, _ = HTMLExporter().from_notebook_node(nb, {"metadata": {"name": path.stem}})
    html = re.sub(r'(href="[^":#]*)\.ipynb', r"\1.html", html)  # a page links to pages
    target.with_suffix(".html").write_text(html, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="rewrite the stored outputs in place, at CPU size")
    parser.add_argument("--only", metavar="PATTERN", help="part of a path under notebooks/, or a glob pattern")
    parser.add_argument("--list", action="store_true", help="print the notebooks that this platform can run, and stop")
    args = parser.parse_args(argv)

    paths = find_notebooks(args.only)
    if args.only and not paths:
        parser.error(f"--only {args.only!r} matches no notebook under {NOTEBOOKS}")
    paths = runnable_here(paths)
    if args.list:
        for path in paths:
            print(path.relative_to(ROOT).as_posix())
        return 0
    if not paths:
        print(f"no notebooks to execute in {NOTEBOOKS}")
        return 0

    import nbformat

    # Kernels inherit these. IPYTHONDIR: neither the reader's start-up files nor a history database shared by kernels.
    os.environ.setdefault("IPYTHONDIR", str(ROOT / "build" / "ipython"))
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger warning on stderr with Python 3.11 and newer
    if args.update:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    names = {path: path.relative_to(NOTEBOOKS).as_posix() for path in paths}
    width = max(map(len, names.values()))
    start = time.perf_counter()
    failures = []
    BUILD.mkdir(parents=True, exist_ok=True)
    KERNEL_LOG.unlink(missing_ok=True)
    for path in paths:
        nb = nbformat.read(path, as_version=4)
        progress = Progress(names[path], len(nb.cells), width)
        problem = execute(path, nb, progress)
        store(path, nb, problem is not None, args.update)
        progress.close("ok" if problem is None else f"FAILED in {problem}")
        if problem is not None:
            failures.append(names[path])

    what = "rewritten in place" if args.update else f"executed into {BUILD.relative_to(ROOT).as_posix()}/"
    done = len(paths) - len(failures)
    print(f"{done} of {len(paths)} notebooks {what} in {time.perf_counter() - start:.0f} s")
    if failures:
        print(f"failed: {', '.join(failures)}; see {BUILD.relative_to(ROOT).as_posix()}/", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
