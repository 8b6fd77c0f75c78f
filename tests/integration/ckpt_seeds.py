"""States told apart by a seed, every bit of them, and what ranks do with them in failure tests."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch

from planish.checkpoint.adapters.loader_state import LoaderShard, LoaderState
from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import Collected, LocalItem, TensorSpec
from planish.checkpoint.loading.agree import LoadOptions
from planish.checkpoint.loading.load import load_state, open_on_all
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.saving import engine as save_engine
from planish.checkpoint.saving import upload
from planish.checkpoint.saving.agree import SaveOptions
from planish.checkpoint.saving.engine import default_engine
from planish.store import base
from planish.store.s3 import S3Store, read_settings
from tests.integration.ckpt_forks import get_ready, write_json
from tests.integration.waiting import wait_for

COLUMNS = 350_000
"""The matrix of 8 rows makes 5.6 MB on each of two ranks: two parts of at least 5 MiB."""
PART_BYTES = 5 << 20
"""The least that the server takes for a part that is not the last."""


def shapes(columns):
    """(kind, name) -> shape, and the axis along which ranks share it (-1: each has a replica)."""
    return {
        ("model", "matrix"): ((8, columns), 0),
        ("model", "bias"): ((33,), -1),
        ("optim", "matrix.exp_avg"): ((64, 10), 0),
        ("optim", "matrix.step"): ((), -1),
    }


def values(shape, seed):
    """Elements whose bits are all others for another seed, and no two of which are equal."""
    count = int(np.prod(shape, dtype=np.int64))
    bits = np.arange(count, dtype=np.int32) + np.int32(seed << 20)
    return bits.view(np.float32).reshape(shape)


def items_of(rank, size, seed, columns=COLUMNS):
    """Return what a rank holds of the state of a seed; -1: room for it, zeros."""
    items = []
    for (kind, name), (shape, axis) in shapes(columns).items():
        spec = TensorSpec("main", kind, name, "F32", shape)
        data, box = values(shape, seed) if seed >= 0 else np.zeros(shape, np.float32), whole(shape)
        if axis == 0:
            low, high = rank * shape[0] // size, (rank + 1) * shape[0] // size
            box = Box((low, *[0] * (len(shape) - 1)), (high - low, *shape[1:]))
            data = data[low:high]
        items.append(LocalItem(spec, (box,), torch.from_numpy(np.array(data))))
    return items


def state_of(rank, size, seed, columns=COLUMNS):
    """Return the state of a seed with everything a checkpoint can have an object for."""
    shard = LoaderShard(rank, 0, buffer=[f"sample {seed}"], cursor={"web": seed})
    return {
        "main": Collected(
            items_of(rank, size, seed, columns),
            shared={"extra": {"seed": seed}},
            own={"random": {"seed": seed, "rank": rank}},
            loader=LoaderState({"seed": seed}, [shard], dp_rank=rank, dp_size=size),
        )
    }


def seed_held(items):
    """Return the seed that every bit of the items is of; AssertionError for a mix."""
    first, (box,) = items[0].data.numpy(), items[0].boxes
    skipped = box.offsets[0] * items[0].tensor.shape[1]
    seed = (int(first.reshape(-1)[:1].view(np.int32)[0]) - skipped) >> 20
    for item in items:
        (box,) = item.boxes
        place = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
        wanted = np.ascontiguousarray(values(item.tensor.shape, seed)[place])
        assert item.data.numpy().tobytes() == wanted.tobytes(), (item.tensor.fqn, seed)
    return seed


def load_seed(place, control=None, *, storage=None, timeout_s=60.0):
    """Load a checkpoint with the engine, check every bit, and return the seed that it is of."""
    control = control or Control.single()
    rank, size = control.rank, control.size
    opened = open_on_all(place, control, storage=storage)
    matrix = opened.metadata.tensor_ids["main", "model", "matrix"]
    items = items_of(rank, size, -1, opened.metadata.tensors.spec(matrix).shape[1])
    wanted = Collected(items, loader=LoaderState(dp_rank=rank, dp_size=size))
    _, loaded = load_state(opened, {"main": wanted}, control, LoadOptions(timeout_s=timeout_s))
    seed = seed_held(items)
    own = {"seed": seed, "rank": rank}
    assert loaded.values["main"] == {"extra": {"seed": seed}, "random": own}
    found = loaded.loader["main"]
    assert found.common["seed"] == seed
    assert all(shard.cursor == {"web": seed} for shard in found.shards)
    return seed


def tune(processes):
    """Make a small state take the path of a large one."""
    if processes:
        save_engine.INLINE_BYTES = 0
    else:
        upload.SINGLE_PUT_BYTES = 1 << 20
        base.PART_BYTES = PART_BYTES


def save_once(rank, size, folder, uri, seed, *, processes=False, columns=COLUMNS, **options):
    """Save the state of a seed once the test says so; returns how it ended."""
    engine = started(folder, rank, processes)
    return how(lambda: saved(engine, uri, seed, columns, options))


def started(folder, rank, processes):
    """Return this rank's engine when the test has said so."""
    tune(processes)
    engine = default_engine()
    if processes:
        engine.uploader.start()
    get_ready(folder, rank, uploader=engine.uploader.pid)
    return engine


def saved(engine, uri, seed, columns=COLUMNS, options=None, storage=None):
    """Save, change every tensor when the call returns, wait for the end; returns the attempt."""
    state = state_of(engine.control.rank, engine.control.size, seed, columns)
    options = SaveOptions(uri, **{"timeout_s": 90.0, "step": seed, **(options or {})})
    handle = engine.save(state, options, storage=storage)
    for item in state["main"].items:
        item.data.fill_(-1.0)
    return handle.result(120).attempt


def train(rank, size, folder, root, steps, *, processes=False, paced=False, read_seconds=0.0):
    """Save once per step, whatever became of the one before; returns how each ended.

    Args:
        steps: name of the checkpoint, seed and options of each save.
        paced: wait for `Site.pace` before each.
        read_seconds: give up a request after so long.
    """
    engine, ends = started(folder, rank, processes), []
    for number, (name, seed, options) in enumerate(steps):
        if paced:
            os.environ.update(word(folder, number))
        storage = impatient(root, read_seconds)
        ends.append(
            how(lambda: saved(engine, f"{root}/{name}", seed, options=options, storage=storage))  # noqa: B023
        )
        write_json(Path(folder) / f"ended-{rank}-{number}.json", ends[-1])
    return ends


def read(rank, size, folder, places, *, paced=False, read_seconds=0.0):
    """Load one place after the other; returns how each load ended."""
    control, ends = Control.join(), []
    get_ready(folder, rank)
    for number, place in enumerate(places):
        if paced:
            word(folder, number)
        storage = impatient(place, read_seconds)
        ends.append(how(lambda: load_seed(place, control, storage=storage)))  # noqa: B023
        write_json(Path(folder) / f"ended-{rank}-{number}.json", ends[-1])
    return ends


def word(folder, number):
    """Wait for the word to do the next thing; returns environment variables to set before."""
    path = Path(folder) / f"step-{number}.json"
    wait_for(path.exists, 90.0, "the word to go on")
    return json.loads(path.read_text())


def impatient(uri, read_seconds):
    """Return a storage whose requests end after `read_seconds`, None for 0."""
    if not read_seconds:
        return None
    bucket = uri.removeprefix("s3://").partition("/")[0]
    return S3Store(read_settings(), bucket, read_seconds=read_seconds, timeout_s=10.0)


def save_dying(rank, size, folder, uri, seed, *, victim, stage):
    """Save as `save_once`, but be killed between requests."""
    tune(False)
    engine = default_engine()
    dies = victim in ("all", ["coordinator", "worker"][rank])

    def die(here):
        if here == stage and victim == "all":
            die_together(Path(folder), rank, size)
        elif dies and here == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    def roles():
        die("plan")
        return state_of(rank, size, seed)

    copy_tensors = save_engine.copy_tensors

    def copy(*arguments):
        die("stage")
        copy_tensors(*arguments)

    save_engine.copy_tensors = copy

    def committed(storage, path):
        write_json(Path(folder) / "committed", [])
        die("committed")
        if victim != "coordinator" and stage == "committed":
            time.sleep(0.3)

    def wait_to_die():
        wait_for((Path(folder) / "committed").exists, 30.0, "the commit")
        die("committed")

    get_ready(folder, rank)
    if rank == 1 and stage == "committed":
        threading.Thread(target=wait_to_die, daemon=True).start()
    options = SaveOptions(uri, step=seed, timeout_s=90.0)
    return how(lambda: engine.save(roles, options, after_commit=committed).result(120).attempt)


def die_together(folder, rank, size):
    """Wait until all ranks are here, then die: rank 0 kills every one, so that none hears first."""
    write_json(folder / f"dying-{rank}.json", os.getpid())
    there = [folder / f"dying-{other}.json" for other in range(size)]
    wait_for(lambda: all(path.exists() for path in there), 60.0, "the other ranks")
    if rank:
        time.sleep(60.0)
    for path in reversed(there):
        os.kill(json.loads(path.read_text()), signal.SIGKILL)


def how(act):
    """Return ["done", what `act` returned] or [kind of its error, text, file or ""], seconds."""
    began = time.monotonic()
    try:
        found = ["done", act(), ""]
    except Exception as error:
        found = [type(error).__name__, str(error), getattr(error, "file", "")]
    return [*found, time.monotonic() - began]
