from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.errors import ConfigError
from planish.store import open_store, parse_uri


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
        ("gs://bucket/a", "must begin with"),
        ("S3://bucket/a", "must begin with"),
        ("s3:bucket/a", "must begin with"),
        ("s3:///a", "must name a bucket"),
        ("s3://", "must name a bucket"),
        ("file://", "must be absolute"),
        ("file://a/b", "must be absolute"),
        ("file://./b", "must be absolute"),
        ("file:///a/../b", r"`\.\.` segment"),
        ("file:///..", r"`\.\.` segment"),
        ("s3://bucket/..", r"`\.\.` segment"),
        ("s3://../a", r"`\.\.` segment"),
        ("s3://bucket/a/./b", r"`\.\.` segment"),
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
        open_store(uri)
    assert repr(uri) in str(raised.value)


@given(st.text(alphabet="ab./\\#:\x00 \n3sfile", max_size=30))
def test_whatever_is_accepted_has_no_segment_that_climbs(text):
    try:
        address = parse_uri(text)
    except ConfigError:
        return
    assert not {"", ".", ".."} & set(address.key.split("/")) or address.key == ""


def test_one_store_serves_all_uris_of_a_scheme():
    assert open_store("file:///a") is open_store("file:///b/c")
