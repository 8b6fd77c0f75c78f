"""The evaluate stage on a tiny policy: reports, rollout sets, second runs."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from planish import store
from planish.base.errors import RecordError
from planish.engines.requests import Output
from planish.models.policy import build_policy, save_policy
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.prompts import PromptSet
from planish.records.refs import Ref
from planish.records.reports import BestPolicy, EvalReport, read_best, read_report, write_report
from planish.records.rollouts import FinishReason, RolloutSet
from planish.run.stage import mark_stopped
from planish.show.command import show
from planish.show.track import RunReader
from planish.stages.evaluate import iteration
from planish.stages.evaluate.config import EvaluateConfig
from planish.stages.evaluate.score import Judged, bootstrap, majority, pass_at_k, scalars
from planish.stages.evaluate.stage import compare, run
from planish.stages.export.card import accuracy_table
from planish.stages.report.gather import gather
from planish.stages.report.page import build_page
from planish.stages.report.stage import as_summary
from planish.verifiers import verify
from planish.verifiers.verdict import failed, not_found, right, wrong
from tests.unit.records import rules
from tests.unit.records.samples import build_rollouts
from tests.unit.tiny_run import TINY_MODEL, artifact, make_run, sums, tiny_model, write_data


def save_version(root, version, seed):
    policy = build_policy(tiny_model(), seed)
    facts = {"version": version, "parents": {}, "attributes": {"config_sha256": "c"}}
    return save_policy(layout.policy(root, version), policy, **facts).pin()


def evaluate(root, tmp_path, digest, before, after):
    evaluation, metrics = artifact(tmp_path, "evaluation"), artifact(tmp_path, "metrics")
    run(
        root=root,
        config_sha256=digest,
        baseline_pin=before,
        policy_pin=after,
        evaluation=evaluation,
        metrics=metrics,
    )
    ref = Ref.from_json((tmp_path / "artifacts" / "evaluation").read_text())
    return ref, json.loads((tmp_path / "artifacts" / "metrics").read_text())


@pytest.fixture
def ready(file_root):
    write_data(file_root)
    return make_run(file_root)


def test_both_policies_are_measured_and_compared(file_root, tmp_path, ready):
    pins = save_version(file_root, 0, seed=1), save_version(file_root, 3, seed=2)
    ref, metrics = evaluate(file_root, tmp_path, ready, *pins)
    assert ref.schema == "eval/1"
    assert ref.attributes["policy_version"] == 3
    report = read_report(EvalReport, ref.uri)
    before = read_report(EvalReport, f"{layout.evaluation(file_root, 0)}/report.json")
    assert report.scalars["num_prompts"] == 12.0
    assert set(report.sources) == {"sums", "sums-high"}
    assert sum(s["num_prompts"] for s in report.sources.values()) == 12.0
    assert metrics["accuracy_after"] == report.scalars["accuracy"]
    assert metrics["accuracy_before"] == before.scalars["accuracy"]
    assert metrics["accuracy_rise"] == metrics["accuracy_after"] - metrics["accuracy_before"]
    assert {"greedy_before", "greedy_after", "pass_at_2_after", "cons_at_3_after"} <= set(metrics)


def test_report_agrees_with_the_rollouts_that_it_was_made_from(file_root, tmp_path, ready):
    pin = save_version(file_root, 0, seed=1)
    ref, metrics = evaluate(file_root, tmp_path, ready, pin, pin)
    assert metrics["accuracy_before"] == metrics["accuracy_after"]
    # The same samples twice: nothing can differ.
    assert (metrics["accuracy_rise"], metrics["accuracy_rise_standard_error"]) == (0.0, 0.0)
    report = read_report(EvalReport, ref.uri)
    rollouts = read_set(RolloutSet, f"{layout.evaluation(file_root, 0)}/rollouts")
    assert (rollouts.num_groups, rollouts.num_rows) == (12, 36)
    rows = zip(rollouts.verifier, rollouts.response, rollouts.answer, strict=True)
    accuracy = np.mean([verify(*row).accuracy for row in rows])
    assert report.scalars["accuracy"] == pytest.approx(accuracy)
    greedy = read_set(RolloutSet, f"{layout.evaluation(file_root, 0)}/temperature-0")
    assert greedy.num_rows == 12
    attributes = read_manifest(f"{layout.evaluation(file_root, 0)}/temperature-0").attributes
    assert attributes["temperature"] == 0.0


def test_a_second_run_computes_nothing_and_one_that_was_killed_goes_on(file_root, tmp_path, ready):
    pins = save_version(file_root, 0, seed=1), save_version(file_root, 1, seed=2)
    first = evaluate(file_root, tmp_path, ready, *pins)
    best = store.read(layout.best_policy(file_root))
    folder = tmp_path / "root" / "evals" / "00001"
    stamp = (folder / "rollouts" / "manifest.json").stat().st_mtime_ns
    for is_killed in (False, True):
        if is_killed:
            (folder / "report.json").unlink()
            (folder / "temperature-0" / "manifest.json").unlink()
            store.delete(layout.best_policy(file_root))
        assert evaluate(file_root, tmp_path, ready, *pins) == first
        assert store.read(layout.best_policy(file_root)) == best
        assert (folder / "rollouts" / "manifest.json").stat().st_mtime_ns == stamp
    # What the log keeps is the attempt that did the work; another root gives equal digests.
    log = json.loads((tmp_path / "root" / "logs" / "00000-evaluate-00.json").read_text())
    assert log["already_done"] is False
    other = f"file://{tmp_path}/other/root"
    write_data(other)
    digest = make_run(other)
    pins = save_version(other, 0, seed=1), save_version(other, 1, seed=2)
    ref, _ = evaluate(other, tmp_path, digest, *pins)
    assert ref.manifest_sha256 == first[0].manifest_sha256


def test_policy_of_another_root_does_not_share_a_folder_with_an_own_one(tmp_path, ready, file_root):
    other = f"file://{tmp_path}/other"
    foreign, own = save_version(other, 2, seed=1), save_version(file_root, 2, seed=2)
    ref, _ = evaluate(file_root, tmp_path, ready, foreign, own)
    assert ref.uri == f"{layout.evaluation(file_root, 2)}/report.json"
    before = read_report(EvalReport, f"{layout.evaluation(file_root, 0)}/report.json")
    assert before.attributes["policy_version"] == 2


def test_fewer_prompts_and_no_greedy_pass_can_be_asked_for(file_root, tmp_path):
    write_data(file_root)
    digest = make_run(file_root, evaluate={"max_prompts": 5, "greedy": False})
    pin = save_version(file_root, 0, seed=1)
    ref, metrics = evaluate(file_root, tmp_path, digest, pin, pin)
    assert read_report(EvalReport, ref.uri).scalars["num_prompts"] == 5.0
    assert "greedy_after" not in metrics
    ids = read_set(PromptSet, layout.evaluation_prompts(file_root)).prompt_id
    used = read_set(RolloutSet, f"{layout.evaluation(file_root, 0)}/rollouts").prompt_id
    assert sorted(set(used)) == sorted(ids)[:5]


def test_the_error_of_the_rise_is_that_of_differences_under_equal_seeds():
    before = {"accuracy": 0.5, "accuracy_standard_error": 0.25, "greedy": 0.1}
    after = {"accuracy": 0.75, "accuracy_standard_error": 0.25, "pass@8": 0.7}
    found = compare(
        EvalReport(before, {}, {"marks": ["1100", "1010"]}),
        EvalReport(after, {}, {"marks": ["1100", "1111"]}),
    )
    assert found["accuracy_rise"] == pytest.approx(0.25)
    # Differences 0, 0, 0, 0 and 0, 1, 0, 1, whose sample variances are 0 and 1/3.
    assert found["accuracy_rise_standard_error"] == pytest.approx((1 / 3 / 4) ** 0.5 / 2)
    assert "greedy_before" not in found


def accuracy_is(root, version, value):
    """Write another accuracy into the report of a version."""
    uri = f"{layout.evaluation(root, version)}/report.json"
    report = read_report(EvalReport, uri)
    report.scalars["accuracy"] = value
    write_report(uri, report)


def test_the_best_policy_is_pinned_and_of_equals_the_earlier(file_root, tmp_path, ready):
    pins = [save_version(file_root, version, seed=version) for version in range(4)]
    _, metrics = evaluate(file_root, tmp_path, ready, pins[0], pins[3])
    accuracies = [
        read_report(EvalReport, f"{layout.evaluation(file_root, v)}/report.json").scalars[
            "accuracy"
        ]
        for v in (0, 3)
    ]
    first = read_best(file_root)
    assert first.evaluated == (0, 3)
    assert first.accuracy == max(accuracies) == metrics["best_accuracy"]
    assert metrics["best_policy_version"] == first.policy_version
    for version, value in ((0, 0.25), (3, 0.5)):
        accuracy_is(file_root, version, value)
    evaluate(file_root, tmp_path, ready, pins[1], pins[1])
    accuracy_is(file_root, 1, 0.5)
    evaluate(file_root, tmp_path, ready, pins[1], pins[1])
    assert read_best(file_root) == BestPolicy(pins[1], 1, 0.5, (0, 1, 3))


def test_only_policies_that_were_measured_alike_and_still_lie_there_compete(
    file_root, tmp_path, ready
):
    pins = [save_version(file_root, version, seed=version) for version in range(4)]
    for version in (1, 2, 3):
        evaluate(file_root, tmp_path, ready, pins[version], pins[version])
    # Version 1 was measured with other samples, the policy 2 was written again.
    uri = f"{layout.evaluation(file_root, 1)}/report.json"
    report = read_report(EvalReport, uri)
    report.attributes["conditions"]["top_p"] = 0.5
    write_report(uri, report)
    save_version(file_root, 2, seed=9)
    evaluate(file_root, tmp_path, ready, pins[3], pins[3])
    assert read_best(file_root).evaluated == (3,)


def test_a_policy_of_another_root_alone_is_not_pinned(file_root, tmp_path, ready):
    foreign = save_version(f"file://{tmp_path}/other", 2, seed=1)
    _, metrics = evaluate(file_root, tmp_path, ready, foreign, foreign)
    assert not store.exists(layout.best_policy(file_root))
    assert "best_policy_version" not in metrics


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b'{"schema": "best-policy/2"}',
        b'{"schema": "best-policy/1", "pin": "x", "policy_version": 1, "accuracy": 0.5, '
        b'"evaluated": [1]}',
        b'{"schema": "best-policy/1", "pin": "file:///r#sha256=%s", "policy_version": true, '
        b'"accuracy": 0.5, "evaluated": [1]}' % (b"0" * 64),
    ],
)
def test_another_document_in_place_of_the_pin_is_refused(file_root, raw):
    store.write(layout.best_policy(file_root), raw)
    with pytest.raises(RecordError, match=r"policies/best.json` must"):
        read_best(file_root)


def measure_before(root, digest, number, pin):
    iteration.run(root=root, config_sha256=digest, number=number, offset=0, policy_pin=pin)


def test_inside_iterations_every_second_policy_is_measured(file_root, tmp_path):
    write_data(file_root)
    digest = make_run(file_root, evaluate={"every": 2})
    pins = [save_version(file_root, version, seed=version) for version in range(4)]
    for number, pin in enumerate(pins, start=1):
        measure_before(file_root, digest, number, pin)
    evaluations = {p.name for p in (tmp_path / "root" / "evals").iterdir()}
    assert evaluations == {"00000", "00002"}
    assert read_best(file_root).evaluated == (0, 2)
    logs = sorted(p.name for p in (tmp_path / "root" / "logs").glob("*.json"))
    assert logs == ["00001-evaluate-00.json", "00003-evaluate-00.json"]
    entry = json.loads((tmp_path / "root" / "logs" / logs[1]).read_text())
    report = read_report(EvalReport, f"{layout.evaluation(file_root, 2)}/report.json")
    assert entry["metrics"]["policy_version"] == 2.0
    assert entry["metrics"]["accuracy"] == report.scalars["accuracy"]
    written = store.read(f"{layout.evaluation(file_root, 2)}/report.json")
    # The stage at the end takes what is there, and gives the same digests.
    ref, _ = evaluate(file_root, tmp_path, digest, pins[0], pins[2])
    assert store.read(ref.uri) == written
    last = json.loads((tmp_path / "root" / "logs" / "00000-evaluate-00.json").read_text())
    assert last["already_done"] is True


def test_without_a_turn_or_after_a_stop_nothing_is_measured(file_root, tmp_path, ready):
    pin = save_version(file_root, 0, seed=1)
    measure_before(file_root, ready, 1, pin)
    digest = make_run(file_root, evaluate={"every": 1})
    store.write(layout.stop_file(file_root), b"{}")
    assert mark_stopped(file_root, 1)
    measure_before(file_root, digest, 1, pin)
    assert not (tmp_path / "root" / "evals").exists()
    assert not list((tmp_path / "root").glob("logs/*"))


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
            total, marks = self.marks.get(request.request_id[:-4], (0, "0000"))
            right = marks[int(request.request_id[-3:])] == "1"
            tokens = [4 + TINY_MODEL["alphabet"].index(c) for c in f"={total if right else 99}"]
            count = len(tokens)
            reason = FinishReason.STOP
            outputs.append(Output(request.request_id, tokens, [-1.0] * count, [0] * count, reason))
        return outputs


@pytest.fixture
def two_sets(file_root, monkeypatch):
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


def test_each_set_has_the_scores_that_are_counted_by_hand(file_root, tmp_path, two_sets):
    pin = save_version(file_root, 0, seed=0)
    _, metrics = evaluate(file_root, tmp_path, two_sets, pin, pin)
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
    file_root, tmp_path, two_sets
):
    pins = [save_version(file_root, version, seed=version) for version in (0, 1)]
    iteration.run(file_root, two_sets, 1, 0, pins[0])
    assert ScriptedEngine.opened == 1
    first = evaluate(file_root, tmp_path, two_sets, *pins)
    assert ScriptedEngine.opened == 2
    # A set that was cut off is measured again, and no other.
    store.delete(f"{layout.evaluation(file_root, 1, 'one')}/report.json")
    store.delete(f"{layout.evaluation(file_root, 1, 'one')}/rollouts/manifest.json")
    stamp = tmp_path / "root/evals/pair/00001/rollouts/manifest.json"
    before = stamp.stat().st_mtime_ns
    assert evaluate(file_root, tmp_path, two_sets, *pins) == first
    assert (ScriptedEngine.opened, stamp.stat().st_mtime_ns) == (3, before)
    entry = json.loads((tmp_path / "root/logs/00001-evaluate-00.json").read_text())
    assert entry["metrics"]["pair_accuracy"] == 0.25


def test_report_show_tracker_and_card_name_each_set(file_root, tmp_path, two_sets, capsys):
    pins = [save_version(file_root, version, seed=version) for version in (0, 1)]
    evaluate(file_root, tmp_path, two_sets, *pins)
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


TABLE = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])


def test_bootstrap_spread_is_that_of_the_mean_over_prompts_and_follows_from_its_seed():
    accuracy = np.repeat(np.array([[0.0], [1.0]]), 50, axis=0)
    error, (low, high) = bootstrap(accuracy, num_resamples=4000, seed=3)
    assert error == pytest.approx(0.05, rel=0.05)
    assert low == pytest.approx(0.4, abs=0.02)
    assert high == pytest.approx(0.6, abs=0.02)
    first, second, other = (bootstrap(TABLE, num_resamples=50, seed=s) for s in (1, 1, 2))
    assert first == second
    assert first != other


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    num_samples, num_correct = case
    right = [i < num_correct for i in range(num_samples)]
    for k in range(1, num_samples + 1):
        subsets = list(itertools.combinations(right, k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share)
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("answers", "position"),
    [
        (["7", "8", "8"], 1),
        (["7", "8", "8", "7"], 0),
        (["8", "7", "7", "8"], 0),
        ([None, None, "3"], 2),
        ([None, None, None], None),
        ([], None),
        (["07", "8", "+7"], 0),
        (["-0", "1", "0"], 0),
        (["a", "b", "b"], 1),
        (["\u0667", "7", "7"], 1),
        (["9" * 65, "1", "9" * 65], 0),
    ],
)
def test_majority_takes_the_first_of_the_largest_class(answers, position):
    assert majority(answers) == position


def rollouts_of(lengths, num_samples, finish):
    found = build_rollouts(
        [[1]] * (len(lengths) // num_samples),
        [[1] * n for n in lengths],
        finish=finish,
        answer=["7"] * len(lengths),
        verifier=["trace"] * len(lengths),
    )
    rules.check(found)
    return found


def judged():
    """Two prompts of three samples: right, wrong, invalid; then right, right, verifier error."""
    stop, length, abort = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
    verdicts = [right("7"), wrong("8"), not_found(), right("7"), right("7"), failed("9")]
    finish = [stop, stop, length, stop, stop, abort]
    return Judged(rollouts_of([2, 2, 4, 3, 3, 0], 3, finish), verdicts, 3)


def test_scalars_by_hand():
    assert judged().answers() == [["7", "8", None], ["7", "7", None]]
    found = scalars(judged(), None, [0, 1], EvaluateConfig(pass_at=[1, 2, 32]), seed=0)
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["accuracy_standard_error"] == pytest.approx((2 / 3 / 3) ** 0.5 / 2)
    assert found["pass@1"] == pytest.approx(0.5)
    assert found["pass@2"] == pytest.approx((2 / 3 + 1.0) / 2)
    assert "pass@32" not in found
    assert found["cons@3"] == pytest.approx(1.0)
    assert found["invalid_fraction"] == pytest.approx(1 / 6)
    assert found["truncated_fraction"] == pytest.approx(1 / 6)
    assert found["refused_fraction"] == pytest.approx(1 / 6)
    assert found["verifier_errors"] == 1.0
    assert found["verifier_timeouts"] == 0.0
    assert found["response_length_mean"] == pytest.approx(14 / 6)
    assert found["num_generated_tokens"] == 14.0
    assert (found["num_prompts"], found["num_samples"]) == (2.0, 3.0)
    assert "greedy" not in found


def test_scalars_of_some_prompts_see_only_their_rows():
    greedy = Judged(rollouts_of([2, 2], 1, [0, 0]), [wrong("8"), right("7")], 1)
    found = scalars(judged(), greedy, [1], EvaluateConfig(), seed=0)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["greedy"] == 1.0
    assert found["num_generated_tokens"] == 6.0
    assert found["invalid_fraction"] == 0.0


def test_one_sample_has_no_standard_error():
    one = Judged(rollouts_of([2, 2], 1, [0, 0]), [right("7"), wrong("8")], 1)
    found = scalars(one, None, [0, 1], EvaluateConfig(), seed=0)
    assert "accuracy_standard_error" not in found
    assert found["accuracy"] == 0.5


@pytest.mark.parametrize("pass_at", [[0], [1, 1], [-1]])
def test_pass_at_must_hold_different_positive_numbers(pass_at):
    with pytest.raises(ValueError, match="different numbers of at least 1"):
        EvaluateConfig(pass_at=pass_at)
