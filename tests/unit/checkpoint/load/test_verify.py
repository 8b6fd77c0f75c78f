"""Checks of committed checkpoints: every fault is told, in bounded memory."""

import dataclasses

import numpy as np
import pytest

from planish.base.errors import CheckpointNotFound
from planish.checkpoint.format.items import TensorSpec
from planish.checkpoint.format.metafile import BLOCK
from planish.checkpoint.load import verify as module
from planish.checkpoint.load.reader import open_state
from planish.checkpoint.load.verify import Fault, verify
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.written import tiny_model, write_checkpoint

MODEL = "data/main.model/00000-0.safetensors"


@pytest.fixture
def place():
    return write_checkpoint(damage.fresh(), tiny_model())


def test_an_intact_checkpoint_has_no_fault_and_every_byte_is_read(place):
    seen = []
    report = verify(place, progress=lambda done, total: seen.append((done, total)))
    sizes = open_state(place).metadata.files.sizes
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


def test_all_that_is_missing_or_short_is_told_without_reading(place):
    damage.remove(place, MODEL)
    damage.truncate(place, "data/main.optim/00000-0.safetensors", 7)
    report = verify(place, "size")
    assert [fault.file for fault in report.faults] == [MODEL, MODEL.replace("model", "optim")]
    assert "is missing" in report.faults[0].text
    assert "got 7" in report.faults[1].text
    assert report.num_bytes == 0
    assert verify(place, "meta").is_intact
    assert len(verify(place, "crc").faults) == 2


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        (lambda place: damage.flip(place, "global.bin", 70), "meta/global.bin"),
        (lambda place: damage.truncate(place, "global.bin", 70), "meta/global.bin"),
        (lambda place: damage.remove(place, "global.bin"), "meta/global.bin"),
        (lambda place: damage.flip(place, "COMMIT", 0), "COMMIT"),
    ],
)
def test_damaged_metadata_is_the_only_fault_told(place, harm, file):
    harm(place)
    report = verify(place)
    assert len(report.faults) == 1
    assert report.faults[0].file.endswith(file)


def test_what_is_not_committed_is_no_checkpoint(place):
    damage.remove(place, "COMMIT")
    with pytest.raises(CheckpointNotFound):
        verify(place)
    with pytest.raises(ValueError, match="`level` must be one of"):
        verify(place, "all")


def test_a_header_that_contradicts_the_metadata_is_told(place, monkeypatch):
    opened = open_state(place)
    row = opened.metadata.files.keys.index(MODEL)
    shards = opened.metadata.shards
    start = shards.start.copy()
    start[np.flatnonzero(shards.file == row)[0]] += 4
    opened.metadata.shards = dataclasses.replace(shards, start=start)
    monkeypatch.setattr(module, "open_state", lambda *_: opened)
    (fault,) = verify(place).faults
    assert isinstance(fault, Fault)
    assert f"of `{MODEL}`, got" in fault.text
