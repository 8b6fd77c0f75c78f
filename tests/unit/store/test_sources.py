"""Addresses of data sets and models: what is refused, and what the real clients bring home."""

import gzip
import hashlib
import io
import json
import logging
import os
import ssl
import subprocess
import tarfile
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish import store
from planish.base.errors import ConfigError
from planish.base.telemetry import LogFormatter
from planish.store import file_uri, normal_pin, normal_uri, open_store, parse_uri
from planish.store.sources import fetch_file, fetch_folder, open_folder, parse_source
from tests.processes import python
from tests.servers.hub import COMMIT, Hub

DIGEST = "0" * 64
TOKEN = "hf_" + "a" * 34


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("hub", "org/name", "", "")),
        ("hf://org/name", ("hub", "org/name", "", "")),
        ("hf://org/name@v1", ("hub", "org/name", "", "v1")),
        ("hf://org/name/a/b.jsonl@refs/pr/1", ("hub", "org/name", "a/b.jsonl", "refs/pr/1")),
        ("hf://datasets/org/name@v1/b.parquet", ("hub", "org/name", "b.parquet", "v1")),
        ("s3://bucket/a/b/", ("s3", "s3://bucket/a/b", "", "")),
        (f"https://a.org/x?id=1#sha256={DIGEST}", ("https", "https://a.org/x?id=1", "", "")),
        ("file:///data/a.jsonl", ("path", "/data/a.jsonl", "", "")),
        ("../a.jsonl", ("path", "../a.jsonl", "", "")),
        ("a.parquet", ("path", "a.parquet", "", "")),
    ],
)
def test_each_form_of_an_address_is_read(text, expected):
    source = parse_source(text, key="curate.dataset")
    assert (source.kind, source.place, source.file, source.revision) == expected


FORMS = r"`curate\.dataset` must be a path, `owner/name`"
OTHERS = ("", "hf://org", "hf://a/b@1/c@2", "s3://bucket", "s3://b/../c", "http://a.org/x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, FORMS) for text in (*OTHERS, "ftp://a/b")),
        ("https://a.org/x.jsonl", "must end with `#sha256="),
        ("https://a.org/x.jsonl#sha256=12", "must end with `#sha256="),
    ],
)
def test_other_forms_are_refused_with_the_forms_there_are(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_source(text, key="curate.dataset")


@pytest.fixture
def shared_folder():
    """A folder that every user may search."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)
        os.seteuid(os.getuid())


def test_files_that_this_user_may_not_read_are_refused_by_name(shared_folder):
    """A pod is a user of its own, and safetensors writes files for their owner alone."""
    folder = shared_folder
    model, rows = folder / "model", folder / "closed" / "rows.jsonl"
    for path in (model / "config.json", model / "model.safetensors", rows):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    (model / "model.safetensors").chmod(0o200)
    rows.parent.chmod(0o600)
    if os.getuid() == 0:
        os.seteuid(65532)
    told = rf"must be readable by the user {os.geteuid()}, .* got .*{{}}.*`chmod -R a\+rX`"
    with pytest.raises(ConfigError, match=told.format("model.safetensors")):
        open_folder(parse_source(str(model), key="model.path"), key="model.path")
    with pytest.raises(ConfigError, match=told.format("rows.jsonl")):
        fetch_file(parse_source(str(rows), key="curate.dataset"), key="curate.dataset")


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:geheim@a.org/x#sha256={DIGEST}",
        f"https://a.org/x?token=geheim#sha256={DIGEST}",
        f"https://a.org/x?id=1&X-Amz-Signature=geheim#sha256={DIGEST}",
        f"https://a.org/{TOKEN}/x#sha256={DIGEST}",
    ],
)
def test_a_token_in_an_address_is_refused_and_shown_nowhere(text):
    with pytest.raises(ConfigError, match="without user, token or signature") as caught:
        parse_source(text, key="curate.dataset")
    assert "geheim" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert "***" in str(caught.value)
    line = LogFormatter().format(logging.makeLogRecord({"msg": f"GET {text} failed"}))
    assert "geheim" not in line
    assert TOKEN not in line


FETCH = """
import json, sys
from planish.base.errors import ConfigError, exit_code
from planish.store.sources import fetch_file, fetch_folder, open_folder, parse_source
from planish.stages.curate.records import read_hub
found = {}
def attempt(name, work):
    try:
        found[name] = work()
    except ConfigError as error:
        found[name] = [exit_code(error), str(error)]
def source(text, key="curate.dataset"):
    return parse_source(text, key=key)
def rows(text, **options):
    return list(read_hub(source(text), config="", split="train", revision="", **options))
def model():
    folder = open_folder(source("org/model", "model.path"), key="model.path", revision="main")
    return [folder.name, dict(folder.sizes), folder.read("model.safetensors", 2, 5).decode()]
attempt("rows", lambda: rows("org/sums"))
attempt("stream", lambda: rows("hf://org/sums", streaming=True))
attempt("file", lambda: fetch_file(source("hf://org/sums/train.jsonl@main"), key="curate.dataset")
        .read_text())
attempt("model", model)
attempt("folder", lambda: sorted(p.name for p in fetch_folder(
    source("org/model", "model.path"), key="model.path", patterns=("*.json",)).iterdir()))
attempt("absent", lambda: rows("org/absent"))
attempt("revision", lambda: rows("hf://org/sums@v9"))
attempt("no_file", lambda: fetch_file(source("hf://org/sums/b.jsonl"), key="curate.dataset"))
print(json.dumps(found))
"""


@pytest.fixture
def hub(tmp_path):
    """A server in the form of the hub, and a function that fetches from it in another process."""
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
    data, model = tmp_path / "hub/datasets/org/sums", tmp_path / "hub/models/org/model"
    data.mkdir(parents=True)
    model.mkdir(parents=True)
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0123456789")
    server = Hub(tmp_path / "hub")

    def fetch(**environment):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        kept |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), **environment}
        done = python("-c", FETCH, env=kept)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    yield server, rows, fetch
    server.close()


@pytest.mark.long
def test_the_real_clients_fetch_data_and_models_and_each_refusal_is_one_line(hub):
    server, rows, fetch = hub
    server.token = TOKEN
    found, _ = fetch(HF_TOKEN=TOKEN)
    assert found["rows"] == found["stream"] == rows
    assert [json.loads(line) for line in found["file"].splitlines()] == rows
    sizes = {"config.json": 2, "model.safetensors": 10}
    assert found["model"] == [f"org/model at {COMMIT[:12]}", sizes, "23456"]
    assert found["folder"] == ["config.json"]
    assert "there is no such data set, or it is private" in found["absent"][1]
    assert "the revision 'v9' does not exist there" in found["revision"][1]
    assert "it has no such file" in found["no_file"][1]
    with ThreadPoolExecutor(2) as pool:
        offline = pool.submit(fetch, HF_HUB_OFFLINE="1")
        refused = pool.submit(fetch, HF_TOKEN="hf_" + "b" * 34)
    # offline, what has been fetched is still there
    found, _ = offline.result()
    assert found["rows"] == found["stream"] == rows
    assert "the hub can not be reached or failed, and the cache has no copy" in found["absent"][1]
    found, logged = refused.result()
    for name in ("rows", "stream", "model", "no_file"):
        assert found[name][0] == 2, found[name]
        assert "\n" not in found[name][1]
        assert "log in" in found[name][1]
    assert "b" * 34 not in json.dumps(found) + logged


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A function that serves bytes over TLS and returns their address."""
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    from huggingface_hub.utils import close_session

    close_session()
    served = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            data = served.get(self.path)
            self.send_response(200 if data is not None else 404)
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    def serve(name, data, digest=""):
        served[f"/{name}"] = data
        digest = digest or hashlib.sha256(data).hexdigest()
        return f"https://localhost:{server.server_address[1]}/{name}#sha256={digest}", served

    yield serve
    server.shutdown()
    server.server_close()
    thread.join()
    close_session()


def test_a_file_of_a_web_server_is_fetched_once_and_checked(web):
    address, served = web("data.jsonl", b'{"a": 1}\n')
    source = parse_source(address, key="curate.dataset")
    path = fetch_file(source, key="curate.dataset")
    assert (path.name, path.read_bytes()) == ("data.jsonl", b'{"a": 1}\n')
    served.clear()
    assert fetch_file(source, key="curate.dataset") == path
    other, _ = web("other.jsonl", b"changed", digest=DIGEST)
    with pytest.raises(ConfigError, match=f"must have the sha256 {DIGEST}, got d67e"):
        fetch_file(parse_source(other, key="curate.dataset"), key="curate.dataset")
    place = address.partition("#")[0].replace("data", "gone")
    gone = parse_source(f"{place}#sha256={DIGEST}", key="curate.dataset")
    with pytest.raises(ConfigError, match="must be a file that its server gives"):
        fetch_file(gone, key="curate.dataset")


def packed(files, mode="w:gz"):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def test_a_model_of_a_web_server_is_an_archive_of_one_folder(web, tmp_path):
    files = {"my/config.json": b"{}", "my/../my/x.safetensors": b"w", "my/run.py": b"print()"}
    address, _ = web("model.tar.gz", packed(files))
    source = parse_source(address, key="model.path")
    with pytest.raises(ConfigError, match="must be a tar archive of one folder"):
        fetch_folder(source, key="model.path", patterns=("*.json", "*.safetensors"))
    files["my/x.safetensors"] = files.pop("my/../my/x.safetensors")
    source = parse_source(web("good.tar.gz", packed(files))[0], key="model.path")
    folder = fetch_folder(source, key="model.path", patterns=("*.json", "*.safetensors"))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        "config.json": b"{}",
        "x.safetensors": b"w",
    }
    for data in (
        b"no archive",
        packed({"my/config.json": b"x" * 9000}, "w")[:5000],
        gzip.compress(b"x"),
    ):
        source = parse_source(web("bad.tar", data)[0], key="model.path")
        with pytest.raises(ConfigError, match="must be a tar archive"):
            fetch_folder(source, key="model.path", patterns=("*.json",))


@pytest.mark.server
def test_files_and_folders_of_a_bucket_are_fetched_and_listed(s3_root):
    for name, data in {"config.json": b"{}", "m.safetensors": b"0123", "sub/x.json": b""}.items():
        store.write(f"{s3_root}/model/{name}", data)
    source = parse_source(f"{s3_root}/model", key="model.path")
    folder = open_folder(source, key="model.path")
    assert dict(folder.sizes) == {"config.json": 2, "m.safetensors": 4}
    assert folder.read("m.safetensors", 1, 2) == b"12"
    fetched = fetch_folder(source, key="model.path", patterns=("*.json", "*.safetensors"))
    assert sorted(p.name for p in fetched.iterdir()) == ["config.json", "m.safetensors"]
    one = parse_source(f"{s3_root}/model/config.json", key="curate.dataset")
    assert fetch_file(one, key="curate.dataset").read_bytes() == b"{}"
    store.write(f"{s3_root}/model/config.json", b"[1]")
    assert fetch_file(one, key="curate.dataset").read_bytes() == b"[1]"
    for absent, fetch in ((f"{s3_root}/none", fetch_file), (f"{s3_root}/none", open_folder)):
        with pytest.raises(ConfigError, match="got none"):
            fetch(parse_source(absent, key="model.path"), key="model.path")


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://runs/a/b", ("s3", "runs", "a/b")),
        ("s3://runs", ("s3", "runs", "")),
        ("s3://runs/", ("s3", "runs", "")),
        ("s3://runs/a/", ("s3", "runs", "a")),
        ("file:///a/b c", ("file", "", "a/b c")),
        ("file:///a/...", ("file", "", "a/...")),
    ],
)
def test_a_uri_splits_into_scheme_bucket_and_key(uri, parts):
    address = parse_uri(uri)
    assert (address.scheme, address.bucket, address.key) == parts


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("", "must begin with"),
        ("/a/b", "must begin with"),
        ("http://host/a", "must begin with"),
        ("S3://bucket/a", "must begin with"),
        ("s3:///a", "must name a bucket"),
        ("s3://", "must name a bucket"),
        ("file://", "must be absolute"),
        ("file://a/b", "must be absolute"),
        ("file:///a/../b", r"`\.\.` segment"),
        ("s3://bucket/..", r"`\.\.` segment"),
        ("s3://../a", r"`\.\.` segment"),
        ("s3://bucket//b", "empty"),
        ("s3://bucket/a//", "empty"),
        ("file:///a\x00b", "must not hold"),
        ("file:///a\nb", "must not hold"),
        ("s3://bucket/a\\..\\b", "must not hold"),
        ("s3://bucket/a#sha256=1", "must not hold"),
    ],
)
def test_a_uri_that_could_leave_its_root_or_mean_two_things_is_refused(uri, words):
    with pytest.raises(ConfigError, match=words) as raised:
        parse_uri(uri)
    assert repr(uri) in str(raised.value)


@given(st.text(alphabet="ab./\\#:\x00 \n3sfile", max_size=30))
def test_whatever_is_accepted_has_no_segment_that_climbs(text):
    try:
        address = parse_uri(text)
    except ConfigError:
        return
    assert not {"", ".", ".."} & set(address.key.split("/")) or address.key == ""


def test_one_store_serves_all_uris_of_a_bucket_while_the_settings_stay(monkeypatch):
    for name in ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY"):
        monkeypatch.setenv(f"MINIO_{name}", "a")
    first, key = open_store("s3://bucket/a/b")
    assert key == "a/b"
    assert open_store("s3://bucket/c")[0] is first
    assert open_store("s3://other/c")[0] is not first
    monkeypatch.setenv("MINIO_SECRET_KEY", "b")
    assert open_store("s3://bucket/c")[0] is not first


@pytest.mark.parametrize(
    "name", ["a b", "m\u00fcde", "100%25", "%41", "c#", "x=1,y+2@z", "a\udcff"]
)
def test_a_path_survives_its_uri_and_has_one_spelling(tmp_path, name):
    folder = tmp_path / name
    uri = file_uri(folder)
    assert uri.isascii()
    assert not {" ", "#"} & set(uri)
    assert normal_uri(f"{uri}/") == uri
    store.write(f"{uri}/sub/object", b"1")
    assert (folder / "sub" / "object").read_bytes() == b"1"
    assert store.list_uris(uri) == [f"{uri}/sub/object"]


def test_a_path_is_a_place_wherever_it_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = file_uri(tmp_path)
    assert normal_uri(f"{tmp_path}/x/") == normal_uri("x") == normal_uri("./a/../x") == f"{here}/x"
    assert normal_uri("12:30 run#1") == f"{here}/12:30%20run%231"
    pin = f"#sha256={'0' * 64}"
    assert normal_pin(f"x{pin}") == f"{here}/x{pin}"
    for text in ("", "s3:/bucket/x", "file:/tmp/x", "ftp://host/x"):
        with pytest.raises(ConfigError, match="must begin with one of"):
            normal_uri(text)


@pytest.mark.parametrize("uri", ["file:///a/%2e%2e/b", "file:///a%00b", "file:///a%5Cb"])
def test_what_is_refused_is_refused_also_when_it_is_encoded(uri):
    with pytest.raises(ConfigError):
        parse_uri(uri)


def test_an_endpoint_that_is_no_address_is_named(monkeypatch):
    for name in ("ACCESS_KEY", "SECRET_KEY"):
        monkeypatch.setenv(f"MINIO_{name}", "a")
    monkeypatch.setenv("MINIO_ENDPOINT", "host:port")
    with pytest.raises(ConfigError, match="`MINIO_ENDPOINT` must be `host:port`, got 'host:port'"):
        open_store("s3://bucket/a")
