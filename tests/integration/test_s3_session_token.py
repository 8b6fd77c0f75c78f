"""Temporary keys of a security token service."""

import pytest
from minio.credentials import AssumeRoleProvider

from planish import store
from planish.base.errors import AccessRefused
from planish.store import open_store

pytestmark = pytest.mark.server


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
