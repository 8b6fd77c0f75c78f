"""The command `planish verifier`: lists verifiers, and tries one before a run uses it."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from planish.base.errors import EXIT_FAILED, ConfigError, Ended
from planish.verifiers import (
    VERIFIERS,
    VerifierOptions,
    answer_fault,
    check_verifier,
    find_verifier,
    split_name,
    verify,
)
from planish.verifiers.contract import VerifierCase, check_contract, read_cases
from planish.verifiers.own import installed_verifiers

MAX_EXAMPLES = 3
GRADERS = {"math-verify": "planish.show.verifier:math_verify"}
"""Name of another project's grader to the function that calls it."""


def run(options: argparse.Namespace, progress: Callable[[str, int, int], None]) -> Iterator[str]:
    """Yield the verifiers or the result of a check.

    Raises:
        Ended: the check found faults.
    """
    if options.action == "list":
        yield from list_verifiers()
    elif options.action == "compare":
        yield from compare(options.name, options.other, options.data, options.timeout_seconds)
    else:
        yield from check(options.name, options.data, options.timeout_seconds)


def list_verifiers() -> Iterator[str]:
    """Yield the built-in verifiers with their descriptions, and the installed entry points."""
    lines = {name: (find_verifier(name).__doc__ or "").splitlines()[0] for name in VERIFIERS}
    lines |= {n: value for n, value in installed_verifiers().items() if n not in VERIFIERS}
    for name, line in lines.items():
        yield f"{name:<14}{line}"


def check(name: str, data: str, timeout_seconds: float) -> Iterator[str]:
    """Yield the result of the contract, or a built-in verifier's verdicts on the rows of `data`.

    A call takes at most `timeout_seconds`.

    Raises:
        Ended: there are faults.
    """
    cases = read_cases(data) if data else []
    if split_name(name)[0] in VERIFIERS:
        if not cases:
            raise ConfigError(f"`--data` must name rows to try {name!r} on, got none")
        yield from _check_built_in(name, cases, VerifierOptions(timeout_seconds=timeout_seconds))
        return
    report = check_contract(name, cases, timeout_seconds=timeout_seconds)
    yield from (f"fault: {' '.join(fault.split())}" for fault in report.faults)
    yield from (f"warning: {warning}" for warning in report.warnings)
    calls = f"{report.num_calls} calls, slowest {report.slowest_seconds:.3f} s"
    if report.faults:
        yield f"{name}: {len(report.faults)} faults in {calls}"
        raise Ended(EXIT_FAILED)
    scores = report.scores
    if scores:
        right = sum(score == 1.0 for score in scores)
        calls += f"; {len(scores)} rows: {right} right, mean {sum(scores) / len(scores):.3f}"
    yield f"{name}: keeps the contract; {calls}"


def math_verify(response: str, answer: str) -> float:
    """Return the verdict of math-verify alone, without our rules; runs in a child process."""
    import math_verify as library

    truth, said = (library.parse(text, parsing_timeout=None) for text in (answer, response))
    return float(library.verify(truth, said, timeout_seconds=None))


def compare(name: str, other: str, data: str, timeout_seconds: float) -> Iterator[str]:
    """Yield the rows of `data` that two verifiers judge differently, and their number.

    `other` is any verifier, or `math-verify`, which stands for its rules without ours.
    """
    names = name, GRADERS.get(other, other)
    for each in names:
        check_verifier(each)
    options = VerifierOptions(timeout_seconds=timeout_seconds)
    cases, num_differing = read_cases(data), 0
    for number, case in enumerate(cases, 1):
        scores = []
        for each in names:
            verdict = verify(each, case.text, case.answer, options, case.extra)
            scores.append(verdict.accuracy if verdict.score is None else verdict.score)
        if abs(scores[0] - scores[1]) > 1e-6:
            num_differing += 1
            row = f"answer {case.answer[:40]!a}, response {case.text[-80:]!a}"
            yield f"row {number}: {name} {scores[0]:g}, {other} {scores[1]:g}: {row}"
    yield f"{name} and {other} differ on {num_differing} of {len(cases)} rows"


def _check_built_in(
    name: str, cases: Sequence[VerifierCase], options: VerifierOptions
) -> Iterator[str]:
    """Yield the numbers of rows that are right, wrong and not judgeable; differing scores are
    faults.
    """
    check_verifier(name)
    kinds: dict[str, list[str]] = defaultdict(list)
    faults = []
    for case in cases:
        fault = answer_fault(name, case.answer)
        verdict = verify(name, case.text, case.answer, options)
        reason = fault or (verdict.reason or "the verifier failed" if verdict.error else "")
        score = verdict.accuracy if verdict.score is None else verdict.score
        kind = "not judgeable" if reason else "right" if verdict.accuracy else "wrong"
        seen = f"saw {verdict.extracted[:40]!a}" if verdict.extracted else "saw no answer"
        row = f"answer {case.answer[:40]!a}, response {case.text[-40:]!a}"
        kinds[kind].append(f"{row}: {reason or seen}")
        if case.score is not None and abs(score - case.score) > 1e-6:
            faults.append(f"fault: the score must be {case.score:g}, got {score:g}: {row}")
    counts = ", ".join(f"{len(kinds[kind])} {kind}" for kind in ("right", "wrong", "not judgeable"))
    lines = [f"{name}: {len(cases)} rows: {counts}"]
    lines += [f"{kind}: {row}" for kind in kinds for row in kinds[kind][:MAX_EXAMPLES]]
    yield from (" ".join(line.split()) for line in [*lines, *faults])
    if faults:
        raise Ended(EXIT_FAILED)
