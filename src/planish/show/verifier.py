"""`planish verifier check`: try a verifier of one's own before a run does."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from planish.base.errors import EXIT_DONE, EXIT_FAILED
from planish.verifiers.contract import check_contract, read_cases


def check(name: str, data: str, timeout_seconds: float, console: Console) -> int:
    """Print what the contract says of a verifier, and return the exit code.

    Args:
        name: `package.module:function` or an entry point.
        data: JSONL file with rows; empty for none.
        timeout_seconds: limit of one call.
        console: where to print.

    Raises:
        ConfigError: no such verifier, or rows that cannot be read.
    """
    cases = read_cases(data) if data else []
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
