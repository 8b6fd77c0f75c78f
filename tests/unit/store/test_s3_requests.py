"""When requests are sent again, the signature of requests, and part sizes."""

from __future__ import annotations

import http.client
import random
import socket
import ssl
import time
from datetime import UTC, datetime

import pytest

from planish.store import Counters, part_bytes
from planish.store.retry import Transient, Tries, longest_wait, transient
from planish.store.s3_client import S3Settings, canonical_query, sign


def failing(times, result="done", *, sent=True):
    """A call that fails so many times first."""
    left = [times]

    def once():
        if left[0]:
            left[0] -= 1
            raise Transient("503", "busy", sent=sent)
        return result

    return once


def tries(waits, deadline=1e9, **options):
    return Tries(Counters(), time.monotonic() + deadline, sleep=waits.append, **options)


@pytest.mark.parametrize("times", range(8))
def test_failures_within_the_retry_seconds_are_outlived(times):
    waits = []
    used = tries(waits)
    assert used.run(failing(times)) == "done"
    assert used.count == times + 1
    assert len(waits) == times
    assert used.counters.retries == ({"503": times} if times else {})
    assert used.is_ambiguous == (times > 0)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 60.0])
def test_tries_go_on_for_the_retry_seconds_and_one_wait_at_most(seconds):
    for seed in range(50):
        waits = []
        used = tries(waits, retry_seconds=seconds)
        used.jitter = random.Random(seed).uniform
        with pytest.raises(Transient, match="busy"):
            used.run(failing(10**6))
        assert seconds <= sum(waits) <= seconds + longest_wait(used.count)


def test_waits_are_uniform_below_a_doubling_limit_of_ten_seconds():
    assert [longest_wait(k) for k in range(1, 9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    waits = []
    for seed in range(400):
        used = tries(waits)
        used.jitter = random.Random(seed).uniform
        used.run(failing(7))
    for number in range(7):
        of_one = waits[number::7]
        assert 0 <= min(of_one) < 0.05 * longest_wait(number + 1)
        assert 0.95 * longest_wait(number + 1) < max(of_one) <= longest_wait(number + 1)
        assert abs(sum(of_one) / 400 / longest_wait(number + 1) - 0.5) < 0.06


def test_no_wait_goes_beyond_the_deadline():
    waits = []
    used = tries(waits, deadline=0.0)
    with pytest.raises(Transient):
        used.run(failing(1))
    assert (used.count, waits) == (1, [])


def test_a_request_that_never_left_is_not_ambiguous():
    used = tries([])
    used.run(failing(3, sent=False))
    assert not used.is_ambiguous


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionRefusedError(111, "Connection refused"), True),
        (ConnectionResetError(104, "reset"), True),
        (BrokenPipeError(32, "pipe"), True),
        (TimeoutError("timed out"), True),
        (BlockingIOError(11, "again"), True),
        (http.client.RemoteDisconnected("closed"), True),
        (http.client.IncompleteRead(b"", 3), True),
        (http.client.BadStatusLine("x"), True),
        (socket.gaierror(socket.EAI_AGAIN, "later"), True),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), True),
        (ssl.SSLCertVerificationError("no"), False),
        (ssl.SSLEOFError(8, "eof"), True),
        (ValueError("ours"), False),
    ],
)
def test_what_passes_is_told_from_what_does_not(error, passes):
    assert (transient(error, sent=False) is not None) == passes
    if isinstance(error, ssl.SSLError):
        assert transient(error, sent=True) is not None


def test_the_signature_is_that_of_the_published_algorithm():
    # The expected value was made by the signing functions of the SDK.
    headers = sign(
        "PUT",
        "/bucket/a%20b",
        canonical_query({"partNumber": "1", "uploadId": "x/y"}),
        {"host": "127.0.0.1:9000", "if-none-match": "*"},
        S3Settings("127.0.0.1:9000", "AKID", "SECRET", secure=False, region="us-east-1"),
        datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    assert headers["x-amz-date"] == "20260102T030405Z"
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers["authorization"].startswith(
        "AWS4-HMAC-SHA256 Credential=AKID/20260102/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;if-none-match;x-amz-content-sha256;x-amz-date, Signature="
    )
    assert (
        headers["authorization"][-64:]
        == "30eeed791585a090296501e8fe0afd919c47218c3c5d5375e53a56e0d7507b40"
    )


def test_part_sizes_keep_the_number_of_parts_below_nine_thousand():
    mib = 1 << 20
    for size in (0, 1, 16 * mib, 9000 * 16 * mib, 9000 * 16 * mib + 1, 5 << 40):
        part = part_bytes(size)
        assert part % mib == 0
        assert part >= 16 * mib
        assert -(-size // part) <= 9000
    assert part_bytes(9000 * 16 * mib) == 16 * mib
    assert part_bytes(9000 * 16 * mib + 1) == 17 * mib
