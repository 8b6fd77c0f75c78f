"""Loads by one process: what fits, what is refused before a tensor is touched, what damage does."""

import dataclasses

import numpy as np
import pytest
import torch

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
from planish.checkpoint.format.geometry import whole
from planish.checkpoint.format.items import LocalItem, TensorSpec
from planish.checkpoint.load.agree import LoadOptions
from planish.checkpoint.load.load import load_state, open_on_all
from planish.checkpoint.load.reader import open_state
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.watch import monitor
from planish.store import open_store
from tests.stores.faulty import FaultyStore
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.written import tiny_model, write_checkpoint


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
    assert monitor.read_timings(place, "load").seconds("plan") > 0


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
