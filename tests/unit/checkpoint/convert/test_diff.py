"""Comparisons tensor by tensor: equal across layouts, every difference told."""

import dataclasses
import math
import random

import numpy as np
import pytest

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.convert import diff as module
from planish.checkpoint.convert.diff import diff
from planish.checkpoint.format.items import TensorSpec
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.tilings import random_tiling
from tests.unit.checkpoint.written import tiny_model, write_checkpoint


def tiled(seed, size):
    def boxes(spec, rank):
        pieces = random_tiling(random.Random(f"{seed} {spec.fqn}"), spec.shape)
        mine = [piece for k, piece in enumerate(pieces) if k % size == rank]
        return [box for piece in mine for box in piece]

    return boxes


@pytest.mark.slow
@pytest.mark.parametrize("window", [64, 1 << 20])
@pytest.mark.parametrize("layout", [tiled(1, 4), tiled(2, 5)])
def test_equal_states_are_equal_whatever_layouts_saved_them(monkeypatch, layout, window):
    monkeypatch.setattr(module, "WINDOW_BYTES", window)
    tensors = tiny_model()
    a = write_checkpoint(damage.fresh(), tensors)
    b = write_checkpoint(damage.fresh(), tensors, layout, num_ranks=5)
    seen = []
    found = diff(a, b, progress=lambda *numbers: seen.append(numbers))
    assert found.is_equal
    total = sum(array.nbytes for array in tensors.values())
    assert (found.num_equal, found.num_bytes) == (len(tensors), total)
    assert seen[-1] == (total, total)


def test_every_kind_of_difference_is_told(monkeypatch):
    monkeypatch.setattr(module, "WINDOW_BYTES", 16)
    w = TensorSpec("main", "model", "w", "F32", (3, 4))
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    other = values.copy()
    other[0, 2], other[2, 1] = 2.5, 12.0
    half = TensorSpec("main", "model", "h", "BF16", (2,))
    lone = TensorSpec("main", "optim", "w.exp_avg", "F32", (1,))
    nan = TensorSpec("main", "model", "n", "F32", ())
    a = write_checkpoint(damage.fresh(), {
        w: values.view(np.uint32), half: np.zeros(2, np.uint16), lone: np.zeros(1, np.uint32),
        nan: np.array(0x7FC00000, np.uint32),
    })  # fmt: skip
    b = write_checkpoint(damage.fresh(), {
        w: other.view(np.uint32), dataclasses.replace(half, dtype="F16"): np.zeros(2, np.uint16),
        nan: np.array(0x7FC00001, np.uint32),
    }, extra=False)  # fmt: skip
    found = diff(a, b)
    assert (found.only_a, found.only_b) == (["`optim.w.exp_avg`"], [])
    assert found.values == ["main"]
    assert found.differing[0][:2] == ("`model.h`", "BF16 [2] against F16 [2]")
    assert found.differing[1][:4] == ("`model.n`", "values", 1, ())
    assert math.isnan(found.differing[1].max_abs)
    assert found.differing[2] == ("`model.w`", "values", 2, (0, 2), 3.0)
    assert found.num_equal == 0
    assert not found.is_equal


def test_a_damaged_side_is_an_error_and_no_difference():
    a, b = (write_checkpoint(damage.fresh(), tiny_model()) for _ in range(2))
    damage.flip(b, "main.optim/00000-0.safetensors")
    with pytest.raises(CheckpointCorrupt) as caught:
        diff(a, b)
    assert caught.value.block == 0
    assert diff(a, b, parts=("model",)).is_equal
