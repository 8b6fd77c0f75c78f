"""Values as text that is safe to print: contents of sets are untrusted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text


def printable(value: Any, *, width: int = 60) -> Text:
    r"""Return one line of at most `width` characters without control characters or markup.

    Example:
        >>> printable("a\x1b[31mb").plain
        'a\\x1b[31mb'
    """
    text = value if isinstance(value, str) else _plain(value)
    text = text[: 4 * width + 1]
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text(safe if len(safe) <= width else safe[: width - 3] + "...")


def _plain(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return " ".join(_plain(item) for item in value[:40].tolist())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return str(value)


def table(title: str, *columns: str, rows: list[list[Any]], width: int = 60) -> Group:
    """Return a title and a table of printable cells; numbers stand on the right."""
    built = Table(show_edge=False, pad_edge=False, show_header=any(columns))
    for number, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[number]) for row in rows)
        built.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        built.add_row(*(printable(cell, width=width) for cell in row))
    heading = Text(title, style="bold", no_wrap=True, overflow="ignore")
    return Group(heading, built, Text())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def bytes_text(count: float) -> str:
    """Return a size for the eye.

    Example:
        >>> bytes_text(1536)
        '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
