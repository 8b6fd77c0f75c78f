"""Simulated runs of a plan, and `planish rollout simulate` as people use it."""

import json
from xml.etree import ElementTree

import pytest

from planish.__main__ import main
from planish.engines.config import DEAD_S
from planish.engines.planner.documents import read_plan
from planish.engines.planner.performance import Workload
from planish.engines.planner.simulate import Death, Disturbances, run


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    sides = ["--attention-gpus", "h20", "--expert-gpus", "l40s", "--objective", "cost"]
    model = ["--model", "mixtral-8x22b", "--output", "20"]
    assert main(["rollout", "plan", *model, *sides, "--json", str(path)]) == 0
    return path


def test_a_full_first_iteration_takes_what_was_planned(plan):
    planned = read_plan(plan)
    outcome = run(planned, planned.places, Disturbances())
    # The plan is for the mean length, and counts the logits of each micro-batch.
    assert outcome.iterations[0] == pytest.approx(planned.times_s["total"], rel=0.03)
    assert len(outcome.iterations) == 20
    assert (outcome.finished, outcome.errors) == (planned.places, 0)
    assert outcome.tokens == 20 * planned.places
    # Attention takes longer as responses grow.
    assert outcome.iterations == sorted(outcome.iterations)


def test_every_request_gets_its_tokens_and_equal_seeds_give_equal_runs(plan):
    planned = read_plan(plan)
    outcome = run(planned, planned.places + 77, Disturbances(length_spread=0.5, jitter=0.1, seed=3))
    assert outcome.finished == planned.places + 77
    assert outcome.tokens == pytest.approx(20 * outcome.finished, rel=0.05)
    disturbed = [Disturbances(jitter=0.1, length_spread=0.4, seed=seed) for seed in (1, 1, 2)]
    runs = [run(planned, 300, one).iterations for one in disturbed]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("disturbed", [Disturbances(jitter=0.3), Disturbances(imbalance=1.5)])
def test_jitter_and_imbalance_make_iterations_longer(plan, disturbed):
    planned = read_plan(plan)
    plain = run(planned, planned.places, Disturbances()).seconds
    assert run(planned, planned.places, disturbed).seconds > 1.05 * plain


def test_a_dead_attention_rank_loses_its_requests_and_the_others_go_on(plan):
    planned = read_plan(plan)
    death = Death("attention", 1, 1.0)
    outcome = run(planned, planned.places, Disturbances(deaths=(death,)))
    share = planned.places // planned.deployment.n_a
    assert (outcome.finished, outcome.errors) == (planned.places - share, share)
    assert max(outcome.iterations) == pytest.approx(DEAD_S, abs=0.2)
    assert outcome.lost_tokens > 0
    assert outcome.tokens == 20 * outcome.finished
    assert not outcome.failed


def test_a_dead_expert_rank_ends_the_run_unless_its_experts_are_stored_twice(plan):
    planned = read_plan(plan)
    dead = Disturbances(deaths=(Death("experts", 3, 1.0),))
    outcome = run(planned, planned.places, dead)
    assert outcome.failed
    assert (outcome.finished, outcome.errors) == (0, planned.places)
    copied = planned.model_copy(update={"workload": Workload(571, 20, redundancy=1.0)})
    outcome = run(copied, planned.places, dead)
    assert (outcome.finished, outcome.failed) == (planned.places, False)
    # Seven nodes do the work of eight.
    assert outcome.iterations[-1] > 1.02 * outcome.iterations[0]
    assert outcome.pipeline.busy["experts"][3] < outcome.pipeline.busy["experts"][0]


def test_the_command_prints_shares_and_draws_a_timeline(plan, tmp_path, capsys):
    files = ["--picture", str(tmp_path / "t.svg"), "--json", str(tmp_path / "s.json")]
    arguments = ["rollout", "simulate", str(plan), "--requests", "300", "--jitter", "0.05"]
    assert main([*arguments, *files]) == 0
    shown = capsys.readouterr().out
    assert "bubble" in shown
    made = json.loads((tmp_path / "s.json").read_text())
    assert made["label"] == "simulated"
    assert made["finished"] == 300
    for found in made["busy"].values():
        assert 0 < found["least"] <= found["mean"] <= found["most"] <= 1
    picture = ElementTree.parse(tmp_path / "t.svg").getroot()
    names = [x.text for x in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"attention 0", "link to experts 0", "experts 7", "link back 7"} <= set(names)
    spans = [x for x in picture.iter("{http://www.w3.org/2000/svg}title") if "layer 5" in x.text]
    # Attention and experts of three micro-batches, and their links.
    assert len(spans) == 3 * (2 * read_plan(plan).deployment.n_a + 2 * 8)


def test_a_run_that_survives_an_expert_rank_is_said_to_be_more_than_our_engines_do(
    plan, tmp_path, capsys
):
    assert main(["rollout", "simulate", str(plan), "--dead", "experts:0@0.2"]) == 0
    assert "nobody else has its experts" in capsys.readouterr().out
    document = json.loads(plan.read_text())
    document["workload"]["redundancy"] = 1.0
    (tmp_path / "twice.json").write_text(json.dumps(document))
    words = "end with the first expert rank that they lose"
    for death, is_said in (("experts:0@0.2", True), ("experts:0@9e9", False)):
        arguments = ["rollout", "simulate", str(tmp_path / "twice.json"), "--requests", "50"]
        assert main([*arguments, "--dead", death]) == 0
        assert (words in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dead", "router:0@1"], "`--dead` must be attention:"),
        (["--dead", "experts:8@1"], "must name a rank of the plan, which has 8 of experts, got 8"),
        (["--dead", "attention:0@x"], "`--dead` must be attention:"),
        (["--jitter", "-1"], "`--jitter` and `--spread` must be from 0 to 2"),
        (["--imbalance", "0.5"], "`--imbalance` must be at least 1"),
        (["--json", "/no/such/x.json"], "must be a file that can be written"),
    ],
)
def test_wrong_input_is_one_line(plan, options, message, capsys):
    assert main(["rollout", "simulate", str(plan), "--requests", "10", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        *(("plan", "b_a", 1.5), ("plan", "m", 0), ("workload", "input_tokens", "x")),
        *(("gpus", "h20", {}), ("model", "layers", True), ("constants", "luck", 1.0)),
        *(("workload", "output_tokens", None), ("plan", "expert_gpu", "b300")),
        *(("constants", "memory_efficiency", 0.0), ("times_s", "total", 0.0)),
        *(("", "", ""), ("", "", []), ("", "", {}), ("", "", {"plan": 3, "constants": {}})),
    ],
)
def test_a_file_that_is_no_plan_is_refused(plan, tmp_path, part, name, value, capsys):
    document = json.loads(plan.read_text())
    if part:
        document[part][name] = value
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document if part else value) if value != "" else "")
    assert main(["rollout", "simulate", str(path)]) == 2
    assert "must be a file of `planish rollout plan --json`" in capsys.readouterr().err
