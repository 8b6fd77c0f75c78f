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
    fields: Mapping[str, Any], asked: str, given: Any, answer: str
) -> tuple[str, str, str]:
    r"""Return the text of a problem with its choices, the label that is its answer, and "".

    Where choices are not understood, text and answer stay and the last item is their column.
    `given` is the answer in the row, a label or an index from 0, and `answer` is its text.

    Example:
        >>> with_choices({"choices": ["red", "blue"]}, "Which?", 1, "1")
        ('Which?\n(A) red\n(B) blue', 'B', '')
    """
    column = next((name for name in CHOICES if fields.get(name)), "")
    choices = read_choices(fields.get(column))
    # Choices that stand in the text have the labels there.
    there = [re.search(rf"{_LABEL}{re.escape(each)}(?!\w)", asked) for each in choices.values()]
    labels = [match[1] for match in there if match]
    text = asked
    if len({*labels}) < len(choices):
        labels = list(choices)
        text += "".join(f"\n({label}) {each}" for label, each in choices.items())
    word = answer.strip("().:[] ")
    named = [label for label in labels if label.casefold() == word.casefold()]
    # Digits as text may as well be what a choice says.
    is_text = isinstance(given, str) and word in choices.values()
    if not named and re.fullmatch("[0-9]{1,3}", word) and not is_text:
        named = labels[int(word) :]
    return (text, named[0], "") if named else (asked, answer, column)


def read_choices(value: Any) -> dict[str, str]:
    """Return the choices of a row, label to text, or nothing where they are not understood.

    Example:
        >>> read_choices(["red", "blue"]), read_choices({"text": ["red"], "label": ["1"]})
        ({'A': 'red', 'B': 'blue'}, {'1': 'red'})
    """
    labels: Any = list(string.ascii_uppercase)
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
    bare = [re.fullmatch(rf"\(?{re.escape(n)}[).:]\s*(.+)", t, re.S) for n, t in found.items()]
    return {n: m[1] for n, m in zip(found, bare, strict=True) if m} if all(bare) else found
