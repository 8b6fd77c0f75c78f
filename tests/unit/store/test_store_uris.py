import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish import store
from planish.base.errors import ConfigError
from planish.store import file_uri, normal_pin, normal_uri, open_store, parse_uri


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
