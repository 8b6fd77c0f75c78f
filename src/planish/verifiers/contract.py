"""The contract of a user's verifier, tested on hostile texts and on the user's rows.

For any text, the verifier must return a number from 0 to 1 in time, and the same number each time.
For the user's rows, it must return the expected scores. No check can tell whether the scores are
worth training on.

Use the contract in a test of your package::

    from planish.verifiers.contract import check_contract, read_cases

    def test_the_contract():
        report = check_contract("my_rewards.code:reward", read_cases("cases.jsonl"))
        assert report.faults == ()
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError, RecordError, VerifierFailure
from planish.verifiers.own import OwnVerifier, installed_verifiers, is_reference
from planish.verifiers.verdict import VerifierOptions

HOSTILE_TEXTS = (
    "",
    " \t\r\n",
    "\x00",
    "\ud800 \udfff",
    "\u202e42\u202c \u0664\u0662",
    "nan",
    "-inf",
    "1e999",
    "Answer: ",
    "Answer: 1\nAnswer: 2",
    "\\boxed{" * 2000,
    "[" * 20000,
    "{" * 20000 + "}" * 20000,
    "```python\nwhile True: pass\n```",
    '```json\n{"a": NaN}\n```',
    "__import__('os')._exit(0)",
    "%s%n{0.__class__}",
    "9" * 5000,
    "a" * 100_000 + "!",
    "x" * 1_000_000,
)
"""Responses that a policy may write, or an attacker who wants to break a verifier."""
MAX_FAULTS = 10
"""Number of faults after which the check ends."""
MAX_ANSWERS = 4
"""Most ground truths that are combined with every hostile text."""


@dataclass(frozen=True)
class VerifierCase:
    """One row to try.

    Example:
        >>> VerifierCase(answer="42", response="Answer: 42", score=1.0).score
        1.0
    """

    answer: str
    """Ground truth, as in the data set."""
    response: str | None = None
    """The response; None: the ground truth serves as the response."""
    score: float | None = None
    """Expected score, compared to 1e-6; None: any number from 0 to 1."""
    extra: str = ""
    """Columns of the row as a JSON object."""

    @property
    def text(self) -> str:
        """The response that is judged."""
        return self.answer if self.response is None else self.response


@dataclass(frozen=True)
class ContractReport:
    """Result of the check."""

    num_calls: int
    """Number of calls of the function."""
    slowest_seconds: float
    """Duration of the slowest call in seconds, with the transfer to the child process and back."""
    scores: tuple[float, ...]
    """Scores of the rows, in order; empty if a fault ended the check earlier."""
    faults: tuple[str, ...]
    """Broken rules of the contract, one line each."""
    warnings: tuple[str, ...]
    """Allowed mistakes, e.g. that the function prints or forks."""


def read_cases(path: str | Path) -> list[VerifierCase]:
    """Read rows from a JSONL or Parquet file.

    The ground truth of a row is in `answer`, else in `ground_truth`, else in
    `reward_model.ground_truth` (files of verl). A row may have `response` and `score`.

    Raises:
        ConfigError: there is no such file, or rows are malformed; the message names the first ones.
    """
    cases, faults = [], []
    for place, row in _rows(Path(path)):
        if isinstance(row, ValueError):
            faults.append(f"{place}: {row}")
            continue
        answer = _answer_of(row) if isinstance(row, dict) else None
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            answer = str(answer)
        response, score = (row.get("response"), row.get("score")) if answer is not None else (0, 0)
        is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
        if (
            not isinstance(answer, str)
            or not isinstance(response, (str, type(None)))
            or not (score is None or (is_number and 0 <= score <= 1))
        ):
            faults.append(
                f"{place}: `answer` must be text, `response` text and `score` a number from "
                f"0 to 1, got {json.dumps(row, default=str)[:80]}"
            )
            continue
        wanted = None if score is None else float(score)
        cases.append(VerifierCase(answer, response, wanted, json.dumps(row, default=str)))
    if faults or not cases:
        raise ConfigError(
            f"{str(path)!r} must hold rows: " + ("; ".join(faults[:3]) or "it is empty")
        )
    return cases


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield place and content of each row of a file; the content is a `ValueError` for a line that
    is not JSON.
    """
    if path.suffix == ".parquet":
        from planish.records.parquet import read_batches

        try:
            batches = read_batches(path, name=str(path))
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        except (OSError, RecordError) as error:
            raise ConfigError(f"rows must be a Parquet file, got {str(path)!r}: {error}") from None
        return
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"rows must be a JSONL file in UTF-8 or a Parquet file, got {str(path)!r}: {error}"
        ) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            row: Any
            try:
                row = json.loads(line)
            except ValueError as error:
                row = error
            yield f"line {number}", row


def _answer_of(row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model")
    inner = model.get("ground_truth") if isinstance(model, dict) else None
    return row.get("answer", row.get("ground_truth", inner))


def check_contract(
    name: str, cases: Sequence[VerifierCase] = (), *, timeout_seconds: float = 10.0
) -> ContractReport:
    """Test a user's verifier on hostile texts and on rows.

    Two processes with different hash seeds run `cases`, in opposite orders. `timeout_seconds`
    limits a call, like `reward.verifier_timeout_seconds`.

    Returns:
        The report; `faults` is empty if the verifier keeps the contract.

    Raises:
        ConfigError: the name does not mean a callable function.
    """
    if not 0 < timeout_seconds <= 600:
        raise ConfigError(f"`timeout_seconds` must be above 0, at most 600, got {timeout_seconds}")
    installed = installed_verifiers()
    if not is_reference(name) and name not in installed:
        raise ConfigError(
            "a verifier of your own must read `package.module:function` or be an entry point of "
            f"the group 'planish.verifiers' (here: {sorted(installed)}), got {name!r}"
        )
    answers = {case.answer: case.extra for case in cases} or {"42": ""}
    rows = [(case.text, case.answer, case.extra) for case in cases]
    judged = list(answers.items())[:MAX_ANSWERS]
    hostile = [(text, *answer) for answer in judged for text in HOSTILE_TEXTS]
    options = VerifierOptions(timeout_seconds=timeout_seconds)
    faults: list[str] = []
    warnings: list[str] = []
    seconds: list[float] = []

    def run(tried: Iterable[tuple[str, str, str]], seed: int) -> list[float]:
        """Return the score of each call in a new process; NaN for a failed call."""
        verifier = OwnVerifier(installed.get(name, name), environment={"PYTHONHASHSEED": str(seed)})
        scores = []
        try:
            verifier.start()
            for response, answer, extra in tried:
                start = time.monotonic()
                verdict = verifier(response, answer, options, extra)
                seconds.append(time.monotonic() - start)
                scores.append(float("nan") if verdict.score is None else verdict.score)
                if verdict.error or verdict.timeout:
                    shown = f"{verdict.reason}, on the response {response[:40]!a}"
                    faults.append(f"{shown} and the answer {answer[:40]!a}")
                if len(faults) >= MAX_FAULTS:
                    break
        except VerifierFailure as error:
            faults.append(str(error))
        finally:
            warnings.extend(w for w in verifier.warnings if w not in warnings)
            verifier.close()
        return scores

    run(hostile, seed=1)
    scores = [] if faults else run(rows, seed=1)
    if not faults:
        again = run(reversed(rows), seed=2)[::-1]
        for case, first, second in zip(cases, scores, again, strict=False):
            if first != second:
                faults.append(
                    f"the same row must get the same score in every process, got {first:g} and "
                    f"{second:g} for the answer {case.answer[:40]!a}"
                )
            if case.score is not None and abs(first - case.score) > 1e-6:
                faults.append(
                    f"the score must be {case.score:g} as the row says, got {first:g} for the "
                    f"response {str(case.response)[:40]!a} and the answer {case.answer[:40]!a}"
                )
    return ContractReport(
        num_calls=len(seconds),
        slowest_seconds=max(seconds, default=0.0),
        scores=tuple(scores),
        faults=tuple(faults[:MAX_FAULTS]),
        warnings=tuple(warnings),
    )
