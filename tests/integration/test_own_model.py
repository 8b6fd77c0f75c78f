"""A model and data of one's own through the whole pipeline, from a folder and from a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planish import store
from planish.checkpoint import train_state
from planish.models.policy import load_policy
from planish.records import layout
from planish.records.io import fetch_files, read_manifest
from tests.integration.own_model import make_model
from tests.integration.test_train_stage import all_tensors

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


def write_tasks(path):
    """Rows whose answers are tests of the code that a response must hold."""
    rows = [
        {"messages": [{"role": "system", "content": "Be brief."},
                      {"role": "user", "content": f"Write `f` that adds {n} to a number."}],
         "label": f"assert f(1) == {n + 1}"}
        for n in range(24)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_pipeline(root, model, dataset, iterations, overrides="", **environment):
    line = [sys.executable, "-m", "pipelines.local", "--root", root, "--preset", "dapo-tiny"]
    line += ["--model", model, "--dataset", dataset, "--dataset-map", "answer=label"]
    line += ["--iterations", str(iterations), "--shards", "1", "--compact"]
    line += ["--overrides", f"{SMALL} {overrides}".strip()]
    return subprocess.run(
        line,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def pin_of(root, version):
    uri = layout.policy(root, version)
    return read_manifest(uri).ref(uri).pin()


def check_export(root, version, family):
    """Open the exported policy with transformers alone and compare its form with the model's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_files(layout.policy(root, version))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == f"{family}ForCausalLM"
    assert model.dtype == torch.bfloat16
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}], tokenize=False
    )
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n"


def check_adapters(root):
    """Compare the export after three iterations with the base and the adapters of the state."""
    from transformers import AutoModelForCausalLM

    check_export(root, 3, "Qwen2")
    state = train_state.latest(root)
    tensors = all_tensors(state.pin())
    plain, merged = (load_policy(pin_of(root, k)).model.state_dict() for k in (0, 3))
    moved = 0
    for name, weight in plain.items():
        layer = f"model.{name.removesuffix('.weight')}"
        wanted = weight.float()
        if f"{layer}.lora_A.weight" in tensors:
            up, down = tensors[f"{layer}.lora_B.weight"], tensors[f"{layer}.lora_A.weight"]
            wanted = wanted + 8.0 * (up @ down)
            moved += not torch.equal(merged[name], weight)
        # bfloat16 keeps eight bits of the sum.
        torch.testing.assert_close(merged[name].float(), wanted, rtol=2**-8, atol=1e-6)
    assert moved == 14
    # transformers alone computes with the folder what the trained policy computes.
    opened = AutoModelForCausalLM.from_pretrained(fetch_files(layout.policy(root, 3)))
    ids = torch.arange(4, 12)[None]
    assert torch.equal(opened(ids).logits, load_policy(pin_of(root, 3)).model(ids).logits)
    page = store.read(f"{layout.report(root)}/report.html").decode()
    assert "trained parameters" in page


@pytest.mark.slow
def test_a_model_is_trained_on_tasks_of_code_and_exported(file_root, tmp_path):
    model = make_model("Qwen3", tmp_path / "model")
    done = run_pipeline(
        file_root,
        str(model),
        str(write_tasks(tmp_path / "mine.jsonl")),
        3,
        "curate.verifier=python_tests rollout.max_iterations_without_signal=0",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "`Qwen3ForCausalLM`" in done.stdout
    assert "| - columns | `messages` list, `label` text |" in done.stdout
    assert "| - system message | in 24 of 24 prompts |" in done.stdout
    assert "cold start skipped: `model.path` gives a trained model" in done.stdout
    check_export(file_root, 3, "Qwen3")


@pytest.mark.slow
def test_a_model_is_trained_by_adapters_and_exported_whole(file_root, tmp_path):
    model = make_model("Qwen2", tmp_path / "model")
    done = run_pipeline(
        file_root,
        str(model),
        str(write_rows(tmp_path / "mine.jsonl")),
        3,
        # Random text has a vowel now and then, so that there is something to learn.
        "curate.verifier=regex curate.answer_pattern=(a|e|i|o|u) rollout.group_size=4 "
        "train.learning_rate=1e-2 train.warmup_iterations=0 model.lora_rank=4",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "| - adapters | rank 4, alpha 32, on `down_proj`, `gate_proj`, `k_proj`" in done.stdout
    check_adapters(file_root)


@pytest.mark.slow
def test_a_start_too_weak_ends_with_advice_and_without_a_retry(file_root, tmp_path):
    model = make_model("Qwen3", tmp_path / "model")
    done = run_pipeline(
        file_root,
        str(model),
        str(write_rows(tmp_path / "mine.jsonl")),
        2,
        "rollout.max_iterations_without_signal=1",
    )
    assert done.returncode != 0
    log = json.loads(store.read(layout.stage_log(file_root, "reward", 1, 0)))
    assert log["exit_code"] == 2
    assert log["error"].startswith("Nothing was learnt: all 4 groups wrong; try easier problems")


@pytest.mark.slow
@pytest.mark.server
def test_a_model_and_rows_in_a_bucket_are_trained_and_exported(s3_root, tmp_path):
    for path in make_model("Qwen2", tmp_path / "model").iterdir():
        store.write(f"{s3_root}/in/model/{path.name}", path.read_bytes())
    store.write(f"{s3_root}/in/mine.jsonl", write_rows(tmp_path / "mine.jsonl").read_bytes())
    root = f"{s3_root}/run"
    done = run_pipeline(
        root,
        f"{s3_root}/in/model",
        f"{s3_root}/in/mine.jsonl",
        1,
        "rollout.max_iterations_without_signal=0",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    check_export(root, 1, "Qwen2")
