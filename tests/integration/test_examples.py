"""`examples/`: data and a reward of one's own in a run, and a checkpoint for other ranks."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from planish.__main__ import parser
from planish.base.config import parse_settings
from planish.records import layout
from planish.records.io import read_set
from planish.records.prompts import PromptSet, TraceSet
from planish.run.stage import Context
from planish.stages.curate.stage import make_prompts
from planish.stages.prepare.checks import check_run
from planish.stages.prepare.inspect import inspect_sources
from planish.stages.prepare.settings import build_config
from planish.submit.parameters import with_data
from planish.verifiers import verify_many

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
pytestmark = pytest.mark.slow


def commands(example):
    """Return the lines of the first block of the page of an example."""
    page = (EXAMPLES / example / "README.md").read_text("utf-8")
    return re.findall(r"```\n(.*?)```", page, re.DOTALL)[0].splitlines()


def demo(example):
    """Return the words of the demo on the page of an example, as `planish run` takes them."""
    (line,) = (line for line in commands(example) if line.startswith("make demo"))
    variables = dict(word.split("=", 1) for word in shlex.split(line)[2:])
    return ["run", "--dataset", variables["DATASET"], *shlex.split(variables["ARGS"])]


EXAMPLES_OF_RUNS = [("own_data", "trace"), ("own_reward", "digit_reward:digits")]


@pytest.mark.parametrize(("example", "verifier"), EXAMPLES_OF_RUNS)
def test_the_rows_become_prompts_and_traces_enough(example, verifier, tmp_path, monkeypatch):
    """The arguments of the page's demo, as far as prepare and curation go."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES / "own_reward"), prepend=":")
    asked = parser().parse_args(demo(example))
    parameters = with_data(
        {"overrides": " ".join(asked.overrides), "dataset": asked.dataset}, asked.dataset_map
    )
    config = build_config(preset=asked.preset, config="", model="", seed=-1, **parameters)
    assert check_run(parse_settings(config), 1) == []
    found = dict(inspect_sources(config).rows)
    assert found["data"].endswith("2048 rows")
    assert found["- verifiers"] == f"`{verifier}` 2048"
    assert "`question` text, `label` number, `worked` text" in found["- columns"]
    root = (tmp_path / "root").as_uri()
    make_prompts(Context(root, "curate", 0, 0, config, "0" * 64, {}))
    prompts = read_set(PromptSet, layout.prompts(root))
    traces = read_set(TraceSet, layout.traces(root))
    # With an eighth of so many, policies learnt the rows by heart and 33 problems measured them.
    assert min(prompts.num_rows, traces.num_rows) > 1500
    assert read_set(PromptSet, layout.evaluation_prompts(root)).num_rows > 200
    answers = dict(zip(prompts.prompt_id, prompts.answer, strict=True))
    rows = [
        (verifier, response, answers[prompt_id])
        for prompt_id, response in zip(traces.prompt_id, traces.response, strict=True)
    ]
    assert {verdict.accuracy for verdict in verify_many(rows)} == {1.0}


@pytest.mark.long
@pytest.mark.parametrize("example", [name for name, _ in EXAMPLES_OF_RUNS])
def test_the_demo_of_the_page_improves_the_policy(example, tmp_path):
    options = ["--no-control", "--iterations", "3", "--root", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "planish", *demo(example), *options],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": f"{EXAMPLES}/own_reward:{REPOSITORY}:{os.environ['PYTHONPATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["accuracy_after"] > told["accuracy_before"] + 0.05


def test_a_checkpoint_of_two_processes_goes_on_with_three(tmp_path):
    def run(line):
        program, *words = shlex.split(line.replace("/tmp/", f"{tmp_path}/"))
        module = program.removeprefix(".venv/bin/").replace("torchrun", "torch.distributed.run")
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    lines = commands("reshard_checkpoint")
    first, second, *_ = [run(line) for line in lines]
    assert first.startswith("2 processes: steps 1 to 5, loss ")
    assert second.startswith("3 processes: steps 6 to 10, loss ")
    # The same ten steps on one process: the gradients are those of the same rows.
    alone = lines[0].replace("per-node 2", "per-node 1").replace("/tmp/reshard", "/tmp/alone")
    run(alone)
    told = [float(text.split("loss ")[1]) for text in (second, run(alone))]
    assert told[0] == pytest.approx(told[1], rel=1e-3)
