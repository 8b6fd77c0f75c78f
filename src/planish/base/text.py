"""Text for people: sizes, durations, and untrusted contents of files and logs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table with a title; a command yields it, and its caller prints it."""

    title: str
    columns: tuple[str, ...]
    """Names of the columns; empty for a column without a name."""
    rows: list[list[Any]]
    """Cells; their text is untrusted."""


def bytes_text(count: float) -> str:
    """Return a size.

    Example:
        >>> bytes_text(0), bytes_text(1536), bytes_text(5 << 30)
        ('0 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.{int(unit != 'B')}f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Return a duration, in milliseconds below 0.1 s.

    Example:
        >>> seconds_text(0.0004), seconds_text(0.25), seconds_text(61.3)
        ('0.4 ms', '0.25 s', '61 s')
    """
    if seconds < 0.1:
        return f"{1000 * seconds:.{int(seconds < 0.01)}f} ms"
    return f"{seconds:.{2 * (seconds < 10)}f} s"


def rate_text(num_bytes: int, seconds: float) -> str:
    """Return a bandwidth; empty if there are no bytes or no time."""
    return f"{bytes_text(num_bytes / seconds)}/s" if num_bytes and seconds > 1e-6 else ""


def printable(text: str, *, limit: int) -> str:
    r"""Return one line of at most `limit` characters; control characters are written as escapes.

    Example:
        >>> printable("a\x1b[31mb\n", limit=20), printable("abcdef", limit=5)
        ('a\\x1b[31mb\\n', 'ab...')
    """
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1]
    )
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def code_span(text: str) -> str:
    """Return any text as one line of inline code in CommonMark; empty text stays empty.

    No part of the text acts as markup: the fence is longer than any row of backticks in the text.

    Example:
        >>> code_span("side_is_full"), code_span("a `b`")
        ('`side_is_full`', '`` a `b` ``')
    """
    flat = " ".join(text.split())
    fence = "`" * (1 + longest_fence(flat))
    return f"{fence} {flat} {fence}" if len(fence) > 1 else f"`{flat}`" if flat else ""


def code_cell(text: str) -> str:
    r"""Return `code_span` for a cell of a table, where a pipe would end the cell.

    Example:
        >>> code_cell("a|b")
        '`a\\|b`'
    """
    return code_span(text).replace("|", "\\|")


def longest_fence(text: str) -> int:
    """Return the length of the longest row of backticks."""
    return max((len(row) for row in re.findall(r"`+", text)), default=0)
