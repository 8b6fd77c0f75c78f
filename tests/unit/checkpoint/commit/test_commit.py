"""COMMIT, the journal and publishing: what is written, what is refused."""

import itertools
import json
import zlib

import pytest

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointIncomplete,
    CheckpointNotFound,
    SaveFailed,
)
from planish.checkpoint.commit.commit import (
    Commit,
    publish,
    read_commit,
    read_meta,
    require_commit,
)
from planish.checkpoint.commit.journal import (
    Journal,
    JournalContent,
    attempt_folder,
    journaled,
    new_attempt,
    started,
)
from tests.integration.waiting import wait_for
from tests.stores.faulty import FaultyStore
from tests.stores.memory import MemoryStore
from tests.unit.checkpoint.small_saves import load, path_of, save

FILES = {"data/x": 3}
FACTS = {"step": 7, "roles": ("actor", "critic"), "run_id": "r1", "tags": {"why": "test"}}


@pytest.fixture
def storage():
    return MemoryStore()


def publish_small(storage, path="run/step-7", **options):
    attempt = new_attempt()
    storage.put(f"{attempt_folder(path, attempt)}/data/x", b"abc")
    with journaled(storage, path, attempt) as journal:
        return publish(
            storage, path, attempt, b"metadata", FILES, journal=journal, **FACTS | options
        )


def test_attempts_sort_by_time_and_never_repeat():
    attempts = [new_attempt() for _ in range(2000)]
    assert len(set(attempts)) == 2000
    assert {len(attempt) for attempt in attempts} == {26}
    moments = [started(attempt) for attempt in attempts]
    assert moments == sorted(moments)
    assert moments[-1] - moments[0] < 60


def test_publish_writes_every_field_of_the_commit(storage):
    commit = publish_small(storage)
    found = json.loads(storage.get("run/step-7/COMMIT", 1 << 20)[0])
    assert found.pop("crc32") == zlib.crc32(json.dumps(found, sort_keys=True).encode())
    assert found == {
        "format": 2,
        "attempt": commit.attempt,
        "meta_key": f"a-{commit.attempt}/meta/global.bin",
        "meta_size": 8,
        "meta_sha256": "45447b7afbd5e544f7d0f1df0fccd26014d9850130abd3f020b89ff96b82079f",
        "n_objects": 2,
        "total_bytes": 11,
        "step": 7,
        "roles": ["actor", "critic"],
        "created_at": commit.created_at,
        "run_id": "r1",
        "tags": {"why": "test"},
    }
    assert read_commit(storage, "run/step-7") == commit
    assert read_commit(storage, "run/step-7").etag == commit.etag
    assert read_meta(storage, "run/step-7", commit) == b"metadata"
    hint = json.loads(storage.get("run/LATEST", 1000)[0])
    assert hint == {"path": "step-7", "attempt": commit.attempt, "step": 7}


def test_a_second_save_needs_overwrite(storage):
    first = publish_small(storage)
    with pytest.raises(CheckpointExists, match="of step 7"):
        publish_small(storage)
    assert read_commit(storage, "run/step-7") == first
    second = publish_small(storage, replaces=first.etag)
    assert read_commit(storage, "run/step-7") == second
    with pytest.raises(CheckpointExists):
        publish_small(storage, replaces=first.etag)


def test_a_missing_or_short_object_is_found_before_the_commit(storage):
    for files in ({"data/x": 4}, {"data/x": 3, "data/y": 0}):
        attempt = new_attempt()
        storage.put(f"{attempt_folder('run/step-7', attempt)}/data/x", b"abc")
        with (
            journaled(storage, "run/step-7", attempt) as journal,
            pytest.raises(CheckpointIncomplete, match=r"data/[xy] \(must have [04] bytes"),
        ):
            publish(storage, "run/step-7", attempt, b"m", files, step=7, roles=(), journal=journal)
        assert read_commit(storage, "run/step-7") is None


def test_metadata_that_come_back_changed_are_never_committed(storage):
    class Changing(FaultyStore):
        def get(self, key, limit):
            data, etag = self.inner.get(key, limit)
            return (data.replace(b"meta", b"mata") if key.endswith("global.bin") else data), etag

    with pytest.raises(CheckpointCorrupt, match="changed on the way"):
        publish_small(Changing(storage))
    assert read_commit(storage, "run/step-7") is None


def test_a_damaged_store_is_told_apart(storage):
    commit = save(storage, 1)
    key = f"{path_of(1)}/{commit.meta_key}"
    meta = storage.get(key, 1 << 20)[0]
    storage.put(key, meta[:-1])
    with pytest.raises(CheckpointIncomplete, match="bytes, got"):
        load(storage, path_of(1))
    storage.put(key, meta[:-1] + b"]")
    with pytest.raises(CheckpointCorrupt, match="SHA-256"):
        load(storage, path_of(1))
    storage.put(key, meta + b" ")
    with pytest.raises(CheckpointCorrupt, match="at most"):
        load(storage, path_of(1))
    storage.delete([key])
    with pytest.raises(CheckpointIncomplete, match="must exist"):
        load(storage, path_of(1))
    with pytest.raises(CheckpointNotFound, match="no COMMIT"):
        require_commit(storage, "run/nothing")


def test_two_processes_can_not_hold_one_journal(storage):
    attempt = new_attempt()
    Journal(storage, "run/s", attempt).begin()
    with pytest.raises(SaveFailed):
        Journal(storage, "run/s", attempt).begin()


def test_a_kept_journal_renews_its_lease(storage):
    with journaled(storage, "run/s", new_attempt()) as journal:
        journal.close()
        times = itertools.count()
        storage.clock = lambda: 1e9 + next(times)
        journal._closed.clear()
        journal.keep(0.01)
        wait_for(lambda: storage.head(journal.key).modified > 1e9 + 3, 120.0)
    assert storage.head(journal.key).modified > 1e9 + 3


def test_hostile_journals_reach_nothing_outside_their_attempt():
    attempt = new_attempt()
    own = f"a-{attempt}/data/x"
    record = JournalContent.decode(
        json.dumps(
            {
                "keys": [own, "../other", "a-x/y", 5, f"a-{attempt}/../../z", "COMMIT"],
                "uploads": [[own, "id"], ["other/COMMIT", "id"], [own, 7]],
                "host": "h",
                "pid": 1,
                "started": 1,
                "fenced": 0,
            }
        ).encode(),
        attempt,
    )
    assert record.keys == (own, "COMMIT")
    assert record.uploads == ((own, "id"),)
    for data in (b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"keys": 1}', b"null"):
        assert JournalContent.decode(data, attempt) == JournalContent()


GOOD = Commit("0" * 26, f"a-{'0' * 26}/meta/global.bin", 9, "ab" * 32, 2, 90, 7, ("main",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "newer version"),
        ({"format": True}, "by something else"),
        ({"attempt": "../../etc"}, "attempt"),
        ({"meta_key": "a-x/../../../secret"}, "meta_key"),
        ({"meta_size": -1}, "meta_size"),
        ({"meta_size": 1 << 50}, "meta_size"),
        ({"meta_sha256": "AB" * 32}, "meta_sha256"),
        ({"n_objects": 1.5}, "n_objects"),
        ({"total_bytes": "9"}, "total_bytes"),
        ({"step": True}, "step"),
        ({"step": 1 << 80}, "step"),
        ({"roles": "main"}, "roles"),
        ({"roles": [1]}, "roles"),
        ({"created_at": "now"}, "created_at"),
        ({"created_at": float("inf")}, "created_at"),
        ({"tags": {"a": []}}, "tags"),
        ({"run_id": None}, "run_id"),
    ],
)
def test_a_commit_with_one_odd_field_is_refused_by_name(change, message):
    fields = {**json.loads(GOOD.encode()), **change}
    with pytest.raises(CheckpointCorrupt, match=message):
        Commit.decode(json.dumps(fields).encode())
