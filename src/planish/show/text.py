"""Values as text that is safe to print, since contents of sets are untrusted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from planish.base.text import printable


def cell(value: Any, *, width: int = 60) -> Text:
    """Return one line of at most `width` characters, without control characters and markup."""
    return Text(printable(_plain(value), limit=width))


def _plain(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return " ".join(_plain(item) for item in value[:40].tolist())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return str(value)


def table(title: str, *columns: str, rows: list[list[Any]], width: int = 60) -> Group:
    """Return a title and a table of printable cells, with numbers aligned to the right."""
    built = Table(show_edge=False, pad_edge=False, show_header=any(columns))
    for place, column in enumerate(columns):
        numeric = bool(rows) and all(
            isinstance(row[place], (int, float)) and not isinstance(row[place], bool)
            for row in rows
        )
        built.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        built.add_row(*(cell(value, width=width) for value in row))
    heading = Text(title, style="bold", no_wrap=True, overflow="ignore")
    return Group(heading, built, Text())
