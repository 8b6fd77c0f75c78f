"""The S3 back end against a real server, through a proxy that breaks single requests."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from planish import store
from planish.base.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StoreUnavailable,
)
from planish.store import open_store, s3
from planish.store.s3 import S3Settings, S3Store
from tests.servers.http_proxy import HttpProxy, Rule

pytestmark = pytest.mark.server
MIB = 1 << 20
FOR_EVER_S = 600
"""Longer than a test may take."""


@pytest.fixture
def bucket(s3_root):
    return s3_root.removeprefix("s3://")


@pytest.fixture
def proxy(minio):
    with HttpProxy(minio.endpoint) as proxy:
        yield proxy


@pytest.fixture
def through(minio, proxy, bucket):
    """Return how to make a storage that reaches the server through the proxy."""
    opened = []

    def make(*, retry_seconds=10.0, **options):
        settings = S3Settings(
            proxy.endpoint,
            minio.access_key,
            minio.secret_key,
            secure=False,
            region="us-east-1",
            retry_seconds=retry_seconds,
        )
        opened.append(S3Store(settings, bucket, **options))
        return opened[-1]

    yield make
    for storage in opened:
        storage._client._http.clear()


@pytest.fixture
def direct(minio, s3_root):
    return open_store(s3_root)[0]


def exercise(storage, data):
    """Use every kind of request once or more; return what was read."""
    storage.put("small", data[:1000], if_none_match=True)
    parts = storage.open_multipart("big", len(data))
    size = parts.part_bytes
    for number, start in enumerate(range(0, len(data), size), 1):
        parts.write(number, data[start : start + size])
    etag = parts.complete(if_none_match=True)
    assert storage.head("big").etag == etag
    target = bytearray(len(data))
    storage.get_into("big", 0, memoryview(target), etag=etag)
    storage.put("gone", b"1")
    storage.delete(["gone"])
    small, _ = storage.get("small", 1000)
    return bytes(target), small, [(stat.key, stat.size) for stat in storage.list("")]


FAULTS = [
    *[(fault, kind) for fault in ("503", "500", "reset", "lost", "500 after") for kind in (
        *("put", "create", "part", "complete", "head", "get", "delete", "list"),
    )],
    *[("truncate", kind) for kind in ("create", "complete", "get", "list")],
    *[(fault, kind) for fault in ("corrupt request", "reset middle") for kind in ("put", "part")],
    *[("delay", kind) for kind in ("part", "get")],
]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_one_broken_request_of_any_kind_is_mended(through, proxy, direct, fault, kind):
    data = np.random.default_rng(1).bytes(17 * MIB)
    proxy.rules = [Rule(fault, kind=kind, seconds=0.2)]
    storage = through()
    assert exercise(storage, data) == (
        data,
        data[:1000],
        [("big", len(data)), ("small", 1000)],
    )
    assert proxy.suffered() == [fault]
    assert sum(storage.retries.values()) == (fault != "delay")
    assert direct.get("big", len(data))[0] == data
    # Of a lost creation the server keeps an upload that the key alone leads to.
    is_stray = kind == "create" and fault in {"lost", "500 after", "truncate"}
    assert len(direct.open_uploads("big")) == is_stray


def test_a_file_whose_upload_began_twice_leaves_no_open_upload(
    proxy, s3_root, direct, monkeypatch, tmp_path
):
    data = bytes(17 * MIB)
    (tmp_path / "big").write_bytes(data)
    monkeypatch.setenv("MINIO_ENDPOINT", proxy.endpoint)
    proxy.rules = [Rule("lost", kind="create")]
    store.write_file(f"{s3_root}/big", tmp_path / "big")
    assert proxy.suffered() == ["lost"]
    assert direct.open_uploads("big") == []
    assert direct.get("big", len(data))[0] == data


def test_nothing_is_asked_twice_without_a_fault(through, proxy):
    exercise(through(), bytes(17 * MIB))
    expected = {"put": 2, "create": 1, "part": 2, "complete": 1, "head": 1, "get": 2, "list": 1}
    assert dict(proxy.counts) == {**expected, "delete": 1}


def test_no_try_and_no_wait_goes_beyond_the_time_limit(through, proxy):
    proxy.rules = [Rule("503", times=0)]
    with pytest.raises(StoreUnavailable):
        through(timeout_s=0.5, retry_seconds=FOR_EVER_S).put("x", b"1")
    assert proxy.total() >= 1


@pytest.mark.parametrize(
    ("fault", "kind"), [("slow", "get"), ("silent", "get"), ("silent", "part"), ("silent", "head")]
)
def test_a_server_that_stops_answering_is_given_up_after_the_read_time(through, proxy, fault, kind):
    data = np.random.default_rng(2).bytes(17 * MIB)
    # A read that waited for more than its time would wait for the whole of the fault.
    proxy.rules = [Rule(fault, kind=kind, seconds=FOR_EVER_S)]
    storage = through(read_seconds=1.0)
    assert exercise(storage, data)[0] == data
    assert proxy.suffered() == [fault]
    assert sum(storage.retries.values()) == 1


@pytest.fixture
def begins(monkeypatch):
    """Where each try of a read began; `then` is called before each but the first."""
    begins, ask = Begins(), s3._Download._headers

    def noted(download):
        if begins:
            begins.then()
        begins.append(download.done)
        return ask(download)

    monkeypatch.setattr(s3._Download, "_headers", noted)
    return begins


class Begins(list):
    def then(self):
        """Do nothing."""


def test_a_read_goes_on_where_it_broke_but_not_in_another_object(through, proxy, direct, begins):
    data = np.random.default_rng(3).bytes(4 * MIB)
    direct.put("x", data)
    proxy.rules = [Rule("truncate", kind="get", times=2)]
    storage, target = through(), bytearray(len(data))
    storage.get_into("x", 0, memoryview(target))
    assert target == data
    assert 0 == begins[0] < begins[1] < begins[2]
    # The object is replaced between the broken try and the next one.
    begins.clear()
    begins.then = lambda: direct.put("x", data[::-1])
    proxy.rules = [Rule("truncate", kind="get")]
    with pytest.raises(ObjectChanged, match="must be the object"):
        storage.get_into("x", 0, memoryview(target))


def test_a_whole_read_that_broke_returns_what_stands_there_now(through, proxy, direct, begins):
    direct.put("x", b"old" * 1000)
    proxy.rules = [Rule("truncate", kind="get")]
    begins.then = lambda: direct.put("x", b"newer" * 1000)
    assert through().get("x", 9000)[0] == b"newer" * 1000


def test_a_conditional_write_whose_answer_is_lost_is_resolved_by_reading(through, proxy, direct):
    storage = through()
    proxy.rules = [Rule("lost", kind="put", path="/x$")]
    first = storage.put("x", b"mine", if_none_match=True)
    proxy.rules = [Rule("500 after", kind="put", path="/x$")]
    second = storage.put("x", b"mine too", if_match=first)
    assert direct.get("x", 99) == (b"mine too", second)
    proxy.rules = [Rule("lost", kind="put", path="/x$")]
    with pytest.raises(ObjectChanged):
        storage.put("x", b"late", if_match=first)
    with pytest.raises(ObjectExists):
        storage.put("x", b"late", if_none_match=True)
    assert direct.get("x", 99) == (b"mine too", second)


def test_a_completion_by_somebody_else_is_not_taken_for_ours(through, proxy, direct):
    storage = through()
    parts = storage.open_multipart("x", 4)
    parts.write(1, b"mine")
    direct.put("x", b"them")
    proxy.rules = [Rule("500", kind="complete")]
    with pytest.raises(ObjectExists):
        parts.complete(if_none_match=True)
    parts.abort()
    with pytest.raises(ObjectMissing):
        parts.complete()
    assert direct.get("x", 9)[0] == b"them"


def test_an_upload_and_a_read_outlive_a_killed_server(minio, through, direct):
    data = np.random.default_rng(4).bytes(33 * MIB)
    storage = through()

    def crash():
        minio.kill()
        time.sleep(0.3)
        minio.start()

    parts = storage.open_multipart("x", len(data))
    parts.write(1, data[: 16 * MIB])
    with ThreadPoolExecutor(1) as pool:
        down = pool.submit(crash)
        parts.write(2, data[16 * MIB : 32 * MIB])
        parts.write(3, data[32 * MIB :])
        down.result(timeout=60)
    parts.complete(if_none_match=True)
    target = bytearray(len(data))
    with ThreadPoolExecutor(1) as pool:
        down = pool.submit(crash)
        for start in range(0, len(data), MIB):
            storage.get_into("x", start, memoryview(target)[start : start + MIB])
        down.result(timeout=60)
    assert target == data


def test_connections_are_kept_and_not_leaked(direct):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: direct.put(f"{n}", b"1"), range(64)))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            list(pool.map(lambda n: direct.get(f"{n}", 1), range(64)))
        assert len(os.listdir("/proc/self/fd")) <= before + 1
