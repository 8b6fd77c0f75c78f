"""The search: brute force, monotone batches, limits, reasons of rejection, published ratios."""

import json

import pytest

from planish.__main__ import main
from planish.engines.config import DEAD_S
from planish.engines.planner.baseline import baselines
from planish.engines.planner.documents import read_plan
from planish.engines.planner.gpus import GPUS, changed, find_gpus
from planish.engines.planner.models import MODELS
from planish.engines.planner.performance import Workload
from planish.engines.planner.pipeline import iteration_seconds
from planish.engines.planner.query import Query, Space
from planish.engines.planner.search import search
from planish.engines.planner.simulate import Death, Disturbances, run
from tests import thin
from tests.unit.engines.planner import brute_force

PAPER = ("mixtral-8x22b", "dbrx", "scaled-moe")
SLO = Space(slo_seconds=0.15)
WITHOUT_PLAN = 47
"""The only random problem in which nothing fits."""


def query(name, gpus="a800", experts="", space=SLO, **more):
    return Query(MODELS[name], find_gpus(gpus), find_gpus(experts or gpus), space=space, **more)


def found(*arguments, **more):
    return search(query(*arguments, **more))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", thin.third([WITHOUT_PLAN, *range(WITHOUT_PLAN), *range(WITHOUT_PLAN + 1, 50)])
)
def test_the_best_plan_is_that_of_brute_force(seed):
    problem = brute_force.problem(seed)
    expected, best = brute_force.best(problem), search(problem).best
    assert (best is None) == (expected is None) == (seed == WITHOUT_PLAN)
    if best is not None:
        assert best.value(problem.objective) == pytest.approx(expected[0], rel=1e-9)


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("gpus", [("a800", "a800"), ("h20", "l40s")])
def test_balance_and_the_default_are_as_good_as_trying_all_replicas(name, gpus):
    every = found(name, *gpus, space=Space(slo_seconds=0.15, replicas=tuple(range(1, 33)))).best
    balanced = found(name, *gpus, space=Space(slo_seconds=0.15, replicas="balance")).best
    assert 0.9 * every.per_gpu <= balanced.per_gpu <= every.per_gpu
    assert found(name, *gpus).best.per_gpu >= 0.999 * every.per_gpu
    if gpus == ("a800", "a800"):
        assert every.times.attention == pytest.approx(every.times.expert, rel=0.25)
        assert every.flags()["balanced"]


def test_the_time_between_tokens_is_kept_and_limits():
    tight = found("mixtral-8x22b", space=Space(slo_seconds=0.03))
    assert tight.best.limit == "slo"
    assert all(one.total <= 0.03 for one in tight.plans)
    assert found("mixtral-8x22b", space=Space()).best.per_gpu > tight.best.per_gpu


@pytest.mark.parametrize(
    ("gpu", "change", "replicas", "limit"),
    [
        ("a800", "a800.network_rate=2e9", 1, "network"),
        ("h20", "h20.flops=2e13", 1, "attention"),
        ("a800", "a800.price=1", 16, "experts"),
        ("l40s", "l40s.memory_bytes=4.2e10", 1, "memory"),
    ],
)
def test_the_limit_is_the_resource_that_is_short(gpu, change, replicas, limit):
    gpus = changed(find_gpus(gpu), [change])
    space = Space(replicas=(replicas,), tp_attention=(1,), micro_batches=(3,))
    best = search(Query(MODELS["mixtral-8x22b"], gpus, gpus, space=space)).best
    assert best.limit == limit


def test_a_fixed_batch_is_spread_and_may_be_uneven():
    space = Space(batch=100, replicas=(3,), micro_batches=(4,), tp_attention=(1,), tp_experts=(1,))
    best = found("mixtral-8x22b", space=space).best
    # 100 rows over 12 slots: the fullest has 9.
    assert (best.batch, best.b_a) == (100, 9)
    assert best.per_gpu == pytest.approx(100 / best.total / 11)


@pytest.mark.parametrize(
    ("name", "gpus", "space", "reason"),
    [
        ("mixtral-8x22b", "l40s", Space(batch=5, replicas=(2,)), "more micro-batches"),
        ("mixtral-8x22b", "a800", Space(slo_seconds=1e-3), "one row takes longer"),
        ("mixtral-8x22b", "a800", Space(max_gpus=8), "more than 8 GPUs"),
        ("mixtral-8x22b", "l40s", Space(batch=100000), "the cache of a batch of 100000"),
        ("mixtral-8x22b", "a800", Space(batch=100, slo_seconds=1e-3), "a batch of 100 takes"),
        ("scaled-moe", "l40s", Space(tp_experts=(1,), expert_nodes=(8,)), "4 experts a layer do"),
        ("deepseek-v3", "l20", Space(tp_attention=(1,)), "the cache of one row"),
        ("mixtral-8x22b", "a800", Space(tp_attention=(16,)), "more than the 8 GPUs of a node"),
        ("mixtral-8x22b", "a800", Space(tp_attention=(3,)), "48 heads and 8 KV heads do not split"),
        ("mixtral-8x22b", "a800", Space(tp_experts=(3,)), "experts of width 16384 do not split"),
    ],
)
def test_each_rejection_has_its_reason(name, gpus, space, reason):
    load = Workload(1e6) if "one row" in reason and name == "deepseek-v3" else Workload()
    result = found(name, gpus, space=space, workload=load)
    assert result.best is None
    assert any(reason in why for why in result.rejected)


def test_ratios_to_the_ideal_baseline_are_the_published_ones():
    # One set of constants; TensorRT-LLM is 1.28x on one node and 1.90x across nodes.
    ratios = []
    for name in PAPER:
        asked = query(name)
        base = next(one for one in baselines(asked, GPUS["a800"]) if one.form == "tp")
        ratios.append(search(asked).best.per_gpu / base.per_gpu)
    assert ratios == pytest.approx([1.28, 1.28, 1.90], rel=0.3)
    assert ratios[2] > max(ratios[:2])


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("objective", ["cost", "watt"])
def test_attention_on_h20_and_experts_on_l40s_beat_either_alone(name, objective):
    sides = [("h20", "l40s"), ("h20", "h20"), ("l40s", "l40s"), ("l40s", "h20")]
    values = [found(name, *pair, objective=objective).best.value(objective) for pair in sides]
    assert values[0] == max(values)


def test_the_default_search_goes_on_around_balance_and_finds_what_sixteen_replicas_miss():
    wide = {"tp_attention": (1, 2), "tp_experts": (1,), "expert_nodes": (256,)}
    few = Space(replicas=tuple(range(1, 17)), **wide)
    stopped, balanced = (
        found("deepseek-v3", "h800", space=space)
        for space in (few, Space(replicas="balance", **wide))
    )
    around = found("deepseek-v3", "h800", space=Space(**wide))
    assert around.best.deployment.n_a > 16
    assert around.best.per_gpu >= balanced.best.per_gpu > 1.5 * stopped.best.per_gpu
    assert "most attention replicas that were tried, 16" in stopped.edge
    assert (around.edge, balanced.edge) == ("", "")


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


def test_the_command_prints_shares(plan, tmp_path, capsys):
    files = ["--json", str(tmp_path / "s.json")]
    arguments = ["rollout", "simulate", str(plan), "--requests", "300", "--jitter", "0.05"]
    assert main([*arguments, *files]) == 0
    shown = capsys.readouterr().out
    assert "bubble" in shown
    made = json.loads((tmp_path / "s.json").read_text())
    assert made["label"] == "simulated"
    assert made["finished"] == 300
    for found in made["busy"].values():
        assert 0 < found["least"] <= found["mean"] <= found["most"] <= 1


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
    ("part", "name", "value"),
    [
        *(("plan", "b_a", 1.5), ("plan", "m", 0), ("workload", "input_tokens", "x")),
        *(("gpus", "h20", {}), ("model", "layers", True), ("constants", "luck", 1.0)),
        *(("workload", "output_tokens", None), ("plan", "expert_gpu", "b300")),
        *(("constants", "memory_efficiency", 0.0), ("times_s", "total", 0.0)),
        *(
            ("", "", text)
            for text in ("", "[]", "{}", '{"plan": 3, "constants": {}}', "[" * 100_000)
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(plan, tmp_path, part, name, value, capsys):
    document = json.loads(plan.read_text())
    if part:
        document[part][name] = value
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document) if part else value)
    assert main(["rollout", "simulate", str(path)]) == 2
    assert "must be a file of `planish rollout plan --json`" in capsys.readouterr().err


BASE = ["rollout", "plan", "--model", "mixtral-8x22b", "--attention-gpus", "a800"]
A800 = [*BASE, "--expert-gpus", "a800"]
SIMULATE = ["rollout", "simulate", "plan.json", "--requests", "10"]


def document(tmp_path, *arguments):
    path = tmp_path / "plan.json"
    assert main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_the_document_holds_what_is_promised(tmp_path, capsys):
    made = document(tmp_path, *A800)
    times, plan = made["times_s"], made["plan"]
    law = iteration_seconds(times["attention"], times["expert"], times["network"], plan["m"], 56)
    assert times["total"] == pytest.approx(law + plan["m"] * times["outside"])
    assert made["tokens_per_s"] == pytest.approx(made["batch"] / times["total"])
    assert made["per_gpu"] == pytest.approx(made["tokens_per_s"] / made["num_gpus"])
    assert made["per_cost"] == pytest.approx(made["per_gpu"] / 2.26)
    assert made["per_watt"] == pytest.approx(made["per_gpu"] / 400)
    assert made["ratio"] == pytest.approx(made["per_gpu"] / made["baseline"]["per_gpu"])
    # A plan is for the mean length of 650 tokens; the last has 730 before it.
    assert 1.0 <= made["total_at_last_token_s"] / times["total"] < 1.1
    assert made["flags"]["network_hidden"] is True
    values = [one["per_gpu"] for one in made["all"]]
    assert values == sorted(values, reverse=True)
    assert made["all"][0]["plan"] == plan
    assert len(values) + sum(made["rejected"].values()) == made["num_evaluated"]
    assert made["edge"] == ""
    # The verdict goes by the strongest colocated form alone.
    assert made["ratio"] > 1.1
    assert made["strongest_colocated"]["form"] == "ep"
    assert made["ratio_to_strongest"] < 1
    assert made["verdict"] == "do not disaggregate"
    rows = {(r["figure"], round(r["factor"], 1)): r["value"] for r in made["sensitivity"]}
    figures = {"compute_efficiency", "memory_efficiency", "half_rate_bytes", "length"}
    assert set(rows) == {(f, x) for f in figures for x in (0.8, 1.2)} | {("imbalance", 1.5)}
    low, high = (rows["compute_efficiency", x] for x in (0.8, 1.2))
    assert rows["imbalance", 1.5] < low < high
    shown = capsys.readouterr().out
    words = ("limit: experts", "ratio: 1.2", "2.2k tokens/s per H200", "gained 1.0 % of throughput")
    assert all(word in shown for word in words)
    framework = document(tmp_path, *A800, "--baseline", "framework")
    assert framework["baseline"]["name"] == "framework"
    assert framework["ratio"] > 1.8 * made["ratio"]
    assert framework["verdict"] == made["verdict"]


def test_the_end_of_what_was_tried_is_told(tmp_path, capsys):
    made = document(tmp_path, *A800, "--replicas", "1..2")
    assert made["edge"] == "the best plan has the most attention replicas that were tried, 2"
    assert "others may be better; widen `--replicas`" in capsys.readouterr().out


def test_options_restrict_what_is_tried(tmp_path):
    options = ["--tp-a", "2", "--tp-e", "1", "--micro-batches", "1,2", "--replicas", "2..3"]
    made = document(tmp_path, *A800, *options, "--batch", "512", "--slo-ms", "inf")
    plans = [one["plan"] for one in made["all"]]
    assert {(p["tp_a"], p["tp_e"]) for p in plans} == {(2, 1)}
    assert {p["m"] for p in plans} == {1, 2}
    assert {p["n_a"] for p in plans} == {2, 3}
    assert {one["batch"] for one in made["all"]} == {512}
    assert made["slo_s"] is None


def test_gpus_constants_and_baseline_can_be_changed(tmp_path):
    sides = ["--attention-gpus", "h100", "--expert-gpus", "h100", "--objective", "cost"]
    options = ["--gpu-data", "h100.price=4", "--constant", "compute_efficiency=0.5"]
    base = ["rollout", "plan", "--model", "dbrx", *sides, *options]
    made = document(tmp_path, *base, "--baseline-gpu", "a800")
    assert made["per_cost"] == pytest.approx(made["per_gpu"] / 4)
    assert made["constants"]["compute_efficiency"] == 0.5
    assert made["baseline"]["gpu"] == "a800"
    assert made["ratio"] == pytest.approx(made["per_cost"] / made["baseline"]["per_cost"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*BASE, "--expert-gpus", "b300"], "a GPU must be one of"),
        ([*BASE, "--expert-gpus", ""], "got none; choose one of these"),
        ([*BASE, "--expert-gpus", "h100", "--objective", "cost"], "needs the price"),
        ([*A800, "--objective", "cost", "--baseline-gpu", "h200"], "price of the baseline's GPU"),
        ([*A800, "--slo-ms", "0.5"], "one row takes longer than the time between tokens ("),
        ([*A800, "--batch", "2"], "more micro-batches"),
        ([*A800, "--expert-nodes", "3"], "must divide the 8 experts"),
        ([*A800, "--imbalance", "0.5"], "`--imbalance` must be from 1"),
        ([*A800, "--imbalance", "9"], "to the 8 experts of mixtral-8x22b, got 9"),
        ([*A800, "--redundancy", "1e308"], "got 1 and 1e+308"),
        ([*A800, "--redundancy", "-1"], "`--redundancy` from 0"),
        ([*A800, "--gpu-data", "a800.flops=1e308"], "a changed figure must be"),
        *(
            ([*A800, "--gpu-data", change], "a changed figure must be")
            for change in ("a800.price", "a800.price=x", "a800.cost=3", "x.price=3", "price=3")
        ),
        ([*A800, "--constant", "kernel_seconds=1e308"], "`--constant` must be"),
        ([*A800, "--constant", "luck=1"], "`--constant` must be"),
        ([*A800, "--constant", "compute_efficiency=1.5"], "efficiencies in (0, 1]"),
        ([*A800, "--tp-a", "3"], "48 heads and 8 KV heads do not split over tp_a=3"),
        ([*A800, "--input", "inf"], "must be finite"),
        ([*A800, "--json", "/no/such/folder/x.json"], "`--json` must be a file"),
        (["rollout", "plan", "--model", "llama", *A800[4:]], "`--model` must be one of"),
        ([*SIMULATE, "--dead", "router:0@1"], "`--dead` must be attention:"),
        ([*SIMULATE, "--dead", "experts:8@1"], "a rank of the plan, which has 8 of experts, got 8"),
        ([*SIMULATE, "--dead", "attention:0@x"], "`--dead` must be attention:"),
        ([*SIMULATE, "--jitter", "-1"], "`--jitter` and `--spread` must be from 0 to 2"),
        ([*SIMULATE, "--imbalance", "0.5"], "`--imbalance` must be at least 1"),
        ([*SIMULATE, "--json", "/no/such/x.json"], "must be a file that can be written"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    plan, arguments, message, capsys, monkeypatch
):
    monkeypatch.chdir(plan.parent)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    [
        *(["--replicas", "0..3"], ["--micro-batches", "a"], ["--slo-ms", "-1"]),
        *(["--tp-a", "4..2"], ["--batch", "1.5"], ["--slo-ms", "nan"], ["--objective", "speed"]),
        *(["--imbalance", "1e308"], ["--input", "1e308"], ["--slo-ms", "1e308"]),
    ],
)
def test_a_wrong_option_is_refused(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*A800, *option])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert option[0] in error
    assert option[1] != "1e308" or "at most 1e+12, or inf, got '1e308'" in error
