"""Random inputs travel to a peer library's own Python and its outputs come back, as safetensors.

The peer's side imports this file by its folder, so it knows nothing of this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
PeerFunction = Callable[[Tensors, dict[str, Any]], Tensors]


@dataclass(frozen=True)
class Case:
    """One call of a function of the peer's side."""

    function: str
    inputs: Tensors
    settings: dict[str, Any] = field(default_factory=dict)


def ask(
    python: str, script: Path, cases: Mapping[str, Case]
) -> tuple[dict[str, Tensors], dict[str, str]]:
    """Let `python script` compute all cases; returns outputs by case, and versions of the peer."""
    calls = {
        name: {"function": c.function, "inputs": sorted(c.inputs), "settings": c.settings}
        for name, c in cases.items()
    }
    # Cases share inputs, which a safetensors file may not.
    tensors = {
        f"{name}:{key}": value.clone(memory_format=torch.contiguous_format)
        for name, c in cases.items()
        for key, value in c.inputs.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/inputs.safetensors", f"{folder}/outputs.safetensors"
        save_file(tensors, source, metadata={"cases": json.dumps(calls)})
        subprocess.run([python, str(script), source, target], check=True)
        outputs: dict[str, Tensors] = {name: {} for name in cases}
        with safe_open(target, framework="pt") as file:
            versions = json.loads(file.metadata()["versions"])
            for key in file.keys():  # noqa: SIM118 - not a mapping
                name, _, output = key.rpartition(":")
                outputs[name][output] = file.get_tensor(key)
    return outputs, versions


def serve(functions: Mapping[str, PeerFunction], versions: dict[str, str]) -> None:
    """Body of the peer's side: read inputs, call `functions`, write outputs."""
    source, target = sys.argv[1:]
    outputs: Tensors = {}
    with safe_open(source, framework="pt") as file:
        for name, call in json.loads(file.metadata()["cases"]).items():
            inputs = {key: file.get_tensor(f"{name}:{key}") for key in call["inputs"]}
            found = functions[call["function"]](inputs, call["settings"])
            outputs |= {f"{name}:{key}": value.clone() for key, value in found.items()}
    save_file(outputs, target, metadata={"versions": json.dumps(versions)})
