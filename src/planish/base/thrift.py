"""Structures in the compact protocol of Thrift, as in the footer of a Parquet file.

Source: Apache Thrift, "Thrift Compact protocol encoding".
"""

from collections.abc import Iterator
from typing import Any


def read_value(data: Iterator[int], kind: int = 12) -> Any:
    """Return an integer (without its sign), a list, or a structure as a dict of field number to
    value.

    Each field occurs once. Other types give None.

    Raises:
        LookupError, RecursionError, StopIteration: the bytes are not a value.
    """
    if 3 < kind < 7:
        return _number(data) >> 1
    if kind in {9, 10}:
        head = next(data)
        count = _number(data) if head >> 4 == 15 else head >> 4
        return [read_value(data, head & 15) for _ in range(count)]
    if kind != 12:
        for _ in range(_number(data) if kind == 8 else 8 if kind == 7 else 1):
            next(data)
        return None
    fields: Any = {}
    number = 0
    while head := next(data):
        step = head >> 4
        number = number + step if step else _number(data) >> 1
        if number in fields:
            raise LookupError
        fields[number] = read_value(data, head & 15) if head & 15 > 2 else None
    return fields


def _number(data: Iterator[int]) -> int:
    byte = next(data)
    return byte & 127 | _number(data) << 7 if byte > 127 else byte
