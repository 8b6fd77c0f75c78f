import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish import store
from planish.base.errors import ObjectMissing, RecordError
from planish.records import manifest as manifest_module
from planish.records.manifest import Manifest, Shard, parse_manifest, read_manifest, seal

GOOD = {
    "schema": "rewards/1",
    "num_rows": 3,
    "shards": [{"name": "shard-00000.parquet", "rows": 3, "bytes": 9, "sha256": "a" * 64}],
    "parents": {"rollouts": "b" * 64},
    "attributes": {"config_sha256": "c"},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def test_a_sealed_manifest_reads_back_as_itself():
    shards = [Shard("shard-00000.parquet", 2, 10, "d" * 64)]
    manifest, data = seal("rewards/1", 2, shards, {"rollouts": "e" * 64}, {"iteration": 1})
    assert parse_manifest(data, "x") == manifest
    assert parse_manifest(data, "x").sha256 == manifest.sha256
    assert data == data.decode("ascii").encode()
    assert data.endswith(b"}\n")


def test_keys_are_sorted_so_that_order_of_arguments_has_no_effect():
    one = seal("a/1", 0, [], {}, {"x": 1, "y": 2})[1]
    assert one == seal("a/1", 0, [], {}, {"y": 2, "x": 1})[1]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"schema": "rewards"}, "`schema`: String should match pattern"),
        ({"schema": 5}, "`schema`: Input should be a valid string, got 5"),
        ({"schema": "rewards/0"}, "`schema`: String should match pattern"),
        ({"num_rows": 4}, "must be the 3 rows of the shards, got 4"),
        ({"num_rows": "3"}, "`num_rows`: Input should be a valid integer, got '3'"),
        ({"num_rows": True, "shards": []}, "`num_rows`: Input should be a valid integer, got True"),
        ({"parents": []}, "`parents`: Input should be an object"),
        ({"attributes": 1}, "`attributes`: Input should be an object"),
        ({"shards": {}}, "`shards`: Input should be a valid array"),
        ({"parents": {"a": "x"}}, "`parents.a`: String should match pattern"),
        ({"shards": [3]}, "`shards.0`: Input should be an object, got 3"),
        ({"shards": GOOD["shards"] * 2, "num_rows": 6}, "names of shards must not repeat"),
        ({"shards": [GOOD["shards"][0] | {"rows": -1}]}, "`shards.0.rows`: Input should be"),
        ({"shards": [GOOD["shards"][0] | {"bytes": 1e9}]}, "`shards.0.bytes`: Input should be"),
        ({"shards": [GOOD["shards"][0] | {"sha256": "A" * 64}]}, "`shards.0.sha256`: String"),
        ({"extra": 1}, "`extra`: Unexpected"),
    ],
)  # fmt: skip
def test_a_manifest_of_another_shape_is_refused(change, fault):
    with pytest.raises(RecordError) as raised:
        parse_manifest(json.dumps({**GOOD, **change}).encode(), "place")
    assert fault in str(raised.value)
    assert "`place`" in str(raised.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
     b'{"num_rows": 1' + b"0" * 10_000 + b"}", b'"' + b"x" * 1_000_000 + b'"'],
)  # fmt: skip
def test_hostile_json_is_refused_in_a_short_message(data):
    with pytest.raises(RecordError) as raised:
        parse_manifest(data, "place")
    assert len(str(raised.value)) < 700


@given(JSON)
def test_no_json_value_but_a_manifest_parses(value):
    with pytest.raises(RecordError):
        parse_manifest(json.dumps(value).encode(), "place")


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_any_value_in_any_field_parses_or_is_refused(name, value):
    data = json.dumps({**GOOD, name: value}).encode()
    try:
        parsed = parse_manifest(data, "place")
    except RecordError:
        return
    assert name == "attributes" or parsed.schema == "rewards/1"


def test_a_huge_manifest_is_not_read(file_root, monkeypatch):
    monkeypatch.setattr(manifest_module, "_LIMIT_BYTES", 100)
    store.write(f"{file_root}/manifest.json", b" " * 101)
    with pytest.raises(RecordError, match="must be at most 100 bytes long"):
        read_manifest(file_root)


def test_a_folder_without_manifest_is_no_set(file_root):
    store.write(f"{file_root}/shard-00000.parquet", b"")
    with pytest.raises(ObjectMissing, match="run the stage that writes it"):
        read_manifest(file_root)


def test_the_ref_of_a_manifest_has_its_scalars_only():
    manifest = Manifest("policy/1", 0, (), {}, {"a": 1, "b": "x", "c": [1], "d": None}, "f" * 64)
    ref = manifest.ref("file:///x/")
    assert (ref.uri, ref.attributes, ref.manifest_sha256) == (
        "file:///x",
        {"a": 1, "b": "x"},
        "f" * 64,
    )
