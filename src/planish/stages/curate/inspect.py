"""Look at a data set before a run: its columns, its bad rows, and what can judge its answers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from planish.base.config import parse_section
from planish.base.errors import ConfigError
from planish.base.inspection import Inspection
from planish.base.text import code_span
from planish.stages.curate.columns import column_names, read_problems
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.filters import remove_unverifiable
from planish.stages.curate.gsm8k import is_gsm8k, step_problems
from planish.stages.curate.problem import CurationLedger, Drop, Problem
from planish.stages.curate.records import DataRow, DataTable, read_hub, read_table
from planish.verifiers import VerifierOptions, is_own, verify

INSPECTED_ROWS = 5000
"""Rows looked at: minutes of a large data set would be too long for a first stage."""
VERIFIED_ROWS = 500
"""Of them, rows whose answers are judged."""
TRIED_ROWS = 4
"""Rows on which each verifier of the user is called; one that hangs costs a single time limit."""
SAMPLED_PROMPTS = 256
"""Prompts handed on, to be measured in tokens."""

_KINDS = {str: "text", bool: "true or false", int: "number", float: "number", list: "list"}


def inspect_data(config: Mapping[str, Mapping[str, Any]], found: Inspection) -> None:
    """Open the configured data sets and add what they hold.

    Args:
        config: resolved tables.
        found: gets rows, faults and warnings.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    settings = parse_section(CurateConfig, config.get("curate", {}), section="curate")
    if not settings.dataset:
        found.rows.append(("data", f"generated, {code_span(settings.task)}"))
        return
    seconds = config.get("reward", {}).get("verifier_timeout_seconds")
    options = VerifierOptions() if seconds is None else VerifierOptions(timeout_seconds=seconds)
    hub = partial(
        read_hub,
        config=settings.hub_config,
        split=settings.hub_split,
        revision=settings.hub_revision,
        streaming=True,
    )
    for label, dataset in (
        ("data", settings.dataset),
        ("held-out data", settings.evaluation_dataset),
    ):
        if not dataset:
            continue
        ledger = CurationLedger()
        try:
            # Bad rows are gathered here, so that several are told at once.
            table = read_table(
                dataset, skip_bad=True, ledger=ledger, hub=hub, max_rows=INSPECTED_ROWS
            )
            problems, drops = read_problems(settings, table.rows)
            if is_gsm8k(table.rows) and settings.gsm8k_as == "steps":
                problems = step_problems(table.rows, settings.max_operand_digits, CurationLedger())
        except ConfigError as error:
            found.faults.append(str(error))
            continue
        bad = [example for kind in ledger.filters[0].examples.values() for example in kind]
        num_bad = ledger.filters[0].num_in - ledger.filters[0].num_out
        if num_bad:
            line = f"{num_bad} of {ledger.filters[0].num_in} rows can not be read: {'; '.join(bad)}"
            if settings.skip_bad:
                found.warnings.append(f"{line}; `curate.skip_bad` leaves them out")
            else:
                found.faults.append(
                    f"each row of {dataset!r} must be readable, but {line}; mend them, or leave "
                    "such rows out with `curate.skip_bad = true`"
                )
        found.rows += data_rows(label, dataset, table, problems, drops, num_bad)
        judged, unjudged = remove_unverifiable(problems[:VERIFIED_ROWS])
        if unjudged:
            found.warnings.append(
                f"{len(unjudged)} of {len(judged) + len(unjudged)} answers of the {label} can not "
                f"be judged and are left out: {'; '.join(_short(drop) for drop in unjudged[:3])}"
            )
        if not judged:
            counts = Counter(drop.reason for drop in (*drops, *unjudged))
            reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
            found.faults.append(
                f"{dataset!r} must hold a prompt with an answer that a verifier can judge, got "
                f"none in {len(table.rows)} rows ({reasons}); "
                f"its columns are {', '.join(column_names(table.rows))}: name them by "
                "`curate.dataset_map` = 'prompt=...,answer=...'"
            )
        found.faults += verifier_faults(judged, options)
        found.prompts += [p.messages for p in problems[:SAMPLED_PROMPTS]]


def verifier_faults(problems: Sequence[Problem], options: VerifierOptions) -> list[str]:
    """Call the verifiers of the user on the first ground truths; return what they must not do.

    A ground truth stands for a response too. Any number from 0 to 1 is right: what a response
    must look like is the verifier's own affair.

    Args:
        problems: rows that can be judged.
        options: as those of the reward stage.
    """
    faults = []
    for name in dict.fromkeys(p.verifier for p in problems if is_own(p.verifier)):
        rows = (p for p in problems if p.verifier == name)
        for problem in itertools.islice(rows, TRIED_ROWS):
            verdict = verify(name, problem.answer, problem.answer, options)
            if verdict.error:
                faults.append(
                    f"the verifier {name!r} must give a number from 0 to 1 for any response, got: "
                    f"{' '.join(verdict.reason.split())}, called with the answer of "
                    f"{problem.origin} as response and as answer; mend it: `planish verifier check "
                    f"{name}` tries more"
                )
                break
    return faults


def _short(drop: Drop) -> str:
    return f"{drop.reason} in {code_span(drop.example[:80])}"


def data_rows(
    label: str,
    dataset: str,
    table: DataTable,
    problems: Sequence[Problem],
    drops: Sequence[Drop],
    num_bad: int,
) -> list[tuple[str, str]]:
    """Return what a data set holds, for people.

    Args:
        label: `data` or `held-out data`.
        dataset: its address.
        table: rows that could be read.
        problems: those of them with prompt and answer.
        drops: those without.
        num_bad: rows that could not be read.
    """
    count = len(table.rows) + num_bad
    first = "the first " if count >= INSPECTED_ROWS else ""
    rows = [(label, f"{code_span(dataset)}, {first}{count} rows")]
    rows.append(("- columns", ", ".join(column_kinds(table.rows))))
    for reason in dict.fromkeys(drop.reason for drop in drops):
        those = [drop.example.partition(":")[0] for drop in drops if drop.reason == reason]
        more = ", ..." if len(those) > 3 else ""
        rows.append((f"- {reason}", f"{len(those)} rows ({', '.join(those[:3])}{more})"))
    judges = Counter(problem.verifier for problem in problems)
    rows.append(("- verifiers", ", ".join(f"{code_span(k)} {v}" for k, v in judges.most_common())))
    led = sum(problem.messages[0]["role"] == "system" for problem in problems)
    if led:
        rows.append(("- system message", f"in {led} of {len(problems)} prompts"))
    traced = sum(problem.trace is not None for problem in problems)
    rows.append(("- worked traces", f"in {traced} of {len(problems)} rows"))
    return rows


def column_kinds(rows: Sequence[DataRow]) -> list[str]:
    """Return each column with the kinds of its values; more than one kind tells how often each.

    Example:
        >>> column_kinds([DataRow({"a": 1}, "row 1"), DataRow({"a": "x"}, "row 2")])
        ['`a` number 1, text 1']
    """
    lines = []
    for name in column_names(rows):
        kinds = Counter(
            "nothing" if row.fields.get(name) is None
            else _KINDS.get(type(row.fields[name]), "table")
            for row in rows
        )  # fmt: skip
        told = [f"{kind} {count}" for kind, count in kinds.most_common()]
        lines.append(f"{code_span(name)} {', '.join(told) if len(told) > 1 else next(iter(kinds))}")
    return lines
