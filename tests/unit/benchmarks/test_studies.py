"""The harness of the studies: intervals, verdicts, and runs that share a start."""

from __future__ import annotations

import json
import math
from itertools import islice, pairwise

import pytest

from planish.base.config import resolve_config
from planish.verifiers import verify
from tests.benchmarks.facts import RESULTS
from tests.benchmarks.studies import arms, column_arms, generated, reading, runner
from tests.benchmarks.studies.__main__ import all_studies, jobs_of
from tests.benchmarks.studies.arms import Arm
from tests.benchmarks.studies.group_relative import STEPS, TOKENS
from tests.benchmarks.studies.reading import Run
from tests.benchmarks.studies.schedule import Job, unfinished
from tests.benchmarks.studies.writing import Direction

SMALL = """
[study]
iterations = 2
evaluate_every = 1

[curate]
num_prompts = 64
evaluation_size = 8

[model]
num_layers = 1
hidden_size = 16
intermediate_size = 24
head_dim = 8

[sft]
max_steps = 4
probe_prompts = 4
probe_samples = 1

[rollout]
prompts_per_iteration = 4
group_size = 2
max_response_tokens = 8
dynamic_sampling = false

[reward]
keep_uniform_groups = true
max_response_tokens = 8
overlong_buffer_tokens = 2

[train]
rollouts_per_minibatch = 8

[evaluate]
num_samples = 2
max_response_tokens = 8
pass_at = [1, 2]
num_resamples = 5
"""


def test_interval_is_that_of_students_t():
    found = reading.interval([0.1, 0.2, 0.4])
    assert found.mean == pytest.approx(0.233333, abs=1e-6)
    # s = 0.152753, t(2) = 4.303, s * t / sqrt(3) = 0.379493
    assert found.high - found.mean == pytest.approx(0.379493, abs=1e-5)
    assert found.mean - found.low == pytest.approx(0.379493, abs=1e-5)


def committed(name):
    return json.loads((RESULTS / f"study_{name}.json").read_text("utf-8"))["result"]


def page_row(start):
    rows = (RESULTS.parents[2] / "docs/results.md").read_text("utf-8").splitlines()
    (row,) = (row for row in rows if row.startswith(start))
    return row


@pytest.mark.parametrize("name", ["tppo_windows", "tppo_partial"])
def test_committed_ratios_are_geometric_means_with_intervals_of_logarithms(name):
    found = committed(name)
    costs = found["figures"]["cost_of_whole_responses_over_own_cost_to_equal_accuracy"]
    ratios = [
        row["ratio"] for row in found["directions"] if "to equal accuracy" in row["statement"]
    ]
    ratios += [x for row in costs.values() for x in row.values() if isinstance(x, dict)]
    assert len(ratios) > 6
    for ratio in ratios:
        logs = [math.log(value) for value in ratio["by_seed"]]
        again = reading.interval(logs)
        assert ratio["mean"] == pytest.approx(math.exp(again.mean))
        bounds = [math.exp(again.low), math.exp(again.high)]
        assert ratio["interval_95"] == pytest.approx(bounds)


def test_a_direction_of_ratios_is_compared_with_one():
    ratio = reading.ratio_interval([1.5, 3.0, 6.0, 3.0])
    told = Direction("A / B in cost", "up to 2x", ratio, is_ratio=True).to_json()
    assert (told["ratio"]["mean"], told["seen"]) == (pytest.approx(3.0), "yes")
    none = Direction("A / B", "", reading.ratio_interval([0.5, 2.0, 1.0]), is_ratio=True).to_json()
    assert none["seen"] == "within noise"


def test_the_page_tells_what_the_last_arm_of_the_ladder_generates():
    figures = committed("ladder")["figures"]
    spent = [figures[step]["generated_tokens"]["by_seed"] for step in (STEPS[-1], STEPS[0])]
    ratio = reading.ratio_interval(a / b for a, b in zip(*spent, strict=True))
    assert figures[TOKENS] == ratio.to_json()
    row = page_row("| [GRPO to DAPO]")
    assert f"the last arm generates {ratio.mean:.1f}x GRPO's tokens" in row


def test_the_page_tells_the_ratios_of_windows_and_when_seeds_were_added():
    found = committed("tppo_windows")
    row = page_row("| E7 [T-PPO's windows]")
    for window in ("L/2", "L/4"):
        name = f"VAPO, whole responses / T-PPO, W = {window} in decode iterations to equal accuracy"
        (ratio,) = (d["ratio"] for d in found["directions"] if d["statement"] == name)
        low, high = ratio["interval_95"]
        assert f"{ratio['mean']:.2f}x [{low:.2f}, {high:.2f}]" in row
    assert "seeds 3 to 5 were added after 0 to 2 had left W = L/4 within noise" in row
    assert found["remark"].startswith("Seeds 3 to 5 were added after seeds 0 to 2")
    before = reading.ratio_interval(ratio["by_seed"][:3])
    assert before.low < 1 < before.high


def test_one_seed_never_decides():
    assert reading.verdict(reading.interval([0.5]), sign=1) == "within noise"
    assert reading.interval([0.5]).to_json()["interval_95"] is None


@pytest.mark.parametrize(
    ("values", "sign", "seen"),
    [
        ([0.10, 0.11, 0.12], 1, "yes"),
        ([0.10, 0.11, 0.12], -1, "no"),
        ([-0.10, -0.11, -0.12], -1, "yes"),
        ([-0.1, 0.1, 0.3], 1, "within noise"),
        ([0.0, 0.0, 0.0], 1, "within noise"),
    ],
)
def test_direction_is_seen_when_the_interval_lies_on_one_side(values, sign, seen):
    assert reading.verdict(reading.interval(values), sign=sign) == seen


def test_cost_to_an_accuracy_is_read_between_evaluations():
    assert reading.first_reaching(0.3, [0, 100, 200], [0.2, 0.2, 0.4]) == pytest.approx(150)
    assert math.isnan(reading.first_reaching(0.5, [0, 100], [0.2, 0.4]))


def test_pretraining_costs_tokens_but_no_policy_update():
    rows = [
        {
            "iteration": number,
            "train": {"pretraining": float(number == 1), "cpu_seconds": 1.0},
            "rollout": {"num_generated_tokens": 10.0 * number, "cpu_seconds": 2.0},
            "reward": {"cpu_seconds": 0.5},
        }
        for number in (1, 2, 3)
    ]
    run = Run({"rows": rows, "evaluations": [{"iteration": 0}, {"iteration": 2}, {"iteration": 3}]})
    assert run.updates() == [0.0, 1.0, 2.0]
    assert run.tokens() == [0.0, 30.0, 60.0]
    assert run.seconds() == [0.0, 7.0, 10.5]


def test_each_arm_of_the_ladder_adds_to_the_one_before():
    tables = [arm.definition(0)["tables"] for arm in column_arms.LADDER]
    for before, after in pairwise(tables):
        assert before != after
        assert {k: before[k] for k in ("curate", "sft", "train")} == {
            k: after[k] for k in ("curate", "sft", "train")
        }
    last, dapo = (
        resolve_config(tables[-1]),
        resolve_config(column_arms.DAPO.definition(0)["tables"]),
    )
    assert last["rollout"] == dapo["rollout"]
    assert last["reward"] == dapo["reward"]


@pytest.mark.parametrize("name", sorted(all_studies()))
def test_every_arm_has_a_valid_configuration_and_one_name(name):
    known: dict[tuple[str, str], Arm] = {}
    for study in all_studies().values():
        for arm in study.arms.values():
            assert known.setdefault((arm.task, arm.name), arm) == arm
    for arm in all_studies()[name].arms.values():
        resolve_config(arm.definition(0)["tables"])


@pytest.fixture
def small_task(tmp_path, monkeypatch):
    """A task of two iterations of the smallest run, with runs kept apart."""
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.setattr(arms, "HERE", tmp_path)
    monkeypatch.setattr(arms, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("RUN_ID", "")
    return "small"


def start(arm, seed=0):
    assert runner.main([json.dumps(arm.to_json()), str(seed)]) == 0
    return json.loads(arms.result_file(arm, seed).read_text("utf-8"))


@pytest.mark.long
def test_arms_share_their_start_and_finished_runs_stay(small_task):
    base, first = Arm(small_task, runner.BASE), Arm(small_task, "first")
    other = Arm(small_task, "other", ("train.learning_rate=1e-3",))
    jobs = [Job(first, 0), Job(other, 0)]
    assert unfinished(jobs) == [Job(base, 0), *jobs]
    start(base)
    one, two = start(first), start(other)
    assert one["start_pin"] == two["start_pin"]
    assert one["evaluations"][0] == two["evaluations"][0]
    assert [row["iteration"] for row in one["rows"]] == [1, 2]
    assert [scores["iteration"] for scores in one["evaluations"]] == [0, 1, 2]
    assert unfinished(jobs) == []
    # A run that was cut off after its first iteration goes on to the same end.
    progress = arms.run_root(first, 0) / "progress.json"
    saved = json.loads(progress.read_text("utf-8"))
    cut = {"rows": saved["rows"][:1], "evaluations": saved["evaluations"][:2]}
    runner.write_json(progress, cut)
    resumed = start(first)
    assert resumed["rows"][-1]["pins"] == one["rows"][-1]["pins"]
    assert [e["entropy"] for e in resumed["evaluations"]] == [
        e["entropy"] for e in one["evaluations"]
    ]
    changed = Arm(small_task, "first", ("train.learning_rate=2e-3",))
    assert unfinished([Job(changed, 0)]) == [Job(changed, 0)]


def test_runs_are_ordered_by_seed():
    studies = [study for study in all_studies().values() if study.name == "token-level"]
    assert [job.seed for job in jobs_of(studies, [0, 1])] == [0, 0, 1, 1]


def test_counted_sums_are_right_and_mostly_short():
    rows = list(islice(generated.counted_sums(), 400))
    for row in rows:
        assert verify("trace", row["trace"], row["answer"]).accuracy == 1.0
        steps = row["trace"].split(",")
        assert len(steps) == int(row["question"][-3:-1])
        assert steps[-1] == f"01={int(row['answer']):02d}"
    lengths = sorted(len(row["trace"]) for row in rows)
    assert lengths[200] <= 17
    assert lengths[-1] == 22 * 6 - 1
