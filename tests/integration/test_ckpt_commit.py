"""The commit protocol on a real MinIO server: killed processes, paused ones, races, restarts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from planish.base.errors import CheckpointExists, StoreError
from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.commit import Commit, read_commit
from planish.checkpoint.commit.journal import Journal, attempt_folder, new_attempt
from planish.store import open_store
from tests import thin
from tests.servers.http_proxy import HttpProxy, Rule
from tests.servers.minio_files import objects, open_uploads
from tests.stores.faulty import FaultyStore, Stopped, stop_at
from tests.unit.checkpoint.small_saves import (
    ROOT,
    check_all,
    load,
    outcome,
    path_of,
    save,
    stray,
)

pytestmark = pytest.mark.server

EVERY = 1 if thin.full else 3
"""Of the requests of a save, one in so many is where it is stopped or killed."""
CHILD = """
import sys
from planish.store import open_store
from planish.base.errors import CheckpointExists
from tests.unit.checkpoint.small_saves import path_of, save

storage, _ = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
path = path_of(2) if sys.argv[2] == "new" else path_of(1)
try:
    save(storage, 2, path=path, overwrite=sys.argv[2] == "overwrite")
except CheckpointExists:
    sys.exit(3)
"""


@pytest.fixture
def storage(s3_root):
    return open_store(s3_root)[0]


@pytest.fixture
def assert_is_clean(storage, minio, s3_root):
    """Check that nothing lies on the server's disk but what commits name."""
    others = open_uploads(minio.data)  # of tests that used the same server before

    def check():
        assert stray(storage) == []
        keys = objects(minio.data, s3_root.removeprefix("s3://"))
        assert keys == [stat.key for stat in storage.list("")]
        assert [upload for upload in open_uploads(minio.data) if upload not in others] == []

    return check


@contextlib.contextmanager
def saving_process(uri, kind, proxy):
    """Start a process that saves through the proxy once it is told to; yield it ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, uri, kind],
        env={**os.environ, "MINIO_ENDPOINT": proxy.endpoint, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdin.close()
        process.stdout.close()


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new", "overwrite"])
def test_a_save_stopped_at_every_request_leaves_old_or_new(storage, minio, assert_is_clean, kind):
    old, new = ([1], [1, 2]) if kind == "new" else ([1], [2])
    seen = []
    for request in range(1, 100, EVERY):
        for after in (False, True):
            storage.delete([stat.key for stat in storage.list("")])
            save(storage, 1)
            faulty = FaultyStore(storage, stop_at(request, after=after))
            try:
                path = path_of(2) if kind == "new" else path_of(1)
                save(faulty, 2, path=path, overwrite=kind == "overwrite")
            except Stopped:
                pass
            seen.append(check_all(storage))
            catalog.gc(storage, "run", grace_s=0)
            assert check_all(storage) == seen[-1]
            assert_is_clean()
        if faulty.requests < request:
            break
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (old, new)
    assert len(seen) > 36 // EVERY


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "kill after"])
def test_a_process_killed_at_every_request_leaves_old_or_new(
    storage, minio, assert_is_clean, s3_root, fault
):
    seen = []
    with HttpProxy(minio.endpoint) as proxy:
        for request in range(1, 100, EVERY):
            kind = ("new", "overwrite")[(request + (fault == "kill")) % 2]
            storage.delete([stat.key for stat in storage.list("")])
            save(storage, 1)
            with saving_process(s3_root, kind, proxy) as process:
                proxy.log.clear()
                proxy.rules = [Rule(fault, at=request, pid=process.pid)]
                go(process)
                ended = process.wait(timeout=60)
            seen.append(check_all(storage))
            assert seen[-1] in ([1], [1, 2] if kind == "new" else [2])
            assert save(storage, 3).step == 3
            catalog.gc(storage, "run", grace_s=0)
            assert check_all(storage) == [*seen[-1], 3]
            assert_is_clean()
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
    assert seen[0] == [1]
    assert seen[-1] != [1]
    assert len(seen) > 16 // EVERY


@pytest.mark.parametrize("request_kind", ["create", "complete", "list"])
def test_a_process_paused_while_another_commits_loses(
    storage, minio, assert_is_clean, s3_root, request_kind
):
    save(storage, 1)
    with HttpProxy(minio.endpoint) as proxy, saving_process(s3_root, "overwrite", proxy) as process:
        proxy.rules = [
            Rule("stop", kind=request_kind, path="a-" if request_kind == "complete" else "",
                 pid=process.pid)
        ]  # fmt: skip
        go(process)
        for _ in range(500):
            if proxy.suffered():
                break
            time.sleep(0.01)
        winner = save(storage, 7, path=path_of(1), overwrite=True)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(timeout=30) == 3
    assert load(storage, path_of(1)) == winner
    catalog.gc(storage, "run", grace_s=0)
    assert_is_clean()


def test_a_process_that_resumes_after_its_attempt_was_collected_can_not_commit(
    storage, minio, assert_is_clean, s3_root
):
    with HttpProxy(minio.endpoint) as proxy, saving_process(s3_root, "new", proxy) as process:
        # Stopped when everything is done but the completion of COMMIT, which is held back.
        proxy.rules = [Rule("delay", kind="complete", path="COMMIT$", seconds=2.0)]
        go(process)
        for _ in range(500):
            if proxy.suffered():
                break
            time.sleep(0.01)
        deleted = catalog.gc(storage, "run", grace_s=0)
        assert [verdict.action for verdict in deleted] == ["delete"]
        assert process.wait(timeout=30) == 1
    assert check_all(storage) == []
    assert_is_clean()


def test_of_eight_processes_worth_of_saves_to_one_path_one_wins(storage, minio, assert_is_clean):
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(
                outcome,
                lambda n=n: save(
                    storage, n, path=path_of(0), before_publish=lambda: barrier.wait(timeout=60)
                ),
                CheckpointExists,
            )
            for n in range(8)
        ]
        results = [future.result() for future in futures]
    winners = [result for result in results if isinstance(result, Commit)]
    assert len(winners) == 1
    assert load(storage, path_of(0)) == winners[0]
    catalog.gc(storage, "run", grace_s=0)
    assert_is_clean()


def test_uploads_that_a_restarted_server_no_longer_lists_are_aborted_by_journal(
    storage, minio, assert_is_clean
):
    attempt = new_attempt()
    folder = attempt_folder(path_of(1), attempt)
    journal = Journal(storage, path_of(1), attempt, name="00003")
    keys = [f"{folder}/data/{number}.safetensors" for number in range(3)]
    journal.begin(keys)
    parts = [storage.open_multipart(key, 9) for key in keys]
    journal.add([(one.key, one.upload_id) for one in parts])
    for one in parts:
        one.write(1, b"123456789")
    minio.kill()
    minio.start()
    before = open_uploads(minio.data)
    assert len(before) >= 3
    told = catalog.gc(storage, "run", grace_s=0, dry_run=True)
    assert [verdict.action for verdict in told] == ["delete"]
    assert open_uploads(minio.data) == before
    catalog.gc(storage, "run", grace_s=0)
    assert_is_clean()
    assert list(storage.list("")) == []


def test_the_server_killed_in_the_middle_of_a_save_delays_it_only(storage, minio, assert_is_clean):
    for request in (2, 6, 9, 12, 15):
        restart = threading.Timer(0.3, minio.start)

        def crash(number, _kind, _key, at=request, restart=restart):
            if number == at:
                minio.kill()
                restart.start()
            return ""

        assert save(FaultyStore(storage, crash), request).step == request
        restart.join(timeout=60)
    assert check_all(storage) == [2, 6, 9, 12, 15]
    catalog.gc(storage, "run", grace_s=0)
    assert_is_clean()


def test_retention_and_collection_run_beside_saves_and_loads(storage, minio, assert_is_clean):
    stop = threading.Event()
    missed = []

    def clean():
        while not stop.is_set():
            catalog.retain(storage, "run", keep_last=3)
            catalog.gc(storage, "run", grace_s=3600)

    def look():
        while not stop.is_set():
            newest = catalog.latest(storage, ROOT)
            if newest is not None:
                # Three newer saves may have ended since; otherwise it must be whole.
                try:
                    assert load(storage, newest.path) in (newest.commit, None)
                except (AssertionError, Exception) as error:
                    if read_commit(storage, newest.path) is not None:
                        missed.append(error)

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(act) for act in (clean, look, clean)]
        for step in range(1, 21):
            save(storage, step)
        stop.set()
        for other in others:
            other.result(timeout=60)
    assert missed == []
    catalog.retain(storage, "run", keep_last=3)
    catalog.gc(storage, "run", grace_s=0)
    assert check_all(storage) == [18, 19, 20]
    assert_is_clean()


def test_random_faults_never_show_a_checkpoint_that_is_not_whole(storage, minio, assert_is_clean):
    chance = random.Random(11)
    saved = []
    for step in range(1, 31):
        faulty = FaultyStore(
            storage,
            lambda number, kind, key: chance.choices(("", "fail", "lost"), (20, 1, 1))[0],
        )
        result = outcome(lambda f=faulty, s=step: save(f, s), StoreError)
        if isinstance(result, Commit):
            saved.append(step)
        visible = check_all(storage)
        assert set(saved) <= set(visible)
    assert 3 < len(saved) < 30
    catalog.gc(storage, "run", grace_s=0)
    assert set(saved) <= set(check_all(storage))
    assert_is_clean()
