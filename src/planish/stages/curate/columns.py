"""Make a problem from the columns of a row, or name the fault of the row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from planish.base.config import nearest
from planish.base.errors import ConfigError
from planish.stages.curate.choices import with_choices
from planish.stages.curate.config import CurateConfig, parse_map
from planish.stages.curate.gsm8k import problem_row
from planish.stages.curate.problem import Drop, Messages, Problem
from planish.stages.curate.records import DataRow, as_answer, field_of
from planish.verifiers import READS_FORMS, answer_fault, asked_form, columns_of, split_name
from planish.verifiers.judging import Judging
from planish.verifiers.math_answer import last_boxed

COLUMNS: dict[str, tuple[str, ...]] = {
    "prompt": ("messages", "prompt", "question", "problem", "instruction", "input"),
    "answer": (
        "answer",
        "ground_truth",
        "reward_model.ground_truth",
        "final_answer",
        "target",
        "answerKey",
    ),
    "system": ("system",),
    "verifier": ("verifier",),
    "trace": ("trace", "response"),
    "source": ("source", "data_source"),
}
"""Parts of a row and the usual names of their columns, in order of preference. A conversation
that ends with its answer is the last choice. A row without an answer takes the last
`\\boxed{}` of `solution`."""

WRONG_TYPE = ("prompt_is_no_text", "system_is_no_text", "answer_is_no_text", "unknown_verifier")
"""Reason codes of bad rows; rows without prompt or answer are dropped and counted instead."""


@with_config(ConfigDict(strict=True))
class Message(TypedDict):
    """One turn of a conversation; the reader ignores further keys."""

    role: Literal["system", "user", "assistant"]
    content: str


_CONVERSATION = TypeAdapter(list[Message])


def read_problems(
    config: CurateConfig, rows: Sequence[DataRow]
) -> tuple[list[Problem], list[Drop]]:
    """Find prompt, answer, verifier and trace in the columns of each row.

    Raises:
        ConfigError: `dataset_map` names a column that no row has, or `check_types` raises it.
    """
    for name, column in parse_map(config.dataset_map).items():
        if rows and all(field_of(row.fields, column) is None for row in rows):
            seen = column_names(rows)
            raise ConfigError(
                f"`curate.dataset_map` must name columns of the data set, got {name}={column!r}"
                f"{nearest(column, seen)}; its columns are {', '.join(seen)}"
            )
    # Indices of choices count from 0, or from 1 if only then every index names a choice.
    for first in (0, 1, 0):
        judged = [judge_row(config, row, first) for row in rows]
        if not any(getattr(each, "unread", "") for each in judged):
            break
    drops = [each for each in judged if isinstance(each, Drop)]
    check_types(config, drops, len(rows))
    return [each for each in judged if isinstance(each, Problem)], drops


def judge_row(config: CurateConfig, row: DataRow, first: int = 0) -> Problem | Drop:
    """Return the problem of a row, or a Drop with its fault; choices count from `first`."""
    problem = read_problem(config, problem_row(row.fields) or row.fields, row.origin, first)
    if isinstance(problem, Problem):
        return replace(problem, extra=reward_columns(config, problem, row.fields))
    return Drop(problem, f"{row.origin}: {json.dumps(row.fields, default=str):.200}")


def with_function_columns(config: CurateConfig, tables: Mapping[str, Any]) -> CurateConfig:
    """Return the settings with all columns that `reward.functions` take as parameters."""
    functions = Judging.of(tables.get("reward", {})).functions
    named = {column for name in functions for column in columns_of(name)}
    return config.model_copy(update={"reward_columns": sorted({*config.reward_columns, *named})})


def reward_columns(config: CurateConfig, problem: Problem, fields: Mapping[str, Any]) -> str:
    """Return the columns of a row for reward functions as a JSON object; "" if they take none.

    The column `prompt` is the text of the messages that the policy sees.
    """
    wanted = {*config.reward_columns, *columns_of(problem.verifier)}
    if not wanted:
        return ""
    asked = "\n\n".join(message["content"] for message in problem.messages)
    every = {**fields, "prompt": asked}
    return json.dumps({name: every[name] for name in sorted(wanted & every.keys())}, default=str)


def check_types(config: CurateConfig, drops: Sequence[Drop], num_rows: int) -> None:
    """Refuse rows with a value of the wrong type (`WRONG_TYPE`), unless `skip_bad` is set.

    Raises:
        ConfigError: there are such rows; the message shows the first three.
    """
    wrong = [drop for drop in drops if drop.reason in WRONG_TYPE]
    if wrong and not config.skip_bad:
        first = [each.example.replace(": ", f" ({each.reason}): ", 1) for each in wrong[:3]]
        raise ConfigError(
            "each row of the data set must hold text, or messages, as its prompt and text or a "
            f"number as its answer, got {len(wrong)} of {num_rows} rows with another type: "
            f"{'; '.join(first)}: mend them, or leave such rows out with "
            "`curate.skip_bad = true`"
        )


def column_names(rows: Iterable[DataRow]) -> list[str]:
    """Return the columns of some rows in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row.fields))


def read_problem(
    config: CurateConfig, fields: dict[str, Any], origin: str, first: int
) -> Problem | str:
    """Return the problem of one row, or the reason code of its fault."""
    columns = parse_map(config.dataset_map)

    def look(name: str) -> Any:
        usual = (columns[name],) if name in columns else COLUMNS[name]
        found = [value for c in usual if (value := field_of(fields, c)) is not None]
        return min(found, key=is_answered, default=None)

    asked, given, system = look("prompt"), look("answer"), look("system")
    if asked is None:
        return "no_prompt"
    if given is None and "answer" not in columns and isinstance(fields.get("solution"), str):
        given = last_boxed(fields["solution"])
    items = given if isinstance(given, list) else [given]
    if len(items) > 1:
        return "several_answers"
    given = next(iter(items), None)
    if given is None:
        return "no_answer"
    answer = as_answer(given)
    if answer is None:
        return "answer_is_no_text"
    if system is not None and not isinstance(system, str):
        return "system_is_no_text"
    verifier = look("verifier") or config.verifier
    if not isinstance(verifier, str):
        return "unknown_verifier"
    read = None if isinstance(asked, str) else read_messages(asked)
    text = asked.strip() if isinstance(asked, str) else read[-1]["content"] if read else None
    if text is None:
        return "prompt_is_no_text"
    text, answer, unread = with_choices(fields, text, given, answer, first)
    verifier, answer = judged_by(config, verifier, answer)
    if read is None:
        question, messages = text, compose(config, text, verifier)
    else:
        messages = [*read[:-1], {"role": "user", "content": text}]
        question = "\n".join(m["content"] for m in messages if m["role"] != "system")
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    verifier = in_asked_form(verifier, messages, fields.get("data_source"))
    trace, source = look("trace"), look("source")
    return Problem(
        question=question,
        messages=messages,
        answer=answer,
        verifier=verifier,
        source=source if isinstance(source, str) and source else "dataset",
        trace=trace if isinstance(trace, str) else None,
        origin=origin,
        unread=unread,
    )


def judged_by(config: CurateConfig, verifier: str, answer: str) -> tuple[str, str]:
    """Return the verifier of a row (never `auto`), and the ground truth in the verifier's form."""
    if verifier == "auto":
        fault = answer_fault("integer", answer)
        verifier = "integer" if fault != "answer_not_an_integer" else "math"
    if split_name(verifier)[0] in READS_FORMS:
        # These verifiers search a response line by line.
        answer = " ".join(answer.split())
    if verifier == "regex" and config.answer_pattern:
        answer = config.answer_pattern.replace("{answer}", re.escape(answer))
    return verifier, answer


def is_answered(value: Any) -> bool:
    """Return whether a value is a conversation whose last turn is of the assistant."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def in_asked_form(verifier: str, messages: Messages, data_source: Any) -> str:
    """Return `verifier/form` for the answer form that the prompt requests, or just `verifier`."""
    form = form_of(messages, data_source)
    is_usual = verifier not in READS_FORMS or form in (None, "line")
    return verifier if is_usual else f"{verifier}/{form}"


def form_of(messages: Messages, data_source: Any = "") -> str | None:
    """Return the answer form that a prompt requests, as `asked_form` does; None for none."""
    text = "\n".join(message["content"] for message in messages)
    return asked_form(text, data_source if isinstance(data_source, str) else "")


def read_messages(value: Any) -> Messages | None:
    """Return untrusted data as {role, content} messages without a last answer; None if invalid."""
    try:
        read = _CONVERSATION.validate_python(value[:-1] if is_answered(value) else value)
    except ValidationError:
        return None
    messages: Messages = [{"role": each["role"], "content": each["content"]} for each in read]
    is_led = any(each["role"] == "system" for each in messages[1:])
    return messages if messages and messages[-1]["role"] == "user" and not is_led else None


def compose(config: CurateConfig, question: str, verifier: str) -> Messages:
    """Return the messages of a plain-text problem, with the instructions its verifier needs."""
    if split_name(verifier)[0] in READS_FORMS:
        question = f"{config.prompt_prefix}{question}{config.prompt_suffix}"
    return [{"role": "user", "content": question}]
