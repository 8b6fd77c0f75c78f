"""When requests are sent again, the signature of requests, and part sizes."""

import http.client
import random
import socket
import ssl
import time
from collections import Counter
from datetime import UTC, datetime

import pytest
import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    IncompleteRead,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
    SSLError,
)

from planish.store import s3_client
from planish.store.keys import keys_of
from planish.store.retry import Transient, Tries, longest_wait, transient
from planish.store.s3 import read_settings
from planish.store.s3_client import S3Settings

POOL = urllib3.HTTPConnectionPool("127.0.0.1", 9000)


def failing(times, result="done"):
    """A call that fails so many times first."""
    left = [times]

    def once():
        if left[0]:
            left[0] -= 1
            raise Transient("503", "busy", sent=True)
        return result

    return once


@pytest.fixture
def waits(monkeypatch):
    """The waits of a request, which pass at once."""
    found = []
    monkeypatch.setattr("planish.store.retry.time.sleep", found.append)
    return found


def tries(deadline=1e9, **options):
    return Tries(Counter(), time.monotonic() + deadline, **options)


@pytest.mark.parametrize("times", range(8))
def test_failures_within_the_retry_seconds_are_outlived(times, waits):
    used = tries()
    assert used.run(failing(times)) == "done"
    assert used.count == times + 1
    assert len(waits) == times
    assert used.retries == ({"503": times} if times else {})
    assert used.is_ambiguous == (times > 0)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 60.0])
def test_tries_go_on_for_the_retry_seconds_and_one_wait_at_most(seconds, waits, monkeypatch):
    for seed in range(50):
        waits.clear()
        monkeypatch.setattr("planish.store.retry._JITTER", random.Random(seed))
        used = tries(retry_seconds=seconds)
        with pytest.raises(Transient, match="busy"):
            used.run(failing(10**6))
        assert seconds <= sum(waits) <= seconds + longest_wait(used.count)


@pytest.mark.parametrize(
    ("error", "passes", "is_sent"),
    [
        (NewConnectionError(POOL, "refused"), True, False),
        (ConnectTimeoutError(POOL, "late"), True, False),
        (NameResolutionError("nowhere", POOL, socket.gaierror(-2, "no such name")), True, False),
        (ProtocolError("aborted", ConnectionResetError(104, "reset")), True, True),
        (NameResolutionError("nowhere", POOL, socket.gaierror(-3, "later")), True, False),
        (ProtocolError("aborted", BrokenPipeError(32, "pipe")), True, True),
        (ProtocolError("aborted", http.client.RemoteDisconnected("closed")), True, True),
        (ProtocolError("aborted", http.client.BadStatusLine("x")), True, True),
        (IncompleteRead(1, 3), True, True),
        (ReadTimeoutError(POOL, "/", "late"), True, True),
        (SSLError(ssl.SSLCertVerificationError("no")), False, True),
        (SSLError(ssl.SSLEOFError(8, "eof")), True, True),
    ],
)
def test_what_passes_is_told_from_what_does_not(error, passes, is_sent):
    found = transient(error)
    assert (found is not None) == passes
    assert found is None or found.sent == is_sent


def test_a_signature_covers_every_header_and_no_body(monkeypatch):
    # The expected value is that of another implementation of the published algorithm.
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    monkeypatch.setattr(s3_client, "utcnow", lambda: moment)
    settings = S3Settings("127.0.0.1:9000", "AKID", "SECRET", secure=False, region="us-east-1")
    client = s3_client.Client(settings, "bucket", timeout_s=1.0)
    url, headers = client._signed(
        "PUT", "a b", {"partNumber": "1", "uploadId": "x/y"}, {"if-none-match": "*"}, None
    )
    assert url == "http://127.0.0.1:9000/bucket/a%20b?partNumber=1&uploadId=x%2Fy"
    assert headers["x-amz-date"] == "20260102T030405Z"
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers["Authorization"].startswith(
        "AWS4-HMAC-SHA256 Credential=AKID/20260102/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;if-none-match;x-amz-content-sha256;x-amz-date, Signature="
    )
    assert (
        headers["Authorization"][-64:]
        == "30eeed791585a090296501e8fe0afd919c47218c3c5d5375e53a56e0d7507b40"
    )


@pytest.mark.parametrize(
    ("variables", "keys"),
    [
        ({"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s"}, ("id", "s")),
        ({"MINIO_ACCESS_KEY": "mine", "MINIO_SECRET_KEY": "own"}, ("mine", "own")),
    ],
)
def test_keys_are_our_own_or_those_of_aws(monkeypatch, variables, keys):
    for name in ("MINIO_ACCESS_KEY", "MINIO_SECRET_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINIO_ENDPOINT", "127.0.0.1:9000")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    given = read_settings()
    found = keys_of(given.access_key, given.secret_key, given.session_token).retrieve()
    assert (found.access_key, found.secret_key) == keys
