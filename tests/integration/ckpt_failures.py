"""States, ranks and checks of the failure tests; and the sweep that kills at every request.

`python -m tests.integration.ckpt_failures --every 1` kills each victim at every k-th request of a
save, before and after the server has done it, and prints a line per save and the counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from planish.checkpoint import catalog, save_engine, upload
from planish.checkpoint.commit import read_commit
from planish.checkpoint.control_store import started_at
from planish.checkpoint.coordination import Control
from planish.checkpoint.geometry import Box, whole
from planish.checkpoint.load import load_state, open_on_all
from planish.checkpoint.load_records import LoadOptions
from planish.checkpoint.loader_state import LoaderShard, LoaderState
from planish.checkpoint.model import Collected, LocalItem
from planish.checkpoint.monitor import TIMINGS
from planish.checkpoint.reader import open_state
from planish.checkpoint.save import SaveOptions, default_engine
from planish.checkpoint.storage import base, open_storage
from planish.checkpoint.tables import TensorSpec
from tests.integration.ckpt_forks import Forks, get_ready, write_json
from tests.integration.ckpt_ranks import wait_for
from tests.servers.http_proxy import HttpProxy, Rule
from tests.servers.minio_files import objects, open_uploads
from tests.servers.run_minio import Minio

HERE = "tests.integration.ckpt_failures"
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
    opened = open_on_all(place, control, storage=storage, timeout_s=timeout_s)
    matrix = opened.metadata.tensor_ids["main", "model", "matrix"]
    items = items_of(rank, size, -1, opened.metadata.tensors.spec(matrix).shape[1])
    wanted = Collected(items, loader=LoaderState(dp_rank=rank, dp_size=size))
    loaded = load_state(opened, {"main": wanted}, control, LoadOptions(timeout_s=timeout_s))
    seed = seed_held(items)
    assert loaded.shared["main"] == {"extra": {"seed": seed}}
    assert loaded.own["main"]["random"] == {"seed": seed, "rank": rank}
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
    tune(processes)
    engine = default_engine()
    if processes:
        engine.warmup(1 << 20)
    get_ready(folder, rank, uploader=engine.uploader.pid)
    options = {"timeout_s": 40.0, "step": seed, **options}
    return how(lambda: saved(engine, rank, size, uri, seed, columns, options))


def saved(engine, rank, size, uri, seed, columns, options):
    """Save and wait for the end; returns the attempt."""
    state = state_of(rank, size, seed, columns)
    handle = engine.save(state, SaveOptions(uri, **options))
    for item in state["main"].items:
        item.data.fill_(-1.0)
    return handle.result(60).attempt


def save_dying(rank, size, folder, uri, seed, *, victim, stage):
    """Save as `save_once`, but be killed between requests."""
    tune(False)
    engine = default_engine()
    dies = victim in ("all", ["coordinator", "worker"][rank])

    def die(here):
        if dies and here == stage:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def roles():
        die("plan")
        return state_of(rank, size, seed)

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
    options = SaveOptions(uri, step=seed, timeout_s=40.0, snapshot="lazy")
    return how(
        lambda: engine.save(
            roles, options, after_commit=committed, is_written_in_step=lambda _: die("stage")
        ).result(60).attempt
    )  # fmt: skip


def load_once(rank, size, folder, place, *, timeout_s=30.0):
    """Load once the test says so; returns how it ended."""
    control = Control.join()
    get_ready(folder, rank)
    return how(lambda: load_seed(place, control, timeout_s=timeout_s))


def how(act):
    """Return ["done", what `act` returned] or [kind of its error, text, file or ""], seconds."""
    began = time.monotonic()
    try:
        found = ["done", act(), ""]
    except Exception as error:
        found = [type(error).__name__, str(error), getattr(error, "file", "")]
    return [*found, time.monotonic() - began]


class Site:
    """A bucket of a server, reached directly by the test and through a proxy by the ranks."""

    def __init__(self, server, uri, proxy, forks, folder):
        self.server, self.uri, self.proxy, self.forks = server, uri, proxy, forks
        self.folder, self.bucket = Path(folder), uri.removeprefix("s3://")
        self.storage = open_storage(uri)[0]
        self._others = open_uploads(server.data)

    @property
    def environment(self):
        """What makes ranks go through the proxy."""
        return {**self.server.environment, "MINIO_ENDPOINT": self.proxy.endpoint}

    def path(self, name):
        return f"{self.uri}/run/{name}"

    def start(self, scenario="save_once", size=2, *, direct=False, **arguments):
        """Start ranks and wait until they are ready; returns them and what they told."""
        ranks = self.forks.start(
            f"{HERE}:{scenario}",
            size,
            self.folder,
            environment=self.server.environment if direct else self.environment,
            **arguments,
        )
        return ranks, ranks.ready()

    def finish(self, ranks, told=(), timeout=60.0):
        """Let ranks go and return their outcomes, once their uploaders have ended too."""
        ranks.go()
        outcomes = ranks.wait(timeout)
        pids = [one["uploader"] for one in told if one.get("uploader")]
        wait_for(lambda: not any(map(started_at, pids)), 30.0, "the end of the uploaders")
        return outcomes

    def save(self, name, seed, size=2, **arguments):
        """Save by new ranks without a proxy; fails unless every rank has."""
        ranks, told = self.start(
            size=size, direct=True, uri=self.path(name), seed=seed, **arguments
        )
        outcomes = self.finish(ranks, told)
        assert [one.value and one.value[0] for one in outcomes] == ["done"] * size, outcomes
        return outcomes[0].value[1]

    def visible(self):
        """Load all that is committed; returns name -> seed."""
        found = catalog.list_checkpoints(self.storage, "run")
        seeds = {one.path.rpartition("/")[2]: load_seed(one.uri) for one in found}
        assert all(one.step == seeds[one.path.rpartition("/")[2]] for one in found)
        return seeds

    def gc(self, grace_s=0.0):
        return catalog.gc(self.storage, "run", grace_s=grace_s)

    def check_disk(self):
        """Check that the server's disk has what commits name, and nothing that they do not."""
        needed, allowed = set(), {"run/LATEST"}
        for entry in catalog.list_checkpoints(self.storage, "run"):
            opened = open_state(entry.uri)
            needed |= {f"{entry.path}/COMMIT", f"{entry.path}/{entry.commit.meta_key}"}
            needed |= {opened.key(row) for row in range(len(opened.metadata.files))}
            allowed.add(opened.folder_key(TIMINGS))
        keys = set(objects(self.server.data, self.bucket))
        assert needed <= keys, sorted(needed - keys)
        assert keys <= needed | allowed, sorted(keys - needed - allowed)
        assert [one for one in open_uploads(self.server.data) if one not in self._others] == []

    def remove(self, name):
        """Remove a checkpoint."""
        catalog.delete(self.storage, f"run/{name}")

    def is_committed(self, name, attempt=""):
        commit = read_commit(self.storage, f"run/{name}")
        return commit is not None and (not attempt or commit.attempt == attempt)


@contextlib.contextmanager
def site_of_its_own(folder):
    """A server, a proxy and a forking process for the length of a block."""
    server = Minio(Path(folder) / "minio" / "data")
    server.start()
    os.environ.update(server.environment)
    server.make_bucket("sweep")
    try:
        with HttpProxy(server.endpoint) as proxy, Forks() as forks:
            yield Site(server, "s3://sweep", proxy, forks, Path(folder) / "ranks")
    finally:
        server.kill()


VICTIMS = ("coordinator", "worker", "all", "uploader")
KINDS = ("new", "overwrite")
FAULTS = ("kill after", "kill")


def kill_at(site, at, victim, kind, fault, held):
    """Kill a victim at a request of a save over or beside `step-1`, and check what is left.

    Returns:
        The request that was hit, None if the save had ended before; and what step 1 holds now.
    """
    name, new = ("step-2", "step-1")[kind == "overwrite"], held + 1
    size = {"columns": COLUMNS * (2 if victim == "uploader" else 1)}
    ranks, told = site.start(
        uri=site.path(name),
        seed=new,
        processes=victim == "uploader",
        overwrite=kind == "overwrite",
        **size,
    )
    pids = {"coordinator": ranks.pids[0], "worker": ranks.pids[1], "all": ranks.group}
    site.proxy.log.clear()
    site.proxy.rules = [Rule(fault, at=at, pid=pids.get(victim, told[at % 2]["uploader"]))]
    outcomes = site.finish(ranks, told)
    hit = next((f"{seen.kind} {seen.path}" for seen in site.proxy.log if seen.fault), "")
    site.proxy.rules = []
    seen = check_left(site, outcomes, name, held, new, **size)
    assert hit or name in seen, outcomes
    if kind == "new":
        site.remove(name)
        return hit, held
    return hit, new + 1


def check_left(site, outcomes, name, held, new, **size):
    """Check what a save of `new` to `name` has left that found `step-1` with `held`; restart it.

    Returns:
        What was visible: either the old or the new state, complete, and as the ranks were told.
    """
    assert all(one.code in (0, -9) and not one.error for one in outcomes), outcomes
    ends = [one.value for one in outcomes if one.value]
    old, both = {"step-1": held}, {"step-1": held, name: new}
    seen = site.visible()
    assert seen in (old, both), (seen, ends)
    assert all((end[0] == "done") == (seen == both) for end in ends), (seen, ends)
    assert all(end[0] in ("done", "SaveFailed", "PlanMismatch", "PeerLost") for end in ends), ends
    site.gc()
    site.save(name, new + 1, overwrite=True, **size)
    site.gc()
    assert site.visible() == {**seen, name: new + 1}
    site.check_disk()
    return seen


def sweep(site, *, every, victims=VICTIMS, kinds=KINDS, faults=FAULTS, start=1, limit=1000):
    """Kill each victim at every k-th request of a save; yield what was done and what failed."""
    held = 0
    for victim, kind, fault in itertools.product(victims, kinds, faults):
        for at in range(start, limit, every):
            wrong = ""
            try:
                if not held:
                    site.storage.delete([stat.key for stat in site.storage.list("")])
                    site.save("step-1", 1, columns=COLUMNS * (1 + (victim == "uploader")))
                    held = 1
                hit, held = kill_at(site, at, victim, kind, fault, held)
            except AssertionError as error:
                hit, held, wrong = "failed", 0, str(error)
            if not hit:
                break
            yield victim, kind, fault, at, hit, wrong


def main():
    """Sweep on a server of its own and print what was done; exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="kill at every k-th request")
    parser.add_argument("--start", type=int, default=1, help="first request")
    parser.add_argument("--victims", nargs="+", default=VICTIMS, choices=VICTIMS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    arguments = vars(parser.parse_args())
    began, counts, stages, failed = time.monotonic(), Counter(), Counter(), 0
    with tempfile.TemporaryDirectory() as folder, site_of_its_own(folder) as site:
        for *case, at, hit, wrong in sweep(site, **arguments):
            counts[" ".join(case)] += 1
            stages[stage_of(hit)] += 1
            failed += bool(wrong)
            print(f"{time.monotonic() - began:7.1f} s", *case, f"{at}: {hit} {wrong}", flush=True)
    seconds = round(time.monotonic() - began)
    told = {"cases": sum(counts.values()), "failed": failed, "seconds": seconds}
    print(json.dumps({**told, "by": counts, "stages": stages}, indent=1))
    sys.exit(failed > 0)


def stage_of(hit):
    """Return kind of request and name of the object without what differs between saves."""
    return re.sub(r"/[^ ]*/(a-\w+/)?|[0-9]{5}-[0-9]+\.", "/", hit)


if __name__ == "__main__":
    main()
