import hashlib
import itertools
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import RecordError
from planish.records import PromptSet, Ragged, RolloutSet, TraceSet, write_set
from planish.records import parquet as parquet_module
from planish.records.parquet import decode_pieces, encode, row_group_bounds
from planish.records.schema import join
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

REPOSITORY = Path(__file__).resolve().parents[3]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def run_elsewhere(code):
    """Run lines in a process that imports only what the package and the samples import."""
    return subprocess.run(
        [sys.executable, "-c", "from tests.unit.records.samples import SAMPLES, file_of\n" + code],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={"PYTHONHASHSEED": "77", "PATH": "", "TZ": "Asia/Tokyo", "OMP_NUM_THREADS": "3"},
    )


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
    for batch in read_batches(path, size=path.stat().st_size, name="x"):
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
