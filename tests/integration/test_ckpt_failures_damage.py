"""Checkpoints of real ranks that were damaged at rest: every object, every byte of COMMIT."""

import pytest

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
)
from planish.checkpoint.commit import catalog
from planish.checkpoint.load.verify import verify
from tests import thin
from tests.integration.ckpt_seeds import load_seed

pytestmark = pytest.mark.server

DAMAGE = {
    "deleted": lambda data: None,
    "flipped": lambda data: flip(data, len(data) // 2),
    "first byte flipped": lambda data: flip(data, 0),
    "last byte flipped": lambda data: flip(data, len(data) - 1),
    "cut": lambda data: data[:-1],
    "halved": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
}


def flip(data, at, bit=0):
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def damage(site, key, data):
    site.storage.delete([key])
    if data is not None:
        site.storage.put(key, data)


def objects_of(site, name):
    """Return name of the object relative to the checkpoint -> (key, content)."""
    start = f"run/{name}/"
    return {
        stat.key[len(start) :]: (stat.key, site.storage.get(stat.key, 1 << 30)[0])
        for stat in site.storage.list(start[:-1])
    }


@pytest.mark.slow
def test_damage_to_any_object_is_found_before_it_is_used(site):
    site.save("step-1", 1)
    site.save("step-2", 2)
    found = objects_of(site, "step-2")
    kinds = sorted(name.partition("/")[2] or name for name in found)
    assert kinds == [
        "COMMIT",
        "data/main.extra/00000.bin",
        "data/main.extra/00001.bin",
        "data/main.extra/shared.bin",
        "data/main.loader/00000-0.bin",
        "data/main.loader/00001-0.bin",
        "data/main.loader/common.bin",
        "data/main.model/00000-0.safetensors",
        "data/main.model/00001-0.safetensors",
        "data/main.optim/00000-0.safetensors",
        "data/main.optim/00001-0.safetensors",
        "meta/global.bin",
        "timings.jsonl",
    ]
    cases = 0
    for number, (name, (key, data)) in enumerate(found.items()):
        # Of an object every third kind of damage, and each kind on some objects.
        for how in [*DAMAGE] if thin.full else [*DAMAGE][number % 3 :: 3]:
            changed = DAMAGE[how](data)
            damage(site, key, changed)
            check_is_found(site, name, how)
            cases += 1
        damage(site, key, data)
        assert load_seed(site.path("step-2")) == 2
    assert cases == (13 * 7 if thin.full else 31)


def check_is_found(site, name, how):
    place = site.path("step-2")
    if name.endswith("timings.jsonl"):
        assert load_seed(place) == 2
        return
    if name == "COMMIT" and how == "deleted":
        with pytest.raises(CheckpointNotFound, match="step-2"):
            load_seed(place)
        assert catalog.latest(site.storage, "run").step == 1
        return
    # This process is rank 0: it never reads what is rank 1's alone.
    if not name.endswith("extra/00001.bin"):
        with pytest.raises((CheckpointCorrupt, CheckpointIncomplete)) as caught:
            load_seed(place)
        wanted = (CheckpointIncomplete,) if how == "deleted" else (CheckpointCorrupt,)
        wanted += (CheckpointIncomplete,) if how in ("cut", "halved", "emptied") else ()
        assert isinstance(caught.value, wanted), (name, how, caught.value)
        assert name.rpartition("/")[2] in str(caught.value) + getattr(caught.value, "file", "")
    if name == "COMMIT":
        assert catalog.latest(site.storage, "run").step == 1
    elif "global.bin" not in name:
        report = verify(place)
        assert not report.is_intact
        assert {fault.file for fault in report.faults} == {name.partition("/")[2]}, how
    assert load_seed(site.path("step-1")) == 1


@pytest.mark.parametrize("name", ["model/00001", "extra/00001.bin", "global.bin", "COMMIT"])
def test_every_rank_of_a_job_is_told_of_damage(site, name):
    site.save("step-1", 1)
    (key, data) = next(pair for found, pair in objects_of(site, "step-1").items() if name in found)
    places = [site.path("step-1")] * 3
    ranks, _ = site.start("read", places=places, paced=True)
    ranks.go()
    damage(site, key, flip(data, len(data) // 2))
    ends = site.pace(ranks, 0)
    assert [end[0] for end in ends] == ["CheckpointCorrupt"] * 2, ends
    assert all(name in end[1] + end[2] for end in ends), ends
    damage(site, key, None)
    ends = site.pace(ranks, 1)
    gone = "CheckpointNotFound" if name == "COMMIT" else "CheckpointIncomplete"
    assert [end[0] for end in ends] == [gone] * 2, ends
    damage(site, key, data)
    ends = site.pace(ranks, 2)
    assert [end[:2] for end in ends] == [["done", 1]] * 2, ends
    ranks.wait(30.0)
