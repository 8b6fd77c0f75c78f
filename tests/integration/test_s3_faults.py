"""The S3 store against a real server behind broken networks, and with wrong settings."""

import datetime
import os

import pytest
from minio.credentials import AssumeRoleProvider

from planish import store
from planish.base.errors import (
    EXIT_CONFIG,
    EXIT_TRANSIENT,
    AccessRefused,
    ConfigError,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
    exit_code,
)
from planish.store import open_store, retry, s3_client
from tests.servers.http_proxy import HttpProxy, Rule

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(s3_client, "STRANGER_SECONDS", 0.05)


@pytest.fixture
def through(minio, monkeypatch):
    """Put a proxy between the store and the server: so many requests suffer, 0 is all."""
    with HttpProxy(minio.endpoint) as proxy:

        def start(fault, times=0):
            monkeypatch.setenv("MINIO_ENDPOINT", proxy.endpoint)
            proxy.rules = [Rule(fault, times=times)]
            return proxy

        yield start


def answer_of(status, body, kind="application/xml"):
    """Return a whole HTTP answer."""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Date: Sat, 01 Jan 2000 00:00:00 GMT\r\nConnection: close\r\n\r\n{body}"
    )


def refusal(status, code):
    """Return an error of S3."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>"
    return answer_of(status, body)


@pytest.mark.parametrize(
    "body",
    [
        "<DeleteResult><Error><Key>x</Key><Code>SlowDown</Code></Error></DeleteResult>",
        "<Error><Code>InternalError</Code></Error>",
        "<html>a page of a proxy",
    ],
)
def test_an_answer_that_turns_out_to_be_an_error_is_asked_for_again(through, s3_root, body):
    uri = f"{s3_root}/x"
    store.write(uri, b"data")
    proxy = through(answer_of("200 OK", body), 2)
    store.delete(uri)
    assert proxy.total() == 3
    assert store.list_uris(s3_root) == []


def test_a_key_that_can_not_be_deleted_is_an_error(through, s3_root):
    body = "<DeleteResult><Error><Key>x</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    through(answer_of("200 OK", body))
    with pytest.raises(AccessRefused, match="give the user a policy"):
        store.delete(f"{s3_root}/x")


def test_after_the_retry_seconds_the_store_counts_as_unavailable(through, s3_root, monkeypatch):
    proxy = through("reset")
    monkeypatch.setenv("MINIO_RETRY_SECONDS", "1.0")
    with pytest.raises(StoreUnavailable, match="must be a server that answers") as raised:
        store.read(f"{s3_root}/x")
    assert proxy.total() > 3
    assert exit_code(raised.value) == EXIT_TRANSIENT


@pytest.mark.parametrize("code", ["SlowDown", "XMinioIAMNotInitialized", "OfALaterVersion"])
def test_an_answer_of_503_for_ever_is_unavailable_whatever_its_code(
    through, s3_root, monkeypatch, code
):
    proxy = through(refusal("503 Service Unavailable", code))
    monkeypatch.setenv("MINIO_RETRY_SECONDS", "0.3")
    with pytest.raises(StoreUnavailable, match=f"keeps answering {code}") as raised:
        store.write(f"{s3_root}/x", b"")
    assert exit_code(raised.value) == EXIT_TRANSIENT
    assert proxy.total() > 1
    monkeypatch.setenv("MINIO_RETRY_SECONDS", "0.05")
    with pytest.raises(StoreUnavailable, match="keeps answering HTTP 503"):
        store.size(f"{s3_root}/x")


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "1e9"])
def test_retry_seconds_that_can_not_be_are_named(s3_root, monkeypatch, text):
    monkeypatch.setenv("MINIO_RETRY_SECONDS", text)
    with pytest.raises(ConfigError, match=f"`MINIO_RETRY_SECONDS` must be .* got '{text}'"):
        store.size(f"{s3_root}/x")


def every_operation(root, path):
    path.write_bytes(b"1")
    return {
        "read": lambda: store.read(f"{root}/x"),
        "size": lambda: store.size(f"{root}/x"),
        "exists": lambda: store.exists(f"{root}/x"),
        "list": lambda: store.list_uris(root),
        "write": lambda: store.write(f"{root}/x", b"1"),
        "write_file": lambda: store.write_file(f"{root}/x", path),
        "create": lambda: store.create(f"{root}/new", b"1"),
        "delete": lambda: store.delete(f"{root}/x"),
    }


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"MINIO_ACCESS_KEY": "nobody0123"}, AccessRefused, "`MINIO_ACCESS_KEY` must be a key"),
        (
            {"MINIO_SECRET_KEY": "wrong-secret-0123"},
            AccessRefused,
            "`MINIO_SECRET_KEY` must belong to `MINIO_ACCESS_KEY`",
        ),
        ({"MINIO_SECURE": "1"}, ConfigError, "`MINIO_SECURE=0`"),
        ({"MINIO_SECURE": "yes"}, ConfigError, "must be 0 or 1, got 'yes'"),
        ({"MINIO_ENDPOINT": "http://localhost:9000"}, ConfigError, "without a scheme"),
        ({"MINIO_ENDPOINT": "127.0.0.1:1"}, StoreUnavailable, "connection refused"),
        ({"MINIO_ENDPOINT": "nowhere.invalid:9"}, StoreUnavailable, "name does not resolve"),
        (
            {"MINIO_ENDPOINT": "", "MINIO_SECRET_KEY": ""},
            ConfigError,
            "`MINIO_ENDPOINT`, `MINIO_SECRET_KEY` must be set",
        ),
    ],
)
def test_each_wrong_setting_is_named_by_every_operation_without_secrets(
    s3_root, monkeypatch, tmp_path, changes, error, words
):
    store.write(f"{s3_root}/x", b"1")
    secrets = [os.environ["MINIO_SECRET_KEY"], "wrong-secret-0123", "nobody0123", "Signature="]
    monkeypatch.setenv("MINIO_RETRY_SECONDS", "0.05")
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    for name, work in every_operation(s3_root, tmp_path / "x").items():
        with pytest.raises(error, match=words) as raised:
            work()
        shown = f"{raised.value!r} {raised.value.__cause__!r}"
        assert not [secret for secret in secrets if secret in shown], name
        expected = EXIT_TRANSIENT if error is StoreUnavailable else EXIT_CONFIG
        assert exit_code(raised.value) == expected


def test_a_missing_bucket_is_told_apart_from_a_missing_object(minio, s3_root, tmp_path):
    operations = every_operation("s3://no-such-bucket", tmp_path / "x")
    for work in operations.values():
        with pytest.raises(ConfigError, match="bucket 'no-such-bucket' must exist"):
            work()
    with pytest.raises(ObjectMissing):
        store.read(f"{s3_root}/x")


def test_a_name_that_no_bucket_can_have_is_refused(minio):
    with pytest.raises(ConfigError, match="not what an S3 server takes"):
        store.read("s3://No_Bucket!/x")
    with pytest.raises(ConfigError, match="must read `s3://bucket/key`"):
        store.read("s3://bucket")


@pytest.mark.parametrize("hours", [-10, 10])
def test_a_wrong_clock_is_told_with_both_times(s3_root, monkeypatch, tmp_path, hours):
    store.write(f"{s3_root}/x", b"1")

    def shifted():
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)

    monkeypatch.setattr(s3_client, "utcnow", shifted)
    for name, work in every_operation(s3_root, tmp_path / "x").items():
        with pytest.raises(
            AccessRefused, match="clocks of this machine and of the server"
        ) as raised:
            work()
        assert str(raised.value).count(" GMT'") == 2, name


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (
            refusal("507 Insufficient Store", "XMinioStorageFull"),
            StoreError,
            "server is full",
        ),
        (refusal("403 Forbidden", "AccessDenied"), AccessRefused, "give the user a policy"),
        (refusal("418 Teapot", "Odd"), StoreError, "the server answers Odd"),
        (
            answer_of("404 Not Found", "hi", "text/html"),
            ConfigError,
            "must be the S3 port of a server",
        ),
    ],
)
def test_other_answers_are_not_tried_again(through, s3_root, answer, error, words):
    proxy = through(answer)
    with pytest.raises(error, match=words):
        store.write(f"{s3_root}/x", b"1")
    # A bare answer may be that of a gateway before a store that starts.
    assert (proxy.total() == 1) == (error is not ConfigError)
    with pytest.raises(StoreError if error is ConfigError else error):
        store.create(f"{s3_root}/x", b"1")


@pytest.fixture(name="token")
def _token(minio, monkeypatch):
    """The token of temporary keys; the environment is set to use them."""
    given = AssumeRoleProvider(
        sts_endpoint=f"http://{minio.endpoint}",
        access_key=minio.access_key,
        secret_key=minio.secret_key,
        duration_seconds=900,
        region="us-east-1",
    ).retrieve()
    monkeypatch.setenv("MINIO_ACCESS_KEY", given.access_key)
    monkeypatch.setenv("MINIO_SECRET_KEY", given.secret_key)
    monkeypatch.setenv("MINIO_SESSION_TOKEN", given.session_token)
    return given.session_token


def test_temporary_keys_write_and_read(s3_root, token):
    storage, key = open_store(f"{s3_root}/run")
    storage.put(f"{key}/small", b"one")
    parts = storage.open_multipart(f"{key}/large", 3)
    parts.write(1, b"two")
    parts.complete()
    assert storage.get(f"{key}/large", 3)[0] == b"two"
    assert store.read(f"{s3_root}/run/small") == b"one"


@pytest.mark.parametrize(
    "change",
    [lambda _: "", lambda _: "no token", lambda old: old[:-9]],
    ids=["none", "other", "cut"],
)
def test_a_token_that_is_not_one_is_named(s3_root, token, monkeypatch, change):
    monkeypatch.setenv("MINIO_SESSION_TOKEN", change(token))
    with pytest.raises(AccessRefused, match="MINIO_SESSION_TOKEN") as error:
        store.write(f"{s3_root}/run/x", b"1")
    assert token[:20] not in str(error.value)
