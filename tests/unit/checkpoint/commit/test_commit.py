"""COMMIT, the journal and publishing: what is written, what is refused."""

import itertools
import json
import zlib

import pytest

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
    ConfigError,
    SaveFailed,
)
from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.commit import Commit, publish, read_commit, read_meta, require_commit
from planish.checkpoint.commit.journal import (
    Journal,
    JournalContent,
    attempt_folder,
    journaled,
    new_attempt,
    started,
)
from planish.store import open_store
from tests.integration.waiting import wait_for
from tests.stores.faulty import FaultyStore
from tests.stores.memory import MemoryStore
from tests.unit.checkpoint.small_saves import ROOT, check_all, load, path_of, save, stray

FILES = {"data/x": 3}
FACTS = {"step": 7, "roles": ("actor", "critic"), "run_id": "r1", "tags": {"why": "test"}}


@pytest.fixture
def storage():
    return MemoryStore()


def publish_small(storage, **options):
    path, attempt = "run/step-7", new_attempt()
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


def begin(storage, path=None):
    """A save that has written one object and is not committed."""
    path = path or path_of(9)
    attempt = new_attempt()
    Journal(storage, path, attempt).begin()
    storage.put(f"{attempt_folder(path, attempt)}/data/x", b"1234")
    return attempt


def test_latest_is_the_highest_committed_step_at_any_depth(storage):
    assert catalog.latest(storage, "run") is None
    save(storage, 100, path="run/step-100")
    save(storage, 300, path="run/states/odd name")
    save(storage, 200, path="run/states/step-999")
    begin(storage, "run/states/step-400")
    for root in ("", "run", "run/states"):
        if root:
            assert catalog.latest(storage, root).path == "run/states/odd name"
    assert catalog.latest(storage, "run/states/odd name").step == 300
    assert catalog.latest(storage, "run/step-100").step == 100
    assert [entry.step for entry in catalog.list_checkpoints(storage, "run")] == [100, 200, 300]
    assert [entry.step for entry in catalog.list_checkpoints(storage, "")] == [100]
    assert catalog.info(storage, "run/states/step-999").uri == "mem://memory/run/states/step-999"


@pytest.mark.parametrize(
    "hint",
    [
        b"",
        b"\xff\x00",
        json.dumps({"path": "step-00000009", "attempt": "x", "step": 10**9}).encode(),
        json.dumps({"path": "../../elsewhere", "attempt": "0" * 26, "step": 2}).encode(),
    ],
)
def test_a_hint_that_lies_or_dangles_is_not_believed(storage, hint):
    save(storage, 1)
    save(storage, 2)
    begin(storage)
    storage.put(f"{ROOT}/LATEST", hint)
    assert catalog.latest(storage, ROOT).step == 2
    storage.delete([f"{ROOT}/LATEST"])
    assert catalog.latest(storage, "run").step == 2


def test_an_unreadable_commit_hides_its_checkpoint_and_stops_the_collection_there(storage, caplog):
    save(storage, 1)
    save(storage, 2)
    begin(storage, path_of(2))
    before = len(list(storage.list(path_of(2))))
    storage.put(f"{path_of(2)}/COMMIT", b'{"format": 1}')
    assert catalog.latest(storage, "run").step == 1
    assert "commit_unreadable" in caplog.text
    verdicts = catalog.gc(storage, "run", grace_s=0)
    kept = [v for v in verdicts if v.key == path_of(2)]
    assert [v.action for v in kept] == ["keep"]
    assert len(list(storage.list(path_of(2)))) == before


def test_retention_keeps_the_newest_the_multiples_and_the_pinned(storage):
    for step in (10, 20, 30, 40, 50, 60, 70):
        save(storage, step)
    begin(storage, path_of(80))
    options = {"keep_last": 2, "keep_every": 30, "pins": (20, storage.uri(path_of(40)) + "/#x")}
    told = catalog.retain(storage, "run", dry_run=True, **options)
    assert check_all(storage) == [10, 20, 30, 40, 50, 60, 70]
    verdicts = catalog.retain(storage, "run", **options)
    assert told == verdicts
    assert [(int(v.key[-2:]), v.action) for v in verdicts] == [
        (70, "keep"),
        (60, "keep"),
        (50, "delete"),
        (40, "keep"),
        (30, "keep"),
        (20, "keep"),
        (10, "delete"),
    ]
    assert verdicts[0].reason == "one of the newest 2"
    assert check_all(storage) == [20, 30, 40, 60, 70]
    # The save that is going on has not been touched.
    assert len(stray(storage)) == 2


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": -1}, {"keep_every": -5}])
def test_retention_never_means_everything(storage, options):
    save(storage, 1)
    with pytest.raises(ConfigError, match="keep_last"):
        catalog.retain(storage, "run", **options)
    assert check_all(storage) == [1]


def test_the_collection_waits_for_the_grace_and_says_why(storage):
    now = [1_800_000_000.0]
    storage.clock = lambda: now[0]
    old = save(storage, 1)
    save(storage, 1, overwrite=True)
    left = begin(storage)
    now[0] += 3000
    assert {v.action for v in catalog.gc(storage, "run", grace_s=3600)} == {"keep"}
    now[0] += 601
    told = catalog.gc(storage, "run", grace_s=3600, dry_run=True)
    reasons = {v.key: (v.action, v.reason) for v in told}
    assert reasons[f"{path_of(1)}/a-{old.attempt}"][0] == "delete"
    action, reason = reasons[f"{path_of(9)}/a-{left}"]
    assert action == "delete"
    assert reason.startswith("not committed, idle for 3601 s, 2 objects, ")
    assert len(stray(storage)) == 6
    assert catalog.gc(storage, "run", grace_s=3600) == told
    assert stray(storage) == []
    assert [v.reason for v in catalog.gc(storage, "run", grace_s=3600)] == ["committed as step 1"]


def test_a_renewed_lease_keeps_a_slow_save_alive(storage):
    now = [1_800_000_000.0]
    storage.clock = lambda: now[0]
    attempt = new_attempt()
    journal = Journal(storage, path_of(3), attempt)
    journal.begin()
    for _ in range(50):
        now[0] += 3000
        journal.refresh()
        assert {v.action for v in catalog.gc(storage, "run", grace_s=3600)} == {"keep"}


def test_uploads_that_no_journal_names_go_and_announced_ones_stay(storage):
    save(storage, 1)
    attempt = new_attempt()
    journal = Journal(storage, path_of(1), attempt)
    journal.begin()
    live = storage.open_multipart(f"{path_of(1)}/COMMIT", 4)
    journal.add([(live.key, live.upload_id)])
    storage.open_multipart(f"{path_of(1)}/COMMIT", 4)
    now = storage.now() + 100
    storage.clock = lambda: now
    journal.refresh()
    catalog.gc(storage, "run", grace_s=50)
    assert [u.upload_id for u in storage.open_uploads(live.key)] == [live.upload_id]


def test_on_a_file_system_nothing_remains_but_the_files_of_commits(tmp_path):
    storage, root = open_store(str(tmp_path / "run"))
    for step in (1, 2):
        save(storage, step, path=f"{root}/step-{step}")
    begin(storage, f"{root}/step-3")
    storage.open_multipart(f"{root}/step-2/COMMIT", 3)
    (tmp_path / "run" / "step-3" / f"a-{new_attempt()}" / "data").mkdir(parents=True)
    (tmp_path / "run" / "step-3" / f"a-{'0' * 26}" / "data").mkdir(parents=True)
    catalog.retain(storage, root, keep_last=1)
    catalog.gc(storage, root, grace_s=0)
    commit = read_commit(storage, f"{root}/step-2")
    assert load(storage, f"{root}/step-2") == commit
    left = sorted(str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*"))
    folder = f"step-2/a-{commit.attempt}"
    assert [name for name in left if (tmp_path / "run" / name).is_file()] == [
        "LATEST",
        "step-2/COMMIT",
        f"{folder}/data/main.extra/00000.bin",
        f"{folder}/data/main.model/00000-0.safetensors",
        f"{folder}/data/main.optim/00001-0.safetensors",
        f"{folder}/meta/global.bin",
    ]
    assert {name.split("/")[0] for name in left} == {"LATEST", "step-2"}
