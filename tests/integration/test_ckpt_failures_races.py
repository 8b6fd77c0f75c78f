"""Jobs of real ranks that meet: at one path, over a pause, with readers, with the collection."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.integration.waiting import wait_for
from tests.servers.http_proxy import Rule

pytestmark = pytest.mark.server


def kinds_of(outcomes):
    return [one.value[0] for one in outcomes]


def is_stopped(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


PAUSES = [
    Rule("stop", kind="create", path="/data/"),
    Rule("stop", kind="part", at=3),
    Rule("stop", kind="complete", path="/data/", at=2),
    Rule("stop", kind="put", path="global.bin$"),
    Rule("stop", kind="list"),
    Rule("stop", kind="create", path="COMMIT$"),
]


@pytest.mark.parametrize("pause", PAUSES, ids=lambda rule: f"{rule.kind}-{rule.path[-7:]}")
@pytest.mark.parametrize("is_collected", [False, True])
def test_a_paused_job_that_resumes_after_another_has_committed_changes_nothing(
    site, pause, is_collected
):
    site.save("step-1", 1)
    ranks, told = site.start(uri=site.path("step-1"), seed=2, overwrite=True)
    # What the job replaces is what it has seen: it must have looked before it sleeps.
    rule = replace(pause, pid=ranks.group, after="step-1/COMMIT$")
    site.proxy.log.clear()
    site.proxy.rules = [rule]
    ranks.go()
    wait_for(lambda: all(is_stopped(pid) for pid in ranks.pids), 20.0, "the pause")
    site.save("step-1", 3, overwrite=True)
    if is_collected:
        site.gc()
    os.kill(ranks.group, signal.SIGCONT)
    ends = kinds_of(site.finish(ranks, told))
    assert ends[0] == ends[1], ends
    # Cleared away while it slept, the paused job may find that out before it meets the other.
    allowed = ("CheckpointExists", "SaveFailed", "CheckpointIncomplete")
    assert ends[0] in (allowed if is_collected else allowed[:1]), ends
    assert site.visible() == {"step-1": 3}
    site.gc()
    assert site.visible() == {"step-1": 3}
    site.check_disk()


@pytest.mark.slow
def test_readers_beside_a_writer_that_overwrites_see_one_whole_save(site):
    site.save("step-1", 1)
    steps = [("step-1", seed, {"overwrite": True}) for seed in range(2, 9)]
    writers, told = site.start("train", root=f"{site.uri}/run", steps=steps, direct=True)
    readers, _ = site.start("read", places=[site.path("step-1")] * 12, direct=True)
    readers.go()
    writers.go()
    collecting = threading.Event()

    def collect():
        while not collecting.is_set():
            site.gc(grace_s=3600.0)

    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(collect)
        found = [one.value for one in readers.wait(90.0)]
        saved = [one.value for one in site.finish(writers, told)]
        collecting.set()
        collected.result(timeout=30)
    assert [end[0] for ends in saved for end in ends] == ["done"] * 14
    seeds = [end[1] for end in found[0]]
    assert [end[0] for ends in found for end in ends] == ["done"] * 24, found
    # Both ranks of a load see the same save, and later loads never an earlier one.
    assert seeds == [end[1] for end in found[1]]
    assert seeds == sorted(seeds)
    assert len(set(seeds)) > 1
    site.gc()
    assert site.visible() == {"step-1": 8}
    site.check_disk()
