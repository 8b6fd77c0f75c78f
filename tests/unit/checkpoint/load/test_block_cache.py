from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.load.reader import BlockReader, open_state
from planish.checkpoint.load.slices import CachedReader
from planish.store import open_store
from tests.unit.checkpoint.written import tiny_model, write_checkpoint

MIB = 1 << 20
_numbers = itertools.count()


@pytest.fixture(scope="module")
def opened():
    tensors = tiny_model(layers=1, hidden=128, vocab=9001)
    return open_state(write_checkpoint(f"mem://cache-{next(_numbers)}/a", tensors))


def largest(opened):
    sizes = opened.metadata.files.sizes
    return max(range(len(sizes)), key=sizes.__getitem__)


def test_what_is_kept_is_read_once_and_is_right(opened):
    file, reader = largest(opened), CachedReader(opened)
    size = opened.metadata.files.sizes[file]
    assert size > 8 * MIB
    whole = bytes(BlockReader(opened).read(file, 0, size))
    rng = np.random.default_rng(0)
    for _ in range(50):
        start, stop = sorted(rng.integers(0, size + 1, 2).tolist())
        assert bytes(reader.read(file, start, stop)) == whole[start:stop]
    assert reader.counters.num_bytes <= size


def test_no_more_is_kept_than_allowed(opened):
    file, reader = largest(opened), CachedReader(opened, capacity=2 * MIB)
    for _ in range(2):
        for start in range(0, 4 * MIB, MIB):
            reader.read(file, start, start + MIB)
    assert reader.counters.requests == 8
    reader.read(file, 3 * MIB, 4 * MIB)
    assert reader.counters.requests == 8


def test_threads_that_want_the_same_blocks_share_one_read(opened):
    file, reader = largest(opened), CachedReader(opened)
    size = opened.metadata.files.sizes[file]
    whole = bytes(BlockReader(opened).read(file, 0, size))
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            start, stop = sorted(rng.integers(0, size + 1, 2).tolist())
            if bytes(reader.read(file, start, stop)) != whole[start:stop]:
                wrong.append((start, stop))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert reader.counters.num_bytes <= size


def test_a_damaged_block_fails_every_reader_and_may_be_read_again():
    uri = f"mem://cache-{next(_numbers)}/a"
    opened = open_state(write_checkpoint(uri, tiny_model(layers=1, hidden=128, vocab=9001)))
    file, reader = largest(opened), CachedReader(opened)
    storage, _ = open_store(uri)
    right, _ = storage.get(opened.key(file), 1 << 30)
    damaged = bytearray(right)
    damaged[5 * MIB + 17] ^= 1
    storage.put(opened.key(file), damaged)
    for _ in range(2):
        with pytest.raises(CheckpointCorrupt) as caught:
            reader.read(file, 0, 7 * MIB)
        assert caught.value.block == 5
    assert bytes(reader.read(file, 0, 5 * MIB)) == right[: 5 * MIB]
    storage.put(opened.key(file), right)
    assert bytes(reader.read(file, 0, 7 * MIB)) == right[: 7 * MIB]
