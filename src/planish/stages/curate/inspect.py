"""Inspect a data set before a run: its columns, its bad rows, and the verifiers of its answers."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from planish.base.config import nearest, parse_section
from planish.base.errors import ConfigError
from planish.base.inspection import Inspection
from planish.base.text import code_span
from planish.stages.curate import columns
from planish.stages.curate.config import SET_KEY, CurateConfig
from planish.stages.curate.filters import remove_unverifiable
from planish.stages.curate.gsm8k import step_problems
from planish.stages.curate.problem import CurationLedger, Drop, Problem, add_drop
from planish.stages.curate.records import DataRow, DataTable, check_rows, open_data
from planish.stages.curate.report import drop_warnings
from planish.stages.curate.select import is_steps, select
from planish.stages.curate.tasks import task_stream
from planish.verifiers import (
    FORMS,
    READS_FORMS,
    VerifierOptions,
    is_own,
    split_name,
    verify,
)
from planish.verifiers.judging import Judging

INSPECTED_ROWS = 5000
"""Number of first rows that are kept; of a hub data set no further row is fetched."""
READING_SECONDS = 60.0
"""Seconds to read the further rows of a file: pods of this stage live for minutes only."""
VERIFIED_ROWS = 500
TRIED_ROWS = 4
"""Rows for which each of the user's verifiers is called; the calls end with the first failure."""
SAMPLED_PROMPTS = 256
"""Prompts of each data set whose length in tokens `prepare` measures."""

READS_ALL = {
    "exact": "compares the whole response",
    "trace": "compares what follows the last `=`",
}
"""Verifiers that look for no answer form, and the text that they compare."""

_KINDS = {
    str: "text",
    bool: "true or false",
    **dict.fromkeys((int, float, Decimal), "number"),
    list: "list",
    type(None): "nothing",
}


def inspect_data(config: Mapping[str, Mapping[str, Any]], found: Inspection) -> None:
    """Open the data sets of a resolved configuration and add findings to `found`.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    settings = parse_section(CurateConfig, config.get("curate", {}), section="curate")
    try:
        settings = columns.with_function_columns(settings, config)
    except ConfigError:
        return  # `check_run` reports it
    if not settings.dataset:
        found.rows.append(("data", f"generated, {code_span(settings.task)}"))
        made = task_stream(settings, config.get("run", {}).get("seed", 0))
        found.prompts += [problem.messages for problem in itertools.islice(made, SAMPLED_PROMPTS)]
    judging = Judging.of(config.get("reward", {}))
    sources = [("data", settings), ("held-out data", settings.of_held_out())]
    opened = [
        inspect_source(label, own, judging.options, found) for label, own in sources if own.dataset
    ]
    if config.get("model", {}).get("path"):
        found.warnings += [
            f"{source.label}: word problems are replaced by their {len(source.problems)} steps "
            "(`curate.gsm8k_as`)"
            for source in opened
            if is_steps(source.config, source.rows)
        ]
    sets = [
        inspect_source(chosen.name, settings.of_set(chosen), judging.options, found, key=SET_KEY)
        for chosen in settings.evaluation_sets
    ]
    if settings.dataset and not found.faults:
        found.faults += verifier_faults(opened[0].problems, judging.options, judging.functions)
        names = columns.column_names(opened[0].rows)
        found.warnings += [
            f"reward functions take the column {column!r}, which no row has"
            f"{nearest(column, names)}; its columns are {', '.join(names)}"
            for column in settings.reward_columns
            if column not in ("prompt", *names)
        ]
        alike = [problem for source in sets for problem in source.problems]
        try_curation(settings, opened, alike, found)


@dataclass
class Opened:
    """An inspected data set."""

    config: CurateConfig
    """Settings for reading it; their `dataset` is its address."""
    label: str
    """`data`, `held-out data` or the name of an evaluation set."""
    rows: list[DataRow] = field(default_factory=list)
    unreadable: list[Drop] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    """Problems of the rows that have prompt and answer."""
    drops: list[Drop] = field(default_factory=list)
    num_later: int = 0
    """Rows of a file read beyond the first `INSPECTED_ROWS`."""
    unread_after: str = ""
    """Origin of the last row read, if the time was too short for all; else empty."""

    @property
    def is_part(self) -> bool:
        """True if the data set may have rows beyond the kept ones."""
        return self.num_later > 0 or len(self.rows) in (0, INSPECTED_ROWS)

    @property
    def num_rows(self) -> int:
        """Number of rows read."""
        return len(self.rows) + len(self.unreadable) + self.num_later

    def read(self, key: str) -> None:
        """Read the rows; of rows beyond the first `INSPECTED_ROWS`, only check the columns."""
        name, _, items = open_data(self.config, key=key, most_of_hub=INSPECTED_ROWS)
        shown: dict[str, list[Drop]] = {}
        later: list[Drop] = []
        end = 0.0
        # Bad rows are collected here, so that one message reports several.
        for item in items:
            if isinstance(item, Drop):
                add_drop(self.unreadable, item, shown)
            elif len(self.rows) < INSPECTED_ROWS:
                self.rows.append(item)
            else:
                now = time.monotonic()
                end = end or now + READING_SECONDS
                self.num_later += 1
                if isinstance(problem := columns.judge_row(self.config, item), Drop):
                    add_drop(later, problem, shown)
                if now > end:
                    self.unread_after = item.origin
                    break
        check_rows(name, self.rows, self.unreadable)
        self.problems, self.drops = columns.read_problems(self.config, self.rows)
        self.drops += later
        columns.check_types(self.config, self.drops, len(self.rows) + self.num_later)
        if is_steps(self.config, self.rows):
            digits = self.config.max_operand_digits
            self.problems = step_problems(self.rows, digits, CurationLedger())


def inspect_source(
    label: str,
    config: CurateConfig,
    options: VerifierOptions,
    found: Inspection,
    key: str = "curate.dataset",
) -> Opened:
    """Open one data set and add findings to `found`; after a fault the result has no rows.

    `config.dataset` is its address; `key` is the name of that setting in messages.
    """
    opened = Opened(config, label)
    try:
        opened.read(key)
    except ConfigError as error:
        found.faults.append(str(error))
        return Opened(config, label)
    if opened.unreadable:
        bad = [drop.example for drop in dict.fromkeys(opened.unreadable)]
        num_bad = len(opened.unreadable)
        line = f"{num_bad} of {opened.num_rows} rows can not be read: {'; '.join(bad)}"
        if config.skip_bad:
            found.warnings.append(f"{line}; `curate.skip_bad` leaves them out")
        else:
            found.faults.append(
                f"each row of {config.dataset!r} must be readable, but {line}; mend them, or leave "
                "such rows out with `curate.skip_bad = true`"
            )
    if opened.unread_after:
        found.warnings.append(
            f"the {label} was read up to {opened.unread_after}, as far as one comes in "
            f"{READING_SECONDS:g} s; `curate` reads the rest"
        )
    found.rows += data_rows(opened)
    judge_answers(opened, found)
    found.faults += verifier_faults(opened.problems[:VERIFIED_ROWS], options)
    found.warnings += form_warnings(label, opened.problems)
    unread = Counter(problem.unread for problem in opened.problems if problem.unread)
    found.warnings += [
        f"the column {column!r} of {count} of {len(opened.problems)} rows of the {label} is not "
        "shown to the policy: its choices must be a list of texts, or texts with labels, and the "
        "answer a label, the text of a choice, or an index from 0, or in all rows from 1"
        for column, count in unread.items()
    ]
    found.prompts += [p.messages for p in opened.problems[:SAMPLED_PROMPTS]]
    return opened


def try_curation(
    config: CurateConfig, opened: Sequence[Opened], sets: Sequence[Problem], found: Inspection
) -> None:
    """Select problems as the stage will, without pass rates, and add faults and warnings.

    If the data sets have further rows, a fault is only a warning. `sets` are the problems of all
    evaluation sets.
    """
    is_part = any(source.is_part for source in opened)
    # A rewriter of the user may load a model and run for minutes.
    trial = config.model_copy(update={"to_integers": config.to_integers and not config.rewriter})
    ledger, tables = CurationLedger(), [DataTable(source.rows, "") for source in opened]
    try:
        select(trial, 0, tables, ledger, sets=sets, most_judged=VERIFIED_ROWS)
    except ConfigError as error:
        (found.warnings if is_part else found.faults).append(str(error))
    of_first = f"of the first {INSPECTED_ROWS} rows, " if is_part else ""
    found.warnings += [of_first + line for line in drop_warnings(ledger)]


def judge_answers(opened: Opened, found: Inspection) -> None:
    """Add a warning if no verifier can judge some ground truths, a fault if it can judge none."""
    judged, unjudged = remove_unverifiable(opened.problems[:VERIFIED_ROWS])
    if unjudged:
        shown = [f"{drop.reason} in {code_span(drop.example[:80])}" for drop in unjudged[:3]]
        found.warnings.append(
            f"{len(unjudged)} of {len(judged) + len(unjudged)} answers of the {opened.label} can "
            f"not be judged and are left out: {'; '.join(shown)}"
        )
    if not judged:
        counts = Counter(drop.reason for drop in (*opened.drops, *unjudged))
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
        rows = opened.rows
        found.faults.append(
            f"{opened.config.dataset!r} must hold a prompt with an answer that a verifier can "
            f"judge, got none in {len(rows)} rows ({reasons}); its columns are "
            f"{', '.join(columns.column_names(rows))}: name them by `curate.dataset_map` = "
            "'prompt=...,answer=...'"
        )


def verifier_faults(
    problems: Sequence[Problem], options: VerifierOptions, functions: Sequence[str] = ()
) -> list[str]:
    """Call the user's verifiers for the first ground truths; return errors and time-outs as faults.

    The ground truth serves as response as well. Any score from 0 to 1 is correct, since only the
    verifier knows the form of a response. `functions` are called for the first rows; without
    them, each verifier is called for the first rows that name it.
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
    """Return warnings for prompts that request another answer form than their verifier expects."""
    found: Counter[tuple[str, str]] = Counter()
    for problem in problems:
        name, form = split_name(problem.verifier)
        asked = columns.form_of(problem.messages)
        if asked and (asked != (form or "line") if name in READS_FORMS else name in READS_ALL):
            found[asked, problem.verifier] += 1
    return [
        f"{count} of {len(problems)} prompts of the {label} ask for the answer as {FORMS[asked]}, "
        f"but the verifier `{name}` "
        + (READS_ALL.get(name) or f"looks for {FORMS[split_name(name)[1] or 'line']} first")
        + "; change the prompts or `curate.verifier`"
        for (asked, name), count in found.items()
    ]


def data_rows(opened: Opened) -> list[tuple[str, str]]:
    """Return (label, text) rows that describe a data set to people."""
    problems, drops, num_rows = opened.problems, opened.drops, opened.num_rows
    # A hub data set may have more rows: only this number is fetched.
    first = "the first " if num_rows == INSPECTED_ROWS else ""
    more = f"; what follows is of the first {INSPECTED_ROWS}" if num_rows > INSPECTED_ROWS else ""
    rows = [(opened.label, f"{code_span(opened.config.dataset)}, {first}{num_rows} rows{more}")]
    rows.append(("- columns", ", ".join(column_kinds(opened.rows))))
    for reason, count in Counter(drop.reason for drop in drops).items():
        those = [drop.example.partition(":")[0] for drop in drops if drop.reason == reason]
        more = ", ..." if count > 3 else ""
        rows.append((f"- {reason}", f"{count} rows ({', '.join(those[:3])}{more})"))
    judges = Counter(code_span(problem.verifier) for problem in problems)
    rows.append(("- verifiers", _counts(judges)))
    asked = Counter(
        FORMS[form] if (form := columns.form_of(p.messages)) else "not said" for p in problems
    )
    rows.append(("- answers asked for as", _counts(asked)))
    led = sum(problem.messages[0]["role"] == "system" for problem in problems)
    if led:
        rows.append(("- system message", f"in {led} of {len(problems)} prompts"))
    traced = sum(problem.trace is not None for problem in problems)
    rows.append(("- worked traces", f"in {traced} of {len(problems)} rows"))
    return rows


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def column_kinds(rows: Sequence[DataRow]) -> list[str]:
    """Return each column with the kinds of its values, and their counts if there are several.

    Example:
        >>> column_kinds([DataRow({"a": 1}, "row 1"), DataRow({"a": "x"}, "row 2")])
        ['`a` number 1, text 1']
    """
    lines = []
    for name in columns.column_names(rows):
        kinds = Counter(_KINDS.get(type(row.fields.get(name)), "table") for row in rows)
        lines.append(f"{code_span(name)} {_counts(kinds) if len(kinds) > 1 else next(iter(kinds))}")
    return lines
