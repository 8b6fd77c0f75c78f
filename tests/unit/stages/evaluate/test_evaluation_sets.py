"""Policies on several evaluation sets: scores by hand, one engine, and who tells them."""

import json

import pytest
from rich.console import Console

from planish import store
from planish.engines.requests import Output
from planish.models.policy import build_policy, save_policy
from planish.records import layout
from planish.records.io import write_set
from planish.records.reports import EvalReport, read_best, read_report
from planish.records.rollouts import FinishReason
from planish.show.command import show
from planish.show.track import RunReader
from planish.stages.evaluate import iteration
from planish.stages.evaluate.stage import run
from planish.stages.export.card import accuracy_table
from planish.stages.report.gather import gather
from planish.stages.report.page import build_page
from planish.stages.report.stage import as_summary
from tests.unit.tiny_run import TINY_MODEL, artifact, make_run, sums, tiny_model, write_data

MARKS = {(1, 7): "1100", (1, 8): "0000", (1, 9): "1111"}
"""Which samples of the two prompts of the set `pair` and of that of `one` are right."""


class ScriptedEngine:
    """Answers sample by sample as `MARKS` says; every other prompt is answered wrong."""

    opened = 0

    def __init__(self):
        ScriptedEngine.opened += 1
        self.marks = {}
        for (a, b), marks in MARKS.items():
            prompts, _ = sums([(a, b)])
            self.marks[prompts.prompt_id[0]] = (a + b, marks)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, requests):
        outputs = []
        for request in requests:
            total, marks = self.marks.get(request.group_id, (0, "0000"))
            right = marks[int(request.request_id[-3:])] == "1"
            tokens = [4 + TINY_MODEL["alphabet"].index(c) for c in f"={total if right else 99}"]
            count = len(tokens)
            reason = FinishReason.STOP
            outputs.append(Output(request.request_id, tokens, [-1.0] * count, [0] * count, reason))
        return outputs


@pytest.fixture
def ready(file_root, monkeypatch):
    monkeypatch.setattr("planish.engines.open_engine", lambda *_, **__: ScriptedEngine())
    monkeypatch.setattr(ScriptedEngine, "opened", 0)
    write_data(file_root)
    facts = {"parents": {}, "attributes": {}}
    for name, pairs in (("pair", [(1, 7), (1, 8)]), ("one", [(1, 9)])):
        write_set(layout.evaluation_prompts(file_root, name), sums(pairs)[0], **facts)
    sets = [{"dataset": "mine/pair"}, {"dataset": "mine/one"}]
    return make_run(
        file_root,
        curate={"evaluation_sets": sets},
        evaluate={"num_samples": 4, "pass_at": [1, 2], "every": 1},
    )


def save_version(root, version):
    policy = build_policy(tiny_model(), version)
    facts = {"version": version, "parents": {}, "attributes": {"config_sha256": "c"}}
    return save_policy(layout.policy(root, version), policy, **facts).pin()


def evaluate(root, tmp_path, digest, *pins):
    outputs = {name: artifact(tmp_path, name) for name in ("evaluation", "metrics")}
    run(root=root, config_sha256=digest, baseline_pin=pins[0], policy_pin=pins[-1], **outputs)
    return json.loads((tmp_path / "artifacts" / "metrics").read_text())


def test_each_set_has_the_scores_that_are_counted_by_hand(file_root, tmp_path, ready):
    metrics = evaluate(file_root, tmp_path, ready, save_version(file_root, 0))
    pair, one = (
        read_report(EvalReport, f"{layout.evaluation(file_root, 0, name)}/report.json")
        for name in ("pair", "one")
    )
    assert pair.scalars["accuracy"] == pytest.approx((2 / 4 + 0) / 2)
    # Of two drawn samples of the first prompt both are wrong in one of six draws.
    assert pair.scalars["pass@2"] == pytest.approx((5 / 6 + 0) / 2)
    # Sample variances 1/3 and 0.
    assert pair.scalars["accuracy_standard_error"] == pytest.approx((1 / 3 / 4) ** 0.5 / 2)
    assert pair.scalars["greedy"] == 0.5
    assert (one.scalars["accuracy"], one.scalars["num_prompts"]) == (1.0, 1.0)
    assert metrics["pair_accuracy_after"] == pair.scalars["accuracy"]
    assert metrics["one_pass_at_2_before"] == 1.0
    assert metrics["accuracy_after"] == 0.0
    assert read_best(file_root).accuracy == 0.0


def test_one_engine_serves_all_sets_of_a_policy_and_none_those_that_are_done(
    file_root, tmp_path, ready
):
    pins = [save_version(file_root, version) for version in (0, 1)]
    iteration.run(file_root, ready, 1, 0, pins[0])
    assert ScriptedEngine.opened == 1
    first = evaluate(file_root, tmp_path, ready, *pins)
    assert ScriptedEngine.opened == 2
    # A set that was cut off is measured again, and no other.
    store.delete(f"{layout.evaluation(file_root, 1, 'one')}/report.json")
    store.delete(f"{layout.evaluation(file_root, 1, 'one')}/rollouts/manifest.json")
    stamp = tmp_path / "root/evals/pair/00001/rollouts/manifest.json"
    before = stamp.stat().st_mtime_ns
    assert evaluate(file_root, tmp_path, ready, *pins) == first
    assert (ScriptedEngine.opened, stamp.stat().st_mtime_ns) == (3, before)
    entry = json.loads((tmp_path / "root/logs/00001-evaluate-00.json").read_text())
    assert entry["metrics"]["pair_accuracy"] == 0.25


def test_report_show_tracker_and_card_name_each_set(file_root, tmp_path, ready, capsys):
    evaluate(file_root, tmp_path, ready, *(save_version(file_root, version) for version in (0, 1)))
    facts = gather(file_root)
    page = build_page(facts, failed_task="", error_message="")
    titles = [table.title for table in page["scores"]]
    assert titles == ["All held-out prompts", "Mean accuracy per source", "one", "pair"]
    assert page["scores"][-1].rows[0].cells[-1].startswith("25.0")
    both = {"accuracy_before": 0.25, "accuracy_after": 0.25}
    assert as_summary(facts)["evaluation_sets"]["pair"] == both
    assert as_summary(facts)["accuracy_after"] == 0.0
    show(file_root, Console(width=200), rows=1)
    assert "evals/pair/00001/report.json" in capsys.readouterr().out
    points = [point for source in RunReader(file_root).look() for point in source.points()]
    found = {(point.name, point.step): point.value for point in points}
    assert found["evaluate_pair/accuracy", 1] == 0.25
    assert found["evaluate/accuracy", 1] == 0.0
    lines = accuracy_table(file_root, 1)
    heads = [line for line in lines if line.startswith("##")]
    assert heads == [f"## Accuracy on {name}" for name in ("held-out prompts", "one", "pair")]
