"""Loads by several processes: each byte read once, exchanged, equal; and no rank hangs."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from planish.base.errors import CheckpointNotFound
from planish.checkpoint.adapters.placement import TYPES
from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import ITEM_BYTES, Collected, LocalItem, TensorSpec
from planish.checkpoint.loading.agree import LoadOptions
from planish.checkpoint.loading.fill import RAW
from planish.checkpoint.loading.load import load_state, open_on_all
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.watch import monitor
from tests.integration.ckpt_forks import run_ranks
from tests.unit.checkpoint.planned import random_tiling
from tests.unit.checkpoint.written import write_checkpoint


def weights(num_tensors=6, rows=700, columns=512, seed=0):
    """Return TensorSpec -> raw elements: matrices of 1.4 MB, and small ones of every type."""
    rng = np.random.default_rng(seed)
    specs = [
        TensorSpec("main", "model", f"layers.{n}.weight", "F32", (rows, columns))
        for n in range(num_tensors)
    ]
    specs += [TensorSpec("main", "optim", f"odd.{dtype}", dtype, (5, 3, 7)) for dtype in ITEM_BYTES]
    found = {}
    for spec in specs:
        size = ITEM_BYTES[spec.dtype]
        high = 2 if spec.dtype == "BOOL" else 256
        raw = rng.integers(0, high, (*spec.shape, size), dtype=np.uint8)
        found[spec] = raw.view(RAW[size]).reshape(spec.shape)
    return found


def boxes_for(layout, spec, rank, size, seed=0):
    """Return what a rank holds of a tensor."""
    if layout == "replicated":
        return (whole(spec.shape),)
    if layout == "none":
        return ()
    if layout == "random":
        pieces = random_tiling(random.Random(f"{seed} {spec.fqn}"), spec.shape)
        mine = pieces[rank::size]
        return mine[0] if mine else ()
    dim = {"rows": 0, "columns": 1}[layout]
    step = -(-spec.shape[dim] // size)
    start, stop = min(rank * step, spec.shape[dim]), min((rank + 1) * step, spec.shape[dim])
    offsets = tuple(start if d == dim else 0 for d in range(len(spec.shape)))
    lengths = tuple(stop - start if d == dim else n for d, n in enumerate(spec.shape))
    return (Box(offsets, lengths),) if stop > start else ()


def target(spec, boxes):
    """Return an item of zeros for boxes of a tensor."""
    shape = boxes[0].lengths if len(boxes) == 1 else (sum(box.volume for box in boxes),)
    return LocalItem(spec, tuple(boxes), torch.zeros(shape, dtype=TYPES[spec.dtype]))


def raw_of(item):
    size = item.data.element_size()
    flat = item.data.reshape(-1)
    return flat.view(torch.uint8).numpy().view(RAW[size])


def expected(array, boxes):
    cuts = [
        array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1)
        for box in boxes
    ]
    return np.concatenate(cuts) if cuts else np.zeros(0, array.dtype)


def scenario_load(
    rank,
    size,
    folder,
    place,
    layouts,
    options=None,
    hosts=None,
    shape=(),
):
    """Load under each layout and compare every element; returns counters of the last load.

    `shape` is for `weights`.
    """
    control = joined(hosts)
    tensors = weights(*shape)
    info = None
    for layout in layouts:
        items = [target(spec, boxes_for(layout, spec, rank, size)) for spec in tensors]
        items = [item for item in items if item.boxes]
        opened = open_on_all(place, control)
        info, _ = load_state(
            opened, {"main": Collected(items)}, control, LoadOptions(**(options or {}))
        )
        for item in items:
            wanted = expected(tensors[item.tensor], item.boxes)
            assert np.array_equal(raw_of(item).view(np.uint8), wanted.view(np.uint8)), item.tensor
    torch.distributed.barrier()
    control.close()
    return {
        "store": info.facts["bytes_from_store"],
        "unique": sum(array.nbytes for array in tensors.values()),
        "own": info.num_bytes,
        "network": info.facts["bytes_over_network"],
        "exchanged": sum(r.num_bytes for r in info.timings.records if r.stage == "exchange"),
        "sharing": info.facts["sharing"],
        "replication": info.facts["replication"],
    }


def joined(hosts=None):
    """Meet the other ranks, as if they ran on these hosts."""
    control = Control.join()

    def call(*arguments, **options):
        opened = Control.call(control, *arguments, **options)
        opened.hosts = tuple(hosts or control.hosts)
        return opened

    control.call = call
    return control


def place_of(tmp_path, **changes):
    return write_checkpoint(
        f"file://{tmp_path}/run/step-1", weights(), extra=False, **({"num_ranks": 2} | changes)
    )


def test_a_replicated_load_reads_every_byte_once_and_balanced(tmp_path):
    place = place_of(tmp_path, num_ranks=4)
    found = run_ranks(
        "tests.integration.test_ckpt_load:scenario_load", 4, tmp_path / "ranks", timeout=300.0,
        place=place, layouts=["replicated"], hosts=[0, 1, 2, 3],
    )  # fmt: skip
    total, unique = found[0]["store"], found[0]["unique"]
    assert total / unique <= 1.05
    assert sum(one["own"] for one in found) == total
    assert max(one["own"] for one in found) <= 0.5 * total
    assert all(one["exchanged"] >= unique - one["own"] for one in found)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 2, 3]])
def test_ranks_of_other_machines_get_packed_messages(tmp_path, hosts):
    found = run_ranks(
        "tests.integration.test_ckpt_load:scenario_load", 4, tmp_path / "ranks", timeout=300.0,
        place=place_of(tmp_path), layouts=["replicated", "columns", "random"], hosts=hosts,
    )  # fmt: skip
    assert found[0]["store"] < 2 * found[0]["unique"]
    assert {one["sharing"] for one in found} == {"all"}


def test_timings_of_all_ranks_are_kept_beside_those_of_the_save_when_asked_for(tmp_path):
    place = place_of(tmp_path)
    for times in (1, 2):
        run_ranks(
            "tests.integration.test_ckpt_load:scenario_load", 2, tmp_path / "ranks", timeout=300.0,
            place=place, layouts=["replicated"] * times, options={"store_timings": times == 2},
            hosts=[0, 1],
        )  # fmt: skip
        if times == 1:
            with pytest.raises(CheckpointNotFound, match="no load was asked to keep them"):
                monitor.read_timings(place, "load")
    records = monitor.read_timings(place, "load").records
    assert {record.op for record in records} == {"load"}
    assert {record.rank for record in records} == {0, 1}
    assert all(record.host for record in records)
    # The last of two loads, whole.
    assert {"plan", "read", "verify", "copy", "exchange", "barrier"} <= {r.stage for r in records}
    assert sum(record.stage == "plan" for record in records) == 2


def scenario_again(rank, size, folder, place, times):
    """Load again and again; returns files, threads and memory in use along the way."""
    control, seen = joined(range(size)), []
    items = [target(spec, (whole(spec.shape),)) for spec in weights()]
    for _ in range(times):
        load_state(open_on_all(place, control), {"main": Collected(items)}, control)
        torch.distributed.barrier()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append(
            (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages << 12)
        )
    control.close()
    return seen


def test_twenty_loads_in_a_row_keep_no_file_thread_or_memory(tmp_path):
    found = run_ranks(
        "tests.integration.test_ckpt_load:scenario_again", 2, tmp_path / "ranks", timeout=300.0,
        place=place_of(tmp_path), times=20,
    )  # fmt: skip
    for seen in found:
        files, threads, memory = zip(*seen[4:], strict=True)
        assert max(files) <= files[0] + 2, files
        assert max(threads) <= threads[0] + 2, threads
        assert memory[-1] <= memory[0] + (16 << 20), memory


@pytest.mark.parametrize(
    ("options", "hosts"),
    [({"redundancy": "off"}, [0, 1]), ({}, [0, 0])],
    ids=["asked to", "from a folder of their machine"],
)
def test_each_rank_reads_for_itself(tmp_path, options, hosts):
    found = run_ranks(
        "tests.integration.test_ckpt_load:scenario_load", 2, tmp_path / "ranks", timeout=300.0,
        place=place_of(tmp_path), layouts=["replicated", "random"],
        options=options, hosts=hosts,
    )  # fmt: skip
    assert (found[0]["exchanged"], found[0]["sharing"]) == (0, "none")
    assert found[0]["store"] > 1.05 * found[0]["unique"]
