"""Plain data between the code of a response and the tests of its row, as JSON.

Numbers, texts, bytes, lists, tuples, sets and dictionaries are copied as exactly these types, so
that no `==` of the response decides a test. Any other value stays in its process, and a number
refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 100


_ITERATIONS: tuple[tuple[type, Callable[[Any], Iterator[Any]]], ...] = (
    (list, list.__iter__),
    (tuple, tuple.__iter__),
    (set, set.__iter__),
    (frozenset, frozenset.__iter__),
)


def encode(value: Any, name_of: Callable[[Any], int], depth: int = 0) -> Any:
    """Return a form of the value that JSON can represent.

    `name_of` returns the number of a value that is not plain data; it may raise.

    Returns:
        None, bool, float, str, or a list of a tag and its content.

    Raises:
        RecursionError: nested deeper than `MAX_DEPTH`.

    Example:
        >>> encode((1, "a"), id)
        ['tuple', [['int', '0x1'], 'a']]
    """
    if depth > MAX_DEPTH:
        raise RecursionError(f"a value nested deeper than {MAX_DEPTH}")
    if value is None or value is True or value is False:
        return value
    # These are methods of the plain type, so a subclass can not override them.
    if isinstance(value, int):
        return ["int", hex(int.__index__(value))]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["complex", [complex.__complex__(value).real, complex.__complex__(value).imag]]
    if isinstance(value, (bytes, bytearray)):
        tag = "bytes" if isinstance(value, bytes) else "bytearray"
        return [tag, bytes(memoryview(value)).hex()]
    for plain, iterate in _ITERATIONS:
        if isinstance(value, plain):
            return [plain.__name__, [encode(item, name_of, depth + 1) for item in iterate(value)]]
    if isinstance(value, dict):
        pairs = list(dict.items(value))
        return [
            "dict",
            [[encode(half, name_of, depth + 1) for half in pair] for pair in pairs],
        ]
    return ["ref", name_of(value)]


def decode(data: Any, named: Callable[[int], Any]) -> Any:
    """Return the value that `encode` encoded.

    The data come from an untrusted process; `named` returns the value for a number.

    Raises:
        ValueError: the data are malformed.
    """
    if data is None or isinstance(data, (bool, float, str)):
        return data
    if not isinstance(data, list) or len(data) != 2:
        raise ValueError(f"no value: {str(data)[:80]}")
    tag, content = data
    if tag == "int":
        return int(content, 16)
    if tag == "ref":
        return named(int(content))
    if tag == "complex":
        return complex(*content)
    if tag in ("bytes", "bytearray"):
        return bytes.fromhex(content) if tag == "bytes" else bytearray.fromhex(content)
    if tag in ("list", "tuple", "set", "frozenset"):
        kinds: dict[str, Callable[[list[Any]], Any]]
        kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return kinds[tag]([decode(item, named) for item in content])
    if tag == "dict":
        return {decode(key, named): decode(value, named) for key, value in content}
    raise ValueError(f"no value: {str(data)[:80]}")
