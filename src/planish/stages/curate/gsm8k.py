"""GSM8K files: word problems as they are, or the steps of their worked solutions.

A row has `question` and `answer`; the answer is a worked solution with `<<expression=result>>`
steps, and ends in `#### n`.

Source: GSM8K, arXiv 2110.14168, section 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from planish.stages.curate.arithmetic import ColumnExpression
from planish.stages.curate.problem import CurationLedger, Drop, Problem, keep_first
from planish.stages.curate.records import DataRow
from planish.stages.curate.tasks import column_problem
from planish.verifiers.expressions import ExpressionError, evaluate

_STEP = re.compile(r"<<([^<>]*)>>")
_FINAL = re.compile(r"####\s*(\S[^\n]*?)\s*$")
_TWO_OPERANDS = re.compile(r"([0-9]+)([-+*])([0-9]+)")
_WHOLE = re.compile(r"-?[0-9]+")


def parse_row(fields: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return question, worked solution and final answer of one row, or None."""
    question, answer = fields.get("question"), fields.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        return None
    final = _FINAL.search(answer)
    return (question, answer[: final.start()].rstrip(), final[1]) if final else None


def problem_row(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return one row as prompt, answer and trace; None if it is not in GSM8K's form."""
    if (parsed := parse_row(fields)) is None:
        return None
    question, solution, final = parsed
    number = final.replace(",", "").replace("$", "")
    trace = f"{_STEP.sub('', solution)}\nAnswer: {number}"
    return {"prompt": question, "answer": number, "trace": trace, "source": "gsm8k"}


def step_problems(
    rows: Sequence[DataRow], max_digits: int, ledger: CurationLedger
) -> list[Problem]:
    """Turn every `<<expression=result>>` of every solution into a column-arithmetic prompt.

    Each expression is kept once, in order of first occurrence. Three filters of the ledger account
    for every row and every step.
    """
    good: list[DataRow] = []
    bad: list[Drop] = []
    kept: list[Problem] = []
    drops: list[Drop] = []
    for row in rows:
        parsed = parse_row(row.fields)
        if texts := _STEP.findall(parsed[1]) if parsed else []:
            good.append(row)
        else:
            reason = "no_steps" if parsed else "not_in_gsm8k_form"
            bad.append(Drop(reason, f"{row.origin}: {row.fields!r:.200}"))
        for number, text in enumerate(texts, 1):
            origin = f"{row.origin} step {number}"
            column = read_step(text, max_digits)
            if isinstance(column, str):
                drops.append(Drop(column, f"{origin}: {text}"))
            else:
                kept.append(column_problem(column, source="gsm8k-steps", origin=origin))
    ledger.record("problems with steps", "problems", good, bad)
    ledger.record("column arithmetic", "steps", kept, drops)
    split = keep_first(kept, lambda problem: problem.question)
    return ledger.record("different expressions", "steps", *split)


def read_step(text: str, max_digits: int) -> ColumnExpression | str:
    """Read one step; return its expression or the reason code of its rejection."""
    expression, equals, result = text.replace(" ", "").rpartition("=")
    if not equals:
        return "no_equals_sign"
    if not _WHOLE.fullmatch(result):
        return "result_not_an_integer"
    match = _TWO_OPERANDS.fullmatch(expression)
    if match is None:
        return _other_form(expression)
    if max(len(match[1]), len(match[3])) > max(max_digits, 18):
        return f"operand_over_{max_digits}_digits"
    column = ColumnExpression(int(match[1]), match[2], int(match[3]))
    fault = column.fault(max_digits)
    return fault or (column if str(column.result) == result else "result_is_wrong")


def _other_form(expression: str) -> str:
    """Return the reason code of an expression that is not two whole numbers and an operator."""
    try:
        parsed = evaluate(expression)
    except ExpressionError:
        return "not_arithmetic"
    if any(operand.denominator != 1 for operand in parsed.operands) or "." in expression:
        return "operand_not_an_integer"
    if len(parsed.operators) > 1:
        return "more_than_two_operands"
    if not parsed.operators:
        return "no_operator"
    return "division" if parsed.operators[0] == "/" else "signs_or_parentheses"
