"""The row of the README's table of figures, put together from a result."""

from __future__ import annotations

from typing import Any

LINK = "[checkpoint.json](tests/benchmarks/results/checkpoint.json)"


def readme_row(document: dict[str, Any]) -> str:
    """Return the row; "-" stands for what was not measured.

    Args:
        document: with `label` and `result`, as `results/checkpoint.json` holds them.
    """
    result = document["result"]
    summaries = result["summaries"]

    def median(phase: str, system: str, name: str) -> float | None:
        found = summaries.get(phase, {}).get(system, {}).get(name)
        return None if found is None else float(found["median"])

    def ratio(phase: str, other: str, name: str, ours: str = "ours") -> str:
        mine, theirs = median(phase, ours, name), median(phase, other, name)
        return "-" if mine is None or theirs is None else f"{theirs / mine:.1f}x"

    def pair(other: str, name: str, ours: str = "ours") -> str:
        found = (ratio(f"{workload} save", other, name, ours) for workload in ("W1", "W2"))
        return " and ".join(found)

    def shown(value: float | None, form: str, factor: float = 1.0) -> str:
        return "-" if value is None else format(value * factor, form)

    phases = ("W2 load 4 to 2", "W2 load 4 to 8", "W2 load 4 to 1", "W2 load FSDP2 to TP")
    loads = ", ".join(ratio(phase, "dcp_s3torch", "load_seconds") for phase in phases)
    scales = {raw["workload"]: raw["scale"] for raw in result["turns"].values()}
    sizes = ", ".join(f"{workload} at {scales[workload]:g}" for workload in sorted(scales))
    rounds = sorted(
        {
            found["count"]
            for phase in summaries.values()
            for values in phase.values()
            for name, found in values.items()
            if name in ("call_seconds", "load_seconds")
        }
    )
    slow = (
        shown(median("W1 save", "ours", "slowdown"), ".2f"),
        shown(median("W1 save, paced", "ours_paced", "slowdown"), ".3f"),
    )
    plans = [
        shown(median(phase, "ours", "stage save.plan"), ".1f", 1e3)
        for phase in ("W1 save", "W4 save")
    ]
    missed = "; ".join(
        f"{row['workload']}: {row['quantity']} {row['value']:.2f} (target {row['target']})"
        for row in result["table"]
        if row["verdict"] == "missed"
    )
    what = (
        "checkpoint with Adam, W1 60 M parameters on each of 4 ranks, W2 120 M sharded over them "
        f"({sizes} of the size), MinIO on the same 2 cores; others over ours in W1 and W2: time "
        "inside `save()` of DCP to S3, of `async_save`, the same with one stager, of gathered flat "
        "slices; CPU seconds of DCP to S3; waiting save; load; W2 on 2, 8, 1 ranks, then tensor-"
        "parallel. A step beside an upload over one without: at full speed, paced. Cached plan, "
        f"W1 and 5,000 tensors ({document['label']}, idle machine, medians of "
        f"{' to '.join(map(str, sorted({rounds[0], rounds[-1]}))) if rounds else '-'})"
    )
    figures = (
        f"{pair('dcp_s3torch', 'call_seconds')}, {pair('dcp_async', 'call_seconds')}, "
        f"{pair('dcp_async_reused', 'call_seconds')}, "
        f"{ratio('W3 save', 'dcp_gather', 'call_seconds')}; "
        f"{pair('dcp_s3torch', 'cpu_seconds')}; "
        f"{pair('dcp_s3torch', 'save_seconds', 'ours_sync')}; "
        f"{ratio('W1 load', 'dcp_s3torch', 'load_seconds')}; {loads}. {slow[0]}, {slow[1]}. "
        f"{plans[0]} ms, {plans[1]} ms. Missed: {missed or 'none'}"
    )
    return f"| {what} | {figures} | {LINK} |"
