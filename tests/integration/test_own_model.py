"""A model and data of one's own through the whole pipeline, from a folder and from a bucket."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planish import store
from planish.__main__ import main
from planish.records import layout
from planish.records.io import fetch_files, read_manifest, read_set
from planish.records.reports import UpdateReport, read_report
from planish.records.rewards import RewardSet
from planish.records.rollouts import RolloutSet
from tests.integration.own_model import make_model
from tests.processes import below

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = (
    "rollout.prompts_per_iteration=4 rollout.group_size=2 rollout.max_response_tokens=8 "
    "rollout.max_prompt_tokens=128 rollout.max_generation_rounds=1 "
    "rollout.starvation_policy=relax reward.keep_uniform_groups=true "
    "reward.max_response_tokens=8 reward.overlong_buffer_tokens=2 "
    "train.rollouts_per_minibatch=4 curate.evaluation_size=4 evaluate.num_samples=2 "
    "evaluate.pass_at=[1,2] evaluate.max_response_tokens=8 model.dtype=bfloat16 "
    "curate.prompt_prefix='' curate.prompt_suffix='' curate.evaluation_fraction=0.25"
)


def write_rows(path):
    rows = [
        {"messages": [{"role": "system", "content": "Be brief."},
                      {"role": "user", "content": f"What is {n} plus {n + 1}?"}],
         "label": 2 * n + 1}
        for n in range(24)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


VOWELS = '''
def share(response, answer):
    """Return the share of the letters that are vowels: random text has some now and then."""
    letters = [letter for letter in response if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
'''


def options(root, model, dataset, iterations, overrides=""):
    """Return the options of `pipelines.local` for a small run of a model and rows of one's own."""
    line = ["--root", root, "--preset", "dapo-tiny"]
    line += ["--model", str(model), "--dataset", str(dataset), "--dataset-map", "answer=label"]
    line += ["--iterations", str(iterations), "--shards", "1"]
    return [*line, "--overrides", f"{SMALL} {overrides}".strip()]


def pin_of(root, version):
    uri = layout.policy(root, version)
    return read_manifest(uri).ref(uri).pin()


def check_export(root, version, family):
    """Open the policy of a run with transformers alone and compare its form with the model's."""
    open_export(fetch_files(layout.policy(root, version)), family)


def open_export(folder, family):
    """Open a folder with transformers alone and compare its form with the model's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == f"{family}ForCausalLM"
    assert model.dtype == torch.bfloat16
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}], tokenize=False
    )
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.slow
@pytest.mark.server
def test_a_model_and_rows_in_a_bucket_are_trained_by_a_reward_of_ones_own(s3_root, tmp_path):
    for path in make_model("Qwen2", tmp_path / "model").iterdir():
        store.write(f"{s3_root}/in/model/{path.name}", path.read_bytes())
    store.write(f"{s3_root}/in/mine.jsonl", write_rows(tmp_path / "mine.jsonl").read_bytes())
    package = tmp_path / "packages" / "vowels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(VOWELS)
    root = f"{s3_root}/run"
    overrides = "curate.verifier=vowels:share"
    line = options(root, f"{s3_root}/in/model", f"{s3_root}/in/mine.jsonl", 1, overrides)
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.local", *line],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{package.parent}:{os.environ['PYTHONPATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    check_export(root, 1, "Qwen2")
    scope: dict[str, Any] = {}
    exec(VOWELS, scope)
    rollouts = read_set(RolloutSet, layout.rollouts(root, 1, 0))
    rewards = read_set(RewardSet, layout.rewards(root, 1))
    assert set(rollouts.verifier) == {"vowels:share"}
    texts = zip(rollouts.response, rollouts.answer, strict=True)
    shares = np.array([scope["share"](*pair) for pair in texts])
    # A share between 0 and 1 lies as far between the rewards of wrong and right ones.
    assert rewards.has_reward.any()
    wanted = np.where(rewards.has_reward, 2 * shares - 1, 0)
    assert rewards.outcome.tolist() == pytest.approx(wanted.tolist())
    assert len(set(wanted)) > 1


@pytest.mark.slow
def test_a_demo_of_ones_own_outlives_what_follows_it_and_the_trackers_get_all(file_root, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, rows = make_model("Qwen3", tmp_path / "model"), write_rows(tmp_path / "mine.jsonl")
    overrides = "rollout.max_iterations_without_signal=0"
    line = [sys.executable, "-m", "planish", "run"]
    line += options(file_root, model, rows, 1, overrides)
    with subprocess.Popen(line, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as demo:
        deadline = time.monotonic() + 300
        while not (followers := [pid for pid in below(demo.pid) if follows(pid, file_root)]):
            assert time.monotonic() < deadline
            assert demo.poll() is None
            time.sleep(0.05)
        os.kill(followers[0], signal.SIGKILL)
        told, _ = demo.communicate(timeout=600)
    assert demo.returncode == 0, told
    assert "the trackers did not get everything" in told
    assert json.loads(told.splitlines()[-1])["iterations"] == 1
    # What was killed is made up for by the command that anyone may run.
    assert main(["track", file_root, "--to", "tensorboard"]) == 0
    read = EventAccumulator(f"{layout.trackers(file_root)}/tensorboard".removeprefix("file://"))
    read.Reload()
    update = read_report(UpdateReport, layout.update(file_root, 1))
    for name in ("loss", "entropy"):
        (event,) = read.Scalars(f"train/{name}")
        assert (event.step, event.value) == (1, pytest.approx(update.scalars[name], rel=1e-6))
    norms = [event.value for event in read.Scalars("train_step/grad_norm")]
    wanted = [step["grad_norm"] for step in update.minibatches]
    assert norms == pytest.approx(wanted, rel=1e-6)


def follows(pid, root):
    """Return whether a process is what sends the curves of a run to its trackers."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return "track" in words and root in words
