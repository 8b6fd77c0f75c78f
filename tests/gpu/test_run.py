"""A whole run of the pipeline with every model on the accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch


@pytest.mark.skipif(torch.__version__ < "2.12", reason="packed rows need torch 2.12 or newer")
@pytest.mark.parametrize("preset", ["dapo-tiny", "vapo-tiny", "dapo-moe-tiny"])
def test_a_run_trains_on_the_accelerator(preset, tmp_path, figures):
    pytest.importorskip("kfp")
    line = [
        sys.executable, "-m", "planish", "run", "--preset", preset, "--iterations", "2",
        "--root", str(tmp_path / "run"), "--no-control",
        *("-o", "sft.max_steps=300"), *("-o", "train.compute_dtype=bfloat16"),
    ]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PLANISH_GPU_POD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    figures[f"run {preset}"] = {
        "seconds": time.perf_counter() - began,
        "end": done.stdout[-1500:].splitlines(),
    }
