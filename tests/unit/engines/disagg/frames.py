"""Frames for tests of both transports: their limits, headers and counts, and what has arrived."""

import torch

from planish.engines.disagg.m2n.frames import FrameHeader, FrameKind, FrameLimits

LIMITS = FrameLimits(num_micro_batches=4, num_rows=32, row_bytes=32, num_local_experts=3)
SECRET = "the secret of this start"


def header(num_rows, *, dtype=torch.float32, **changes):
    """Return a header from rank 0 to rank 1 of rows of 4 numbers for 3 experts."""
    numbers = {"source": 0, "target": 1, "weight_version": 7, "iteration": 40, "layer": 0}
    numbers |= {"micro_batch": 0, "row_bytes": 4 * dtype.itemsize, "num_local_experts": 3}
    return FrameHeader(kind=FrameKind.DISPATCH, num_rows=num_rows, dtype=dtype, **numbers | changes)


def counts_of(num_rows):
    return torch.tensor([num_rows // 2, 0, num_rows - num_rows // 2], dtype=torch.int32)


def received(inbox):
    """Return the next frame of a queue; raise the error that stands in its place."""
    item = inbox.get(timeout=120)
    if isinstance(item, Exception):
        raise item
    return item
