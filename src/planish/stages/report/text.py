"""Formats of numbers for people, and untrusted text with visible control characters."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

_NOT_PLAIN = re.compile(r"[^\x20-\x7e\n\t]")
MAX_TEXT = 1600
"""Limit on the characters of one model text on the page."""


def number(value: float) -> str:
    """Return a number with about three digits.

    Example:
        >>> [number(v) for v in (0.0, 0.1234, 0.0006, -2.5, 1536.0, 1234567.0, 0.00004)]
        ['0', '0.123', '0.0006', '-2.5', '1,536', '1.23 M', '4e-5']
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.3g} G"
    if size >= 1e6:
        return f"{value / 1e6:.3g} M"
    if size >= 1000:
        return f"{value:,.0f}"
    if size != 0 and size < 0.0005:
        return re.sub(r"e-0*", "e-", f"{value:.2g}")
    if size < 1e-12:
        return "0"
    if size < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}".rstrip("0").rstrip(".") if size < 10 else f"{value:.4g}"


def percent(value: float, *, decimals: int | None = None) -> str:
    """Return a fraction in per cent: 0.0234 -> `2.3 %`; its size decides the default decimals."""
    scaled = 100 * value
    if decimals is not None:
        return f"{scaled:.{decimals}f} %"
    if abs(scaled) >= 10 or abs(scaled - round(scaled)) < 1e-9:
        return f"{scaled:.0f} %"
    return f"{scaled:.1f} %" if abs(scaled) >= 0.1 else f"{scaled:.2g} %"


def seconds(value: float) -> str:
    """Return a duration in words: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    if value < 0:
        return str(value)
    if value < 10:
        return f"{value:.2g} s" if value else "0 s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def utc(second: float) -> str:
    """Return seconds since 1970 as a UTC time; empty for 0."""
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S} UTC" if second else ""


Unit = Literal["number", "percent", "seconds"]
FORMATS: dict[Unit, Callable[[float], str]] = {
    "number": number,
    "percent": percent,
    "seconds": seconds,
}


def visible(text: str, *, limit: int = MAX_TEXT) -> str:
    """Return text cut to `limit` characters, with control and direction characters made visible.

    A control character becomes its picture (U+2400 block), any other invisible one its code point;
    new lines and tabs are kept. The template escapes markup later.
    """
    shown = _NOT_PLAIN.sub(_picture, text[:limit])
    hidden = len(text) - limit
    return f"{shown} ... ({hidden:,} more characters)" if hidden > 0 else shown


def _picture(match: re.Match[str]) -> str:
    character = match[0]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return f"\\u{ord(character):04x}"
    return character


def one_line(text: str, *, limit: int = 300) -> str:
    """Return text as one visible line, for table cells."""
    return visible(" ".join(text.split()), limit=limit)
