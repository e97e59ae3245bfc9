"""The benches' own arithmetic, and that each can be started; the times themselves are the GPU's."""

import pkgutil
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("tqdm")

import cce.bench  # noqa: E402
from cce.bench import contenders  # noqa: E402
from cce.bench.__main__ import measure, table  # noqa: E402
from cce.bench.sharpness import measure as measure_sharpness  # noqa: E402
from cce.bench.timeline import Span, by_name, gaps  # noqa: E402
from cce.bench.timing import interleaved  # noqa: E402

PROGRAMS = [m.name for m in pkgutil.iter_modules(cce.bench.__path__)]
PROGRAMS = [
    name
    for name in PROGRAMS
    if name not in ("__main__", "contenders", "exact", "inputs", "memory", "program", "timing")
]


@pytest.mark.parametrize("program", ["cce.bench", *(f"cce.bench.{name}" for name in PROGRAMS)])
def test_a_program_says_what_it_does(program):
    run = subprocess.run([sys.executable, "-m", program, "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "usage: python -m cce.bench" in run.stdout, run.stderr


def test_a_measurement_has_a_row_for_who_ran_and_a_reason_for_who_did_not(device):
    run = measure("trained_like", (16, 8, 100), ["naive", "chunked", "QuACK"], repeats=2, seed=0)
    assert list(run["contenders"]) == ["naive", "chunked"] and "quack" in run["not_run"]["QuACK"]
    for row in run["contenders"].values():
        assert max(row["de_error"], row["dc_error"]) < (1e-5 if device.type == "cpu" else 3e-2)
        assert row["forward_ms"] > 0 and row["forward_backward_ms"] > 0
        assert (
            row["forward_backward_bytes"]
            >= run["gradient_bytes"]
            == (16 + 100) * 8 * (4 if device.type == "cpu" else 2)
        )
    assert "QuACK" in table(run).splitlines()[-1]


def test_every_contender_can_be_had_or_says_why_not():
    losses, missing = contenders.load(list(contenders.FACTORIES))
    assert set(losses) | set(missing) == set(contenders.FACTORIES) and {"naive", "chunked", "gather"} <= set(losses)


def test_sharpness_tells_what_the_backward_did():
    (point,) = measure_sharpness((16, 8, 100), [1.0], ["naive", "gather"], repeats=1)
    assert set(point["contenders"]) == {"naive", "gather"} and point["loss"] > 0
    assert all(row["ms"] > 0 for row in point["contenders"].values())


def test_interleaved_runs_everybody_equally_often():
    calls = []
    times = interleaved({name: (lambda name=name: calls.append(name)) for name in "ab"}, repeats=5)
    assert sorted(calls) == ["a"] * 6 + ["b"] * 6 and set(times) == {"a", "b"}  # one call each to warm up


def test_gaps_are_what_no_stream_covers():
    spans = [
        Span("a", 0, 10),
        Span("b", 2, 5),
        Span("c", 12, 20),
        Span("d", 13, 15),
        Span("e", 26, 30),
        Span("b", 30, 31),
    ]
    assert gaps(spans) == [(6, "c", "e"), (2, "a", "c")]
    assert by_name(spans) == [(10, 1, "a"), (8, 1, "c"), (4, 2, "b"), (4, 1, "e"), (2, 1, "d")]
