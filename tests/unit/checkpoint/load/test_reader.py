"""Ranges of verified blocks, by one process: what is read, how often, and what memory it takes."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import (
    CheckpointCorrupt,
)
from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.items import TensorSpec
from planish.checkpoint.format.metafile import BLOCK
from planish.checkpoint.load.read_pool import RING, Rounds
from planish.checkpoint.load.reader import BlockReader, open_state
from planish.checkpoint.load.slices import SliceReader
from planish.store import open_store
from tests.stores.faulty import FaultyStore
from tests.thin import examples
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.written import write_checkpoint

MATRIX = TensorSpec("main", "model", "w", "U8", (5, BLOCK))


@pytest.fixture(scope="module")
def matrix():
    """A tensor of five rows of 1 MiB; its file has a header before them."""
    values = np.random.default_rng(0).integers(0, 256, MATRIX.shape, dtype=np.uint8)
    return write_checkpoint(damage.fresh(), {MATRIX: values}, extra=False), values


@settings(max_examples=examples(40))
@given(st.integers(0, 5 * BLOCK), st.integers(0, 5 * BLOCK))
def test_any_range_is_widened_to_blocks_and_equal(matrix, a, b):
    place, values = matrix
    reader = BlockReader(open_state(place))
    size = reader.opened.metadata.files.sizes[0]
    start, stop = size - 5 * BLOCK + min(a, b), size - 5 * BLOCK + max(a, b)
    assert bytes(reader.read(0, start, stop)) == values.tobytes()[min(a, b) : max(a, b)]
    blocks = -(-stop // BLOCK) - start // BLOCK if stop > start else 0
    assert reader.counters.num_bytes <= blocks * BLOCK
    assert reader.counters.requests == (blocks > 0)
    assert reader.counters.rereads == 0


def test_one_column_is_read_in_requests_that_cost_least(matrix):
    place, values = matrix
    reader = SliceReader(open_state(place))
    found = reader.read(reader.spec("w"), Box((0, 100), (5, 50)))
    assert np.array_equal(found, values[:, 100:150])
    # Five runs of 50 bytes a MiB apart: one request for all costs less than five.
    assert reader.reader.counters.requests == 1
    found = reader.read(reader.spec("w"), Box((3, 0), (1, 9)))
    assert np.array_equal(found, values[3:4, :9])
    assert reader.reader.counters.num_bytes <= 8 * BLOCK


def test_bytes_that_change_on_the_way_are_read_once_more(matrix):
    place, _ = matrix
    uri = place.partition("#")[0]
    opened = open_state(place)

    class Flipping(FaultyStore):
        left = 1

        def get_into(self, key, offset, target, *, etag=""):
            self.inner.get_into(key, offset, target, etag=etag)
            if self.left:
                self.left -= 1
                target[7] ^= 1

    opened.storage = Flipping(open_store(uri)[0])
    reader = BlockReader(opened)
    reader.read(0, 0, 3 * BLOCK)
    assert (reader.counters.rereads, reader.counters.requests) == (1, 2)
    opened.storage.left = 2
    with pytest.raises(CheckpointCorrupt) as caught:
        reader.read(0, BLOCK, 2 * BLOCK)
    assert (caught.value.block, caught.value.file) == (1, "data/main.model/00000-0.safetensors")
    opened.storage.left = 1
    unchecked = BlockReader(opened, verify=False)
    unchecked.read(0, 0, BLOCK)
    assert unchecked.counters.rereads == 0


@given(st.lists(st.integers(1, 100), max_size=60))
def test_a_schedule_never_reuses_a_bucket_before_its_round_is_over(sizes):
    rounds = Rounds.plan(list(range(len(sizes))), sizes, 100)
    turns = [rounds.places[k].round for k in range(len(sizes))]
    assert turns == sorted(turns)
    assert rounds.count == len(set(turns))
    assert rounds.ring_bytes <= 100 * min(RING, rounds.count)
    ends = {}
    for request, size in enumerate(sizes):
        turn, base = rounds.places[request]
        assert base // 100 == turn % RING
        assert base + size <= rounds.ring_bytes
        assert base >= ends.get(turn, 0)
        ends[turn] = base + size


@pytest.mark.long
@pytest.mark.parametrize("what", ["load", "verify", "diff", "export"])
def test_memory_stays_within_the_state_and_320_mib(tmp_path, what):
    shape = (16, 1 << 20)
    count = 6
    tensors = {
        TensorSpec("main", "model", f"w{n}", "F32", shape): np.zeros(shape, np.uint32)
        for n in range(count)
    }
    place = write_checkpoint(f"file://{tmp_path}/state", tensors, extra=False)
    code = {
        "load": (
            "import torch\n"
            "from planish.checkpoint.format.geometry import whole\n"
            "from planish.checkpoint.ranks.control import Control\n"
            "from planish.checkpoint.load.load import load_state, open_on_all\n"
            "from planish.checkpoint.format.items import Collected, LocalItem\n"
            "from planish.checkpoint.format.items import TensorSpec\n"
            f"specs = [TensorSpec('main', 'model', f'w{{n}}', 'F32', {shape}) for n in range(6)]\n"
            f"items = [LocalItem(s, (whole(s.shape),), torch.ones({shape})) for s in specs]\n"
            "run = lambda: load_state(open_on_all(place, Control.single()), "
            "{'main': Collected(items)}, Control.single())\n"
        ),
        "verify": (
            "from planish.checkpoint.load.verify import verify\nrun = lambda: verify(place)\n"
        ),
        "export": (
            "from planish.checkpoint.convert.export_hf import export\n"
            f"run = lambda: export(place, 'file://{tmp_path}/out', dtype='BF16')\n"
        ),
        "diff": (
            "from planish.checkpoint.convert.diff import diff\nrun = lambda: diff(place, place)\n"
        ),
    }[what]
    code = (
        f"import json\nplace = {json.dumps(place)}\n{code}"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "run()\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) << 10 <= 320 << 20 < count * (64 << 20)
