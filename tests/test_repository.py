"""The repository itself: the wheel works alone, and the files that state the same fact agree."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INSTALL = "-e .[notebooks,test]"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def package_version() -> str:
    """From the text, so that it is also right where cce cannot be imported."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', read("cce/__init__.py"), flags=re.MULTILINE)
    return version


def repository_files() -> list[str]:
    """Tracked files, and new ones that git does not ignore. Without git (a downloaded archive): all but what we build."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        return sorted(path.as_posix() for path in files if not any(map(is_built, path.parts)))
    return [name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def is_built(part: str) -> bool:
    hidden = part.startswith(".") and part not in {".ci", ".devcontainer", ".gitignore"}
    return hidden or part in {"build", "dist", "__pycache__"} or part.endswith(".egg-info")


# The wheel


def run(*command) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools leaves build/ and egg-info behind, and packs what an earlier build left there."""
    tmp = tmp_path_factory.mktemp("wheel")
    for name in repository_files():
        target = tmp / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp / "dist", tmp / "source")
    (path,) = (tmp / "dist").glob("*.whl")
    return path


def test_wheel_is_named_linear_cce(wheel):
    assert wheel.name == f"linear_cce-{package_version()}-py3-none-any.whl"


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {name for name in repository_files() if name.startswith("cce/") and name.endswith(".py")}
    assert packed == package | {"cce/py.typed", "cce/bench/style.mplstyle"}


USE_THE_WHEEL = """
import sys, json
sys.path[:0] = sys.argv[1:]
import cce, importlib.metadata, importlib.resources, torch
loss = cce.linear_cross_entropy(torch.eye(2), torch.eye(2), torch.tensor([0, 1]))
print(json.dumps({
    "file": cce.__file__,
    "version": cce.__version__,
    "metadata": importlib.metadata.version("linear-cce"),
    "typed": importlib.resources.files("cce").joinpath("py.typed").is_file(),
    "loss": loss.item(),
}))
"""


def test_wheel_works_without_the_source_tree(wheel, tmp_path):
    """In an interpreter without site: no .pth file is read there, so the editable install is not on its path."""
    import numpy
    import torch

    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel)
    dependencies = dict.fromkeys(str(Path(module.__file__).parent.parent) for module in (torch, numpy))
    found = json.loads(run(sys.executable, "-I", "-S", "-c", USE_THE_WHEEL, site, *dependencies).splitlines()[-1])
    assert Path(found["file"]) == site / "cce" / "__init__.py"
    assert found["version"] == found["metadata"] == package_version()
    assert found["typed"]
    assert found["loss"] == pytest.approx(0.3132617, rel=1e-5)  # log(1 + 1/e)


# pyproject.toml, constraints.txt, environment.yml, Makefile


def pins() -> dict[str, Version]:
    found = {}
    for line in read("constraints.txt").splitlines():
        line = line.split("#")[0].strip()
        if line:
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==" and "*" not in specifier.version, f"{line!r} is not one exact version"
            found[canonicalize_name(requirement.name)] = Version(specifier.version)
    return found


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for texts in lists for text in texts]


def test_every_requirement_is_pinned():
    missing = {r.name for r in requirements() if canonicalize_name(r.name) not in pins()}
    assert not missing, f"constraints.txt lacks {sorted(missing)}"


def test_every_pin_satisfies_its_requirement():
    for requirement in requirements():
        pin = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"constraints.txt has {pin}, pyproject.toml wants {requirement}"


def test_no_pin_has_a_local_version():
    """torch==2.13.0 takes a CPU or a CUDA build, whichever pip finds; torch==2.13.0+cpu exists on few machines."""
    assert not {name for name, version in pins().items() if version.local}


def test_torch_and_triton_are_the_pair_that_belongs_together():
    assert (str(pins()["torch"]), str(pins()["triton"])) == ("2.13.0", "3.7.1")


def test_environment_yml_is_python_pip_and_one_pip_block():
    python, pip, block = yaml.safe_load(read("environment.yml"))["dependencies"]
    name, _, version = python.partition("=")
    assert name == "python"
    assert SpecifierSet(PYPROJECT["project"]["requires-python"]).contains(version + ".0")
    assert pip == "pip"
    assert block == {"pip": ["-c constraints.txt", INSTALL]}


def test_makefile_installs_what_environment_yml_installs():
    makefile = read("Makefile")
    (extras,) = re.findall(r"^EXTRAS := (\S+)$", makefile, flags=re.MULTILINE)
    assert f"-e .[{extras}]" == INSTALL
    assert '-c constraints.txt -e ".[$(EXTRAS)]"' in makefile


def test_devcontainer_sets_up_with_make():
    assert json.loads(read(".devcontainer/devcontainer.json"))["postCreateCommand"] == "make setup"


# README.md and CITATION.cff


def promised_targets(markdown: str) -> set[str]:
    """Targets of every `make …` in a code block or code span."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL))
    targets = set()
    for line in "\n".join(blocks + spans).splitlines():
        for command in re.split(r"&&|;|\|", line.split("#")[0]):
            words = command.split()
            if words[:1] == ["$"]:
                words = words[1:]
            if words[:1] == ["make"]:
                targets.update(word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word))
    return targets


def test_promised_targets_are_found():
    block = "```bash\n$ make setup  # make tea\ncd x && make test PYTHON=python3\n```\n"
    markdown = f"Make it so.\n\n{block}\n`make lab`, make no\n"
    assert promised_targets(markdown) == {"setup", "test", "lab"}


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", read("Makefile"), flags=re.MULTILINE))
    promised = promised_targets(read("README.md"))
    assert {"notebooks", "test"} <= promised, "README.md does not name the two commands"
    assert promised <= targets, f"README.md names {sorted(promised - targets)}, which the Makefile lacks"


def test_citation_and_changelog_have_the_version():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == package_version()
    assert "2411.09009" in citation["references"][0]["url"]
    assert f"## [{package_version()}]" in read("CHANGELOG.md")


# Nothing from the machine it was written on. The pattern is in pieces, or this file would match itself.

FOLDERS = "|".join(["work/", "root/", "home/", "Users/", r"tmp/ipykernel_\d"])
MACHINE_PATH = re.compile(rf"(?<![\w.~*])/(?:{FOLDERS})\S*")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('File "/' + 'root/x.py"', True),
        ("see /" + "home/me/project", True),
        ("file:///" + "work/main", True),
        ("/" + "tmp/ipykernel_12/1.py:3: UserWarning", True),
        ("https://example.org/" + "home/x", False),
        ("src/" + "work/x", False),
        ("~/" + "work/x", False),
        ("/" + "workspaces/x", False),
    ],
)
def test_machine_paths_are_recognised(text, found):
    assert bool(MACHINE_PATH.search(text)) == found


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    hits = []
    for name in repository_files():
        try:
            text = read(name)
        except UnicodeDecodeError:
            continue  # a picture
        hits += [f"{name}: {match.group()[:80]}" for match in MACHINE_PATH.finditer(text)]
    assert not hits, "\n".join(hits)
