"""Verified blocks kept for a while, for readers that come back to the same bytes.

Where one tensor is written for several ranks by columns, each of them needs every row of the
source: without a cache it would be read as often as there are ranks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from planish.checkpoint.format.integrity import BLOCK
from planish.checkpoint.load.reader import BlockReader, Opened

CACHE_BYTES = 256 << 20
"""Blocks that are kept."""

_Key = tuple[int, int]


class CachedReader(BlockReader):
    """A `BlockReader` that reads no block twice while it is kept; for any number of threads."""

    def __init__(self, opened: Opened, *, capacity: int = CACHE_BYTES) -> None:
        """Keep at most `capacity` bytes of blocks, the last used ones."""
        super().__init__(opened)
        self._most = max(1, capacity // BLOCK)
        self._blocks: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def fetch(self, file: int, start: int, target: memoryview) -> None:
        """Fill `target` with verified bytes; see `BlockReader.fill`."""
        assert start % BLOCK == 0, "ranges are whole blocks"
        keys = [(file, place) for place in range(start, start + len(target), BLOCK)]
        with self._lock:
            found = {key: self._blocks[key] for key in keys if key in self._blocks}
            for key in found:
                self._blocks.move_to_end(key)
            mine = [key for key in keys if key not in found]
            self._blocks.update({key: Future() for key in mine})
            claimed = {key: self._blocks[key] for key in mine}
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)
        # Own blocks first: nobody waits for somebody who waits.
        self._read_claimed(file, start, target, claimed)
        for key, block in found.items():
            data = block.result()
            target[key[1] - start : key[1] - start + len(data)] = data

    def check(self, file: int, start: int, target: memoryview) -> None:
        """Do nothing: what `fetch` returns has been verified."""

    def _read_claimed(
        self, file: int, start: int, target: memoryview, claimed: dict[_Key, Future[bytes]]
    ) -> None:
        """Read runs of neighbouring blocks, and hand each block to whoever waits for it."""
        places = sorted(place for _, place in claimed)
        try:
            while places:
                length = 1
                while length < len(places) and places[length] == places[0] + length * BLOCK:
                    length += 1
                first = places[0] - start
                run = target[first : first + length * BLOCK]
                super().fetch(file, places[0], run)
                super().check(file, places[0], run)
                for place in places[:length]:
                    block = target[place - start : place - start + BLOCK]
                    claimed[file, place].set_result(bytes(block))
                places = places[length:]
        except BaseException as error:
            with self._lock:
                for place in places:
                    self._blocks.pop((file, place), None)
            for place in places:
                if not claimed[file, place].done():
                    claimed[file, place].set_exception(error)
            raise
