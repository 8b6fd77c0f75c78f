"""Sets of ranks by number, so that millions of rows can say who needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planish.checkpoint.format.geometry import I64


class RankSets:
    """Numbers for sets of ranks; equal sets have one number. Repeated ranks count.

    Example:
        >>> sets = RankSets()
        >>> sets.add_rows(np.array([0, 2, 1, 0, 2]), np.array([0, 2, 3, 5])).tolist()
        [0, 1, 0]
        >>> sets.union([0, 1]), sets.members[2].tolist()
        (2, [0, 1, 2])
    """

    def __init__(self) -> None:
        """Begin without sets."""
        self.members: list[I64] = []
        """By number: ascending ranks."""
        self._numbers: dict[bytes, int] = {}
        self._unions: dict[tuple[int, ...], int] = {}

    def add(self, ranks: I64) -> int:
        """Return the number of a set, given ascending."""
        key = ranks.astype(np.int32).tobytes()
        number = self._numbers.setdefault(key, len(self.members))
        if number == len(self.members):
            self.members.append(ranks)
        return number

    def add_rows(self, ranks: I64, starts: I64) -> I64:
        """Return the numbers of the sets `ranks[starts[i] : starts[i + 1]]`, each ascending."""
        data = memoryview(ranks.astype(np.int32).tobytes())
        bounds = (4 * starts).tolist()
        result = np.empty(len(starts) - 1, np.int64)
        for row in range(len(starts) - 1):
            key = bytes(data[bounds[row] : bounds[row + 1]])
            number = self._numbers.setdefault(key, len(self.members))
            if number == len(self.members):
                self.members.append(np.frombuffer(key, np.int32).astype(np.int64))
            result[row] = number
        return result

    def union(self, numbers: Sequence[int]) -> int:
        """Return the number of the union of sets, without repeated ranks."""
        key = tuple(numbers)
        if key not in self._unions:
            joined = np.unique(np.concatenate([self.members[number] for number in key]))
            self._unions[key] = self.add(joined)
        return self._unions[key]

    def unions(self, numbers: I64, starts: I64) -> I64:
        """Return [k]: the unions of `numbers[starts[i] : starts[i + 1]]`."""
        held, bounds = numbers.tolist(), starts.tolist()
        rows = range(len(bounds) - 1)
        return np.array([self.union(held[bounds[i] : bounds[i + 1]]) for i in rows], np.int64)
