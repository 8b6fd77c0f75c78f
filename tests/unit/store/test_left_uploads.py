"""What killed writers leave of large objects goes when the object is written again."""

import os
import subprocess
import sys
import time

import pytest

from planish import store
from tests.servers.http_proxy import HttpProxy, Rule
from tests.servers.minio_files import open_uploads

pytestmark = pytest.mark.server
LARGE = store.PART_BYTES + store.SINGLE_PUT_BYTES


@pytest.fixture
def place(s3_root):
    return store.open_store(f"{s3_root}/policy/model.safetensors")


def ids(place):
    opened, key = place
    return [upload.upload_id for upload in opened.open_uploads(key)]


@pytest.mark.parametrize("how", ["write", "write_file"])
@pytest.mark.parametrize(("size", "stays"), [(LARGE, False), (1, True)])
def test_uploads_from_before_this_process_go(place, tmp_path, monkeypatch, how, size, stays):
    opened, key = place
    left = [opened.open_multipart(key, LARGE) for _ in range(2)]
    left[0].write(1, b"1")
    monkeypatch.setattr(store, "_BEGUN", time.time() + 10)
    if how == "write":
        store.write(opened.uri(key), bytes(size))
    else:
        (tmp_path / "file").write_bytes(bytes(size))
        store.write_file(opened.uri(key), tmp_path / "file")
    assert sorted(ids(place)) == (sorted(parts.upload_id for parts in left) if stays else [])
    assert opened.head(key).size == size


def test_an_upload_that_began_since_is_of_a_living_writer(place):
    opened, key = place
    other = opened.open_multipart(key, LARGE)
    beside = opened.open_multipart(f"{key}.index", LARGE)
    store.write(opened.uri(key), bytes(LARGE))
    assert ids(place) == [other.upload_id]
    assert ids((opened, beside.key)) == [beside.upload_id]


def test_a_store_that_does_not_tell_its_uploads_is_written_all_the_same(
    minio, place, monkeypatch, caplog
):
    opened, key = place
    for name, value in minio.user_without("ListBucketMultipartUploads").items():
        monkeypatch.setenv(name, value)
    store.write(opened.uri(key), bytes(LARGE))
    assert opened.head(key).size == LARGE
    assert "s3:ListBucketMultipartUploads" in caplog.text


WRITE = """
import sys
from planish import store
store.write(sys.argv[1], bytes(int(sys.argv[2])))
"""


def test_a_process_killed_at_its_second_part_leaves_nothing_to_the_next(minio, place):
    opened, key = place
    before = open_uploads(minio.data)
    with HttpProxy(minio.endpoint) as proxy:
        environment = {**os.environ, "MINIO_ENDPOINT": proxy.endpoint}
        command = [sys.executable, "-c", WRITE, opened.uri(key), str(LARGE)]
        with subprocess.Popen(command, env=environment) as killed:
            proxy.victim = killed.pid
            proxy.rules = [Rule("kill", kind="part", at=2)]
            assert killed.wait() == -9
        assert len(open_uploads(minio.data)) == len(before) + 1
        # The clock of the server has whole seconds.
        time.sleep(1)
        assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert open_uploads(minio.data) == before
    assert opened.head(key).size == LARGE
