"""Select the three sets from the sources: the order of the filters, with a ledger of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from planish.base.errors import ConfigError
from planish.records.prompts import prompt_id
from planish.stages.curate import dedup, filters
from planish.stages.curate.columns import compose, read_problems
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.gsm8k import parse_row, step_problems
from planish.stages.curate.problem import CurationLedger, Drop, Problem, drop, keep_first, sift
from planish.stages.curate.records import DataRow, DataTable
from planish.stages.curate.tasks import task_stream, with_mistake

MAX_DRAWS_FACTOR = 200
"""Draws per wanted prompt after which a generated task counts as exhausted."""

PassRates = Callable[[Sequence[Problem]], list[Problem]]
"""Function that returns the given problems with `pass_rate` set."""


@dataclass(frozen=True)
class Curated:
    """Result of curation."""

    train: list[Problem]
    evaluation: list[Problem]
    traced: list[Problem]
    """Training problems with worked traces for the cold start."""
    ledger: CurationLedger
    sets: dict[str, list[Problem]] = field(default_factory=dict)


def curate(
    config: CurateConfig,
    seed: int,
    tables: Sequence[DataTable],
    ledger: CurationLedger,
    pass_rates: PassRates | None = None,
    *,
    sets: Mapping[str, list[Problem]] | None = None,
) -> Curated:
    """Select problems as `select` does, and the training problems with worked traces."""
    sets = dict(sets or {})
    alike = [problem for problems in sets.values() for problem in problems]
    train, evaluation = select(config, seed, tables, ledger, pass_rates, sets=alike)
    traced = _traced(config, train, ledger)
    if config.trace_mistakes and (not tables or is_steps(config, tables[0].rows)):
        traced = [with_mistake(problem, config.trace_mistakes, seed) for problem in traced]
    return Curated(train, evaluation, traced, ledger, sets)


def set_problems(
    config: CurateConfig, tables: Mapping[str, DataTable], ledger: CurationLedger
) -> dict[str, list[Problem]]:
    """Return all problems of each evaluation set except those that no verifier can judge.

    No other problem is dropped or rewritten, so that scores are comparable with published ones.

    Raises:
        ConfigError: no problem of a set is left.
    """
    found: dict[str, list[Problem]] = {}
    for chosen in config.evaluation_sets:
        name, rows = chosen.name, tables[chosen.name].rows
        read = read_problems(config.of_set(chosen), rows)
        problems = ledger.record(f"{name}, readable problems", "rows", *read)
        judged = filters.remove_unverifiable(problems)
        problems = ledger.record(f"{name}, verifiable answer", "prompts", *judged)
        # Prompts are distinguished by their ids.
        different = keep_first(problems, lambda p: prompt_id(p.messages, p.answer))
        found[name] = ledger.record(f"{name}, equal prompts", "prompts", *different)
        if not found[name]:
            raise ConfigError(
                f"the evaluation set {name!r} must hold a prompt with an answer that a verifier "
                f"can judge, got none: {ledger.counts()}; check its columns and its `verifier`"
            )
    return found


def select(
    config: CurateConfig,
    seed: int,
    tables: Sequence[DataTable],
    ledger: CurationLedger,
    pass_rates: PassRates | None = None,
    *,
    sets: Sequence[Problem] = (),
    most_judged: int | None = None,
) -> tuple[list[Problem], list[Problem]]:
    """Select (training, held-out) problems.

    Args:
        config: settings of the stage.
        seed: seed of generated tasks; it does not change the selection from data sets.
        tables: rows of `dataset` and of `evaluation_dataset`, if configured.
        ledger: ledger that already has the rows dropped by the readers.
        pass_rates: function that measures pass rates; None without a reference policy.
        sets: problems of all evaluation sets; training problems similar to them are dropped.
        most_judged: number of ground truths of each table to judge; None for all.

    Raises:
        ConfigError: no training or no held-out problem is left; names the counts per filter.
    """
    if not tables:
        train, evaluation = _generate(config, seed, ledger)
    else:
        train = _prepare(config, tables[0], ledger, "", most_judged)
        if len(tables) > 1:
            evaluation = _prepare(config, tables[1], ledger, "held-out ", most_judged)
        else:
            train, evaluation = filters.split(
                train, config.evaluation_fraction, config.evaluation_size
            )
            drops = [drop(problem, "held_out") for problem in evaluation]
            ledger.record("split, training part", "prompts", train, drops, is_choice=True)
    # Generated problems share most of their words, so only equal ones are leaks.
    ngram = config.contamination_ngram if tables else 0
    clean = dedup.remove_contaminated(train, [*evaluation, *sets], ngram=ngram)
    train = ledger.record("contamination", "prompts", *clean)
    chosen = filters.choose(evaluation, config.evaluation_size, "over_evaluation_size")
    evaluation = ledger.record("evaluation size", "prompts", *chosen, is_choice=True)
    if pass_rates is not None:
        band = filters.remove_outside_band(
            pass_rates(train), config.pass_rate_min, config.pass_rate_max
        )
        train = ledger.record("pass rate", "prompts", *band)
    for name, problems in (("training", train), ("evaluation", evaluation)):
        if not problems:
            raise ConfigError(
                f"curation must leave at least one {name} prompt, got none: {ledger.counts()}; "
                "change the filters in [curate] or its `dataset`"
            )
    return train, evaluation


def _traced(config: CurateConfig, train: list[Problem], ledger: CurationLedger) -> list[Problem]:
    def judge(problem: Problem) -> Drop | None:
        if filters.has_good_trace(problem):
            return None
        return drop(problem, "no_trace" if problem.trace is None else "wrong_trace")

    good, bad = sift(train, judge)
    count = len(good) if config.num_traces is None else config.num_traces
    chosen, surplus = filters.choose(good, count, "over_num_traces")
    drops = [*bad, *surplus]
    return ledger.record("traces for the cold start", "prompts", chosen, drops, is_choice=True)


def _generate(
    config: CurateConfig, seed: int, ledger: CurationLedger
) -> tuple[list[Problem], list[Problem]]:
    """Draw different problems until both sides are full or the task is exhausted."""
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    wanted = (config.num_prompts, config.evaluation_size)
    seen: set[str] = set()
    drops: list[Drop] = []
    patience = MAX_DRAWS_FACTOR * sum(wanted)
    for draws, problem in enumerate(task_stream(config, seed)):
        if draws >= patience or all(len(s) >= w for s, w in zip(sides, wanted, strict=True)):
            break
        side = int(filters.is_held_out(problem, config.evaluation_fraction))
        if problem.key in seen:
            drops.append(drop(problem, "duplicate"))
        elif len(sides[side]) >= wanted[side]:
            drops.append(drop(problem, "side_is_full"))
        else:
            seen.add(problem.key)
            sides[side].append(problem)
    both = [*sides[0], *sides[1]]
    ledger.record(f"generated {config.task}", "draws", both, drops, is_choice=True)
    return sides


def is_steps(config: CurateConfig, rows: Sequence[DataRow]) -> bool:
    """Return whether the problems are the arithmetic steps of GSM8K's solutions."""
    return config.gsm8k_as == "steps" and any(parse_row(row.fields) for row in rows[:1])


def _prepare(
    config: CurateConfig,
    table: DataTable,
    ledger: CurationLedger,
    label: str,
    most_judged: int | None,
) -> list[Problem]:
    if is_steps(config, table.rows):
        problems = step_problems(table.rows, config.max_operand_digits, ledger)
    else:
        read = read_problems(config, table.rows)
        problems = ledger.record(f"{label}readable problems", "rows", *read)

    def record(name: str, result: tuple[list[Problem], list[Drop]]) -> list[Problem]:
        return ledger.record(label + name, "prompts", *result)

    if config.to_integers:
        # Imported only here: the import of sympy is slow.
        from planish.stages.curate.integers import load_rewriter, rewrite_problems

        rewriter = load_rewriter(config.rewriter)
        rewritten = rewrite_problems(problems, lambda q, v: compose(config, q, v), rewriter)
        problems = record("answers as integers", rewritten)
    problems = record("verifiable answer", filters.remove_unverifiable(problems, most_judged))
    problems = record("prompt length", filters.remove_long(problems, config.max_prompt_chars))
    problems = record("duplicates", dedup.remove_duplicates(problems))
    near = dedup.remove_near_duplicates(
        problems,
        threshold=config.near_duplicate_threshold,
        workers=config.workers,
    )
    return record("near duplicates", near)
