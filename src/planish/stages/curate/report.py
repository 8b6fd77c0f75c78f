"""The curation report: where every row went, as Markdown and as scalars."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from planish.base.text import code_cell, code_span, printable
from planish.stages.curate.problem import CurationLedger
from planish.stages.curate.select import Curated

EXAMPLE_CHARS = 120


def curation_metrics(curated: Curated) -> dict[str, float]:
    """Return the sizes of the sets, and the rows in and out of every filter."""
    metrics = {
        "num_train": float(len(curated.train)),
        "num_evaluation": float(len(curated.evaluation)),
        "num_traces": float(len(curated.traced)),
    }
    for item in curated.ledger.filters:
        name = re.sub(r"[^a-z0-9]+", "_", item.name.lower()).strip("_")
        metrics[f"in_{name}"] = float(item.num_in)
        metrics[f"out_{name}"] = float(item.num_out)
        if item.num_dropped and not item.is_choice:
            metrics[f"dropped_{name}"] = float(item.num_dropped)
    if curated.traced:
        lengths = [len(problem.trace or "") for problem in curated.traced]
        metrics["trace_chars_median"] = float(np.percentile(lengths, 50))
        metrics["trace_chars_max"] = float(max(lengths))
    rates = [p.pass_rate for p in curated.train if not math.isnan(p.pass_rate)]
    if rates:
        metrics["pass_rate_mean"] = float(np.mean(rates))
    return metrics


def drop_warnings(ledger: CurationLedger) -> list[str]:
    """Return a Markdown line, with up to three examples, for each large loss (`Filter.much`)."""
    lines = []
    for item in ledger.filters:
        examples = [(reason, text) for reason, own in item.examples.items() for text in own]
        shown = "; ".join(f"{reason} in {_code(text)}" for reason, text in examples[:3])
        for source, (dropped, num_in) in item.much().items():
            whose = f" of the source {_code(source)}" if source else ""
            lines.append(
                f"the filter `{item.name}` drops {dropped} of {num_in} {item.unit}{whose} "
                f"({dropped / num_in:.0%}), such as {shown}"
            )
    return lines


def curation_report(curated: Curated, source_sha256: str) -> str:
    """Return the report as Markdown; it shows text of the data as code, never as markup."""
    source = ", ".join(sorted({problem.source for problem in curated.train}))
    lines = [
        "# Curation report",
        "",
        f"Source: {code_span(source)}" + (f", sha256 `{source_sha256}`" if source_sha256 else ""),
        "",
        f"**{len(curated.train)}** training prompts, **{len(curated.evaluation)}** held out, "
        + "".join(f"**{len(own)}** in `{name}`, " for name, own in curated.sets.items())
        + f"**{len(curated.traced)}** worked traces.",
        "",
        *(f"* {line}" for line in drop_warnings(curated.ledger)),
        "",
        "## Rows in and out",
        "",
        "| filter | unit | in | out | dropped |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {f.name} | {f.unit} | {f.num_in} | {f.num_out} | {f.num_dropped} |"
        for f in curated.ledger.filters
    ]
    lines += ["", "Each row of a filter went on or is counted under one reason below.", ""]
    for item in curated.ledger.filters:
        if item.reasons:
            lines += [f"### {item.name}", ""]
            lines += ["| reason | dropped | examples |", "| --- | ---: | --- |"]
            for reason, count in item.reasons.items():
                shown = ", ".join(_code(example) for example in item.examples[reason])
                lines.append(f"| {code_cell(reason)} | {count} | {shown} |")
            lines.append("")
    lines += ["## What was kept", ""]
    lines += _lengths("prompt characters", [len(p.question) for p in curated.train])
    lines += _lengths("trace characters", [len(p.trace or "") for p in curated.traced])
    lines += ["", "| source | training | held out |", "| --- | ---: | ---: |"]
    train, held = (Counter(p.source for p in s) for s in (curated.train, curated.evaluation))
    lines += [f"| {_code(s)} | {train[s]} | {held[s]} |" for s in sorted({*train, *held})]
    lines += ["", "| prompt | answer | trace |", "| --- | --- | --- |"]
    lines += [
        f"| {_code(p.question)} | {_code(p.answer)} | {_code(p.trace or '')} |"
        for p in [*curated.traced, *curated.train][:5]
    ]
    return "\n".join(lines) + "\n"


def _lengths(name: str, lengths: Sequence[int]) -> list[str]:
    if not lengths:
        return []
    low, middle, high, most = np.percentile(lengths, [10, 50, 90, 100], method="lower")
    return [f"* {name}: p10 {low}, median {middle}, p90 {high}, longest {most}"]


def _code(text: str) -> str:
    """Return untrusted text as one line of code, without markup for a table or a page."""
    return code_cell(printable(" ".join(text.split()), limit=EXAMPLE_CHARS))
