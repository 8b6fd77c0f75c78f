"""The rows of docs/results.md on checkpoints, put together from a result."""

from __future__ import annotations

from typing import Any

LINK = "[checkpoint.json](../tests/benchmarks/results/checkpoint.json)"


def result_rows(document: dict[str, Any]) -> str:
    """Return the rows as Markdown; "-" stands for what was not measured.

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
        return " and ".join(ratio(f"{w} save", other, name, ours) for w in ("W1", "W2"))

    def shown(value: float | None, form: str, factor: float = 1.0) -> str:
        return "-" if value is None else format(value * factor, form)

    rounds = [
        found["count"]
        for phase in summaries.values()
        for values in phase.values()
        for name, found in values.items()
        if name in ("call_seconds", "load_seconds")
    ]
    medians = f"medians of {min(rounds)} to {max(rounds)}" if rounds else "medians"
    scales = {raw["workload"]: raw["scale"] for raw in result["turns"].values()}
    sizes = ", ".join(f"{workload} at {scales[workload]:g}" for workload in sorted(scales))
    loads = [
        ratio(phase, "dcp_s3torch", "load_seconds")
        for phase in ("W2 load 4 to 2", "W2 load 4 to 8", "W2 load 4 to 1", "W2 load FSDP2 to TP")
    ]
    slow = (
        shown(median("W1 save", "ours", "slowdown"), ".2f"),
        shown(median("W1 save, paced", "ours_paced", "slowdown"), ".3f"),
    )
    plans = [
        shown(median(phase, "ours", "stage save.plan"), ".1f", 1e3)
        for phase in ("W1 save", "W4 save")
    ]
    missed: dict[str, list[str]] = {}
    for row in result["table"]:
        if row["verdict"] == "missed":
            what = f"missed: {row['quantity']}, target {row['target']}"
            missed.setdefault(what, []).append(f"{row['workload']} {row['value']:.2f}")
    rows = [
        (
            f"time inside `save()`, DCP to S3 over ours, W1 and W2 ({sizes} of the size; "
            f"{document['label']}, idle machine, {medians})",
            pair("dcp_s3torch", "call_seconds"),
        ),
        (
            "the same, `async_save` of DCP; `async_save` with one stager kept",
            f"{pair('dcp_async', 'call_seconds')}; {pair('dcp_async_reused', 'call_seconds')}",
        ),
        (
            "the same, optimizer state as flat slices that DCP gathers first (W3)",
            ratio("W3 save", "dcp_gather", "call_seconds"),
        ),
        ("CPU seconds of a save, DCP to S3 over ours", pair("dcp_s3torch", "cpu_seconds")),
        (
            "a save that waits for its commit, DCP to S3 over ours",
            pair("dcp_s3torch", "save_seconds", "ours_sync"),
        ),
        (
            "load, DCP over ours: W1; W2 saved by 4 ranks on 2, 8 and 1 ranks; FSDP2 to TP",
            f"{ratio('W1 load', 'dcp_s3torch', 'load_seconds')}; "
            f"{', '.join(loads[:3])}; {loads[3]}",
        ),
        (
            "a step beside an upload over a step without: at full speed; paced",
            f"{slow[0]}; {slow[1]}",
        ),
        ("plan of a save like the one before, W1; 5,000 tensors", f"{plans[0]} ms; {plans[1]} ms"),
        *((what, ", ".join(values)) for what, values in missed.items()),
    ]
    return "\n".join(f"| {what} | {figure} | {LINK} |" for what, figure in rows)
