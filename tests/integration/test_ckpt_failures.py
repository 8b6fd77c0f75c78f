"""Processes killed in the middle of saves and loads; and where each failure is tested.

Every test here and in `test_ckpt_failures_*` uses real ranks, engine and MinIO server. Beside them:
`commit_full`: `test_ckpt_commit_full`, `storage`: `test_ckpt_storage_faults` (every fault on every
kind of request), `save`: `test_ckpt_save`, `stops`: `unit/checkpoint/commit/test_commit_stops` (the
commit protocol alone, at every request, in memory).

=====================================  ===========================================================
failure                                tests
=====================================  ===========================================================
SIGKILL of coordinator, worker, their  here: some requests; `ckpt_failures --every 1`: each;
uploader, all ranks, at every stage    planning, staging, after the commit; and during loads
server killed and started again        store: saves and loads; commit_full, storage
reset, black hole, 1 byte/s,           store: saves and loads; storage
truncated, corrupted in flight
503 bursts, 500 on complete, answer    store: saves; storage, stops
to COMMIT lost
disk full                              store: on the server itself; storage
credentials revoked and rotated        store
two jobs save one path                 races (one of them paused); stops
paused job resumes after a commit      races; stops
overwrite interrupted at each request  here (each kill is also done to an overwrite); stops
collection and retention beside        races; stops
object deleted, flipped, cut; COMMIT   `unit/checkpoint/loading`; on the server's disk; on one
gone, LATEST dangling                  rank of several: `test_ckpt_load_faults`
save N fails, N + 1 succeeds           training: seven causes, the jobs going on; save
state changed right after save()       training: upload held back
plan cache, change on rank 3 only      training
reader while the writer overwrites     races; stops
200 saves in a row                     training
=====================================  ===========================================================
"""

import pytest

from tests import thin
from tests.integration.ckpt_failures import check_left, kill_at
from tests.integration.ckpt_seeds import load_seed
from tests.servers.http_proxy import Rule

pytestmark = pytest.mark.server

VICTIMS = [
    ("coordinator", "new", 3),
    ("coordinator", "overwrite", 1),
    ("worker", "overwrite", 3),
    ("worker", "new", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "kind", "first"), VICTIMS)
def test_a_rank_killed_at_a_request_leaves_old_or_new(site, victim, kind, first):
    site.save("step-1", 1)
    held, hits = 1, []
    every = 8 if thin.full else 16
    for at in range(first, 100, every):
        hit, held = kill_at(site, at, victim, kind, "kill after", held)
        if not hit:
            break
        hits.append(hit)
    assert 32 <= len(hits) * every <= 64


@pytest.mark.parametrize(("victim", "at"), [("all", 7), ("all", 28), ("uploader", 9)])
def test_all_ranks_or_an_uploader_killed_leave_old_or_new(site, victim, at):
    site.save("step-1", 1, columns=700_000 if victim == "uploader" else 350_000)
    hit, _ = kill_at(site, at, victim, "new", "kill after", 1)
    assert hit


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["plan", "stage", "committed"])
@pytest.mark.parametrize("victim", ["coordinator", "worker", "all"])
def test_a_rank_killed_between_requests_leaves_old_or_new(site, stage, victim):
    site.save("step-1", 1)
    ranks, told = site.start(
        "save_dying", uri=site.path("step-2"), seed=2, victim=victim, stage=stage
    )
    outcomes = site.finish(ranks, told)
    assert [one.code for one in outcomes].count(-9) == (2 if victim == "all" else 1)
    seen = check_left(site, outcomes, "step-2", 1, 2)
    assert ("step-2" in seen) == (stage == "committed")


@pytest.mark.parametrize("victim", ["coordinator", "worker"])
@pytest.mark.parametrize("fault", ["kill", "kill after"])
def test_a_rank_killed_in_a_load_ends_the_load_of_the_others(site, victim, fault):
    site.save("step-1", 1)
    number = ["coordinator", "worker"].index(victim)
    for at in (1, 4) if victim == "coordinator" else (3, 5):
        ranks, _ = site.start("read", places=[site.path("step-1")])
        site.proxy.log.clear()
        site.proxy.rules = [Rule(fault, kind="get", at=at, pid=ranks.pids[number])]
        outcomes = site.finish(ranks)
        assert site.proxy.suffered() == [fault]
        assert outcomes[number].code == -9
        ((kind, text, _, seconds),) = outcomes[1 - number].value
        assert kind in ("PeerLost", "PlanMismatch"), text
        assert seconds < 20
    site.proxy.rules = []
    assert load_seed(site.path("step-1")) == 1
