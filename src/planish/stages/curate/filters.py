"""Filters that look at one problem at a time, and the split into training and held-out problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from planish.stages.curate.dedup import contents
from planish.stages.curate.problem import Drop, Problem, drop, fraction_of, sift, words
from planish.verifiers import answer_fault, verify

# Some verifiers start a process for each call, and `prepare` checks each answer twice.
_answer_fault = lru_cache(maxsize=1 << 12)(answer_fault)


def remove_unverifiable(
    problems: Sequence[Problem], most: int | None = None
) -> tuple[list[Problem], list[Drop]]:
    """Drop problems whose ground truth no verifier can judge; only the first `most` are judged."""

    def judge(problem: Problem) -> Drop | None:
        fault = _answer_fault(problem.verifier, problem.answer)
        return None if fault is None else drop(problem, fault)

    kept, drops = sift(problems[:most], judge)
    return [*kept, *(problems[most:] if most is not None else ())], drops


def has_good_trace(problem: Problem) -> bool:
    """Return whether the problem's own verifier accepts its worked trace."""
    if problem.trace is None:
        return False
    verdict = verify(problem.verifier, problem.trace, problem.answer, extra=problem.extra)
    return verdict.accuracy == 1.0


def remove_long(problems: Sequence[Problem], max_chars: int) -> tuple[list[Problem], list[Drop]]:
    """Drop prompts without any text and prompts of more than `max_chars` characters."""

    def judge(problem: Problem) -> Drop | None:
        if not problem.question.strip():
            return drop(problem, "prompt_empty")
        length = sum(len(message["content"]) for message in problem.messages)
        if length > max_chars:
            told = f"{problem.origin}: {length} characters"
            return Drop("prompt_too_long", told, problem.source)
        return None

    return sift(problems, judge)


def remove_outside_band(
    problems: Sequence[Problem], low: float, high: float
) -> tuple[list[Problem], list[Drop]]:
    """Drop problems whose measured pass rate lies outside [low, high]."""

    def judge(problem: Problem) -> Drop | None:
        if math.isnan(problem.pass_rate) or low <= problem.pass_rate <= high:
            return None
        reason = "too_hard" if problem.pass_rate < low else "too_easy"
        told = f"{problem.origin}: pass rate {problem.pass_rate:.3f}"
        return Drop(reason, told, problem.source)

    return sift(problems, judge)


def is_held_out(problem: Problem, fraction: float) -> bool:
    """Return whether a problem is held out, which depends on this problem alone."""
    return fraction_of(problem.split_key) < fraction


def split(
    problems: Sequence[Problem], fraction: float, most: int
) -> tuple[list[Problem], list[Problem]]:
    """Return (training, held-out) problems in order; all of a family go to one side.

    A problem in different frames is one family, if it has enough words outside of them. The hash of
    the family decides: about `fraction` of the problems are held out, at most `most`, but always
    at least one family.
    """
    found = contents([words(problem.question) for problem in problems])
    places = [
        fraction_of(problem.family or content.family or problem.key)
        for problem, content in zip(problems, found, strict=True)
    ]
    ranked = sorted(places)
    limit = min([fraction, *ranked[most : most + 1]])
    if ranked:
        limit = max(limit, math.nextafter(ranked[0], 1.0))
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem, place in zip(problems, places, strict=True):
        sides[place < limit].append(problem)
    return sides


def choose(
    problems: Sequence[Problem], count: int, reason: str
) -> tuple[list[Problem], list[Drop]]:
    """Keep `count` problems chosen by hash, in their own order; drop the others for `reason`."""
    ranked = sorted(range(len(problems)), key=lambda i: (fraction_of(problems[i].key), i))
    surplus = {id(problems[i]) for i in ranked[count:]}
    return sift(problems, lambda p: drop(p, reason) if id(p) in surplus else None)
