"""Faults and what was done about them: from events, stage logs and alerts to the page."""

from __future__ import annotations

from planish import store
from planish.records import layout
from planish.run.events import record_event
from planish.stages.report.gather import gather
from planish.stages.report.happenings import ALERTS, ATTEMPTS, COMMITS, CORDONS, GANGS
from planish.stages.report.page import build_page
from planish.stages.report.render import render_html, render_markdown
from planish.store.documents import read_json, write_json
from tests.unit.stages.report.synthetic_run import BEGAN

GRID = {"nodes": 4, "trainer": "megatron", "world": 4, "dp": 2, "tp": 2, "pp": 1, "ep": 1}
AFTER = {"nodes": 3, "trainer": "megatron", "world": 3, "dp": 3, "tp": 1, "pp": 1, "ep": 1}


def disturb(root):
    """Write what the stage and the monitor write when iteration 2 loses a machine."""
    train = read_json(layout.stage_log(root, "train", 2, 0))
    begin = train["start_seconds"]
    failed = {"stage": "train", "shard": 0, "exit_code": 75, "error": "got 75 from `pod-3`"}
    record_event(root, "attempt", 2, begin_seconds=begin - 60, end_seconds=begin - 20, **failed)
    for second, end, grid in (
        (begin - 58, "every pod must end with code 0, got 75", GRID),
        (begin + 1, "complete", AFTER),
    ):
        record_event(root, "gang", 2, begin_seconds=second, **grid)
        facts = {**grid, "end_seconds": second + 30, "end": end}
        record_event(root, "gang", 2, begin_seconds=second, **facts)
    record_event(root, "resumed", 2, begin_seconds=begin + 9, step=12, of=80, **AFTER)
    write_json(
        f"{layout.alerts(root)}/a.json",
        {
            "machine": "machine-3", "metric": "gpu_duty_cycle", "score": 3.0, "state": "acted",
            "first_second": begin - 50, "last_second": begin - 35, "stage": "train",
            "iteration": 2, "action": "",
            "history": [
                {"second": begin - 38, "state": "firing", "action": ""},
                {"second": begin - 37, "state": "firing", "action": "evict waiting: for a call"},
                {"second": begin - 35, "state": "acted",
                 "action": "evict done: cordon machine-3 and evict pod-3"},
            ],
        },
    )  # fmt: skip
    return begin


def test_an_undisturbed_run_tells_nothing_though_it_has_gangs(short_root):
    record_event(short_root, "gang", 1, begin_seconds=BEGAN, end_seconds=BEGAN + 5, end="complete")
    facts = gather(short_root)
    assert facts.happenings == []
    page = build_page(facts, failed_task="", error_message="")
    assert page.recovery == []
    assert "Faults and recovery" not in render_html(page) + render_markdown(page)


def test_a_fault_is_told_from_the_alert_to_the_commit_that_was_gone_on_from(short_root):
    record_event(short_root, "gang", 1, begin_seconds=BEGAN, end_seconds=BEGAN + 5, end="complete")
    begin = disturb(short_root)
    facts = gather(short_root)
    assert [(one.row, one.begin_seconds - begin, one.is_bad) for one in facts.happenings] == [
        (ATTEMPTS, -60, True),
        (GANGS, -58, True),
        (ALERTS, -50, True),
        (CORDONS, -35, False),
        (ATTEMPTS, 0, False),
        (GANGS, 1, False),
        (COMMITS, 9, False),
    ]
    texts = [one.text for one in facts.happenings]
    assert texts[0] == "train of iteration 2: ended with 75 after 40 s: got 75 from `pod-3`"
    assert texts[1].startswith("gang of 4 pods, megatron tp 2, pp 1, dp 2: every pod must end")
    assert texts[3] == "machine-3: evict done: cordon machine-3 and evict pod-3"
    assert texts[6] == "training went on from step 12 of 80, megatron tp 1, pp 1, dp 3"
    page = build_page(facts, failed_task="", error_message="")
    assert page.alerts[0]["action"] == "evict done: cordon machine-3 and evict pod-3"
    (chart,) = page.recovery
    for text in (chart.svg, render_html(page), render_markdown(page)):
        assert "training went on from step 12 of 80" in text
    assert all(f">{row}<" in chart.svg for row in (ATTEMPTS, GANGS, COMMITS, ALERTS, CORDONS))


def test_a_gang_is_told_once_with_its_end(short_root):
    disturb(short_root)
    assert (
        len([u for u in store.list_uris(layout.events(short_root)) if u.endswith("-gang.json")])
        == 2
    )


def test_damaged_events_are_left_out_or_told_as_they_are(short_root):
    disturb(short_root)
    for name, value in (("a", [1]), ("b", {"kind": "attempt"}), ("c", {"kind": 3, "step": "x"})):
        write_json(layout.event(short_root, name), value)
    store.write(layout.event(short_root, "d"), b"{")
    facts = gather(short_root)
    assert len(facts.happenings) == 8
    assert any("event d.json" in line for line in facts.missing)
    assert render_html(build_page(facts, failed_task="", error_message=""))
