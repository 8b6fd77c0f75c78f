"""From sources to the three sets: the order of the filters, each accounted for in a ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from planish.base.errors import ConfigError
from planish.records.prompts import prompt_id
from planish.stages.curate.columns import compose, read_problems
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.dedup import (
    remove_contaminated,
    remove_duplicates,
    remove_near_duplicates,
)
from planish.stages.curate.filters import (
    choose,
    has_good_trace,
    is_held_out,
    remove_long,
    remove_outside_band,
    remove_unverifiable,
    split,
)
from planish.stages.curate.gsm8k import is_gsm8k, step_problems
from planish.stages.curate.integers import load_rewriter, rewrite_problems
from planish.stages.curate.problem import CurationLedger, Drop, Problem, drop
from planish.stages.curate.records import DataTable
from planish.stages.curate.tasks import task_stream, with_mistake

MAX_DRAWS_FACTOR = 200
"""A generated task that repeats itself so often has no more different prompts."""

PassRates = Callable[[Sequence[Problem]], list[Problem]]
"""Measures pass rates: problems in, the same problems with `pass_rate` out."""


@dataclass(frozen=True)
class Curated:
    """Everything that curation hands on."""

    train: list[Problem]
    """Training problems."""
    evaluation: list[Problem]
    """Held-out problems."""
    traced: list[Problem]
    """Training problems whose worked traces teach the cold start."""
    ledger: CurationLedger
    """Counts of every filter."""
    sets: dict[str, list[Problem]] = field(default_factory=dict)
    """Problems of each evaluation set."""


def curate(
    config: CurateConfig,
    seed: int,
    tables: Sequence[DataTable],
    ledger: CurationLedger,
    pass_rates: PassRates | None = None,
    *,
    sets: Mapping[str, list[Problem]] | None = None,
) -> Curated:
    """Select problems, and the worked traces among them.

    Args and errors are those of `select`, but for `sets`, which are by name here.
    """
    sets = dict(sets or {})
    alike = [problem for problems in sets.values() for problem in problems]
    train, evaluation = select(config, seed, tables, ledger, pass_rates, sets=alike)
    traced = _traced(config, train, ledger)
    if config.trace_mistakes and (not tables or _is_steps(config, tables[0])):
        traced = [with_mistake(problem, config.trace_mistakes, seed) for problem in traced]
    return Curated(train, evaluation, traced, ledger, sets)


def set_problems(
    config: CurateConfig, tables: Mapping[str, DataTable], ledger: CurationLedger
) -> dict[str, list[Problem]]:
    """Return all problems of each evaluation set, but for those that nothing can judge.

    Scores are compared with published ones, so that nothing else is left out or rewritten.

    Args:
        config: names the sets.
        tables: rows of each.
        ledger: gets the filters of each.

    Raises:
        ConfigError: nothing is left of a set.
    """
    found: dict[str, list[Problem]] = {}
    for chosen in config.evaluation_sets:
        name, rows = chosen.name, tables[chosen.name].rows
        read, drops = read_problems(config.of_set(chosen), rows)
        ledger.record(f"{name}, readable problems", "rows", len(rows), len(read), drops)
        judged, drops = remove_unverifiable(read)
        ledger.record(f"{name}, verifiable answer", "prompts", len(read), len(judged), drops)
        # Prompts are told apart by their ids.
        first: dict[str, Problem] = {}
        drops = [
            drop(problem, "duplicate")
            for problem in judged
            if first.setdefault(prompt_id(problem.messages, problem.answer), problem) is not problem
        ]
        found[name] = list(first.values())
        ledger.record(f"{name}, equal prompts", "prompts", len(judged), len(first), drops)
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
        config: what to do.
        seed: seed of generated tasks; data sets are treated alike under every seed.
        tables: rows of `dataset` and of `evaluation_dataset`, as far as they are configured.
        ledger: already holds what reading the rows dropped.
        pass_rates: measures pass rates, when a reference policy is configured.
        sets: problems of all evaluation sets; what is like them is not trained on.
        most_judged: ground truths of each table that are judged, for a first look; None for all.

    Raises:
        ConfigError: nothing is left to train or to evaluate on; names the counts per filter.
    """
    if not tables:
        train, evaluation = _generate(config, seed, ledger)
    else:
        pool = _prepare(config, tables[0], ledger, "", most_judged)
        if len(tables) > 1:
            train = pool
            evaluation = _prepare(config, tables[1], ledger, "held-out ", most_judged)
        else:
            train, evaluation = split(pool, config.evaluation_fraction, config.evaluation_size)
            drops = [drop(problem, "held_out") for problem in evaluation]
            ledger.record(
                "split, training part", "prompts", len(pool), len(train), drops, is_choice=True
            )
    # Generated problems are made of few words: only equal ones leak.
    ngram = config.contamination_ngram if tables else 0
    train, drops = remove_contaminated(train, [*evaluation, *sets], ngram=ngram)
    ledger.record("contamination", "prompts", len(train) + len(drops), len(train), drops)
    chosen = choose(evaluation, config.evaluation_size)
    names = {id(problem) for problem in chosen}
    drops = [drop(p, "over_evaluation_size") for p in evaluation if id(p) not in names]
    ledger.record("evaluation size", "prompts", len(evaluation), len(chosen), drops, is_choice=True)
    if pass_rates is not None:
        train, drops = remove_outside_band(
            pass_rates(train), config.pass_rate_min, config.pass_rate_max
        )
        ledger.record("pass rate", "prompts", len(train) + len(drops), len(train), drops)
    for name, problems in (("training", train), ("evaluation", chosen)):
        if not problems:
            raise ConfigError(
                f"curation must leave at least one {name} prompt, got none: {ledger.counts()}; "
                "change the filters in [curate] or its `dataset`"
            )
    return train, chosen


def _traced(config: CurateConfig, train: list[Problem], ledger: CurationLedger) -> list[Problem]:
    good = [problem for problem in train if has_good_trace(problem)]
    count = len(good) if config.num_traces is None else config.num_traces
    chosen = choose(good, count)
    names = {id(problem) for problem in chosen}
    usable = {id(problem) for problem in good}
    drops = []
    for problem in train:
        if id(problem) in names:
            continue
        if id(problem) in usable:
            drops.append(drop(problem, "over_num_traces"))
        else:
            drops.append(drop(problem, "no_trace" if problem.trace is None else "wrong_trace"))
    ledger.record(
        "traces for the cold start", "prompts", len(train), len(chosen), drops, is_choice=True
    )
    return chosen


def _generate(
    config: CurateConfig, seed: int, ledger: CurationLedger
) -> tuple[list[Problem], list[Problem]]:
    """Draw different problems until both sides are full or the task has no more."""
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    wanted = (config.num_prompts, config.evaluation_size)
    seen: set[str] = set()
    drops: list[Drop] = []
    draws = 0
    patience = MAX_DRAWS_FACTOR * sum(wanted)
    for problem in task_stream(config, seed):
        if draws >= patience or all(len(s) >= w for s, w in zip(sides, wanted, strict=True)):
            break
        draws += 1
        side = int(is_held_out(problem, config.evaluation_fraction))
        if problem.key in seen:
            drops.append(drop(problem, "duplicate"))
        elif len(sides[side]) >= wanted[side]:
            drops.append(drop(problem, "side_is_full"))
        else:
            seen.add(problem.key)
            sides[side].append(problem)
    ledger.record(f"generated {config.task}", "draws", draws, len(seen), drops, is_choice=True)
    return sides


def _is_steps(config: CurateConfig, table: DataTable) -> bool:
    """Return whether the problems are arithmetic made of GSM8K's steps."""
    return config.gsm8k_as == "steps" and is_gsm8k(table.rows)


def _prepare(
    config: CurateConfig,
    table: DataTable,
    ledger: CurationLedger,
    label: str,
    most_judged: int | None,
) -> list[Problem]:
    """Turn rows into problems and apply the filters that look at one set."""
    rows = table.rows
    if _is_steps(config, table):
        problems = step_problems(rows, config.max_operand_digits, ledger)
    else:
        problems, drops = read_problems(config, rows)
        ledger.record(f"{label}readable problems", "rows", len(rows), len(problems), drops)

    def apply(name: str, result: tuple[list[Problem], list[Drop]], unit: str = "prompts") -> None:
        nonlocal problems
        problems, drops = result
        ledger.record(label + name, unit, len(problems) + len(drops), len(problems), drops)

    if config.to_integers:
        rewriter = load_rewriter(config.rewriter)
        apply(
            "answers as integers",
            rewrite_problems(problems, lambda q, v: compose(config, q, v), rewriter),
        )
    apply("verifiable answer", remove_unverifiable(problems, most_judged))
    apply("prompt length", remove_long(problems, config.max_prompt_chars))
    apply("duplicates", remove_duplicates(problems))
    apply(
        "near duplicates",
        remove_near_duplicates(
            problems,
            threshold=config.near_duplicate_threshold,
            min_words=config.near_duplicate_min_words,
            workers=config.workers,
        ),
    )
    return problems
