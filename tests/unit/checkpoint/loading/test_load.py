"""Loads by one process: what fits, what is refused before a tensor is touched, what damage does."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
    DtypeMismatch,
    LayoutMismatch,
    MissingKeys,
    ShapeMismatch,
    UnexpectedKeys,
)
from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import LocalItem, TensorSpec
from planish.checkpoint.format.metafile import BLOCK
from planish.checkpoint.loading import verify as module
from planish.checkpoint.loading.agree import LoadOptions
from planish.checkpoint.loading.load import load_state, open_on_all
from planish.checkpoint.loading.read_pool import RING, Rounds
from planish.checkpoint.loading.reader import BlockReader, open_state
from planish.checkpoint.loading.slices import SliceReader
from planish.checkpoint.loading.verify import Fault, verify
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.watch import monitor
from planish.store import open_store
from tests.processes import python
from tests.stores.faulty import FaultyStore
from tests.thin import examples
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.written import COMMON, SHARED, stored, tiny_model, write_checkpoint


@pytest.fixture
def place():
    return write_checkpoint(damage.fresh(), tiny_model(), extra=False)


def load(place, items, **options):
    control = Control.single()
    opened = open_on_all(place, control)
    return load_state(opened, damage.collected(items), control, LoadOptions(**options))[0]


def ones(place, **changes):
    return damage.zeros_for(open_state(place), **changes)


def renamed(item, **changes):
    return LocalItem(dataclasses.replace(item.tensor, **changes), item.boxes, item.data)


def test_every_element_comes_back_and_no_block_is_read_twice(place):
    items = ones(place)
    loaded = load(place, items)
    damage.assert_holds(items, tiny_model())
    # Header and data of two files of less than one block each.
    assert loaded.facts["bytes_from_store"] == sum(open_state(place).metadata.files.sizes)
    assert (loaded.step, loaded.pin) == (7, place)
    stages = {record.stage for record in loaded.timings.records}
    assert stages == {"plan", "meta", "read", "verify", "copy", "barrier"}


def test_the_optimizers_bytes_are_never_read_when_only_the_model_is_wanted(place):
    items = ones(place, parts=("model",))
    loaded = load(place, [*items, *ones(place, parts=("optim",))], parts=("model",))
    damage.assert_holds(items, tiny_model())
    files = open_state(place).metadata.files
    sizes = [s for k, s in zip(files.keys, files.sizes, strict=True) if ".optim/" not in k]
    assert loaded.facts["bytes_from_store"] == sum(sizes)
    assert {r.state for r in loaded.timings.records} == {"", "main.model"}


def test_a_load_from_where_nothing_can_be_written_is_none_the_worse(place, caplog):
    def decide(number, kind, key):
        return "fail" if kind == "put" else ""

    storage = FaultyStore(open_store(place.partition("#")[0])[0], decide)
    control, items = Control.single(), ones(place)
    opened = open_on_all(place, control, storage=storage)
    options = LoadOptions(store_timings=True)
    load_state(opened, damage.collected(items), control, options)
    damage.assert_holds(items, tiny_model())
    assert [kind for kind, _ in storage.log].count("put") == 1
    assert "timings_not_written" in caplog.text
    load(place, ones(place), store_timings=True)
    assert "plan" in {record.stage for record in monitor.read_timings(place, "load").records}


def test_all_offenders_are_listed_and_nothing_is_touched(place):
    items = ones(place)
    items[0] = renamed(items[0], fqn="other.weight")
    items[1] = renamed(items[1], shape=(99, *items[1].tensor.shape[1:]))
    items[2] = renamed(items[2], dtype="BF16")
    with pytest.raises(LayoutMismatch) as caught:
        load(place, items)
    text = str(caught.value)
    assert "lacks `model.other.weight`" in text
    assert "[99" in text
    assert "must be BF16, got F32" in text
    assert f"nothing asks for `model.{ones(place)[0].tensor.fqn}`" in text
    assert damage.untouched(items)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"fqn": "x"}, MissingKeys),
        ({"shape": (3, 3)}, ShapeMismatch),
        ({"dtype": "F16"}, DtypeMismatch),
    ],
)
def test_one_kind_of_fault_has_its_own_error(place, change, error):
    items = ones(place)
    extra = renamed(items[0], **change)
    wanted = [extra, *items] if error is MissingKeys else [extra, *items[1:]]
    with pytest.raises(error):
        load(place, wanted)
    assert damage.untouched(items)


def test_what_nothing_asks_for_is_refused_unless_not_strict(place):
    items = ones(place)
    with pytest.raises(UnexpectedKeys, match=items[0].tensor.fqn):
        load(place, items[1:])
    missing = renamed(items[0], fqn="new.weight")
    loaded = load(place, [missing, *items[1:]], strict=False)
    assert loaded.facts["missing"] == ["`model.new.weight`"]
    assert loaded.facts["unexpected"] == [f"`model.{items[0].tensor.fqn}`"]
    assert bool((missing.data == 1).all())
    damage.assert_holds(items[1:], tiny_model())


def test_generators_of_ranks_that_are_gone_are_no_fault(place):
    item = LocalItem(TensorSpec("main", "extra", "random.00007", "U8", (4,)),
                     (whole((4,)),), torch.ones(4, dtype=torch.uint8))  # fmt: skip
    loaded = load(place, [*ones(place), item])
    assert loaded.facts["missing"] == ["`extra.random.00007`"]
    assert item.data.tolist() == [1, 1, 1, 1]


def test_types_are_converted_only_when_asked():
    spec = TensorSpec("main", "model", "w", "F32", (3,))
    values = np.array([1.5, -2.0, 3e38], np.float32)
    place = write_checkpoint(damage.fresh(), {spec: values.view(np.uint32)}, extra=False)
    half = LocalItem(dataclasses.replace(spec, dtype="BF16"), (whole((3,)),),
                     torch.zeros(3, dtype=torch.bfloat16))  # fmt: skip
    with pytest.raises(DtypeMismatch, match=r"`model\.w` must be BF16, got F32"):
        load(place, [half])
    load(place, [half], dtype_policy="cast")
    assert half.data.tolist() == torch.tensor(values).to(torch.bfloat16).tolist()


def test_a_bit_that_flipped_in_the_store_is_told_by_file_and_block(place):
    damage.flip(place, "main.optim/00000-0.safetensors")
    items = ones(place)
    with pytest.raises(CheckpointCorrupt) as caught:
        load(place, items)
    assert caught.value.file == "data/main.optim/00000-0.safetensors"
    assert caught.value.block == 0
    assert caught.value.target_modified is not damage.untouched(items)


@pytest.mark.parametrize(
    ("harm", "error", "text"),
    [
        (lambda p: damage.remove(p, "main.model/00000-0.safetensors"), CheckpointIncomplete,
         "00000-0.safetensors` is missing"),
        (lambda p: damage.truncate(p, "main.model/00000-0.safetensors", 99), CheckpointIncomplete,
         r"must have \d+ bytes, got 99"),
        (lambda p: damage.remove(p, "global.bin"), CheckpointIncomplete, "global.bin"),
        (lambda p: damage.truncate(p, "global.bin", 99), CheckpointIncomplete, "global.bin"),
        (lambda p: damage.flip(p, "global.bin", 50), CheckpointCorrupt, "global.bin"),
        (lambda p: damage.flip(p, "COMMIT", 0), CheckpointCorrupt, "COMMIT"),
        (lambda p: damage.remove(p, "COMMIT"), CheckpointNotFound, "COMMIT"),
    ],
)  # fmt: skip
def test_damage_that_is_seen_first_leaves_the_target_untouched(place, harm, error, text):
    items = ones(place)
    harm(place)
    with pytest.raises(error, match=text):
        load(place, items)
    assert damage.untouched(items)


def test_a_reader_that_is_overtaken_by_a_writer_says_so_and_mixes_nothing():
    place = write_checkpoint(damage.fresh(), tiny_model(), extra=False)
    uri = place.partition("#")[0]
    storage, path = open_store(uri)
    old = [key for key in damage.keys_of(place) if "/data/" in key]

    def overtake(number, kind, key):
        if kind == "get" and "/data/" in key and old:
            storage.delete([f"{path}/COMMIT", *old])
            old.clear()
            write_checkpoint(uri, tiny_model(seed=1), extra=False)
        return ""

    control, items = Control.single(), ones(place)
    opened = open_on_all(uri, control, storage=FaultyStore(storage, overtake))
    with pytest.raises(CheckpointIncomplete, match="must stand still while it is read") as caught:
        load_state(opened, damage.collected(items), control)
    assert caught.value.target_modified is False
    assert damage.untouched(items)
    load(uri, items)
    damage.assert_holds(items, tiny_model(seed=1))


def test_a_pin_of_another_state_is_refused(place):
    other = place[:-1] + ("0" if place[-1] != "0" else "1")
    with pytest.raises(CheckpointCorrupt, match="overwritten, or the pin is of another run"):
        load(other, [])


@pytest.mark.parametrize(
    "options",
    [{"parts": ("modell",)}, {"parts": ()}, {"verify": "md5"}, {"redundancy": "on"},
     {"dtype_policy": "any"}, {"timeout_s": 0.0}],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(place, options):
    with pytest.raises(ValueError, match="must be"):
        load(place, [], **options)


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


def test_one_column_is_read_in_requests_that_cost_least(matrix):
    place, values = matrix
    reader = SliceReader(open_state(place))
    found = reader.read(stored(reader, "w"), Box((0, 100), (5, 50)))
    assert np.array_equal(found, values[:, 100:150])
    # Five runs of 50 bytes a MiB apart: one request for all costs less than five.
    assert reader.reader.counters.requests == 1
    found = reader.read(stored(reader, "w"), Box((3, 0), (1, 9)))
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
    assert reader.counters.requests == 2
    opened.storage.left = 2
    with pytest.raises(CheckpointCorrupt) as caught:
        reader.read(0, BLOCK, 2 * BLOCK)
    assert (caught.value.block, caught.value.file) == (1, "data/main.model/00000-0.safetensors")
    opened.storage.left = 1
    unchecked = BlockReader(opened, verify=False)
    unchecked.read(0, 0, BLOCK)
    assert unchecked.counters.requests == 1


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
            "from planish.checkpoint.loading.load import load_state, open_on_all\n"
            "from planish.checkpoint.format.items import Collected, LocalItem\n"
            "from planish.checkpoint.format.items import TensorSpec\n"
            f"specs = [TensorSpec('main', 'model', f'w{{n}}', 'F32', {shape}) for n in range(6)]\n"
            f"items = [LocalItem(s, (whole(s.shape),), torch.ones({shape})) for s in specs]\n"
            "run = lambda: load_state(open_on_all(place, Control.single()), "
            "{'main': Collected(items)}, Control.single())\n"
        ),
        "verify": (
            "from planish.checkpoint.loading.verify import verify\nrun = lambda: verify(place)\n"
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
    done = python("-c", code)
    assert int(done.stdout) << 10 <= 320 << 20 < count * (64 << 20)


MODEL = "data/main.model/00000-0.safetensors"


@pytest.fixture
def verified():
    return write_checkpoint(damage.fresh(), tiny_model())


def test_an_intact_checkpoint_has_no_fault_and_every_byte_is_read(verified):
    seen = []
    report = verify(verified, progress=lambda done, total: seen.append((done, total)))
    sizes = open_state(verified).metadata.files.sizes
    assert report.is_intact
    assert (report.num_objects, report.num_bytes) == (1 + len(sizes), sum(sizes))
    assert report.num_tensors == len(tiny_model())
    assert seen[-1] == (sum(sizes), sum(sizes))


def test_every_damaged_block_is_told():
    spec = TensorSpec("main", "model", "w", "U8", (5 * BLOCK,))
    place = write_checkpoint(damage.fresh(), {spec: np.zeros(spec.shape, np.uint8)}, extra=False)
    for block in (1, 3):
        damage.flip(place, ".safetensors", block * BLOCK + 17)
    report = verify(place)
    assert [(fault.file, fault.block) for fault in report.faults] == [(MODEL, 1), (MODEL, 3)]


def test_every_damaged_object_is_told(verified):
    keys = open_state(verified).metadata.files.keys
    assert {SHARED, COMMON} < {*keys}
    for key in keys:
        damage.flip(verified, key)
    assert {fault.file for fault in verify(verified).faults} == {*keys}


def test_all_that_is_missing_or_short_is_told_without_reading(verified):
    damage.remove(verified, MODEL)
    damage.truncate(verified, "data/main.optim/00000-0.safetensors", 7)
    report = verify(verified, "size")
    assert [fault.file for fault in report.faults] == [MODEL, MODEL.replace("model", "optim")]
    assert "is missing" in report.faults[0].text
    assert "got 7" in report.faults[1].text
    assert report.num_bytes == 0
    assert verify(verified, "meta").is_intact
    assert len(verify(verified, "crc").faults) == 2


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        (lambda place: damage.flip(place, "global.bin", 70), "meta/global.bin"),
        (lambda place: damage.truncate(place, "global.bin", 70), "meta/global.bin"),
        (lambda place: damage.remove(place, "global.bin"), "meta/global.bin"),
        (lambda place: damage.flip(place, "COMMIT", 0), "COMMIT"),
    ],
)
def test_damaged_metadata_is_the_only_fault_told(verified, harm, file):
    harm(verified)
    report = verify(verified)
    assert len(report.faults) == 1
    assert report.faults[0].file.endswith(file)


def test_what_is_not_committed_is_no_checkpoint(verified):
    damage.remove(verified, "COMMIT")
    with pytest.raises(CheckpointNotFound):
        verify(verified)
    with pytest.raises(ValueError, match="`level` must be one of"):
        verify(verified, "all")


def test_a_header_that_contradicts_the_metadata_is_told(verified, monkeypatch):
    opened = open_state(verified)
    row = opened.metadata.files.keys.index(MODEL)
    shards = opened.metadata.shards
    start = shards.start.copy()
    start[np.flatnonzero(shards.file == row)[0]] += 4
    opened.metadata.shards = dataclasses.replace(shards, start=start)
    monkeypatch.setattr(module, "open_state", lambda *_: opened)
    (fault,) = verify(verified).faults
    assert isinstance(fault, Fault)
    assert f"of `{MODEL}`, got" in fault.text
