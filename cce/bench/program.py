"""What the benches share: their command line, where measurements are stored, and what a stored one says of where it comes from."""

import argparse
import datetime
import json
import pathlib
import platform
import subprocess

import torch
import triton

DATA = pathlib.Path(__file__).parents[2] / "figures" / "data"


class Parser(argparse.ArgumentParser):
    """`python -m program`, described by its module's first line. Every bench takes --save NAME."""

    def __init__(self, program: str, doc: str):
        super().__init__(prog=f"python -m {program}", description=doc.split("\n")[0])
        self.add_argument("--save", metavar="NAME", help="write figures/data/NAME.json")

    def parse(self, needs_gpu: bool) -> argparse.Namespace:
        options = self.parse_args()
        if needs_gpu and not torch.cuda.is_available():
            self.error("needs a GPU")
        return options


def environment() -> dict:
    """What a stored measurement must say about where it comes from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=DATA.parent)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
    }


def save(name: str | None, **measured) -> None:
    """Writes figures/data/name.json: the environment, and what was measured in it. Nothing without a name."""
    if name is None:
        return
    DATA.mkdir(parents=True, exist_ok=True)
    path = DATA / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **measured}, indent=1) + "\n")
    print(f"saved {path.relative_to(DATA.parents[1])}")


def _cpu_name() -> str:
    """The processor's name where Linux tells it, and the threads that PyTorch uses."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"
