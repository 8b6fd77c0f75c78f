"""The README's row of the checkpoint benchmark, and the time that a run takes."""

from __future__ import annotations

from tests.benchmarks.checkpoint.readme import readme_row
from tests.benchmarks.checkpoint.schedule import PHASES


def spread(median, count=7):
    return {"median": median, "low": median, "high": median, "count": count}


def test_the_row_holds_ratios_of_one_phase_and_a_dash_for_what_was_not_measured():
    saves = {
        "ours": {"call_seconds": spread(0.1), "slowdown": spread(1.25)},
        "dcp_s3torch": {"call_seconds": spread(2.6)},
    }
    document = {
        "label": "measured-cpu",
        "result": {
            "summaries": {"W1 save": saves},
            "turns": {"W1 save": {"workload": "W1", "scale": 0.5}},
            "table": [
                {"workload": "W1 save", "quantity": "stall", "value": 3.0, "target": ">= 25x",
                 "verdict": "missed"},
                {"workload": "W1 save", "quantity": "call", "value": 26.0, "target": ">= 25x",
                 "verdict": "held"},
            ],
        },
    }  # fmt: skip
    row = readme_row(document)
    assert row.startswith("| checkpoint with Adam")
    assert row.count(" | ") == 2
    assert "W1 at 0.5 of the size" in row
    assert "| 26.0x and -, - and -" in row
    assert "1.25, -." in row
    assert "medians of 7)" in row
    assert row.count("Missed: W1 save: stall 3.00 (target >= 25x) |") == 1


def test_the_phases_of_the_readme_take_less_than_half_an_hour():
    seconds = sum(phase.seconds(1.0, 9) for phase in PHASES if not phase.is_extra)
    assert 600 < seconds < 1800
