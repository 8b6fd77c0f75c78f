"""`planish verifier`: list verifiers, and try one before a run does."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from planish.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError
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
"""Rows shown of each kind."""


def run(options: argparse.Namespace, console: Console) -> int:
    """Do one of the commands, and return the exit code."""
    if options.action == "list":
        return list_verifiers(console)
    return check(options.name, options.data, options.timeout_seconds, console)


def list_verifiers(console: Console) -> int:
    """Print the built-in verifiers, what each does, and the entry points that are installed."""
    lines = {name: (find_verifier(name).__doc__ or "").splitlines()[0] for name in VERIFIERS}
    lines |= {n: value for n, value in installed_verifiers().items() if n not in VERIFIERS}
    for name, line in lines.items():
        console.print(Text(f"{name:<14}{line}"), soft_wrap=True)
    return EXIT_DONE


def check(name: str, data: str, timeout_seconds: float, console: Console) -> int:
    """Print what the contract says of a verifier, or how a built-in one judges rows.

    Args:
        name: a built-in one, `package.module:function` or an entry point.
        data: JSONL or Parquet file with rows; empty for none.
        timeout_seconds: limit of one call.
        console: where to print.

    Returns:
        The exit code.
    """
    cases = read_cases(data) if data else []
    if split_name(name)[0] in VERIFIERS:
        if not cases:
            raise ConfigError(f"`--data` must name rows to try {name!r} on, got none")
        return _check_built_in(
            name, cases, VerifierOptions(timeout_seconds=timeout_seconds), console
        )
    report = check_contract(name, cases, timeout_seconds=timeout_seconds)
    for fault in report.faults:
        console.print(Text(f"fault: {' '.join(fault.split())}"), soft_wrap=True)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}"), soft_wrap=True)
    calls = f"{report.num_calls} calls, slowest {report.slowest_seconds:.3f} s"
    if report.faults:
        console.print(Text(f"{name}: {len(report.faults)} faults in {calls}"), soft_wrap=True)
        return EXIT_FAILED
    scores = report.scores
    if scores:
        right = sum(score == 1.0 for score in scores)
        calls += f"; {len(scores)} rows: {right} right, mean {sum(scores) / len(scores):.3f}"
    console.print(Text(f"{name}: keeps the contract; {calls}"), soft_wrap=True)
    return EXIT_DONE


def _check_built_in(
    name: str, cases: Sequence[VerifierCase], options: VerifierOptions, console: Console
) -> int:
    """Print how many rows are right, wrong and not judgeable; scores that differ are faults."""
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
    for line in [*lines, *faults]:
        console.print(Text(" ".join(line.split())), soft_wrap=True)
    return EXIT_FAILED if faults else EXIT_DONE
