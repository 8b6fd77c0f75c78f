"""Readers of native code on files that anybody may have written: refusals, and never a signal."""

import json
import os
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.base.errors import CheckpointCorrupt, ConfigError, RecordError
from planish.checkpoint.format import metafile, version_2
from planish.models.tokens import character_tokenizer, load_tokenizer
from planish.records.parquet import chunk_sizes, read_batches
from tests.fuzz.native import TARGETS, parquet_samples
from tests.processes import python
from tests.unit.checkpoint.format.metadata_samples import small

REPOSITORY = Path(__file__).resolve().parents[3]
LIGHT = ("metadata", "rows", "cases", "csv", "record", "manifest")


def fuzz(folder, *targets, cases, seed=0):
    """Read damaged files in a process of its own, which a signal may end."""
    options = [f"--cases={cases}", f"--seed={seed}", f"--folder={folder}"]
    words = ("-X", "faulthandler", "-m", "tests.fuzz.native", *targets, *options)
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = python(*words, cwd=REPOSITORY, errors="replace", env=env)
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{folder}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_damaged_files_are_refused_and_end_no_process(tmp_path):
    for found in fuzz(tmp_path, *LIGHT, cases=60):
        assert 10 < found["refused"] <= 60, found


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_many_damaged_files_are_refused_and_end_no_process(tmp_path, target):
    (found,) = fuzz(tmp_path, target, cases=4_000, seed=1)
    assert 2_000 < found["refused"] < 4_000


@pytest.mark.parametrize("place", [8, 12, 16, 40, 400, 1000, 1255])
def test_a_changed_schema_is_refused_before_arrow_follows_it(place, monkeypatch):
    data = bytearray(metafile.encode(small(plain=True)))
    data[place] ^= 0x40
    monkeypatch.setattr(version_2.pa.ipc, "read_message", None)
    with pytest.raises(CheckpointCorrupt, match="has other columns than"):
        metafile.decode(bytes(data))


def test_the_schema_of_metadata_is_its_bytes():
    assert metafile.encode(small())[8:].startswith(version_2._SCHEMA.serialize().to_pybytes())


@pytest.mark.parametrize("data", parquet_samples())
def test_a_footer_says_what_arrow_reads_in_it(data):
    found = chunk_sizes(pa.BufferReader(data))
    facts = pq.read_metadata(pa.BufferReader(data))
    assert found == [
        (place, chunk.num_values, chunk.total_uncompressed_size)
        for group in range(facts.num_row_groups)
        for place in range(facts.num_columns)
        for chunk in [facts.row_group(group).column(place)]
    ]


GOOD = parquet_samples()[0]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"PAR1", GOOD[:-4] + b"PARE", GOOD[:-1], GOOD[:40] + GOOD[-8:],
        GOOD[:-8] + struct.pack("<I", 1 << 31) + b"PAR1",
        GOOD[:-8] + struct.pack("<I", len(GOOD)) + b"PAR1",
        # Lists of 2**70 of nothing, a field twice, 5,000 levels, texts without end.
        *(b"PAR1" + tail + struct.pack("<I", len(tail)) + b"PAR1" for tail in (
            b"\x49\xf0" + b"\xff" * 10 + b"\x01", b"\x15\x02\x05\x02\x02\x00",
            b"\x1c" * 5000, b"\x49\x19" * 3000, b"\x18" + b"\xff" * 9 + b"\x01", b"\x1f",
        )),
    ],
)  # fmt: skip
def test_what_is_no_parquet_is_refused(data):
    with pytest.raises(RecordError, match="`x` must be a Parquet file"):
        list(read_batches(data, name="x"))


@pytest.mark.parametrize("number", [10_000_000, (1 << 32) - 1, 1 << 40, -1, 1.5, True])
def test_a_tokenizer_with_a_strange_id_is_refused_before_memory_is_taken(tmp_path, number):
    character_tokenizer("01").save(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"]["1"] = number
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="must number tokens from 0"):
        load_tokenizer(tmp_path)
