"""Inputs that once failed, where their folder lies beside the checkout: each is right today."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planish.base.errors import ConfigError, PlanishError
from planish.base.inspection import Inspection
from planish.checkpoint import import_dcp, load
from planish.models.config import ModelConfig
from planish.models.pretrained import load_pretrained
from planish.models.tokens import load_tokenizer
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.inspect import inspect_data
from planish.stages.curate.problem import CurationLedger
from planish.stages.curate.select import curate
from planish.stages.curate.stage import read_tables
from planish.stages.prepare.inspect import inspect_sources
from planish.stages.prepare.settings import build_config
from planish.stages.reward.config import RewardConfig
from planish.stages.reward.score import score
from planish.stages.reward.signal import groups_without_signal
from planish.verifiers import verify

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = REPOSITORY.parent / "shared" / "cases"

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no ../shared/cases beside the checkout")


def program(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_answers_are_graded_as_published():
    cases = CASES.glob("*/rows.jsonl")
    lines = [line for path in cases for line in path.read_text("utf-8").splitlines()]
    assert len(lines) >= 9
    for row in map(json.loads, lines):
        found = verify(row["verifier"], row["response"], row["answer"])
        assert float(found.accuracy) == row["expect"], row


def read(path):
    """Return what prepare refuses of a data set, and what curate keeps of it or refuses."""
    settings = {"dataset": str(path)}
    found = Inspection()
    inspect_data({"curate": settings}, found)
    ledger, config = CurationLedger(), CurateConfig(**settings)
    try:
        kept = curate(config, 0, read_tables(config, ledger), ledger)
    except PlanishError as error:
        return found, str(error)
    return found, len(kept.train)


def test_published_forms_are_read():
    for name in ("blank-last-line", "bom", "id-twice", "messages-before-problem"):
        found, kept = read(CASES / name / "data.jsonl")
        assert (found.faults, kept > 0) == ([], True), name


def test_decimals_are_read(tmp_path):
    assert program(str(CASES / "decimal-answer/make.py"), folder=tmp_path).returncode == 0
    found, kept = read(tmp_path / "decimal.parquet")
    assert (found.faults, kept > 0) == ([], True)


@pytest.mark.parametrize(
    "path", ["unreadable-without-reason/data.json", "small-set-no-held-out/data.jsonl"]
)
def test_prepare_and_curate_agree(path):
    found, kept = read(CASES / path)
    assert bool(found.faults) == isinstance(kept, str), (found.faults, kept)
    if found.faults:
        assert "JSON array" in found.faults[0]


def test_an_instruction_around_problems_is_no_leak():
    (_, framed), (_, plain) = (
        read(CASES / "frame-counts-as-leak" / f"{name}.jsonl") for name in ("framed", "plain")
    )
    assert abs(framed - plain) <= 10


def zoo(case: str, name: str, folder: Path) -> Path:
    """Make one model of the case."""
    made = program(str(CASES / case / "zoo.py"), name, folder=folder)
    assert made.returncode == 0, made.stderr
    return folder / "zoo" / name


@pytest.mark.parametrize(
    ("case", "name", "words"),
    [
        ("context-not-checked", "llama-dynamic", "48"),
        ("longrope", "phi3-longrope", "rotary scaling depends"),
    ],
)
def test_prepare_refuses_what_a_stage_would(case, name, words, tmp_path):
    model = zoo(case, name, tmp_path)
    config = build_config(
        preset="dapo-tiny", config="", overrides="", model=str(model), dataset="", seed=-1
    )
    with pytest.raises(ConfigError, match=words):
        inspect_sources(config)


def test_what_prepare_takes_the_cold_start_takes_too(tmp_path):
    model = zoo("moe-refused-late", "qwen2moe", tmp_path)
    config = build_config(
        preset="dapo-tiny", config="", overrides="", model=str(model), dataset="", seed=-1
    )
    assert inspect_sources(config).faults == []
    assert load_pretrained(ModelConfig(path=str(model))).model.config.num_experts == 4


def test_ends_that_only_the_configuration_names_count(tmp_path):
    model = zoo("eos-in-config-only", "qwen2-nogen-cfgeos", tmp_path)
    assert sorted(load_tokenizer(model).eos_token_ids) == [0, 2]


def test_an_end_token_is_no_text(tmp_path):
    from tokenizers import AddedToken

    tokenizer = runpy.run_path(str(CASES / "eos-in-config-only/zoo.py"))["tok"](eos="<|endoftext|>")
    tokenizer.add_tokens([AddedToken("<|turn_end|>", special=False, normalized=False)])
    tokenizer.save_pretrained(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|turn_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    ours = load_tokenizer(tmp_path)
    assert ours.decode([*ours.encode_response("Answer: 5")[:-1], end]) == "Answer: 5"


def test_one_response_that_takes_too_long_is_wrong():
    batch = runpy.run_path(str(CASES / "one-hostile-response/rew.py"), run_name="case")["batch"]
    scored = score(
        batch(16, 4, [5]),
        RewardConfig(max_response_tokens=48, overlong_buffer_tokens=12, verifier_timeout_seconds=2),
    )
    assert scored.metrics["num_verifier_timeouts"] == 1


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Make the traces of the three cases of the monitor."""
    folder = tmp_path_factory.mktemp("traces")
    for case in ("faulty-from-the-start", "missing-samples-silent", "replay-exit-code"):
        made = program(str(CASES / case / "make.py"), str(folder), folder=REPOSITORY)
        assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("name", ["start_power40", "nan10", "base"])
def test_a_replay_names_the_machine_and_ends_with_2(name, traces):
    made = program(
        *("-m", "planish", "minder", "replay", "--from-file", f"{name}.csv"), folder=traces
    )
    assert (made.returncode, "node-00" in made.stdout) == (2, True), made.stdout + made.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_groups_of_an_imported_optimizer_are_kept(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def made(lr):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
        return model, torch.optim.AdamW(model.parameters(), lr=lr)

    model, optimizer = made(0.01)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=tmp_path / "a", no_dist=True)
    import_dcp(str(tmp_path / "a"), str(tmp_path / "p"))
    other, loaded = made(0.5)
    load(str(tmp_path / "p"), {"model": other, "optimizer": loaded})
    assert loaded.param_groups[0]["lr"] == 0.01
    assert torch.equal(model[0].weight, other[0].weight)


@pytest.mark.full
def test_a_file_that_is_not_there_is_told_without_markup(tmp_path):
    made = program(
        *("-m", "planish", "run", "--dataset", "nope.jsonl", "--no-control", "--no-track"),
        *("--root", str(tmp_path / "root")),
        folder=REPOSITORY,
    )
    assert (made.returncode, "nope.jsonl" in made.stdout + made.stderr) == (2, True)
    assert "MarkupError" not in made.stderr


def test_graded_scores_are_trained_on(monkeypatch):
    case = CASES / "continuous-reward-advice"
    monkeypatch.setenv("PYTHONPATH", str(case), prepend=os.pathsep)
    of_case = json.loads((case / "data.jsonl").read_text("utf-8").splitlines()[0])
    batch = runpy.run_path(str(CASES / "one-hostile-response/rew.py"), run_name="case")["batch"]
    rollouts = batch(4, 4, [])
    texts = ["abcdefgh"[: 1 + row % 4] for row in range(16)]
    rollouts = replace(rollouts, response=texts, verifier=[of_case["verifier"]] * 16)
    scored = score(rollouts, RewardConfig(max_response_tokens=48, overlong_buffer_tokens=12))
    assert scored.rewards.keep.all()
    assert groups_without_signal(rollouts, scored.rewards, []) == {}
