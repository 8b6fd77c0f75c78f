from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from planish.checkpoint.watch import heatmap
from planish.checkpoint.watch.report_page import html_report
from planish.checkpoint.watch.report_text import SHADES, text_report
from planish.checkpoint.watch.timings import Timeline, Timing


def uploads(*seconds, per_host=8, name="node"):
    return [
        Timing(rank, "save", "main.model", "upload", 100.0, 100.0 + s, 1 << 20, "data/x", 0, host)
        for rank, s in enumerate(seconds)
        for host in [f"{name}-{rank // per_host:03d}"]
    ]


def test_rows_of_the_heat_map_are_machines_and_cells_their_ranks():
    grid = heatmap.heat_map(Timeline(uploads(*[1.0] * 5, per_host=2)))
    assert [row.host for row in grid.rows] == ["node-000", "node-001", "node-002"]
    assert [[cell.rank for cell in row.cells] for row in grid.rows] == [[0, 1], [2, 3], [4]]
    assert (grid.num_ranks, grid.median_seconds, grid.max_seconds) == (5, 1.0, 1.0)


def test_ranks_that_write_loader_state_stand_out():
    # As in the paper: ranks 0, 4, 8, 12 also write the state of data loaders.
    seconds = [1.6 if rank % 4 == 0 else 1.0 for rank in range(16)]
    grid = heatmap.heat_map(Timeline(uploads(*seconds)))
    dark = [cell.rank for row in grid.rows for cell in row.cells if cell.level == 6]
    assert dark == [0, 4, 8, 12]
    assert {cell.level for row in grid.rows for cell in row.cells} == {0, 6}


def test_a_straggler_does_not_hide_the_differences_of_the_others():
    grid = heatmap.heat_map(Timeline(uploads(1.0, 1.0, 1.0, 1.6, 60.0)))
    cells = grid.rows[0].cells
    assert [cell.level for cell in cells] == [0, 0, 0, 6, 6]
    assert [cell.is_straggler for cell in cells] == [False] * 4 + [True]
    assert grid.bounds[-1] == pytest.approx(1.6)


def test_noise_gets_no_deep_colour():
    grid = heatmap.heat_map(Timeline(uploads(1.0, 1.05, 1.02, 1.01)))
    assert max(cell.level for cell in grid.rows[0].cells) == 0


def test_very_many_ranks_become_one_cell_a_machine():
    timeline = Timeline(uploads(*[1.0] * 9000, 1.5))
    grid = heatmap.heat_map(timeline)
    cells = [cell for row in grid.rows for cell in row.cells]
    assert grid.is_by_host
    assert len(cells) == 1126
    assert cells[-1].rank == 9000
    assert len(html_report(timeline, title="t")) < 1 << 20


def test_lanes_of_a_rank_join_the_objects_of_a_stage():
    records = [
        Timing(1, "save", "", "plan", 10.0, 10.5),
        Timing(0, "save", "", "plan", 9.0, 9.5),
        Timing(1, "save", "a", "upload", 11.0, 13.0, 100, retries=2),
        Timing(1, "save", "a", "upload", 12.0, 14.0, 300),
        Timing(1, "save", "a", "upload", 15.0, 16.0, 200),
    ]
    plan, upload = heatmap.lanes(Timeline(records), 1)
    assert (plan.state, plan.stage, plan.start) == ("all", "plan", 1.0)
    assert (upload.start, upload.end, upload.busy_seconds) == (2.0, 7.0, 4.0)
    assert (upload.num_bytes, upload.retries) == (600, 2)
    assert heatmap.lanes(Timeline(records), 5) == []


def test_the_table_of_stages_names_the_slowest_rank():
    timeline = Timeline([*uploads(1.0, 3.0, 2.0), Timing(0, "save", "", "plan", 99.0, 99.5)])
    plan, upload = heatmap.stage_rows(timeline)
    assert (plan.stage, upload.stage) == ("plan", "upload")
    assert (upload.median_seconds, upload.max_seconds, upload.rank) == (2.0, 3.0, 1)
    assert upload.num_bytes == 3 << 20


def test_the_text_shows_a_block_for_each_rank_and_the_timeline_of_the_slowest():
    text = text_report(Timeline(uploads(1.0, 1.0, 1.0, 9.0, per_host=2)), title="mem://a/step-1")
    lines = text.splitlines()
    assert lines[0].startswith("save of mem://a/step-1: 4 ranks on 2 machines, 9.00 s")
    assert lines[1] == (
        "! straggler: rank 3 on node-001 took 9.0 s (median 1.0 s), "
        "most of it beyond the others in upload"
    )
    (row,) = [line for line in lines if line.startswith("  node-001")]
    assert row == f"  node-001  {SHADES[0]}{SHADES[-1]}  1.00 s 9.00 s!"
    assert "timeline of rank 3, 0 to 9.00 s" in lines
    assert lines[-1].endswith("| 9.00 s  1.0 MiB  113.8 KiB/s")


def test_reports_of_no_records_and_of_an_absent_rank_say_so():
    assert text_report(Timeline(), title="x") == "save of x: no records\n"
    assert "rank 9 has no records" in text_report(Timeline(uploads(1.0)), title="x", rank=9)
    assert "no records" in html_report(Timeline(uploads(1.0)), title="x", rank=9)
    assert "0 records of 0 ranks" in html_report(Timeline(), title="x")


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in {"meta", "rect", "line"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in {"rect", "line"}:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page):
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def test_the_page_has_a_cell_for_each_rank_and_a_bar_for_each_record_of_two_ranks():
    timeline = Timeline([*uploads(1.0, 1.0, 1.0, 9.0), *uploads(1.0, 1.0, 1.0, 8.0)])
    tags = parsed(html_report(timeline, title="s3://b/step-1"))
    cells = [a for tag, a in tags.tags if tag == "i" and "rank" in a.get("title", "")]
    assert [a["title"] for a in cells] == [
        *(f"rank {rank}: 1.00 s" for rank in range(3)),
        "rank 3: 9.00 s",
    ]
    assert [a["class"].split() for a in cells if "slow" in a["class"]] == [["l6", "slow"]]
    assert sum(tag == "rect" for tag, _ in tags.tags) == 4
    text = " ".join(tags.text)
    assert "Rank 3 on node-000" in text
    assert "Rank 1 on node-000" in text
    assert "1 straggler" in text


def test_no_bar_leaves_the_chart():
    page = html_report(Timeline(uploads(*[0.001] * 7, 30.0)), title="t")
    for x, width in re.findall(r'<rect class="s\d" x="([\d.]+)"[^>]* width="([\d.]+)"', page):
        assert 0 <= float(x) <= float(x) + float(width) <= 1128


def test_names_in_records_are_text_and_nothing_else():
    hostile = '<script>alert(1)</script>"\u202e\x1b[31m'
    record = Timing(0, "save", hostile, hostile, 1.0, 2.0, 5, hostile, 0, hostile)
    page = html_report(Timeline([record]), title=hostile)
    tags = parsed(page)
    assert {tag for tag, _ in tags.tags}.isdisjoint({"script", "img", "a", "iframe"})
    assert not any("onload" in a or "href" in a for _, a in tags.tags)
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "default-src 'none'" in page
    text = text_report(Timeline([record]), title=hostile)
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize("seconds", [1e-6, 0.003, 0.9, 7.0, 61.0, 86400.0])
def test_a_chart_has_a_handful_of_ticks_whatever_its_length(seconds):
    page = html_report(Timeline(uploads(seconds)), title="t")
    assert 4 <= len(re.findall(r'class="tick"', page)) <= 10
