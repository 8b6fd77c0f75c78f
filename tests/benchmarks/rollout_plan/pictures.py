"""Pictures of the planner's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks.facts import COLOURS
from tests.benchmarks.rollout_plan.tables import PAPER

LABELS = {"mixtral-8x22b": "Mixtral 8x22B", "dbrx": "DBRX", "scaled-moe": "Scaled-MoE"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw ratios, pairs of GPUs, micro-batches and replicas as one SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    # Equal figures give equal bytes.
    matplotlib.rcParams["svg.hashsalt"] = "rollout_plan"
    figure = Figure(figsize=(11.0, 7.4), layout="constrained")
    panels = figure.subplots(2, 2)
    draw_ratios(panels[0][0], result["ratios"])
    draw_pairs(panels[0][1], result["heterogeneous"])
    draw_micro_batches(panels[1][0], result["micro_batches"])
    draw_replicas(panels[1][1], result["replicas"])
    for axes in (panels[0][0], panels[0][1], panels[1][0], panels[1][1]):
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    figure.savefig(path, metadata={"Date": None})


def draw_pairs_of_all_models(pairs: dict[str, Any], path: Path) -> None:
    """Draw tokens per second per GPU of every model on every pair of GPUs, over its best pair."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "rollout_plan_pairs"
    figure = Figure(figsize=(13.0, 8.4), layout="constrained")
    names = sorted({key.split()[0] for key in pairs})
    gpus = sorted({key.split()[1] for key in pairs})
    panels = [axes for row in figure.subplots(2, 3) for axes in row]
    for axes, name in zip(panels, names, strict=True):
        rates = [
            [pairs[f"{name} {a} {e}"].get("best", {}).get("per_gpu", 0.0) for e in gpus]
            for a in gpus
        ]
        top = max(max(row) for row in rates)
        axes.pcolormesh([[value / top for value in row] for row in rates], cmap="Blues", vmax=1.4)
        for y, row in enumerate(rates):
            for x, value in enumerate(row):
                words = f"{value:.0f}" if value else "-"
                axes.text(x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=7)
        axes.set_xticks([x + 0.5 for x in range(len(gpus))], gpus, fontsize=7)
        axes.set_yticks([y + 0.5 for y in range(len(gpus))], gpus, fontsize=7)
        axes.invert_yaxis()
        axes.set_title(name, fontsize=10)
    panels[0].set_ylabel("attention")
    panels[3].set_ylabel("attention")
    for axes in panels[3:]:
        axes.set_xlabel("experts")
    figure.suptitle("tokens/s per GPU, 150 ms between tokens (simulated)", fontsize=11)
    figure.savefig(path, metadata={"Date": None})


def bars(axes: Any, groups: list[str], series: dict[str, list[float]]) -> None:
    """Draw a bar of each series in each group."""
    width = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        xs = [x + (place - (len(series) - 1) / 2) * width for x in range(len(groups))]
        axes.bar(xs, values, 0.92 * width, color=COLOURS[place], label=name)
        for x, value in zip(xs, values, strict=True):
            axes.annotate(f"{value:.2f}", (x, value), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.15)
    axes.legend(fontsize=7)


def draw_ratios(axes: Any, table: dict[str, Any]) -> None:
    """Draw tokens per second per GPU over the baseline, simulated and published."""
    rows = [table[model] for model in PAPER]
    bars(
        axes,
        [LABELS[model] for model in PAPER],
        {
            "over tensor parallelism (simulated)": [row["ideal"] for row in rows],
            "over TensorRT-LLM (published)": [row["published"]["ideal"] for row in rows],
            "over the strongest colocated form (simulated)": [row["strongest"] for row in rows],
        },
    )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_title("per GPU, A800", fontsize=10)


def draw_pairs(axes: Any, table: dict[str, Any]) -> None:
    """Draw tokens per second per cost of H20 and L40S, over the best baseline."""
    names = ("h20+h20", "l40s+l40s", "h20+l40s")
    base = [
        max(v for k, v in table[model]["cost"].items() if k.startswith("tensor")) for model in PAPER
    ]
    series = {
        name.replace("+", " attention, ") + " experts": [
            table[model]["cost"][name] / value for model, value in zip(PAPER, base, strict=True)
        ]
        for name in names
    }
    bars(axes, [LABELS[model] for model in PAPER], series)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_title("per cost, over the better tensor-parallel baseline (simulated)", fontsize=10)


def draw_micro_batches(axes: Any, table: dict[str, Any]) -> None:
    """Draw what each further micro-batch of the same size gains."""
    steps = ["1 to 2", "2 to 3", "3 to 4"]
    series = {
        LABELS[model]: [table[model]["fixed_size"][step] for step in steps] for model in PAPER
    }
    bars(axes, steps, series)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("micro-batches, each of the same size")
    axes.set_title("rate over the rate with one less (simulated)", fontsize=10)


def draw_replicas(axes: Any, table: dict[str, Any]) -> None:
    """Draw the rate per GPU and where both stages take as long."""
    for colour, model in zip(COLOURS, PAPER, strict=False):
        rows = table[model]["sweep"]
        xs = [row["replicas"] for row in rows]
        top = max(row["per_gpu"] for row in rows)
        ys = [row["per_gpu"] / top for row in rows]
        label = f"{LABELS[model]}, tp_a = {table[model]['tp_a']}"
        axes.plot(xs, ys, "o-", color=colour, markersize=3, label=label)
        even = min(rows, key=lambda row: abs(row["attention"] - row["experts"]))
        axes.axvline(even["replicas"], color=colour, linewidth=0.8, linestyle="--")
    axes.set_xlabel("attention replicas; dashed: both stages take as long")
    axes.set_title("rate per GPU over its peak, A800 (simulated)", fontsize=10)
    axes.legend(fontsize=7)
