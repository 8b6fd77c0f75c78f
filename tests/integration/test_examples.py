"""`examples/`: data of one's own through prepare and curation, and a checkpoint for other ranks."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from planish.__main__ import parser
from planish.records import layout
from planish.records.io import read_set
from planish.records.prompts import PromptSet, TraceSet
from planish.run.stage import Context
from planish.stages.curate.stage import make_prompts
from planish.stages.prepare.inspect import inspect_sources
from planish.stages.prepare.settings import build_config
from planish.submit.parameters import with_data

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
pytestmark = pytest.mark.slow


def commands(example):
    """Return the lines of the first block of the page of an example."""
    page = (EXAMPLES / example / "README.md").read_text("utf-8")
    return re.findall(r"```\n(.*?)```", page, re.DOTALL)[0].splitlines()


def test_the_rows_of_own_data_become_prompts_and_traces(tmp_path, monkeypatch):
    """The arguments of the page's demo, as far as prepare and curation go."""
    monkeypatch.chdir(REPOSITORY)
    variables = dict(word.split("=", 1) for word in shlex.split(commands("own_data")[0])[2:])
    words = ["run", "--preset", "dapo-tiny", "--dataset", variables["DATASET"]]
    asked = parser().parse_args([*words, *shlex.split(variables["ARGS"])])
    parameters = with_data(
        {"overrides": " ".join(asked.overrides), "dataset": asked.dataset}, asked.dataset_map
    )
    config = build_config(preset=asked.preset, config="", model="", seed=-1, **parameters)
    found = dict(inspect_sources(config).rows)
    assert found["data"].endswith("256 rows")
    assert found["- verifiers"] == "`trace` 256"
    assert "`question` text, `label` number, `worked` text" in found["- columns"]
    root = (tmp_path / "root").as_uri()
    make_prompts(Context(root, "curate", 0, 0, config, "0" * 64, {}))
    prompts = read_set(PromptSet, layout.prompts(root))
    assert prompts.num_rows > 150
    traces = read_set(TraceSet, layout.traces(root))
    assert traces.num_rows > 150


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
