"""Imports go downwards only; to change these tables is an architecture decision."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

LAYERS = [
    {"__version__", "errors", "config", "telemetry"},
    {
        *("records", "store", "verifiers", "shaping", "tokens"),
        *("lock", "stage_log", "stage_metrics", "stage", "signals", "avoid", "runs"),
    },
    {"models", "logprobs", "engines", "algorithms", "checkpoint", "parallel", "measure"},
    {
        *("prepare", "curate", "sft", "rollout", "reward", "train", "evaluate", "report"),
        *("checkpoint_stage", "next_run", "show", "doctor", "minder", "monitor_check"),
        *("reshard_prepare", "reshard", "checkpoint_verify", "checkpoint_retain"),
    },
    {"components", "pipelines", "__main__"},
]
"""From the bottom up; a file may import from any layer below its own."""

EDGES = {
    *(("config", "errors"), ("telemetry", "errors")),
    *(("records", "store"), ("lock", "records"), ("lock", "store")),
    *(("stage_log", "records"), ("stage_log", "store"), ("stage_log", "lock")),
    *(("stage", "records"), ("stage", "store"), ("stage", "stage_log")),
    *(("signals", "store"), ("stage", "signals")),
    *(("stage", "stage_metrics"), ("avoid", "records"), ("avoid", "store")),
    *(("checkpoint", "parallel"), ("checkpoint", "models")),
    *(("logprobs", "models"), ("engines", "models"), ("engines", "logprobs")),
    ("measure", "engines"),
    *(("pipelines", "components"), ("monitor_check", "minder")),
}
"""Allowed inside one layer; stages never import each other, but the monitor is none."""

OWNERS = {
    "minio": ("src/planish/store/",),
    "tenacity": ("src/planish/store/",),
    "prometheus_client": ("src/planish/telemetry.py", "src/planish/minder/own_metrics.py"),
    "kfp": ("components/", "pipelines/", "src/planish/runs/"),
    "vllm": ("src/planish/engines/",),
    "megatron": ("src/planish/train/", "src/planish/checkpoint/"),
    "sklearn": ("src/planish/minder/",),
    "math_verify": ("src/planish/verifiers/",),
    "datasets": ("src/planish/curate/",),
    "rich": ("src/planish/show/", "src/planish/doctor.py", "src/planish/__main__.py", "pipelines/"),
}
"""Third-party package -> the only places that may know it."""


def sources():
    for folder in ("src/planish", "components", "pipelines"):
        yield from sorted((REPOSITORY / folder).rglob("*.py"))


@functools.cache
def imported(path):
    """Return (module in full, whether at the top level) for every import of a file."""
    found = []
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} must import by full names"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [(name, node in tree.body) for name in names]
    return found


def unit_of(path):
    """Return the part of the house that a file belongs to."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    part = parts[2] if parts[0] == "src" else parts[0]
    return "__version__" if part == "__init__" else part


def target_of(module):
    parts = module.split(".")
    if parts[0] in {"components", "pipelines"}:
        return parts[0]
    if parts[0] != "planish":
        return None
    return parts[1] if len(parts) > 1 else "__version__"


def layer_of(unit):
    found = [number for number, units in enumerate(LAYERS) if unit in units]
    assert found, f"`{unit}` stands in no layer: add it to LAYERS"
    return found[0]


def faults_of(path, unit):
    for module, _ in imported(path):
        target = target_of(module)
        if target in {None, unit}:
            continue
        if layer_of(target) >= layer_of(unit) and (unit, target) not in EDGES:
            yield f"{path} must not import {module}"


def test_every_import_goes_down_or_along_an_allowed_edge():
    assert [fault for path in sources() for fault in faults_of(path, unit_of(path))] == []


@pytest.mark.parametrize(
    ("unit", "code", "expected"),
    [
        ("records", "import planish.train.update", 1),
        ("records", "from planish.store import base\nfrom planish import telemetry", 0),
        ("store", "def f():\n    from planish.records import read_set", 1),
        ("reward", "from planish.rollout.stage import run", 1),
        ("checkpoint", "from planish import parallel, records", 0),
        ("models", "from planish import checkpoint", 1),
        ("pipelines", "import components.train", 0),
        ("train", "import components.train", 1),
    ],
)
def test_the_check_sees_upward_and_sideways_imports(tmp_path, unit, code, expected):
    (tmp_path / "x.py").write_text(code)
    assert len(list(faults_of(tmp_path / "x.py", unit))) == expected


def test_every_layer_entry_exists():
    units = {unit_of(path) for path in sources()}
    assert set().union(*LAYERS) - units == set()


@pytest.mark.parametrize("package", OWNERS)
def test_a_third_party_package_is_known_in_its_own_place_only(package):
    strangers = [
        str(path.relative_to(REPOSITORY))
        for path in sources()
        if any(module.split(".")[0] == package for module, _ in imported(path))
        and not str(path.relative_to(REPOSITORY)).startswith(OWNERS[package])
    ]
    assert strangers == []


def test_components_import_the_package_inside_their_bodies_only():
    outside = [
        f"{path.relative_to(REPOSITORY)}: {module}"
        for path in sorted((REPOSITORY / "components").rglob("*.py"))
        for module, top in imported(path)
        if top and module.split(".")[0] == "planish"
    ]
    assert outside == []


def test_nobody_imports_kfps_components_under_the_name_of_ours():
    names = [module for path in sources() for module, _ in imported(path)]
    assert "kfp.components" not in names
