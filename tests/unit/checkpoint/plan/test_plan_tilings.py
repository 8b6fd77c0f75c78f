"""Random layouts into others, by plans alone: two thousand with `--full`, else a tenth."""

from __future__ import annotations

import random

import pytest

from planish.checkpoint.plan.match import match
from planish.checkpoint.plan.save import plan_save
from planish.checkpoint.plan.share import share_reads
from tests.thin import examples
from tests.unit.checkpoint.planned import (
    item_bytes,
    random_tensors,
    random_world,
    read,
    write,
)

CASES = examples(2000)


@pytest.mark.slow
def test_random_tilings_become_others_to_the_bit():
    tensors = compared = 0
    for seed in range(CASES):
        rng = random.Random(seed)
        specs = random_tensors(rng, rng.randint(1, 4), side=8)
        source = random_world(rng, rng.randint(1, 6), specs)
        plan = plan_save(source.columns, split_bytes=rng.choice([64, 1 << 20]))
        files, metadata = write(source, plan), plan.metadata({})
        target = random_world(rng, rng.randint(1, 6), specs, source)
        reads = [match(metadata, items) for items in target.items]
        shared = share_reads(metadata, reads)
        for items, held in zip(
            target.items, read(metadata, files, shared, reads, target.items), strict=True
        ):
            for item, boxes in zip(items, held, strict=True):
                got = b"".join(box.tobytes() for box in boxes)
                assert got == item_bytes(target, item), (seed, item.tensor)
                compared += len(got)
        tensors += len(specs)
    assert tensors > 4 * CASES // 2
    assert compared > 500 * CASES
