"""A server whose disk is full, and a server that speaks TLS."""

from __future__ import annotations

import os
import subprocess
import time

import numpy as np
import pytest

from planish.base.errors import StoreError, StoreMisconfigured
from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.commit import publish
from planish.checkpoint.commit.journal import attempt_folder, journaled, new_attempt
from planish.store import open_store, upload
from tests.servers.minio_files import objects, open_uploads
from tests.servers.program import require
from tests.servers.run_minio import Minio, require_minio, server_of_few_mib

pytestmark = pytest.mark.server
MIB = 1 << 20


@pytest.fixture
def small_server(tmp_path, monkeypatch):
    """A server whose disk has 96 MiB."""
    with server_of_few_mib(tmp_path, 96) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("full")
        yield server


def save_large(storage, step, size):
    """Save one random object of `size` bytes; return its bytes."""
    data = np.random.default_rng(step).bytes(size)
    path, attempt = f"run/step-{step}", new_attempt()
    key = f"{attempt_folder(path, attempt)}/data/x.safetensors"
    with journaled(storage, path, attempt, [key]) as journal:
        upload(storage, key, data)
        files = {"data/x.safetensors": size}
        publish(storage, path, attempt, b"meta", files, step=step, roles=("main",), journal=journal)
    return data


def test_a_full_disk_fails_the_save_at_once_and_room_makes_the_next_succeed(small_server):
    storage = open_store("s3://full")[0]
    first = save_large(storage, 1, 30 * MIB)
    start = time.monotonic()
    with pytest.raises(StoreError, match=r"s3://full/run/step-2/.*the server is full"):
        save_large(storage, 2, 90 * MIB)
    assert time.monotonic() - start < 20
    newest = catalog.latest(storage, "run")
    assert newest.step == 1
    target = bytearray(len(first))
    storage.get_into(
        f"run/step-1/a-{newest.commit.attempt}/data/x.safetensors", 0, memoryview(target)
    )
    assert target == first
    catalog.gc(storage, "run", grace_s=0)
    assert open_uploads(small_server.data) == []
    assert len(objects(small_server.data, "full")) == 4
    # The server empties its bin in its own time; a larger disk is room at once.
    disk = small_server.data.parent
    subprocess.run(["mount", "-o", "remount,size=256m", disk], check=True)
    for _ in range(40):
        try:
            save_large(storage, 3, 20 * MIB)
            break
        except StoreError:  # it looks at the size of its disk now and then only
            time.sleep(0.25)
    assert [entry.step for entry in catalog.list_checkpoints(storage, "run")] == [1, 3]


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
    storage.close()
    start = time.monotonic()
    monkeypatch.setenv("MINIO_REGION", "us-east-2")  # another region: another connection
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(StoreMisconfigured, match=r"safe.*TLS.*SSL_CERT_FILE"):
        open_store("s3://safe")[0].head("x")
    monkeypatch.setenv("MINIO_SECURE", "0")
    with pytest.raises(StoreError, match="MINIO_SECURE"):
        open_store("s3://safe")[0].head("x")
    assert time.monotonic() - start < 5
