"""Sets written, read, found finished and refused, on every store."""

import hashlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish import store
from planish.base.errors import ObjectMissing, RecordError
from planish.records import PromptSet, Ragged, RolloutSet, TraceSet, finished, read_set, write_set
from planish.records import io as io_module
from planish.records import manifest as manifest_module
from planish.records import parquet as parquet_module
from planish.records.manifest import Manifest, Shard, parse_manifest, read_manifest, seal
from planish.records.parquet import decode_pieces, encode, row_group_bounds
from planish.records.schema import join
from tests.processes import python
from tests.thin import examples
from tests.unit.records.bombs import bomb, peak_megabytes
from tests.unit.records.samples import (
    SAMPLES,
    changed,
    decode,
    file_of,
    random_prompts,
    random_rollouts,
)

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

    def die_at_the_manifest(uri, data, **options):
        if uri.endswith("manifest.json"):
            raise KeyboardInterrupt
        written.append(uri)
        write(uri, data, **options)

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
    assert finished(uri, "prompts/2", "prompts/1", parents=PARENTS, config_sha256="c0") == ref


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
    with pytest.raises(RecordError, match="must hold prompts/1, got rollouts/2; pass the URI"):
        read_set(PromptSet, ref.uri)
    monkeypatch.setattr(RolloutSet, "SCHEMA", "rollouts/3")
    with pytest.raises(
        RecordError, match="must hold version 3 of rollouts, got rollouts/2; read it with"
    ):
        read_set(RolloutSet, ref.uri)
    monkeypatch.setattr(RolloutSet, "OLDER", ("rollouts/1", "rollouts/2"))
    assert read_set(RolloutSet, ref.uri) == random_rollouts()


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


REPOSITORY = Path(__file__).resolve().parents[3]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def run_elsewhere(code):
    """Run lines in a process that imports only what the package and the samples import."""
    line = "from tests.unit.records.samples import SAMPLES, file_of\n" + code
    env = {"PYTHONHASHSEED": "77", "PATH": "", "TZ": "Asia/Tokyo", "OMP_NUM_THREADS": "3"}
    return python("-c", line, cwd=REPOSITORY, env=env)


@pytest.mark.parametrize("kind", SAMPLES)
def test_equal_columns_give_equal_bytes_in_another_process(kind):
    digest = hashlib.sha256(file_of(SAMPLES[kind]())).hexdigest()
    assert hashlib.sha256(file_of(SAMPLES[kind]())).hexdigest() == digest
    seen = run_elsewhere(
        f"import hashlib; print(hashlib.sha256(file_of(SAMPLES[{kind!r}]())).hexdigest())"
    )
    assert (seen.stdout.strip(), seen.stderr, seen.returncode) == (digest, "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_neither_writing_nor_reading_starts_a_thread():
    # A thread of Arrow that still holds the bytes of a file while Python ends aborts the process.
    seen = run_elsewhere(
        "from pathlib import Path; import pyarrow.parquet\n"
        "from tests.unit.records.samples import decode\n"
        "def threads():\n"
        "    names = [p.read_text().strip() for p in Path('/proc/self/task').glob('*/comm')]\n"
        "    return len([n for n in names if n != 'jemalloc_bg_thd'])\n"
        "before = threads()\n"
        "for kind, make in SAMPLES.items():\n"
        "    record = make()\n"
        "    decode(file_of(record), record.COLUMNS)\n"
        "print(threads() - before)\n"
    )
    assert (seen.stdout.strip(), seen.stderr, seen.returncode) == ("0", "", 0)


@given(
    st.lists(st.tuples(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), TEXT), max_size=9)
)
@settings(max_examples=examples(50), deadline=None)
def test_any_text_survives_the_file(rows):
    record = TraceSet(
        prompt_id=["0" * 16] * len(rows),
        messages=[[{"role": r, "content": c} for r, c in messages] for messages, _ in rows],
        response=[text for _, text in rows],
        source=["s"] * len(rows),
    )
    assert TraceSet.from_columns(decode(file_of(record), TraceSet.COLUMNS)) == record


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 5), st.integers(20, 300))
@settings(max_examples=examples(40), deadline=None)
def test_row_groups_hold_whole_groups_and_every_row_once(seed, groups, group_size, cells):
    record = random_rollouts(seed, groups=groups, group_size=group_size)
    kept, parquet_module.ROW_GROUP_CELLS = parquet_module.ROW_GROUP_CELLS, cells
    try:
        columns = record.columns()
        bounds = row_group_bounds(columns, record.group_starts())
        data = encode(columns, record.COLUMNS, bounds)
    finally:
        parquet_module.ROW_GROUP_CELLS = kept
    assert (bounds[0], bounds[-1]) == (0, record.num_rows)
    assert all(a < b and b % group_size == 0 for a, b in itertools.pairwise(bounds))
    sizes = sum((d.lengths if isinstance(d, Ragged) else 1) for d in columns.values())
    for start, stop in itertools.pairwise(bounds[:-1]):
        assert sizes[start:stop].sum() >= cells
        assert sizes[start : stop - group_size].sum() < cells
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == np.diff(
        bounds
    ).tolist()
    assert RolloutSet.from_columns(decode(data, RolloutSet.COLUMNS)) == record


def test_a_rollout_set_opens_in_duckdb_as_it_is(file_root):
    record = random_rollouts(groups=3, group_size=4)
    write_set(f"{file_root}/set", record, parents={}, attributes={})
    pattern = f"{file_root[7:]}/set/*.parquet"
    rows = duckdb.sql(
        "select group_index, count(*), sum(len(response_tokens)), "
        f"max(len(prompt_tokens)) from '{pattern}' group by 1 order by 1"
    ).fetchall()
    lengths = record.response_tokens.lengths.reshape(3, 4).sum(axis=1)
    expected = zip(range(3), [4] * 3, lengths, record.prompt_tokens.lengths, strict=True)
    assert rows == [tuple(int(v) for v in row) for row in expected]
    one = duckdb.sql(
        f"select response_tokens, response, finish from '{pattern}' where answer = '7'"
    ).fetchall()
    assert one == [(record.response_tokens.row(7).tolist(), record.response[7], record.finish[7])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "nested", "numbers"])
def test_a_small_file_that_decodes_to_much_is_refused_before_it_is_decoded(kind, tmp_path):
    data = bomb(kind, decoded=(640 if kind == "numbers" else 2048) << 20)
    assert len(data) < 1 << 20
    (tmp_path / "bomb.parquet").write_bytes(data)
    code = f"""
from pathlib import Path
from planish.base.errors import RecordError
from planish.records.parquet import read_batches
path = Path({str(tmp_path / "bomb.parquet")!r})
try:
    for batch in read_batches(path, name="x"):
        pass
except RecordError as error:
    print(error)
"""
    megabytes, printed = peak_megabytes(code)
    assert f"`x` has {len(data)} bytes and must decode to at most {512 << 20} " in printed
    assert megabytes < 400


def test_equal_texts_are_held_once():
    prompts = changed(random_prompts(rows=9), source=["".join(["ab", "c"])] * 9)
    sources = decode(file_of(prompts), PromptSet.COLUMNS)["source"]
    assert len({id(text) for text in sources}) == 1


@pytest.mark.slow
def test_a_file_of_many_batches_comes_back_as_it_was():
    record = random_rollouts(groups=9_000, group_size=4)
    pieces = list(decode_pieces(file_of(record), RolloutSet.COLUMNS, name="x"))
    assert len(pieces) > 2
    assert RolloutSet.from_columns(join(pieces, RolloutSet.COLUMNS)) == record


def test_text_of_a_row_group_has_a_limit_with_a_clear_message(monkeypatch):
    record = random_prompts(rows=2)
    monkeypatch.setattr(parquet_module, "_MAX_TEXT_BYTES", 5)
    with pytest.raises(RecordError, match="text of one row group must be under 5 bytes"):
        file_of(record)


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
