"""Uploads that a restarted server has forgotten, and a server that speaks TLS."""

import os
import subprocess
import time

import numpy as np
import pytest

from planish.base.errors import StoreError, StoreMisconfigured
from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.journal import Journal, attempt_folder, new_attempt
from planish.store import open_store, upload
from tests.servers.minio_files import objects, open_uploads
from tests.servers.program import require
from tests.servers.run_minio import Minio, require_minio
from tests.unit.checkpoint.small_saves import path_of, stray

pytestmark = pytest.mark.server
MIB = 1 << 20


@pytest.fixture
def tls_server(tmp_path, monkeypatch):
    """A server with a certificate of its own authority."""
    require_minio()
    require("openssl", remedy="apt-get install openssl")
    home = tmp_path / "server"
    certificates = home / ".minio" / "certs"
    certificates.mkdir(parents=True)
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subprocess.run(
        [
            *command.split(),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", certificates / "private.key", "-out", certificates / "public.crt"),
        ],
        check=True,
        capture_output=True,
    )
    server = Minio(home / "data")
    server.data.mkdir()
    try:
        server.begin()
        for name, value in {**server.environment, "MINIO_SECURE": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "public.crt"))
        yield server
    finally:
        server.kill()


def make_bucket(server, certificate):
    import urllib3
    from minio import Minio as Client
    from minio.error import MinioException

    pool = urllib3.PoolManager(ca_certs=certificate, retries=False)
    keys = (server.access_key, server.secret_key)
    client = Client(server.endpoint, *keys, region="us-east-1", http_client=pool)
    for left in range(300, -1, -1):
        try:
            client.make_bucket("safe")
            break
        except (urllib3.exceptions.HTTPError, MinioException):  # not up yet
            if not left:
                raise
            time.sleep(0.1)
    pool.clear()


def test_tls_moves_large_bodies_and_needs_a_known_authority(tls_server, monkeypatch):
    make_bucket(tls_server, os.environ["SSL_CERT_FILE"])
    storage = open_store("s3://safe")[0]
    data = np.random.default_rng(0).bytes(17 * MIB)
    upload(storage, "x", data)
    target = bytearray(len(data))
    storage.get_into("x", 0, memoryview(target))
    assert target == data
    assert [stat.size for stat in storage.list("")] == [len(data)]
    storage._client._http.clear()
    start = time.monotonic()
    monkeypatch.setenv("MINIO_REGION", "us-east-2")  # another region: another connection
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(StoreMisconfigured, match=r"safe.*TLS.*SSL_CERT_FILE"):
        open_store("s3://safe")[0].head("x")
    monkeypatch.setenv("MINIO_SECURE", "0")
    with pytest.raises(StoreError, match="MINIO_SECURE"):
        open_store("s3://safe")[0].head("x")
    assert time.monotonic() - start < 5


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
