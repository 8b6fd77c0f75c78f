"""Data sets as files and on the hub: rows in, rows out, and what is no data set."""

import gzip
import hashlib
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.base.errors import ConfigError
from planish.stages.curate import records
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.problem import CurationLedger
from planish.stages.curate.records import as_answer, read_data
from tests.unit.records.bombs import bomb, peak_megabytes

GOOD = b'{"prompt": "1+1", "answer": "2"}'


def read(path, *, skip_bad=False):
    ledger = CurationLedger()
    table = read_data(CurateConfig(dataset=str(path)), ledger, skip_bad=skip_bad)
    return table, ledger.filters[0]


def refused(path, **options):
    with pytest.raises(ConfigError) as caught:
        read(path, **options)
    return str(caught.value)


def jsonl(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_rows_of_a_jsonl_file_know_their_lines_and_the_file_its_digest(tmp_path):
    path = jsonl(tmp_path, GOOD + b"\r", b'{"prompt": "2+2", "answer": 4}')
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    table, counts = read(path)
    assert [row.origin for row in table.rows] == ["line 1", "line 2"]
    assert table.rows[1].fields == {"prompt": "2+2", "answer": 4}
    assert table.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (counts.num_in, counts.num_out) == (2, 2)


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b'{"prompt": ', "not_json", "not JSON"),
        (b"[1, 2]", "not_an_object", "must be an object"),
        (b'"text"', "not_an_object", "must be an object"),
        (b'{"prompt": "\xff\xfe"}', "not_utf8", "not UTF-8 at byte 12 (0xff)"),
        (b'{"prompt": "\\ud800"}', "not_utf8", "no valid Unicode"),
        (b"[" * 100_000, "not_json", "not JSON"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "not_json", "not JSON"),
    ],
)
def test_a_bad_line_stops_with_its_number_and_is_left_out_on_demand(tmp_path, line, reason, words):
    path = jsonl(tmp_path, GOOD, line, GOOD.replace(b"1+1", b"3+3"))
    told = refused(path)
    assert "line 2 of `data.jsonl`" in told
    assert words in told
    assert "skip_bad" in told
    table, counts = read(path, skip_bad=True)
    assert [row.fields["prompt"] for row in table.rows] == ["1+1", "3+3"]
    assert counts.reasons == {reason: 1}


KINDS = "JSONL (one object a line, gzip may pack it), Parquet"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["`data.jsonl` must hold at least one readable row, got 0 bad rows", "it is empty"]),
        (b"x\ny\n", ["line 1", KINDS]),
        (b"[" + GOOD + b"]", ["line 1", "a row must be an object, got [{'prompt'", KINDS]),
        (json.dumps([{"a": 1}], indent=1).encode(), ["line 1", "not JSON", KINDS]),
        (b"prompt,answer\n1+1,2\n2+2,4\n", ["line 1", "not JSON", KINDS]),
        (GOOD.decode().encode("utf-16"), ["line 1", "not UTF-8 at byte 0", KINDS]),
        (b"PAR1 and nothing else", ["`data.jsonl` must be a Parquet file"]),
    ],
)
def test_a_file_of_another_kind_is_told_why_and_which_kinds_there_are(tmp_path, content, words):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    for skip_bad in (False, True):
        told = refused(path, skip_bad=skip_bad)
        assert [word for word in words if word not in told] == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_blank_lines_and_ids_that_repeat_are_no_fault(tmp_path, packed):
    row = b'{"id": 7, "prompt": "%d+1"}'
    lines = [b"\xef\xbb\xbf" + row % 1, b"", row % 2, b" \t", row % 3, b"\r", b"", b""]
    content = b"\n".join(lines)
    path = tmp_path / "data.jsonl"
    path.write_bytes(gzip.compress(content) if packed else content)
    table, counts = read(path)
    assert [row.origin for row in table.rows] == ["line 1", "line 3", "line 5"]
    assert (counts.num_in, counts.num_out) == (3, 3)


def test_parquet_is_known_by_its_content_and_read_in_order(tmp_path):
    path = tmp_path / "data.jsonl"
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [Decimal("7.00"), None]}), path)
    rows = read(path)[0].rows
    assert [row.fields["prompt"] for row in rows] == ["a", "b"]
    assert rows[1].origin == "row 2"
    assert as_answer(rows[0].fields["answer"]) == "7"


@pytest.mark.parametrize("kind", ["text", "nested", "broken"])
def test_a_parquet_file_that_decodes_to_much_or_to_nothing_is_refused(tmp_path, kind):
    path = tmp_path / "data.parquet"
    if kind == "broken":
        broken = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
        pq.write_table(pa.table({"prompt": broken}), path)
        assert "must be a Parquet file" in refused(path)
    else:
        path.write_bytes(bomb(kind))
        assert "must decode to at most 536870912" in refused(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "/nowhere/data", "a/b/c", "owner/na me", "/tmp"])
def test_what_is_neither_a_file_nor_a_hub_id_is_refused(name):
    assert "curate.dataset" in refused(name)


def test_rows_of_a_hub_data_set_have_a_digest_of_their_content(monkeypatch):
    rows = [{"prompt": "a", "answer": "1"}, {"answer": "2", "prompt": "b"}]
    monkeypatch.setattr(records, "read_hub", lambda *_, **options: iter(rows))
    table, _ = read("owner/name")
    canonical = "\n".join(json.dumps(row, sort_keys=True) for row in rows)
    assert table.sha256 == hashlib.sha256(canonical.encode()).hexdigest()
    assert len(table.rows) == 2


def test_a_long_line_is_bad_by_its_size_and_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
    fits = b'{"prompt": "%s", "answer": 1}' % (b"x" * 973)
    assert len(fits) == 1000
    path = jsonl(tmp_path, GOOD, fits, fits + b" ", b"x" * 1000, b"y" * 100_000, GOOD)
    table, counts = read(path, skip_bad=True)
    assert [row.origin for row in table.rows] == ["line 1", "line 2", "line 6"]
    assert counts.reasons == {"line_too_long": 2, "not_json": 1}
    assert "line 3 of `data.jsonl` must be readable, got: more than 1000 bytes" in refused(path)


@pytest.mark.slow
def test_a_line_of_half_a_gigabyte_takes_no_memory(tmp_path):
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b"\n")
        file.seek(1 << 29)
        file.write(b"\n" + GOOD)
    peak, printed = peak_megabytes(
        "from planish.stages.curate.records import bounded_lines\n"
        f"with open({str(path)!r}, 'rb') as file:\n"
        "    print([type(line).__name__ for line in bounded_lines(file, 'data.jsonl')])"
    )
    assert printed.strip() == "['bytes', 'BadRow', 'bytes']"
    assert peak < 300


@pytest.mark.slow
def test_packed_lines_are_read_and_a_bomb_is_refused(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD + b"\n" + GOOD.replace(b"1+1", b"2+2")))
    assert [row.origin for row in read(path)[0].rows] == ["line 1", "line 2"]
    path.write_bytes(path.read_bytes()[:-9])
    assert "must be a whole gzip file" in refused(path)
    # many lines, and one long one
    for block in (b'{"prompt": "%s"}\n' % (b"x" * (1 << 20)), b"x" * (1 << 20)):
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(80):
                file.write(block)
        assert "must unpack to at most 67108864 bytes, 100 times" in refused(path, skip_bad=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(" 7 ", "7"), (7, "7"), (-7, "-7"), (7.0, "7"), (7.5, "7.5"), (True, None), (None, None),
     (1e-7, "0.0000001"), (1 / 3, None), (Decimal(7), "7"), (Decimal("2.50"), "2.50"),
     (Decimal("NaN"), None), (Decimal("-1E+9"), "-1000000000"), (float("-inf"), None),
     (float("nan"), None), ([7], None), (10**4000, None), (10**99, "1" + "0" * 99)],
)  # fmt: skip
def test_answers_become_text_without_loss_or_not_at_all(value, text):
    assert as_answer(value) == text
