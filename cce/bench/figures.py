"""python -m cce.bench.figures: draws figures/*.svg and the README's table from the stored measurements. No GPU needed."""

import argparse
import json
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "figures" / "data"
MARKERS = ("<!-- measured: written by `make figures` -->\n", "<!-- end of measured -->")
MODELS = {(4096, 4096, 128256): "Llama 3 8B", (8192, 2304, 256000): "Gemma 2 2B"}
# Okabe and Ito's colours, which stay apart for every kind of colour blindness; ours are the two saturated ones.
COLOURS = {
    "naive": "#999999", "torch.compile": "#E69F00", "cut-cross-entropy": "#CC79A7",
    "Liger, Triton": "#F0E442", "chunked": "#56B4E9", "cce": "#0072B2", "cce_exact": "#009E73",
    "gather": "#D55E00", "gather, exact": "#7A3E00",
}  # fmt: skip

LABELS = {
    "naive": "F.cross_entropy",
    "gather, exact": "`gather`, `filter_eps=None`",
}  # the usual three lines, not impl="naive"


def load(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text())


def readme_table() -> str:
    """The forward + backward measurements of gather.json in Markdown, with the machine they come from."""
    document = load("gather")
    where = document["environment"]
    lines = [
        f"Forward + backward in bfloat16 on one {where['device']} (torch {where['torch']}, triton {where['triton']}, {where['date']}, "
        f"commit {where['commit']}): milliseconds, peak memory beyond the inputs (the gradients themselves included), and the larger of "
        "the two relative gradient errors against exact float32 gradients. Flat (random) softmaxes are in "
        "`figures/data/gather.json` too, `cce_exact` in `figures/data/cut.json`.",
    ]
    for run in document["runs"]:
        if run["input"] != "trained_like":
            continue
        shape = (run["N"], run["D"], run["V"])
        gemm, gradients = f"{run['gemm_ms']:.1f} ms", f"{run['gradient_bytes'] / 1e6:,.0f} MB"
        lines += [
            "",
            f"**{MODELS[shape]}'s head, trained-like softmax**: N={shape[0]:,} D={shape[1]:,} V={shape[2]:,}; "
            f"one logits GEMM takes {gemm}, the gradients {gradients}.",
            "",
            "| | ms | MB | error |",
            "|---|---:|---:|---:|",
        ]
        for name, row in run["contenders"].items():
            label = LABELS.get(name, f"`{name}`" if name in ("chunked", "cce", "gather") else name)
            error = max(row["de_error"], row["dc_error"])
            lines.append(
                f"| {label} | {row['forward_backward_ms']:.1f} | {row['forward_backward_bytes'] / 1e6:,.0f} | {error:.1e} |"
            )
    cpu = load("chunked_cpu")
    (run,) = cpu["runs"]
    ours, rows = run["contenders"]["chunked"], run["contenders"]
    lines += [
        "",
        f"On a laptop-sized CPU ({cpu['environment']['device']}, torch {cpu['environment']['torch']}; "
        f"N={run['N']:,} D={run['D']} V={run['V']:,}, float32, "
        f"`figures/data/chunked_cpu.json`), forward + backward of `chunked` takes {ours['forward_backward_ms'] / 1e3:.1f} s and "
        f"{ours['forward_backward_bytes'] / 1e6:,.0f} MB, "
        + " and ".join(
            f"{label} {rows[name]['forward_backward_ms'] / 1e3:.1f} s and {rows[name]['forward_backward_bytes'] / 1e6:,.0f} MB"
            for name, label in {
                "naive": "the naive loss",
                "torch.linear_cross_entropy": "`torch.nn.functional.linear_cross_entropy`",
            }.items()
        )
        + ".",
    ]
    return "\n".join(lines) + "\n"


def with_table(readme: str) -> str:
    """The README with its measured part replaced by `readme_table()`."""
    before, rest = readme.split(MARKERS[0])
    return before + MARKERS[0] + readme_table() + MARKERS[1] + rest.split(MARKERS[1])[1]


def draw(measurement: str) -> None:
    """Time against memory, a point a contender: down and to the left is better."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cce"  # the same bytes every time
    import matplotlib.pyplot as plt

    document = load(measurement)
    runs = [run for run in document["runs"] if run["input"] == "trained_like"]
    figure, axes = plt.subplots(1, len(runs), figsize=(9.6, 4.2), facecolor="white", layout="constrained")
    for axis, run in zip(axes, runs, strict=True):
        for name, row in run["contenders"].items():
            x, y = row["forward_backward_ms"], row["forward_backward_bytes"] / 1e9
            axis.scatter(x, y, s=70, color=COLOURS[name], zorder=3)
            text, place = LABELS.get(name, name).replace("`", ""), {"textcoords": "offset points", "fontsize": 9}
            if name in ("cut-cross-entropy", "gather, exact"):
                axis.annotate(text, (x, y), xytext=(2, -16), ha="right" if name == "gather, exact" else "left", **place)
            else:
                axis.annotate(text, (x, y), xytext=(8, 5), **place)
        axis.axhline(run["gradient_bytes"] / 1e9, color="#555555", linestyle=":", linewidth=1)
        label = {"transform": axis.get_yaxis_transform(), "va": "top", "fontsize": 8, "color": "#555555"}
        axis.text(0.01, 0.79 * run["gradient_bytes"] / 1e9, "the gradients alone", **label)
        axis.set_yscale("log")
        axis.set_ylim(0.7, 40)
        axis.set_xlim(0, 1.3 * max(r["forward_backward_ms"] for r in run["contenders"].values()))
        shape = (run["N"], run["D"], run["V"])
        axis.set_title(f"{MODELS[shape]}: N={shape[0]:,}, V={shape[2]:,}", fontsize=11)
        axis.set_xlabel("forward + backward, ms")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("peak memory beyond the inputs, GB")
    figure.savefig(ROOT / "figures" / f"{measurement}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    argparse.ArgumentParser(prog="python -m cce.bench.figures", description=__doc__).parse_args()
    for measurement in ("cut", "gather"):
        draw(measurement)
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text()))
    print("wrote figures/cut.svg, figures/gather.svg and the README's table")


if __name__ == "__main__":
    main()
