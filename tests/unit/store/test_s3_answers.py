"""What a store's server, and the service of its keys, answer that no real one can be made to."""

import contextlib
import json

import pytest

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
from planish.minder.service.http import AccessConfig, HttpClient
from planish.store import retry, s3, s3_client
from planish.store.s3 import S3Store
from planish.store.s3_client import S3Settings
from tests.servers.scripted_http import Reply, ScriptedServer

LISTING = (
    b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>%s</ListBucketResult>"
)
ENTRY = (
    b"<Contents><Key>a</Key><LastModified>2026-01-02T03:04:05Z</LastModified><Size>1</Size>"
    b"<ETag>&quot;e&quot;</ETag></Contents>"
)
BARE = b"<html>a page of a gateway</html>"


def error_page(code):
    return f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()


@pytest.fixture
def server():
    with_answers = ScriptedServer()
    yield with_answers
    with_answers.close()


@pytest.fixture(autouse=True)
def _new_server(monkeypatch):
    """Wait shortly, and know nothing of an earlier server that had the same port."""
    monkeypatch.setattr(s3_client, "_spoken", set())
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(s3_client, "STRANGER_SECONDS", 0.01, raising=False)


def store_of(server, *, timeout_s=20.0, retry_seconds=0.05, key="key"):
    settings = S3Settings(
        server.url.removeprefix("http://"),
        *(key, "secret"),
        secure=False,
        region="us-east-1",
        retry_seconds=retry_seconds,
    )
    return S3Store(settings, "bucket", timeout_s=timeout_s)


OPERATIONS = {
    "put": lambda store: store.put("a", b"1"),
    "create": lambda store: store.put("a", b"1", if_none_match=True),
    "read": lambda store: store.read("a"),
    "get": lambda store: store.get("a", 1 << 20),
    "head": lambda store: store.head("a"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete(["a"]),
    "begin": lambda store: store.open_multipart("a", 1),
    "uploads": lambda store: store.open_uploads("a"),
    "abort": lambda store: store.abort_upload("a", "u"),
}


@pytest.mark.parametrize(
    ("operation", "reply"),
    [
        *((name, Reply(drips_head=True, drip_seconds=0.02)) for name in OPERATIONS),
        *(
            (name, Reply(status, b" " * 2000, drip_seconds=0.02))
            for name in OPERATIONS
            for status in (200, 403)
            if name != "head"
        ),
    ],
)
def test_an_answer_that_trickles_ends_with_the_time_of_the_request(server, operation, reply):
    server.answer = lambda _: reply
    with pytest.raises(StoreUnavailable, match="no answer in time") as raised:
        OPERATIONS[operation](store_of(server, timeout_s=0.05, retry_seconds=0))
    assert exit_code(raised.value) == EXIT_TRANSIENT


@pytest.mark.parametrize("status", [200, 403, 404, 500])
@pytest.mark.parametrize("operation", ["put", "create", "list", "delete", "begin", "abort"])
def test_a_page_without_an_end_is_not_read_whole(server, operation, status):
    server.answer = lambda _: Reply(status, error_page("Odd"), endless_mib=256)
    with contextlib.suppress(StoreError):
        OPERATIONS[operation](store_of(server, retry_seconds=0))
        assert (status == 200 and operation in ("put", "create")) or operation == "abort"
    assert server.sent_mib < 128


def test_an_object_may_be_longer_than_any_document(server, monkeypatch):
    monkeypatch.setattr(s3_client, "_DOCUMENT_BYTES", 2000)
    server.answer = lambda _: Reply(body=b"x" * 100_000, headers={"ETag": '"e"'})
    assert len(store_of(server).read("a")) == 100_000


def test_a_connection_serves_the_next_request_after_an_error_page(server):
    server.answer = lambda r: Reply(404 if r.number % 2 else 200, error_page("NoSuchKey"))
    store = store_of(server)
    for _ in range(3):
        with pytest.raises(ObjectMissing):
            store.read("a")
        store.put("a", b"1")
    (pool,) = store._client._http.pools._container.values()
    assert pool.num_connections == 1


@pytest.mark.parametrize("status", [301, 401, 404, 418])
@pytest.mark.parametrize("operation", ["put", "read", "list", "delete"])
def test_a_bare_answer_passes_where_s3_has_answered_before(server, operation, status):
    good = {"put": b"", "read": b"1", "list": LISTING % ENTRY, "delete": b"<DeleteResult/>"}
    bare = Reply(status, BARE)
    server.answer = lambda r: bare if 1 < r.number < 4 else Reply(body=good[operation])
    store = store_of(server, retry_seconds=5)
    OPERATIONS[operation](store)
    OPERATIONS[operation](store)
    assert len(server.requests) == 4
    server.answer = lambda _: bare
    with pytest.raises(StoreUnavailable, match=f"HTTP {status} without an S3 error") as raised:
        OPERATIONS[operation](store_of(server))
    assert exit_code(raised.value) == EXIT_TRANSIENT


@pytest.mark.parametrize("status", [301, 403, 404, 405])
def test_a_bare_answer_of_what_never_spoke_s3_is_a_wrong_address(server, status):
    server.answer = lambda _: Reply(status, BARE)
    with pytest.raises(ConfigError, match="must be the S3 port of a server") as raised:
        store_of(server, retry_seconds=60).put("a", b"1")
    assert exit_code(raised.value) == EXIT_CONFIG
    server.answer = lambda r: Reply(status, BARE) if r.number % 2 else Reply()
    store_of(server).put("a", b"1")


def test_a_gateway_that_denies_an_object_is_not_believed(server):
    listing = Reply(body=LISTING % ENTRY)
    server.answer = lambda r: Reply(404) if r.method == "HEAD" else listing
    assert store_of(server).head("a").size == 1
    with pytest.raises(ObjectMissing):
        store_of(server).head("b")


@pytest.mark.parametrize(
    "body",
    [
        b"<DeleteResult><Error><Key>a</Key><Code>SlowDown</Code></Error></DeleteResult>",
        b"<Error><Code>InternalError</Code></Error>",
        b"<html>a page of a gateway",
    ],
)
def test_an_answer_that_turns_out_to_be_an_error_is_asked_for_again(server, body):
    server.answer = lambda r: Reply(body=body if r.number < 3 else b"<DeleteResult/>")
    store_of(server, retry_seconds=5).delete(["a"])
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("operation", "page", "words"),
    [
        ("put", error_page("SlowDown"), "keeps answering SlowDown"),
        ("put", error_page("XMinioIAMNotInitialized"), "keeps answering XMinioIAMNotInitialized"),
        ("create", error_page("OfALaterVersion"), "keeps answering OfALaterVersion"),
        ("head", b"", "keeps answering HTTP 503"),
    ],
)
def test_an_answer_of_503_for_ever_is_unavailable_whatever_its_code(server, operation, page, words):
    server.answer = lambda _: Reply(503, page)
    with pytest.raises(StoreUnavailable, match=words) as raised:
        OPERATIONS[operation](store_of(server))
    assert exit_code(raised.value) == EXIT_TRANSIENT
    assert len(server.requests) > 1


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(507, "XMinioStorageFull", "server is full"), (418, "Odd", "the server answers Odd")],
)
def test_other_answers_are_not_tried_again(server, status, code, words):
    server.answer = lambda _: Reply(status, error_page(code))
    with pytest.raises(StoreError, match=words):
        store_of(server, retry_seconds=60).put("a", b"1")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("operation", "action"),
    [
        ("put", "s3:PutObject"),
        ("create", "s3:PutObject"),
        ("begin", "s3:PutObject"),
        ("read", "s3:GetObject"),
        ("head", "s3:ListBucket"),
        ("list", "s3:ListBucket"),
        ("delete", "s3:DeleteObject"),
        ("uploads", "s3:ListBucketMultipartUploads"),
        ("abort", "s3:AbortMultipartUpload"),
    ],
)
def test_what_a_store_forbids_is_named(server, operation, action):
    server.answer = lambda _: Reply(403, error_page("AccessDenied"))
    with pytest.raises(AccessRefused, match=f"must be allowed `{action}`.*a policy") as raised:
        OPERATIONS[operation](store_of(server))
    assert exit_code(raised.value) == EXIT_CONFIG


def test_a_key_that_may_not_be_deleted_names_the_action(server):
    body = b"<DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    server.answer = lambda _: Reply(body=body)
    with pytest.raises(AccessRefused, match="must be allowed `s3:DeleteObject`"):
        store_of(server).delete(["a"])


@pytest.mark.parametrize(
    "endpoint",
    [
        "user:pass-word@host:9000",
        "http://user:pass-word@host:9000",
        "user:pass-word@host",
        "user:pass-word/more@host:9000",
        "user:at@pass-word@host:9000",
    ],
)
def test_a_password_in_the_address_is_refused_and_never_printed(monkeypatch, endpoint):
    monkeypatch.setenv("MINIO_ENDPOINT", endpoint)
    monkeypatch.setenv("MINIO_ACCESS_KEY", "key")
    monkeypatch.setenv("MINIO_SECRET_KEY", "secret")
    with pytest.raises(ConfigError, match=r"got '\*\*\*@host") as raised:
        s3.connect("bucket")
    assert "pass-word" not in f"{raised.value!r}{raised.value.__cause__!r}"


@pytest.mark.parametrize(
    "uri",
    [
        "s3://u:pass-word@b/k",
        "s3://u:pass-word@b",
        "https://u:pass-word@b/k",
        "s3://u:pass-word@b//k",
    ],
)
def test_a_password_in_a_uri_is_in_no_message(server, monkeypatch, uri):
    for name in ("MINIO_ENDPOINT", "MINIO_ACCESS_KEY", "MINIO_SECRET_KEY"):
        monkeypatch.setenv(name, "word")
    with pytest.raises(ConfigError) as raised:
        store.read(uri)
    assert "pass-word" not in f"{raised.value!r}{raised.value.__cause__!r}"


def test_a_password_in_the_url_of_a_monitoring_server_is_refused(server):
    access = AccessConfig(url="http://u:pass-word@host:9090")
    with pytest.raises(ConfigError, match=r"got 'http://\*\*\*@host:9090'"):
        HttpClient(access)


KEYS = {
    "AccessKeyId": "id",
    "SecretAccessKey": "secret",
    "Token": "token",
    "Expiration": "2099-01-01T00:00:00Z",
}
GOOD_KEYS = Reply.of(KEYS)


@pytest.fixture
def service(monkeypatch):
    """A service of keys as pods of AWS have one."""
    server = ScriptedServer()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.url}/keys?secret=hidden")
    yield server
    server.close()


HICCUPS = {
    "503": Reply(503),
    "500": Reply(500, b"<html>"),
    "429": Reply(429),
    "cut": Reply(body=json.dumps(KEYS).encode(), cut_bytes=20),
    "page": Reply(body=b"<html>starting</html>"),
    "list": Reply(body=b"[]"),
    "half": Reply.of({"AccessKeyId": "id"}),
    "code": Reply.of({"Code": "Failed", "Message": "later"}),
}


@pytest.mark.parametrize("hiccup", HICCUPS)
def test_a_service_of_keys_that_hiccups_costs_a_few_tries(server, service, hiccup):
    service.answer = lambda r: HICCUPS[hiccup] if r.number < 4 else GOOD_KEYS
    store = store_of(server, key="", retry_seconds=5)
    assert isinstance(store.put("a", b"1"), str)
    assert (len(service.requests), len(server.requests)) == (4, 1)
    assert server.requests[0].headers["x-amz-security-token"] == "token"
    store.put("b", b"1")
    assert len(service.requests) == 4


@pytest.mark.parametrize("hiccup", HICCUPS)
def test_a_service_of_keys_that_stays_away_is_tried_again_later(server, service, hiccup):
    service.answer = lambda _: HICCUPS[hiccup]
    with pytest.raises(StoreUnavailable, match=r"service of keys .*/keys' must give") as raised:
        store_of(server, key="").put("a", b"1")
    assert exit_code(raised.value) == EXIT_TRANSIENT
    assert "hidden" not in str(raised.value)
    assert len(service.requests) > 1
    assert server.requests == []


@pytest.mark.parametrize("drips", [{"drips_head": True}, {"body": b" " * 2000}])
def test_a_service_of_keys_that_trickles_ends_with_the_request(server, service, drips):
    service.answer = lambda _: Reply(drip_seconds=0.02, **drips)
    with pytest.raises(StoreUnavailable, match="no answer in time"):
        store_of(server, key="", timeout_s=0.05, retry_seconds=0).put("a", b"1")


def test_keys_that_expire_are_asked_for_again_through_a_hiccup(server, service):
    old = {**KEYS, "Expiration": "2000-01-01T00:00:00Z"}
    answers = {1: Reply.of(old), 2: Reply(503), 3: Reply(503)}
    service.answer = lambda r: answers.get(r.number, GOOD_KEYS)
    store = store_of(server, key="", retry_seconds=5)
    store.put("a", b"1")
    store.put("b", b"1")
    assert (len(service.requests), len(server.requests)) == (4, 2)


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_service_that_refuses_keys_is_told_at_once(server, service, status):
    service.answer = lambda _: Reply(status, b"no role")
    with pytest.raises(AccessRefused, match=f"got HTTP {status}; check the role") as raised:
        store_of(server, key="").put("a", b"1")
    assert exit_code(raised.value) == EXIT_CONFIG
    assert len(service.requests) == 1


def test_a_token_file_that_is_not_there_is_told(server, service, monkeypatch):
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "/nowhere/token")
    with pytest.raises(AccessRefused, match="/nowhere/token"):
        store_of(server, key="").put("a", b"1")
