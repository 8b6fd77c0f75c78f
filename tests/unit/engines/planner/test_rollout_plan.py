"""`planish rollout plan` as people use it: tables, the document, and what is refused."""

import json

import pytest

from planish.__main__ import main
from planish.engines.planner.pipeline import iteration_seconds

BASE = ["rollout", "plan", "--model", "mixtral-8x22b", "--attention-gpus", "a800"]
A800 = [*BASE, "--expert-gpus", "a800"]


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
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(arguments, message, capsys):
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


@pytest.mark.parametrize("action", ["plan", "simulate"])
def test_json_that_is_nested_too_deeply_is_refused(tmp_path, capsys, action):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000, "utf-8")
    plan = ["rollout", "plan", "--model", str(path), *A800[4:]]
    arguments = plan if action == "plan" else ["rollout", "simulate", str(path)]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
