"""Finding, keeping and clearing away checkpoints."""

import json

import pytest

from planish.base.errors import ConfigError
from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.commit import read_commit
from planish.checkpoint.commit.journal import Journal, attempt_folder, new_attempt
from planish.store import open_store
from tests.stores.memory import MemoryStore
from tests.unit.checkpoint.small_saves import ROOT, check_all, load, path_of, save, stray


@pytest.fixture
def storage():
    return MemoryStore()


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
