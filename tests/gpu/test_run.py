"""A whole run of the pipeline with every model on the accelerator."""

import json
import os
import re
import subprocess
import sys
import time

import pytest


def run(preset, iterations, folder, *options):
    """Return what a run prints."""
    pytest.importorskip("kfp")
    line = [
        sys.executable, "-m", "planish", "run", "--preset", preset, "--no-control",
        "--iterations", str(iterations), "--root", str(folder / "run"),
        *("-o", "sft.max_steps=100"), *("-o", "train.compute_dtype=bfloat16"), *options,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        line, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PLANISH_GPU_POD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.parametrize("preset", ["dapo-tiny", "vapo-tiny", "dapo-moe-tiny"])
def test_a_run_trains_on_the_accelerator(preset, tmp_path, figures):
    began = time.perf_counter()
    told = run(preset, 2, tmp_path)
    figures[f"run {preset}"] = {
        "seconds": time.perf_counter() - began,
        "end": told[-1500:].splitlines(),
    }


def test_iterations_in_one_task_end_with_the_policy_of_tasks_apart(tmp_path, figures):
    policies, seconds = {}, {}
    for name, size in (("resident", "3"), ("apart", "0")):
        told = run("dapo-tiny", 3, tmp_path / name, "--resident", size)
        policies[name] = json.loads(told.splitlines()[-1])["policy"].partition("#")[2]
        ends = re.findall(r"(\S+) s +iteration \d +checkpoint", told)
        seconds[f"{name}_iteration_seconds"] = (float(ends[-1]) - float(ends[0])) / 2
    figures["iterations in one task, dapo-tiny"] = seconds
    assert policies["resident"] == policies["apart"]
