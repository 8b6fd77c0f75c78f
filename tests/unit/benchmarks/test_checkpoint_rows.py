"""The rows of the checkpoint benchmark in docs/results.md, and the time that a run takes."""

from __future__ import annotations

from tests.benchmarks.checkpoint.rows import result_rows
from tests.benchmarks.checkpoint.schedule import PHASES


def spread(median, count=7):
    return {"median": median, "low": median, "high": median, "count": count}


def test_the_rows_hold_ratios_of_one_phase_and_a_dash_for_what_was_not_measured():
    saves = {
        "ours": {"call_seconds": spread(0.1), "slowdown": spread(1.25)},
        "dcp_s3torch": {"call_seconds": spread(2.6)},
    }
    table = [
        {"quantity": "stall", "value": 3.0, "verdict": "missed"},
        {"quantity": "call", "value": 26.0, "verdict": "held"},
    ]
    document = {
        "label": "measured-cpu",
        "result": {
            "summaries": {"W1 save": saves},
            "turns": {"W1 save": {"workload": "W1", "scale": 0.5}},
            "table": [{**row, "workload": "W1 save", "target": ">= 25x"} for row in table],
        },
    }
    rows = result_rows(document).splitlines()
    assert all(row.count(" | ") == 2 for row in rows)
    assert "W1 at 0.5 of the size" in rows[0]
    assert "medians of 7 to 7)" in rows[0]
    assert "| 26.0x and - |" in rows[0]
    assert "| 1.25; - |" in rows[6]
    assert rows[-1].startswith("| missed: stall, target >= 25x | W1 save 3.00 |")
    assert len(rows) == 9


def test_the_phases_of_the_page_take_less_than_half_an_hour():
    seconds = sum(phase.seconds(1.0, 9) for phase in PHASES if not phase.is_extra)
    assert 600 < seconds < 1800
