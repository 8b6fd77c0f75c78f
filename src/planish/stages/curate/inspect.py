"""Look at a data set before a run: its columns, its bad rows, and what can judge its answers."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from planish.base.config import nearest, parse_section
from planish.base.errors import ConfigError
from planish.base.inspection import Inspection
from planish.base.text import code_span
from planish.stages.curate.columns import (
    check_types,
    column_names,
    form_of,
    judge_row,
    read_problems,
    with_function_columns,
)
from planish.stages.curate.config import SET_KEY, CurateConfig, parse_map
from planish.stages.curate.filters import remove_unverifiable
from planish.stages.curate.gsm8k import is_gsm8k, step_problems
from planish.stages.curate.problem import CurationLedger, Drop, Problem, add_drop
from planish.stages.curate.records import DataRow, DataTable, read_data
from planish.stages.curate.report import drop_warnings
from planish.stages.curate.select import select
from planish.stages.curate.tasks import task_stream
from planish.verifiers import (
    FORMS,
    READS_FORMS,
    VerifierOptions,
    is_own,
    split_name,
    verify,
)

INSPECTED_ROWS = 5000
"""Rows that are kept, and all that is looked at of a data set of the hub."""
READING_SECONDS = 60.0
"""Time to read the further rows of a file, one by one: pods of this stage live for minutes."""
VERIFIED_ROWS = 500
"""Of them, rows whose answers are judged."""
TRIED_ROWS = 4
"""Rows on which each verifier of the user is called; one that hangs costs a single time limit."""
SAMPLED_PROMPTS = 256
"""Prompts handed on, to be measured in tokens."""

READS_ALL = {
    "exact": "compares the whole response",
    "trace": "compares what follows the last `=`",
}
"""Verifiers that look for no form of an answer, and what they do."""

_KINDS = {
    str: "text",
    bool: "true or false",
    **dict.fromkeys((int, float, Decimal), "number"),
    list: "list",
}


def inspect_data(config: Mapping[str, Mapping[str, Any]], found: Inspection) -> None:
    """Open the configured data sets and add what they hold.

    Args:
        config: resolved tables.
        found: gets rows, faults and warnings.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    settings = parse_section(CurateConfig, config.get("curate", {}), section="curate")
    try:
        settings = with_function_columns(settings, config)
    except ConfigError:
        return  # `check_run` tells it
    if not settings.dataset:
        found.rows.append(("data", f"generated, {code_span(settings.task)}"))
        made = task_stream(settings, config.get("run", {}).get("seed", 0))
        found.prompts += [problem.messages for problem in itertools.islice(made, SAMPLED_PROMPTS)]
    seconds = config.get("reward", {}).get("verifier_timeout_seconds")
    options = VerifierOptions() if seconds is None else VerifierOptions(timeout_seconds=seconds)
    sources = [("data", settings), ("held-out data", settings.of_held_out())]
    opened = [inspect_source(label, own, options, found) for label, own in sources if own.dataset]
    sets = [
        inspect_source(chosen.name, settings.of_set(chosen), options, found, key=SET_KEY)
        for chosen in settings.evaluation_sets
    ]
    if settings.dataset and not found.faults:
        functions = [table["name"] for table in config.get("reward", {}).get("functions", ())]
        found.faults += verifier_faults(opened[0].problems, options, functions)
        columns = column_names(opened[0].table.rows)
        found.warnings += [
            f"reward functions take the column {column!r}, which no row has"
            f"{nearest(column, columns)}; its columns are {', '.join(columns)}"
            for column in settings.reward_columns
            if column not in ("prompt", *columns)
        ]
        alike = [problem for source in sets for problem in source.problems]
        is_part = any(source.is_part for source in opened)
        try_curation(settings, [s.table for s in opened], alike, found, is_part=is_part)


@dataclass(frozen=True)
class Opened:
    """A data set that was looked at."""

    table: DataTable
    """Its first rows."""
    problems: list[Problem]
    """Those with prompt and answer."""
    is_part: bool
    """There may be further rows."""


def inspect_source(
    label: str,
    settings: CurateConfig,
    options: VerifierOptions,
    found: Inspection,
    key: str = "curate.dataset",
) -> Opened:
    """Open one data set and add what it holds.

    Args:
        label: what it is called.
        settings: name it as `dataset`.
        options: of the verifiers of the user.
        found: gets rows, faults and warnings.
        key: setting that names it, for messages.

    Returns:
        Without rows where there is a fault.
    """
    dataset, ledger, later = settings.dataset, CurationLedger(), LaterRows(settings)
    try:
        # Bad rows are gathered here, so that several are told at once.
        table = read_data(
            settings,
            skip_bad=True,
            ledger=ledger,
            key=key,
            streaming=True,
            max_rows=INSPECTED_ROWS,
            beyond=later.judge,
        )
        problems, drops = read_problems(settings, table.rows)
        drops += later.drops
        check_types(settings, drops, len(table.rows) + later.num_rows)
        if is_gsm8k(table.rows) and settings.gsm8k_as == "steps":
            problems = step_problems(table.rows, settings.max_operand_digits, CurationLedger())
    except ConfigError as error:
        found.faults.append(str(error))
        return Opened(DataTable([], ""), [], is_part=True)
    bad = [example for kind in ledger.filters[0].examples.values() for example in kind]
    num_bad = ledger.filters[0].num_in - ledger.filters[0].num_out
    num_rows = len(table.rows) + later.num_rows + num_bad
    if num_bad:
        line = f"{num_bad} of {num_rows} rows can not be read: {'; '.join(bad)}"
        if settings.skip_bad:
            found.warnings.append(f"{line}; `curate.skip_bad` leaves them out")
        else:
            found.faults.append(
                f"each row of {dataset!r} must be readable, but {line}; mend them, or leave "
                "such rows out with `curate.skip_bad = true`"
            )
    if later.unread_after:
        found.warnings.append(
            f"the {label} was read up to {later.unread_after}, as far as one comes in "
            f"{READING_SECONDS:g} s; `curate` reads the rest"
        )
    found.rows += data_rows(label, dataset, table, problems, drops, num_rows)
    faults, warnings = answer_faults(label, dataset, table, problems, drops)
    found.faults += faults + verifier_faults(problems[:VERIFIED_ROWS], options)
    found.warnings += warnings + form_warnings(label, problems)
    found.prompts += [p.messages for p in problems[:SAMPLED_PROMPTS]]
    is_part = later.num_rows > 0 or len(table.rows) == INSPECTED_ROWS
    return Opened(table, problems, is_part)


def try_curation(
    config: CurateConfig,
    tables: Sequence[DataTable],
    sets: Sequence[Problem],
    found: Inspection,
    *,
    is_part: bool,
) -> None:
    """Select problems as the stage will, without pass rates, and add what people must know.

    Args:
        config: what the stage will do.
        tables: as of `select`.
        sets: as of `select`.
        found: gets faults and warnings.
        is_part: there are rows beyond those of the tables; then nothing is sure.
    """
    # A rewriter of the user may take a model and minutes.
    trial = config.model_copy(update={"to_integers": config.to_integers and not config.rewriter})
    ledger = CurationLedger()
    try:
        select(trial, 0, tables, ledger, sets=sets, most_judged=VERIFIED_ROWS)
    except ConfigError as error:
        (found.warnings if is_part else found.faults).append(str(error))
    of_first = f"of the first {INSPECTED_ROWS} rows, " if is_part else ""
    found.warnings += [of_first + line for line in drop_warnings(ledger)]


class LaterRows:
    """The rows of a file beyond those that are kept, each judged by its form alone."""

    def __init__(self, config: CurateConfig) -> None:
        self._config = config
        self._columns = parse_map(config.dataset_map)
        self._shown: dict[str, list[Drop]] = {}
        self._end = 0.0
        self.num_rows = 0
        self.drops: list[Drop] = []
        """Rows without prompt or answer, or with one of another type."""
        self.unread_after = ""
        """The last row that was read where the time was too short for all."""

    def judge(self, row: DataRow) -> bool:
        """Look at one row; return whether there is time for another."""
        now = time.monotonic()
        self._end = self._end or now + READING_SECONDS
        self.num_rows += 1
        problem = judge_row(self._config, self._columns, row)
        if isinstance(problem, Drop):
            add_drop(self.drops, problem, self._shown)
        if now > self._end:
            self.unread_after = row.origin
        return now <= self._end


def answer_faults(
    label: str,
    dataset: str,
    table: DataTable,
    problems: Sequence[Problem],
    drops: Sequence[Drop],
) -> tuple[list[str], list[str]]:
    """Return faults and warnings of the first ground truths; arguments as of `data_rows`."""
    judged, unjudged = remove_unverifiable(problems[:VERIFIED_ROWS])
    warnings = []
    if unjudged:
        warnings.append(
            f"{len(unjudged)} of {len(judged) + len(unjudged)} answers of the {label} can not "
            f"be judged and are left out: {'; '.join(_short(drop) for drop in unjudged[:3])}"
        )
    if judged:
        return [], warnings
    counts = Counter(drop.reason for drop in (*drops, *unjudged))
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    return [
        f"{dataset!r} must hold a prompt with an answer that a verifier can judge, got "
        f"none in {len(table.rows)} rows ({reasons}); "
        f"its columns are {', '.join(column_names(table.rows))}: name them by "
        "`curate.dataset_map` = 'prompt=...,answer=...'"
    ], warnings


def verifier_faults(
    problems: Sequence[Problem], options: VerifierOptions, functions: Sequence[str] = ()
) -> list[str]:
    """Call the verifiers of the user on the first ground truths; return what they must not do.

    A ground truth stands for a response too. Any number from 0 to 1 is right: what a response
    must look like is the verifier's own affair.

    Args:
        problems: rows with a ground truth.
        options: as those of the reward stage.
        functions: verifiers to call on any rows; empty: those that the rows name.
    """
    faults = []
    for name in filter(is_own, dict.fromkeys(functions or (p.verifier for p in problems))):
        rows = (p for p in problems if functions or p.verifier == name)
        for problem in itertools.islice(rows, TRIED_ROWS):
            verdict = verify(name, problem.answer, problem.answer, options, problem.extra)
            if verdict.error or verdict.timeout:
                faults.append(
                    f"the verifier {name!r} must give a number from 0 to 1 for any response, got: "
                    f"{' '.join(verdict.reason.split())}, called with the answer of "
                    f"{problem.origin} as response and as answer; mend it: `planish verifier check "
                    f"{name}` tries more"
                )
                break
    return faults


def form_warnings(label: str, problems: Sequence[Problem]) -> list[str]:
    """Return where prompts ask for an answer in another form than their verifier looks for first.

    Args:
        label: as of `data_rows`.
        problems: those of the data set.
    """
    found: Counter[tuple[str, str]] = Counter()
    for problem in problems:
        name, form = split_name(problem.verifier)
        asked = form_of(problem.messages)
        if asked and (asked != (form or "line") if name in READS_FORMS else name in READS_ALL):
            found[asked, problem.verifier] += 1
    return [
        f"{count} of {len(problems)} prompts of the {label} ask for the answer as {FORMS[asked]}, "
        f"but the verifier `{name}` "
        + (READS_ALL.get(name) or f"looks for {FORMS[split_name(name)[1] or 'line']} first")
        + "; change the prompts or `curate.verifier`"
        for (asked, name), count in found.items()
    ]


def _short(drop: Drop) -> str:
    return f"{drop.reason} in {code_span(drop.example[:80])}"


def data_rows(
    label: str,
    dataset: str,
    table: DataTable,
    problems: Sequence[Problem],
    drops: Sequence[Drop],
    num_rows: int,
) -> list[tuple[str, str]]:
    """Return what a data set holds, for people.

    Args:
        label: `data`, `held-out data` or the name of an evaluation set.
        dataset: its address.
        table: rows that could be read.
        problems: those of them with prompt and answer.
        drops: those without.
        num_rows: all that were looked at.
    """
    # Of the hub exactly so many are asked for.
    first = "the first " if num_rows == INSPECTED_ROWS else ""
    more = f"; what follows is of the first {INSPECTED_ROWS}" if num_rows > INSPECTED_ROWS else ""
    rows = [(label, f"{code_span(dataset)}, {first}{num_rows} rows{more}")]
    rows.append(("- columns", ", ".join(column_kinds(table.rows))))
    for reason in dict.fromkeys(drop.reason for drop in drops):
        those = [drop.example.partition(":")[0] for drop in drops if drop.reason == reason]
        more = ", ..." if len(those) > 3 else ""
        rows.append((f"- {reason}", f"{len(those)} rows ({', '.join(those[:3])}{more})"))
    judges = Counter(problem.verifier for problem in problems)
    rows.append(("- verifiers", ", ".join(f"{code_span(k)} {v}" for k, v in judges.most_common())))
    asked = Counter(FORMS[form] if (form := form_of(p.messages)) else "not said" for p in problems)
    rows.append(("- answers asked for as", ", ".join(f"{k} {v}" for k, v in asked.most_common())))
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
