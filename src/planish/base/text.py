"""Text for people: sizes, and contents of files and logs, which are untrusted, on one line."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """Return a size.

    Example:
        >>> bytes_text(0), bytes_text(1536), bytes_text(5 << 30)
        ('0 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


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
