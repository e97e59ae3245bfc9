"""The pictures in figures/ are those of the notebooks' tagged cells, and the course shows them."""

import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
COURSE = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")


def tagged() -> set[str]:
    notebooks = [nbformat.read(path, as_version=4) for path in (ROOT / "notebooks").glob("*.ipynb")]
    tags = [tag for nb in notebooks for cell in nb.cells for tag in cell.metadata.get("tags", [])]
    return {tag.removeprefix("figure-") for tag in tags if tag.startswith("figure-")}


def test_every_tagged_cell_has_its_picture_and_every_picture_is_shown():
    shown = set(re.findall(r"\.\./figures/(\w+)\.svg\)", COURSE))
    drawn = {path.stem for path in (ROOT / "figures").glob("*.svg")} - {"cut", "gather"}  # cce.bench.figures' own
    assert tagged() == drawn == shown and len(drawn) == 5


def test_every_notebook_is_in_the_course():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"({path.name})" in COURSE, path.name
