"""Launch files for the public plug-in: its rules, what is changed to meet them, and refusals."""

from __future__ import annotations

import json

import pytest

from planish.__main__ import main
from planish.engines.deploy.afd import estimate, fit
from planish.engines.planner.documents import read_plan
from tests.unit.engines.deploy.plans import tiny_plan


@pytest.fixture(scope="module")
def make_plan(tmp_path_factory):
    """Return a function that plans Qwen3-30B; each question is asked once."""
    made = {}

    def make(replicas=1, nodes=2, *options):
        key = (replicas, nodes, options)
        if key not in made:
            path = tmp_path_factory.mktemp("plan") / "plan.json"
            sides = ["--model", "qwen3-30b", "--attention-gpus", "h20", "--expert-gpus", "h20"]
            sizes = ["--replicas", str(replicas), "--expert-nodes", str(nodes), "--tp-a", "1"]
            words = [*sides, *sizes, "--tp-e", "1", "--micro-batches", "3", *options]
            assert main(["rollout", "plan", *words, "--json", str(path)]) == 0
            made[key] = path
        return made[key]

    return make


def launch(plan, *options):
    """Return exit code and document."""
    out = plan.parent / "launch"
    words = ["--policy", "/models/qwen3", "--max-model-len", "1024", "--out", str(out), "--anyway"]
    code = main(["rollout", "afd", str(plan), *words, *options])
    return code, json.loads((out / "launch.json").read_text()) if code == 0 else None


def words_of(one):
    """Return the options of a process and their values."""
    argv = one["argv"]
    return {
        word: argv[at + 1] if at + 1 < len(argv) and not argv[at + 1].startswith("--") else True
        for at, word in enumerate(argv)
        if word.startswith("--")
    }


def test_both_roles_are_vllm_with_one_topology_and_gpus_of_their_own(make_plan):
    plan = make_plan(2, 2)
    code, document = launch(plan)
    assert code == 0
    ffn, attention = document["launches"]
    assert [one["role"] for one in (ffn, attention)] == ["ffn", "attention"]
    for one in (ffn, attention):
        assert one["argv"][:3] == ["vllm", "serve", "/models/qwen3"]
        words = words_of(one)
        assert json.loads(words["--additional-config"]) == {
            "afd": {
                "role": one["role"],
                "connector": "P2pNcclAFDConnector",
                "host": "127.0.0.1",
                "port": 6239,
                "num_attention_ranks": 2,
                "num_ffn_ranks": 2,
            }
        }
        assert words["--data-parallel-size"] == "2"
        assert words["--tensor-parallel-size"] == "1"
        assert words["--enable-dbo"] is words["--enable-expert-parallel"] is True
        graph = json.loads(words["--compilation-config"])
        assert graph["cudagraph_mode"] == "FULL_DECODE_ONLY"
        assert one["env"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert ffn["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert attention["env"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (words_of(ffn)["--port"], words_of(attention)["--port"]) == ("18001", "18000")
    assert document["plugin"]["vllm"] == "0.26.0"
    text = (plan.parent / "launch/launch.txt").read_text()
    assert "It can not do:\n- three or more micro-batches" in text


@pytest.mark.parametrize(
    ("replicas", "nodes", "wanted"), [(1, 2, 2), (2, 2, 2), (3, 2, 4), (4, 2, 4), (1, 4, 4)]
)
def test_attention_ranks_become_a_multiple_of_ffn_ranks(make_plan, replicas, nodes, wanted):
    topology = fit(read_plan(make_plan(replicas, nodes)))
    assert (topology.replicas, topology.attention_ranks, topology.ffn_ranks) == (
        wanted,
        wanted,
        nodes,
    )
    said = f"{wanted} attention replicas in place of {replicas}"
    assert any(said in line for line in topology.changes) == (wanted != replicas)


def test_two_micro_batches_hold_the_rows_of_the_plans_three(make_plan):
    planned = read_plan(make_plan(2, 2, "--batch", "600"))
    assert (planned.micro_batches, planned.rows) == (3, 100)
    topology = fit(planned)
    assert topology.rows == 300
    assert "2 micro-batches of 150 rows in place of 3 of 100" in topology.changes


def test_the_estimate_of_the_plan_itself_with_two_micro_batches_is_the_planners(make_plan):
    one = read_plan(make_plan(2, 2)).deployment
    rate, gpus = estimate(one, 2, 64)
    assert gpus == one.gpus == 4
    assert rate == pytest.approx(2 * 2 * 64 / one.total(64, 2))
    twice, more = estimate(one, 4, 64)
    assert more == 6
    assert rate < twice <= 2 * rate * (1 + 1e-9)
    # Experts that serve twenty times the replicas become the slower side.
    assert estimate(one, 40, 512)[0] < 10 * estimate(one, 2, 512)[0]


def test_roles_on_machines_of_their_own(make_plan):
    options = ["--ffn-machines", "10.0.0.1", "--attention-machines", "10.0.0.2", "--eager"]
    ffn, attention = launch(make_plan(2, 2), *options)[1]["launches"]
    assert ffn["env"]["CUDA_VISIBLE_DEVICES"] == attention["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    settings = json.loads(words_of(attention)["--additional-config"])["afd"]
    assert settings["host"] == "10.0.0.1"
    assert words_of(attention)["--host"] == "10.0.0.2"
    assert words_of(attention)["--enforce-eager"] is True
    assert "--compilation-config" not in words_of(attention)


def test_a_role_of_more_gpus_than_a_machine_has(make_plan):
    options = ["--ffn-machines", "f0", "--attention-machines", "a0,a1"]
    launches = launch(make_plan(12, 4), *options)[1]["launches"]
    assert [(one["role"], one["machine"]) for one in launches] == [
        ("ffn", "f0"),
        ("attention", "a0"),
        ("attention", "a1"),
    ]
    first, second = map(words_of, launches[1:])
    assert (first["--data-parallel-size-local"], second["--data-parallel-size-local"]) == ("8", "4")
    assert (first["--data-parallel-start-rank"], second["--data-parallel-start-rank"]) == ("0", "8")
    assert first["--data-parallel-address"] == second["--data-parallel-address"] == "a0"
    assert "--headless" in second
    assert "--headless" not in first
    assert "--port" not in second
    assert launches[2]["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--vllm-version", "0.32.0"], "the plug-in is for vLLM 0.26.0, got '0.32.0'"),
        (["--architecture", "MixtralForCausalLM"], "Qwen3MoeForCausalLM, got 'MixtralForCausalLM'"),
        (["--ffn-machines", "a,b"], "`--ffn-machines` must name the 1 machines"),
        (["--http-port", "6240"], "`--port` must leave 3 ports from 6239 on free"),
        (["--port", "65535"], "`--port` must leave 3 ports from 65535 on free"),
        (["--out", "/proc/launch"], "`--out` must be a folder that can be written"),
    ],
)
def test_what_the_plug_in_can_not_run_is_refused(make_plan, capsys, options, said):
    assert launch(make_plan(2, 2), *options)[0] == 2
    assert said in capsys.readouterr().err


def test_both_roles_must_fit_a_machine_that_they_share(make_plan, capsys):
    assert launch(make_plan(8, 2))[0] == 2
    assert "only if both fit its 8 GPUs, got 8 and 2" in capsys.readouterr().err


def test_replicas_of_experts_and_a_verdict_against_are_refused(make_plan, capsys):
    plan = make_plan(2, 2, "--redundancy", "0.5")
    document = json.loads(plan.read_text())
    against = plan.with_name("against.json")
    against.write_text(json.dumps({**document, "verdict": "do not disaggregate"}))
    words = ["--policy", "x", "--max-model-len", "64", "--out", str(plan.parent)]
    assert main(["rollout", "afd", str(against), *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "the plug-in has no replicas of experts, got 0.5" in error
    assert "got its verdict 'do not disaggregate': serve it colocated" in error


def test_a_model_that_the_planner_knows_not_needs_its_architecture(tmp_path, capsys):
    plan = tiny_plan(tmp_path)
    assert launch(plan)[0] == 2
    assert "or name the model's `--architecture`" in capsys.readouterr().err
    code, document = launch(plan, "--architecture", "Qwen3MoeForCausalLM")
    assert (code, document["architecture"]) == (0, "Qwen3MoeForCausalLM")
