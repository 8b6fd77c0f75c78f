"""Problems with choices: what a row lets choose from stands in its problem, under letters."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from planish.stages.curate.records import as_answer

CHOICES = ("choices", "options")
"""Columns of what a problem lets choose from, in order of preference."""

_LABEL = r"(?<!\w)(\w+)[).:\]*]+\s*"


def with_choices(
    fields: Mapping[str, Any], asked: str, given: Any, answer: str, first: int = 0
) -> tuple[str, str, str]:
    r"""Return the text of a problem with its choices, the label that is its answer, and "".

    Where choices are not understood, text and answer stay and the last item is their column.
    `given` is the answer in the row, a label, the text of a choice or an index from `first`, and
    `answer` is its text.

    Example:
        >>> with_choices({"choices": ["red", "blue"]}, "Which?", 1, "1")
        ('Which?\n(A) red\n(B) blue', 'B', '')
    """
    column = next((name for name in CHOICES if fields.get(name)), "")
    choices = read_choices(fields.get(column))
    # Choices that stand in the text have the labels there.
    patterns = [rf"{_LABEL}{re.escape(each)}(?!\w)" for each in choices.values()]
    labels = [match[1] for pattern in patterns if (match := re.search(pattern, asked))]
    text = asked
    if len({*labels}) < len(choices):
        labels = list(choices)
        text += "".join(f"\n({label}) {each}" for label, each in choices.items())
    named = {str(number): label for number, label in enumerate(labels, first)}
    if isinstance(given, str):
        # Digits as text may as well be what a choice says.
        named |= dict(zip(choices.values(), labels, strict=True))
    named |= {label.casefold(): label for label in labels}
    if found := named.get(answer.strip("().:[] ").casefold()) or named.get(answer):
        return text, found, ""
    return asked, answer, column


def read_choices(value: Any) -> dict[str, str]:
    """Return the choices of a row, label to text, or nothing where they are not understood.

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
