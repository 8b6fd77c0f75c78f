"""Sets of plain files: policies and the like."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from planish import store
from planish.base.errors import RecordError
from planish.records import fetch_files, read_manifest, write_files
from planish.records import files as files_module
from tests.servers.http_proxy import HttpProxy

FILES = {"config.json": b"{}", "sub/.metadata": b"m", "model.safetensors": b"w" * 5000}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def write(root, files=FILES, **attributes):
    return write_files(f"{root}/policy", "policy/1", files, parents={}, attributes=attributes)


def contents(folder: Path):
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name != "manifest.json"
    }


def test_files_come_back_in_a_local_folder(store_root, tmp_path):
    (tmp_path / "weights").write_bytes(b"w" * 5000)
    files = {**FILES, "model.safetensors": tmp_path / "weights"}
    ref = write(store_root, files, policy_version=4, config_sha256="c")
    assert contents(fetch_files(ref.uri, sha256=ref.manifest_sha256, schema="policy/1")) == FILES
    assert ref.attributes == {"policy_version": 4, "config_sha256": "c"}
    names = [(s.name, s.bytes, s.rows) for s in read_manifest(ref.uri).shards]
    assert names == [("config.json", 2, 0), ("model.safetensors", 5000, 0), ("sub/.metadata", 1, 0)]


def test_files_that_are_left_out_are_not_asked_for(store_root):
    ref = write(store_root)
    store.delete(f"{ref.uri}/model.safetensors")
    assert contents(fetch_files(ref.uri, without=".safetensors")) == {
        name: data for name, data in FILES.items() if name != "model.safetensors"
    }
    with pytest.raises(RecordError, match=r"`model.safetensors` is missing"):
        fetch_files(ref.uri)


def test_the_folder_of_a_file_store_is_used_in_place(file_root):
    ref = write(file_root)
    assert fetch_files(ref.uri) == Path(ref.uri.removeprefix("file://"))


@pytest.mark.server
def test_a_process_hashes_each_byte_of_a_fetched_set_once(s3_root, monkeypatch):
    """On its way, and not again for the engine that asks after the tokenizer."""
    files = {f"{number}.safetensors": bytes([number]) * (20 << 20) for number in range(2)}
    ref = write(s3_root, files)
    hashed, plain = [], hashlib.sha256

    class Counting:
        def __init__(self, data=b"", **_):
            self._digest = plain()
            self.update(data)
            self.hexdigest, self.digest = self._digest.hexdigest, self._digest.digest

        def update(self, data):
            hashed.append(len(data))
            self._digest.update(data)

    def file_digest(file, _):
        return Counting(file.read())

    counting = SimpleNamespace(sha256=Counting, file_digest=file_digest)
    for module in (store, files_module):
        monkeypatch.setattr(module, "hashlib", counting, raising=False)
    monkeypatch.setattr(files_module, "_TICK_NS", 0)
    for _ in range(2):
        folder = fetch_files(ref.uri)
    whole = sum(map(len, files.values()))
    assert sum(hashed) == whole
    path = folder / "1.safetensors"
    path.write_bytes(bytes(20 << 20))
    assert contents(fetch_files(ref.uri)) == files


@pytest.mark.server
def test_a_fetched_set_is_fetched_once_and_mended_when_damaged(s3_root):
    ref = write(s3_root)
    first = fetch_files(ref.uri, sha256=ref.manifest_sha256)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert fetch_files(ref.uri) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    (first / "model.safetensors").write_bytes(b"v" * 5000)
    assert contents(fetch_files(ref.uri)) == FILES
    assert oct(first.parent.parent.stat().st_mode)[-3:] == "700"


@pytest.mark.server
def test_processes_of_one_machine_take_a_set_from_its_bucket_once(s3_root, minio, tmp_path):
    size = 3 << 20
    ref = write(s3_root, {"model.safetensors": os.urandom(size)})
    proxy = HttpProxy(minio.endpoint)
    code = f"from planish.records import fetch_files; fetch_files({ref.uri!r})"
    changes = {"MINIO_ENDPOINT": proxy.endpoint, "TMPDIR": str(tmp_path / "tmp")}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **changes})
        for _ in range(3)
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    proxy.close()
    assert size < proxy.answered_bytes < 1.1 * size


@pytest.mark.server
def test_of_old_fetched_sets_the_three_newest_stay(s3_root):
    folders = []
    for number in range(6):
        folders.append(fetch_files(write(f"{s3_root}/{number}", {"x": bytes([number])}).uri))
        long_ago = time.time() - 10_000 + number
        os.utime(folders[-1], (long_ago, long_ago))
    last = fetch_files(write(f"{s3_root}/last", {"x": b"last"}).uri)
    assert [f.exists() for f in folders] == [False] * 4 + [True] * 2
    assert last.exists()


def test_a_second_set_in_the_same_place_leaves_no_stale_file(store_root):
    write(store_root)
    ref = write(store_root, {"other.json": b"1"})
    assert contents(fetch_files(ref.uri)) == {"other.json": b"1"}


def spoil_size(uri):
    store.write(f"{uri}/model.safetensors", b"w" * 4999)


def spoil_byte(uri):
    store.write(f"{uri}/model.safetensors", b"w" * 4999 + b"v")


def spoil_missing(uri):
    store.delete(f"{uri}/sub/.metadata")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_size, "`model.safetensors` must have 5000 bytes, got 4999"),
        (spoil_byte, "`model.safetensors` must have the sha256"),
        (spoil_missing, "is missing"),
    ],
)
def test_a_damaged_set_is_refused(store_root, spoil, words):
    ref = write(store_root)
    spoil(ref.uri)
    with pytest.raises(RecordError, match=words):
        fetch_files(ref.uri)


def test_a_file_that_no_manifest_names_is_refused_where_it_would_be_loaded(file_root):
    ref = write(file_root)
    store.write(f"{ref.uri}/pytorch_model.bin", b"\x80")
    with pytest.raises(RecordError, match=r"`pytorch_model\.bin` is not in the manifest"):
        fetch_files(ref.uri)


def test_another_schema_or_digest_is_refused(file_root):
    ref = write(file_root)
    with pytest.raises(RecordError, match="must hold train-state/1, got policy/1"):
        fetch_files(ref.uri, schema="train-state/1")
    with pytest.raises(RecordError, match="must have the sha256 0000"):
        fetch_files(ref.uri, sha256="0" * 64)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "manifest.json", "", "a b"])
def test_names_that_leave_the_folder_are_not_written(file_root, name):
    with pytest.raises(ValueError, match="must be a path below its set"):
        write(file_root, {name: b""})


def test_a_cache_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: 4242)
    with pytest.raises(RecordError, match="must belong to this user"):
        files_module.cache_folder()
