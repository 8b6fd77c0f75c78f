"""The evaluate stage on a tiny policy: reports, rollout sets, second runs."""

import json

import numpy as np
import pytest

from planish import store
from planish.base.errors import RecordError
from planish.models.policy import build_policy, save_policy
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.prompts import PromptSet
from planish.records.refs import Ref
from planish.records.reports import BestPolicy, EvalReport, read_best, read_report, write_report
from planish.records.rollouts import RolloutSet
from planish.run.stage import mark_stopped
from planish.stages.evaluate import iteration
from planish.stages.evaluate.stage import compare, run
from planish.verifiers import verify
from tests.unit.tiny_run import artifact, make_run, sums, tiny_model, write_data


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
    report = read_report(EvalReport, ref.uri, sha256=ref.manifest_sha256)
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


def test_no_held_out_prompts_is_an_error_that_says_so(file_root, tmp_path, caplog):
    digest = make_run(file_root)
    empty, _ = sums([])
    write_set(layout.evaluation_prompts(file_root), empty, parents={}, attributes={})
    pin = save_version(file_root, 0, seed=1)
    with pytest.raises(SystemExit):
        evaluate(file_root, tmp_path, digest, pin, pin)
    assert "an evaluation needs at least one prompt, got none" in caplog.text


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
