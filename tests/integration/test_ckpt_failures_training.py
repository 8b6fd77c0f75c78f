"""Training that goes on: after failed saves, over changed tensors and plans, 200 saves long."""

import numpy as np
import pytest

from planish.store.processes import process_start
from tests.integration.ckpt_states import read_back
from tests.integration.ckpt_training import PLANS, tensors_of
from tests.integration.waiting import wait_for
from tests.servers.http_proxy import Rule
from tests.thin import examples

pytestmark = pytest.mark.server

HERE = "tests.integration.ckpt_training"
DATA = r"/data/.*\.safetensors$"
CAUSES = [
    (Rule("507", kind="part"), "the server is full"),
    (Rule("403", kind="create"), "MINIO_SECRET_KEY"),
    (Rule("507", kind="put", path="global.bin$"), "the server is full"),
    (Rule("corrupt", kind="get", path="global.bin$"), "must come back as it was written"),
    (Rule("507", kind="complete", path="COMMIT$"), "could not be committed"),
    (Rule("403", kind="list"), "MINIO_SECRET_KEY"),
]


def start(site, scenario, size=2, **arguments):
    ranks = site.forks.start(
        f"{HERE}:{scenario}", size, site.folder, environment=site.environment, **arguments
    )
    return ranks, ranks.ready()


@pytest.mark.slow
def test_after_every_save_that_fails_the_next_succeeds_and_nothing_is_left(site):
    steps = [(f"step-{number // 2}", number, {}) for number in range(2 * len(CAUSES))]
    ranks, told = site.start("train", root=f"{site.uri}/run", steps=steps, paced=True)
    ranks.go()
    expected = {}
    for number, (rule, text) in enumerate(CAUSES):
        ends = site.pace(ranks, 2 * number, [rule])
        assert site.proxy.suffered() == [rule.fault], rule
        assert [end[0] for end in ends] in (["SaveFailed"] * 2, ["CheckpointCorrupt"] * 2), ends
        assert all(text in end[1] for end in ends), (text, ends)
        # It was cleared away by those who wrote it, without a collection.
        assert site.visible() == expected
        site.check_disk()
        ends = site.pace(ranks, 2 * number + 1)
        assert [end[0] for end in ends] == ["done"] * 2, ends
        expected[f"step-{number}"] = 2 * number + 1
    site.finish(ranks, told)
    assert site.visible() == expected


@pytest.mark.parametrize("processes", [False, True])
def test_what_changes_while_the_upload_is_held_back_is_not_saved(site, processes):
    # `saved` fills every tensor with -1 when the call has returned, a second before a byte leaves.
    ranks, told = site.start(uri=site.path("step-1"), seed=5, processes=processes)
    held = Rule("delay", path=rf"journal/|{DATA}", times=0, seconds=1.0)
    site.proxy.rules = [held]
    ends = [one.value for one in site.finish(ranks, told)]
    assert [end[0] for end in ends] == ["done"] * 2, ends
    assert held.seen >= 4
    assert site.visible() == {"step-1": 5}


def test_a_plan_is_never_used_for_other_tensors_even_if_only_rank_three_changed(site):
    ranks, told = start(site, "replan", size=4, root=f"{site.uri}/run")
    hits = [one.value for one in site.finish(ranks, told)]
    # The second save is like the first, the last one again.
    assert hits == [[0, 1, 0, 0, 0, 0, 0, 0, 0, 1]] * 4, hits
    for number in range(len(PLANS)):
        _, _, tensors, _ = read_back(site.path(f"step-{number}"))
        expected = tensors_of(number)
        assert {name for _, _, name in tensors} == expected.keys()
        for (_, _, name), found in tensors.items():
            assert found.dtype == expected[name].dtype
            np.testing.assert_array_equal(found, expected[name], err_msg=f"{number} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [True, False])
def test_two_hundred_saves_in_a_row_keep_no_file_thread_or_memory(site, processes):
    count = examples(200)
    ranks, told = start(site, "many", uri=site.path("step-1"), count=count, processes=processes)
    ranks.go()
    outcomes = ranks.wait(timeout=400.0)
    pids = [one["uploader"] for one in told if one["uploader"]]
    wait_for(lambda: not any(map(process_start, pids)), 30.0, "the end of the uploaders")
    for outcome in outcomes:
        assert not outcome.error, outcome.error
        early, late, closed = outcome.value
        for name in ("files", "threads", "shared", "children"):
            assert late[name] <= early[name] + (name == "files"), (name, outcome.value)
        for name in ("uploader files", "uploader threads", "keys"):
            assert late[name] <= early[name] + 4, (name, outcome.value)
        for name in ("memory", "uploader memory"):
            assert late[name] <= early[name] + 16, (name, outcome.value)
        assert closed["shared"] == closed["children"] == 0, outcome.value
    assert site.visible() == {"step-1": count}
    site.gc()
    site.check_disk()
