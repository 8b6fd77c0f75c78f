"""Sets written, read, found finished and refused, on every store."""

import json
from dataclasses import replace

import pytest

from planish import store
from planish.base.errors import ObjectMissing, RecordError
from planish.records import PromptSet, RolloutSet, finished, read_manifest, read_set, write_set
from planish.records import io as io_module
from planish.records import parquet as parquet_module
from tests.unit.records.samples import SAMPLES, changed, random_prompts, random_rollouts

PARENTS = {"policy": "ab" * 32}
ATTRIBUTES = {"config_sha256": "c0", "iteration": 3, "consumed": [4, 5], "seed": 0}


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_set_comes_back_equal(store_root, kind):
    record = SAMPLES[kind]()
    ref = write_set(f"{store_root}/set", record, parents=PARENTS, attributes=ATTRIBUTES)
    back = read_set(type(record), ref.uri, sha256=ref.manifest_sha256)
    assert back == record
    assert ref.schema == record.SCHEMA
    assert ref.attributes == {
        "config_sha256": "c0",
        "iteration": 3,
        "seed": 0,
        "num_rows": record.num_rows,
    }
    assert store.list_uris(store_root) == [
        f"{store_root}/set/manifest.json",
        f"{store_root}/set/shard-00000.parquet",
    ]


@pytest.mark.server
def test_equal_inputs_have_equal_digests_wherever_they_lie(minio, s3_root, file_root):
    refs = [
        write_set(f"{root}/x/{n}", random_rollouts(7), parents=PARENTS, attributes=ATTRIBUTES)
        for n, root in enumerate((file_root, s3_root, file_root))
    ]
    assert len({ref.manifest_sha256 for ref in refs}) == 1
    other = write_set(f"{file_root}/y", random_rollouts(8), parents=PARENTS, attributes=ATTRIBUTES)
    assert other.manifest_sha256 != refs[0].manifest_sha256


@pytest.mark.parametrize("kind", SAMPLES)
def test_an_empty_set_can_be_written_and_read(file_root, kind):
    record = SAMPLES[kind](rows=0) if kind != "rollouts" else RolloutSet.empty()
    ref = write_set(f"{file_root}/set", record, parents={}, attributes={})
    assert read_set(type(record), ref.uri) == record
    assert ref.attributes == {"num_rows": 0}


def test_large_sets_split_into_shards_of_whole_groups(file_root, monkeypatch):
    monkeypatch.setattr(parquet_module, "ROW_GROUP_CELLS", 200)
    monkeypatch.setattr(io_module, "ROW_GROUPS_PER_SHARD", 3)
    record = random_rollouts(groups=40, group_size=3)
    ref = write_set(f"{file_root}/set", record, parents={}, attributes={})
    shards = read_manifest(ref.uri).shards
    assert [s.name for s in shards] == [f"shard-{n:05d}.parquet" for n in range(len(shards))]
    assert len(shards) == 6
    assert sum(s.rows for s in shards) == 120
    assert all(s.rows % 3 == 0 for s in shards)
    assert read_set(RolloutSet, ref.uri) == record


def test_a_smaller_set_in_the_same_place_leaves_no_stale_shard(store_root, monkeypatch):
    monkeypatch.setattr(parquet_module, "ROW_GROUP_CELLS", 50)
    monkeypatch.setattr(io_module, "ROW_GROUPS_PER_SHARD", 1)
    write_set(f"{store_root}/set", random_rollouts(groups=9), parents={}, attributes={})
    small = random_rollouts(1, groups=1, group_size=1)
    write_set(f"{store_root}/set", small, parents={}, attributes={"iteration": 2})
    assert [uri.rpartition("/")[2] for uri in store.list_uris(f"{store_root}/set")] == [
        "manifest.json",
        "shard-00000.parquet",
    ]
    assert read_set(RolloutSet, f"{store_root}/set") == small


def test_a_writer_that_dies_before_the_manifest_leaves_no_set(store_root, monkeypatch):
    """Also when another set stood in the same place before."""
    write_set(f"{store_root}/set", random_prompts(1), parents={}, attributes={})
    written = []

    def die_at_the_manifest(uri, data):
        if uri.endswith("manifest.json"):
            raise KeyboardInterrupt
        written.append(uri)
        write(uri, data)

    write = store.write
    monkeypatch.setattr(store, "write", die_at_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        write_set(f"{store_root}/set", random_prompts(2), parents={}, attributes={})
    assert written == [f"{store_root}/set/shard-00000.parquet"]
    with pytest.raises(ObjectMissing, match="must hold a finished set"):
        read_set(PromptSet, f"{store_root}/set")
    assert finished(f"{store_root}/set", "prompts/1", parents={}, config_sha256="c0") is None


def test_finished_needs_the_same_schema_parents_and_configuration(store_root):
    uri = f"{store_root}/set"
    assert finished(uri, "prompts/1", parents=PARENTS, config_sha256="c0") is None
    ref = write_set(uri, random_prompts(), parents=PARENTS, attributes=ATTRIBUTES)
    assert finished(uri, "prompts/1", parents=PARENTS, config_sha256="c0") == ref
    assert finished(uri, "prompts/1", parents=PARENTS, config_sha256="c1") is None
    assert finished(uri, "prompts/1", parents={}, config_sha256="c0") is None
    assert finished(uri, "prompts/2", parents=PARENTS, config_sha256="c0") is None


def test_a_set_that_breaks_a_rule_is_not_written(file_root):
    bad = changed(random_prompts(rows=2), prompt_id=["x", "y"])
    with pytest.raises(RecordError, match="16 hex digits"):
        write_set(f"{file_root}/set", bad, parents={}, attributes={})
    assert store.list_uris(file_root) == []


@pytest.fixture
def written(file_root):
    ref = write_set(f"{file_root}/set", random_rollouts(), parents=PARENTS, attributes=ATTRIBUTES)
    return ref, f"{ref.uri}/shard-00000.parquet"


def test_any_flipped_byte_of_a_shard_is_refused(written):
    ref, shard = written
    data = store.read(shard)
    for position in range(0, len(data), max(1, len(data) // 60)):
        spoiled = bytearray(data)
        spoiled[position] ^= 0x10
        store.write(shard, bytes(spoiled))
        with pytest.raises(RecordError, match="must have the sha256"):
            read_set(RolloutSet, ref.uri)
    store.write(shard, data)
    assert read_set(RolloutSet, ref.uri) == random_rollouts()


@pytest.mark.slow
def test_any_flipped_byte_of_a_manifest_is_refused_under_its_pin(written):
    ref, _ = written
    data = store.read(f"{ref.uri}/manifest.json")
    for position in range(len(data)):
        spoiled = bytearray(data)
        spoiled[position] ^= 0x01
        store.write(f"{ref.uri}/manifest.json", bytes(spoiled))
        with pytest.raises(RecordError, match="must have the sha256"):
            read_set(RolloutSet, ref.uri, sha256=ref.manifest_sha256)


def test_truncated_missing_and_longer_shards_are_refused(written):
    ref, shard = written
    data = store.read(shard)
    for spoiled in (data[:-1], data[: len(data) // 2], b"", data + b"x"):
        store.write(shard, spoiled)
        with pytest.raises(RecordError, match="must have the sha256"):
            read_set(RolloutSet, ref.uri)
    store.delete(shard)
    with pytest.raises(RecordError, match=r"is missing; remove the set and run its stage again"):
        read_set(RolloutSet, ref.uri)


def test_another_record_and_an_unknown_version_are_refused_differently(written, monkeypatch):
    ref, _ = written
    with pytest.raises(RecordError, match="must hold prompts/1, got rollouts/1; pass the URI"):
        read_set(PromptSet, ref.uri)
    monkeypatch.setattr(RolloutSet, "SCHEMA", "rollouts/2")
    with pytest.raises(
        RecordError, match="must hold version 2 of rollouts, got rollouts/1; read it with"
    ):
        read_set(RolloutSet, ref.uri)


def rewrite(written, **fields):
    """Replace fields of the manifest; its own digest is not checked without a pin."""
    ref, _ = written
    raw = json.loads(store.read(f"{ref.uri}/manifest.json"))
    raw.update(fields)
    store.write(f"{ref.uri}/manifest.json", json.dumps(raw).encode())
    return ref


def test_row_counts_that_disagree_are_refused(written):
    shard = read_manifest(written[0].uri).shards[0]
    more = vars(replace(shard, rows=21))
    with pytest.raises(RecordError, match="must be the 21 rows of the shards, got 20"):
        read_set(RolloutSet, rewrite(written, shards=[more]).uri)
    with pytest.raises(RecordError, match="at least one shard"):
        read_set(RolloutSet, rewrite(written, shards=[], num_rows=0).uri)


@pytest.mark.parametrize(
    "name",
    ["../other/shard.parquet", "/etc/passwd", "a/../../b", "..", ".", "", "a//b", "manifest.json",
     "a\x00", "a\\b", "x" * 2000],
)  # fmt: skip
def test_names_of_shards_can_not_leave_their_set(written, name):
    shard = vars(read_manifest(written[0].uri).shards[0]) | {"name": name}
    with pytest.raises(RecordError, match="must be a path below its set"):
        read_set(RolloutSet, rewrite(written, shards=[shard]).uri)
