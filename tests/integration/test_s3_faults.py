"""The S3 store against a real server with wrong settings, clocks and keys."""

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
    StoreUnavailable,
    exit_code,
)
from planish.store import open_store, s3_client

pytestmark = pytest.mark.server


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "1e9"])
def test_retry_seconds_that_can_not_be_are_named(s3_root, monkeypatch, text):
    monkeypatch.setenv("MINIO_RETRY_SECONDS", text)
    with pytest.raises(ConfigError, match=f"`MINIO_RETRY_SECONDS` must be .* got '{text}'"):
        store.exists(f"{s3_root}/x")


def every_operation(root, path):
    path.write_bytes(b"1")
    return {
        "read": lambda: store.read(f"{root}/x"),
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
