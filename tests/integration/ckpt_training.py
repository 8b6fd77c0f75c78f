"""What ranks do in the tests of training that goes on: failing saves, other plans, many saves."""

import os
import resource
import threading

import numpy as np
import psutil
import torch

from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import Collected, LocalItem, TensorSpec
from planish.checkpoint.saving.agree import SaveOptions
from tests.integration.ckpt_seeds import saved, started, values

TYPES = {"F32": np.float32, "I64": np.int64}
PLANS = [
    {},
    {},
    {"a": ("F32", (12, 6))},
    {"new": ("F32", (5,))},
    {"b": None},
    {"a": ("I64", (8, 6))},
    {"last": ("F32", (3,))},
    {"last": ("F32", (4,))},
    {"last": ("I64", (4,))},
    {},
]
"""Changes to the tensors of each save; `last` is on the last rank only."""
TENSORS = {"a": ("F32", (8, 6)), "b": ("F32", (7,)), "c": ("F32", ())}


def tensors_of(number):
    """Return name -> array of the save of that number."""
    specs = {name: spec for name, spec in (TENSORS | PLANS[number]).items() if spec is not None}
    return {
        name: values(shape, number + 1).astype(TYPES[dtype])
        for name, (dtype, shape) in specs.items()
    }


def replan(rank, size, folder, root):
    """Save once per plan; returns which saves used a plan again."""
    engine, hits = started(folder, rank, False), []
    for number in range(len(PLANS)):
        items = []
        for name, array in tensors_of(number).items():
            dtype = {np.float32: "F32", np.int64: "I64"}[array.dtype.type]
            spec, box = TensorSpec("main", "model", name, dtype, array.shape), whole(array.shape)
            if name == "last" and rank != size - 1:
                continue
            if name == "a":
                low, high = (array.shape[0] * r // size for r in (rank, rank + 1))
                box, array = Box((low, 0), (high - low, array.shape[1])), array[low:high]
            items.append(LocalItem(spec, (box,), torch.from_numpy(np.array(array))))
        before = engine.planner.hits
        options = SaveOptions(f"{root}/step-{number}", step=number)
        engine.save({"main": Collected(items)}, options).result(120)
        hits.append(engine.planner.hits - before)
    return hits


def many(rank, size, folder, uri, count, processes):
    """Save `count` times; returns what this rank holds after a quarter and at the end."""
    engine, held = started(folder, rank, processes), []
    for number in range(1, count + 1):
        saved(engine, uri, number, columns=100, options={"overwrite": number > 1})
        if number in (count // 4, count):
            held.append(holdings(engine))
    engine.close()
    return [*held, holdings()]


def holdings(engine=None):
    """Return open files, threads, shared memory in bytes and resident memory in MB."""
    found = {"uploader files": 0, "uploader threads": 0, "uploader memory": 0, "keys": 0}
    if engine is not None:
        found["keys"] = len(engine.control._line.words.store.list_keys())
    if engine is not None and engine.uploader.pid:
        other = psutil.Process(engine.uploader.pid)
        found["uploader files"], found["uploader threads"] = other.num_fds(), other.num_threads()
        found["uploader memory"] = other.memory_info().rss >> 20
    with open("/proc/self/smaps_rollup") as file:
        facts = dict(line.split(":") for line in file if ":" in line)
    shared = sum(
        int(line.split()[0].split("-")[1], 16) - int(line.split()[0].split("-")[0], 16)
        for line in open("/proc/self/maps")  # noqa: SIM115
        if "memfd" in line or "/dev/shm" in line
    )
    return found | {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared": shared,
        "memory": int(facts["Rss"].split()[0]) // 1024,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "children": len(children()),
    }


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()
