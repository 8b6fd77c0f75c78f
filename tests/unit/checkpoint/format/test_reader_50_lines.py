"""A program of fifty lines that knows only the format reads what ours has written."""

import random

import numpy as np

from planish.checkpoint.format.items import TensorSpec
from tests.unit.checkpoint.format import reader_50_lines
from tests.unit.checkpoint.tilings import random_tiling
from tests.unit.checkpoint.written import write_checkpoint


def boxes(spec, rank):
    """Return what one of two ranks holds under a random tiling."""
    pieces = random_tiling(random.Random(spec.fqn), spec.shape)
    return [box for piece in pieces[rank::2] for box in piece]


def test_fifty_lines_without_our_package_read_a_checkpoint(tmp_path):
    shapes = {"embed.weight": (300, 5, 250), "step": (), "lone": (7,), "a|b/ é": (3, 4, 2, 5)}
    rng = np.random.default_rng(0)
    tensors = {
        TensorSpec("main", "optim", name, "F32", shape): rng.integers(0, 1 << 32, shape, np.uint32)
        for name, shape in shapes.items()
    }
    write_checkpoint(f"file://{tmp_path}/x", tensors, boxes, num_ranks=2)
    (folder,) = (tmp_path / "x").glob("a-*")
    for spec, array in tensors.items():
        read = reader_50_lines.tensor(folder, "main", "optim", spec.fqn)
        assert (read.dtype, read.shape) == (np.float32, spec.shape)
        assert read.tobytes() == array.tobytes()
