"""A save in miniature over the real commit protocol, and a reader that checks every byte."""

import contextlib
import hashlib
import json

from planish.base.errors import SaveFailed, StoreError
from planish.checkpoint.commit.catalog import latest, list_checkpoints
from planish.checkpoint.commit.commit import publish, read_commit, read_meta, standing
from planish.checkpoint.commit.journal import Journal, attempt_folder, new_attempt

ROOT = "run/states"


def path_of(step):
    return f"{ROOT}/step-{step:08d}"


def files_of(step, salt=""):
    """The objects of a checkpoint: two small ones and one that is written in parts."""
    return {
        "data/main.model/00000-0.safetensors": f"weights {step} {salt}".encode() * 3,
        "data/main.optim/00001-0.safetensors": f"moments {step} {salt}".encode() * 5,
        "data/main.extra/00000.bin": b"",
    }


def save(storage, step, *, path="", overwrite=False, salt="", before_publish=lambda: None):
    """Save as two ranks would, with each rank's journal, and return the commit."""
    path = path or path_of(step)
    replaces = standing(storage, path) if overwrite else ""
    attempt = new_attempt()
    folder = attempt_folder(path, attempt)
    files = files_of(step, salt)
    coordinator = Journal(storage, path, attempt)
    coordinator.begin()
    parts_key = f"{folder}/data/main.optim/00001-0.safetensors"
    rank = Journal(storage, path, attempt, name="00001")
    rank.begin([parts_key])
    for name, data in files.items():
        if f"{folder}/{name}" != parts_key:
            storage.put(f"{folder}/{name}", data)
    parts = storage.open_multipart(parts_key, len(files["data/main.optim/00001-0.safetensors"]))
    try:
        rank.add([(parts.key, parts.upload_id)])
        parts.write(1, files["data/main.optim/00001-0.safetensors"])
        parts.complete()
    except Exception:
        with contextlib.suppress(StoreError):
            parts.abort()
        raise
    rank.close()
    meta = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    before_publish()
    return publish(
        storage,
        path,
        attempt,
        meta.encode(),
        {name: len(data) for name, data in files.items()},
        step=step,
        roles=("main",),
        replaces=replaces,
        journal=coordinator,
    )


def load(storage, path):
    """Read everything that a commit names and check it; return the commit, None for none."""
    commit = read_commit(storage, path)
    if commit is None:
        return None
    total = commit.meta_size
    for name, digest in json.loads(read_meta(storage, path, commit)).items():
        data, _ = storage.get(f"{path}/a-{commit.attempt}/{name}", 1 << 20)
        assert hashlib.sha256(data).hexdigest() == digest, name
        total += len(data)
    assert total == commit.total_bytes
    return commit


def check_all(storage):
    """Read whatever is visible below the root; return the steps."""
    found = list_checkpoints(storage, ROOT)
    for entry in found:
        assert load(storage, entry.path) == entry.commit
    newest = latest(storage, ROOT)
    assert newest == (found[-1] if found else None)
    return [entry.step for entry in found]


def stray(storage):
    """Return the keys below the root that no commit accounts for."""
    allowed = {f"{ROOT}/LATEST"}
    for entry in list_checkpoints(storage, ROOT):
        folder = f"{entry.path}/a-{entry.commit.attempt}"
        names = json.loads(read_meta(storage, entry.path, entry.commit))
        allowed |= {f"{entry.path}/COMMIT", f"{entry.path}/{entry.commit.meta_key}"}
        allowed |= {f"{folder}/{name}" for name in names}
    return sorted(stat.key for stat in storage.list(ROOT) if stat.key not in allowed)


def outcome(act, *errors):
    """Call `act`; return what it returns, or the error if it is one of `errors`."""
    try:
        return act()
    except (SaveFailed, *errors) as error:
        return error
