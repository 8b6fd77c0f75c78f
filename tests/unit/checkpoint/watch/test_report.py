"""The text of a report: heat map of ranks, table of stages, timeline of one rank."""

import pytest

from planish.checkpoint.watch.monitor import Timeline, Timing
from planish.checkpoint.watch.report import SHADES, text_report


def uploads(*seconds, per_host=8, name="node"):
    return [
        Timing(rank, "save", "main.model", "upload", 100.0, 100.0 + s, 1 << 20, "data/x", 0, host)
        for rank, s in enumerate(seconds)
        for host in [f"{name}-{rank // per_host:03d}"]
    ]


def lines_of(records, **options):
    return text_report(Timeline(records), title="mem://a/step-1", **options).splitlines()


def rows_of(records):
    """Return machine -> the shade of each of its ranks, 0 to 6."""
    lines = lines_of(records)
    first = next(n for n, line in enumerate(lines) if line.startswith("time of each")) + 1
    found, name = {}, ""
    for line in lines[first : lines.index("", first)]:
        name = line[2:].split("  ")[0] or name
        found.setdefault(name, []).extend(SHADES.index(c) for c in line if c in SHADES)
    return found


WITHOUT_HOSTS = [Timing(rank, "save", "", "plan", 1.0, 2.0) for rank in range(10)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            uploads(*[1.0] * 5, per_host=2),
            {"node-000": [0, 0], "node-001": [0, 0], "node-002": [0]},
        ),
        (WITHOUT_HOSTS, {"ranks 0 to 7": [0] * 8, "ranks 8 to 15": [0, 0]}),
        # As in the paper: ranks 0, 4, 8, 12 also write the state of data loaders.
        (
            uploads(*[1.6 if rank % 4 == 0 else 1.0 for rank in range(16)]),
            {"node-000": [6, 0, 0, 0, 6, 0, 0, 0], "node-001": [6, 0, 0, 0, 6, 0, 0, 0]},
        ),
        # Noise gets no deep shade, and a straggler does not hide differences.
        (uploads(1.0, 1.05, 1.02, 1.01), {"node-000": [0, 0, 0, 0]}),
        (uploads(1.0, 1.0, 1.0, 1.6, 60.0), {"node-000": [0, 0, 0, 6, 6]}),
    ],
)
def test_rows_of_the_heat_map_are_machines_and_blocks_their_ranks(records, expected):
    assert rows_of(records) == expected


def test_beyond_64_ranks_only_stragglers_have_a_number():
    lines = lines_of(uploads(*[1.0] * 65, 9.0, per_host=66))
    assert f"  node-000  {SHADES[0] * 64}" in lines
    assert f"            {SHADES[0]}{SHADES[-1]}  !65" in lines


def test_the_timeline_of_a_rank_joins_the_objects_of_a_stage():
    records = [
        Timing(1, "save", "", "plan", 10.0, 10.5),
        Timing(0, "save", "", "plan", 9.0, 9.5),
        Timing(1, "save", "a", "upload", 11.0, 13.0, 100, retries=2),
        Timing(1, "save", "a", "upload", 12.0, 14.0, 300),
        Timing(1, "save", "a", "upload", 15.0, 16.0, 200),
    ]
    heading, plan, upload = lines_of(records, rank=1)[-3:]
    assert heading == "timeline of rank 1, 0 to 7.00 s"
    bar = plan.split("|")[1]
    assert (bar.index("\u2588"), bar.rindex("\u2588")) == (int(44 / 7), int(44 * 1.5 / 7))
    assert plan.startswith("  all plan")
    assert plan.endswith("| 0.50 s")
    bar = upload.split("|")[1]
    assert (bar.index("\u2588"), len(bar)) == (int(44 * 2 / 7), 44)
    assert bar.endswith("\u2588")
    # Two objects overlap for one second, which counts once.
    assert upload.endswith("| 4.00 s  600 B  150 B/s  2 retries")


def test_the_text_shows_a_block_for_each_rank_and_the_timeline_of_the_slowest():
    lines = lines_of(uploads(1.0, 1.0, 1.0, 9.0, per_host=2))
    assert lines[0].startswith("save of mem://a/step-1: 4 ranks on 2 machines, 9.00 s")
    assert lines[1] == (
        "! straggler: rank 3 on node-001 took 9.0 s (median 1.0 s), "
        "most of it beyond the others in upload"
    )
    (row,) = [line for line in lines if line.startswith("  node-001")]
    assert row == f"  node-001  {SHADES[0]}{SHADES[-1]}  1.00 s 9.00 s!"
    scale = f"{SHADES[0]} 1.00 s .. {SHADES[-1]} 1.50 s   ! straggler, beyond the scale"
    assert scale in "".join(lines)
    assert "timeline of rank 3, 0 to 9.00 s" in lines
    assert lines[-1].endswith("| 9.00 s  1.0 MiB  113.8 KiB/s")


def test_reports_of_no_records_and_of_an_absent_rank_say_so():
    assert text_report(Timeline(), title="x") == "save of x: no records\n"
    assert "rank 9 has no records" in text_report(Timeline(uploads(1.0)), title="x", rank=9)


def test_names_in_records_are_text_and_nothing_else():
    hostile = '<script>alert(1)</script>"\u202e\x1b[31m'
    record = Timing(0, "save", hostile, hostile, 1.0, 2.0, 5, hostile, 0, hostile)
    text = text_report(Timeline([record]), title=hostile)
    assert not set(text) & set("\x1b\u202e")


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 86400.0])
def test_a_record_of_any_length_has_a_bar(seconds):
    assert "\u2588" in lines_of(uploads(seconds))[-1]
