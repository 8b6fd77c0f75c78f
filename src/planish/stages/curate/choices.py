"""Multiple-choice problems: the choices of a row are written into its problem, with labels."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from planish.stages.curate.records import as_answer

CHOICES = ("choices", "options")
"""Columns that may contain the choices, in order of preference."""

_LABEL = r"(?<!\w)(\w+)[).:\]*]+\s*"


def with_choices(
    fields: Mapping[str, Any], asked: str, given: Any, answer: str, first: int = 0
) -> tuple[str, str, str]:
    r"""Return the text of a problem with its choices, the label of the right choice, and "".

    If the choices cannot be read, return `asked` and `answer` unchanged, and the column's name.
    `given` is the answer in the row: a label, the text of a choice, or an index counted from
    `first`. `answer` is `given` as text.

    Example:
        >>> with_choices({"choices": ["red", "blue"]}, "Which?", 1, "1")
        ('Which?\n(A) red\n(B) blue', 'B', '')
    """
    column = next((name for name in CHOICES if fields.get(name)), "")
    choices = read_choices(fields.get(column))
    # If the text already lists the choices, it gives their labels.
    patterns = [rf"{_LABEL}{re.escape(each)}(?!\w)" for each in choices.values()]
    labels = [match[1] for pattern in patterns if (match := re.search(pattern, asked))]
    text = asked
    if len({*labels}) < len(choices):
        labels = list(choices)
        text += "".join(f"\n({label}) {each}" for label, each in choices.items())
    named = {str(number): label for number, label in enumerate(labels, first)}
    if isinstance(given, str):
        # Digits given as text may be the text of a choice instead of an index.
        named |= dict(zip(choices.values(), labels, strict=True))
    named |= {label.casefold(): label for label in labels}
    if found := named.get(answer.strip("().:[] ").casefold()) or named.get(answer):
        return text, found, ""
    return asked, answer, column


def read_choices(value: Any) -> dict[str, str]:
    """Return the choices of a row, label to text; empty if `value` has no known form.

    Example:
        >>> read_choices(["red", "blue"]), read_choices({"text": ["red"], "label": ["1"]})
        ({'A': 'red', 'B': 'blue'}, {'1': 'red'})
    """
    labels: Any = list(string.ascii_uppercase)
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        value = {str(each.get("label")): each.get("text") for each in value}
    texts = value
    if isinstance(value, Mapping):
        labels, texts = value.get("label", [*value]), value.get("text", [*value.values()])
    if not isinstance(texts, list) or not isinstance(labels, list):
        return {}
    pairs = zip(labels, texts, strict=False)
    found = {str(label): text for label, each in pairs if (text := as_answer(each))}
    if len(found) < len(texts):
        return {}
    # Texts may begin with their labels.
    bare = {
        label: match[1]
        for label, text in found.items()
        if (match := re.fullmatch(rf"\(?{re.escape(label)}[).:]\s*(.+)", text, re.DOTALL))
    }
    return bare if len(bare) == len(found) else found
