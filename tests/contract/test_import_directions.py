"""Imports go downwards only; to change these tables is an architecture decision."""

import ast
import functools
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

LAYERS = [
    {"__version__", "base"},
    {"records", "store", "verifiers"},
    {"algorithms", "models", "engines", "checkpoint", "run"},
    {
        *("stages.prepare", "stages.curate", "stages.sft", "stages.rollout", "stages.reward"),
        *("stages.train", "stages.export", "stages.evaluate", "stages.report", "stages.next_run"),
        *("stages.monitor_check", "stages.reshard", "minder", "show", "submit"),
    },
    # Rollout, reward, train and export of several iterations, by their functions.
    {"stages.iterate"},
    {"components", "pipelines", "__main__"},
]
"""From the bottom up; a file may import from any layer below its own."""

EDGES = {
    ("records", "store"),
    # Files of a user are opened at one place, which looks at their frame first.
    ("verifiers", "records"),
    ("engines", "models"),
    ("checkpoint", "models"),
    ("stages.monitor_check", "minder"),
    ("show", "stages.report"),
    # The exit task of a failed run is the one that starts it again.
    ("stages.report", "stages.next_run"),
    ("submit", "stages.prepare"),
    *(("show", f"stages.{stage}") for stage in ("prepare", "curate", "sft", "evaluate")),
    *(("submit", f"stages.{stage}") for stage in ("curate", "report")),
    # The package hands out what a notebook calls, once it is asked for.
    ("__version__", "submit"),
    ("pipelines", "components"),
}
"""Allowed inside one layer; `report` is the only stage of it that imports another, and the monitor
is no stage. An evaluation without a run calls the functions of its stages."""

ROOMS = {
    "checkpoint": {
        "__init__": {"adapters", "api", "checkpoint_manager", "loading", "saving", "watch"},
        "format": set(),
        "ranks": set(),
        "pinned": set(),
        "commit": set(),
        "watch": {"commit"},
        "adapters": {"format"},
        "plan": {"format", "ranks"},
        "saving": {"commit", "format", "plan", "ranks", "watch"},
        "loading": {"adapters", "commit", "format", "plan", "ranks", "watch"},
        "convert": {
            *("adapters", "commit", "format", "loading", "pinned", "plan", "ranks", "saving"),
            "watch",
        },
        "api": {"adapters", "commit", "convert", "format", "loading", "ranks", "saving", "watch"},
        "checkpoint_manager": {"adapters", "api", "commit", "saving", "watch"},
        "train_state": {
            "adapters",
            "api",
            "commit",
            "convert",
            "format",
            "loading",
            "pinned",
            "ranks",
        },
        "reshard": {"commit", "convert", "format", "loading", "train_state"},
        "cli": {"commit", "convert", "format", "loading", "train_state", "watch"},
    },
    "minder": {
        "__init__": set(),
        "detect": set(),
        "act": {"detect"},
        "service": {"act", "detect"},
        "lab": {"act", "detect"},
        "check": {"act", "detect", "lab", "service"},
        "cli": {"detect", "lab", "service"},
    },
}
"""Rooms inside a part of the house -> the rooms beside them that they may import."""

DOORS = {
    "minder": {"check", "cli"},
    "checkpoint": {"cli", "reshard", "train_state"},
}
"""Part of the house -> the modules through which others use it, beside the part itself."""
OWNERS = {
    "certifi": ("src/planish/store/",),
    "prometheus_client": (
        "src/planish/base/telemetry.py",
        "src/planish/minder/service/own_metrics.py",
    ),
    "kfp": ("components/", "pipelines/"),
    "kfp_server_api": ("src/planish/run/", "src/planish/submit/"),
    "vllm": ("src/planish/engines/",),
    "megatron": ("src/planish/stages/train/", "src/planish/checkpoint/"),
    "math_verify": ("src/planish/verifiers/", "src/planish/show/verifier.py"),
    "datasets": ("src/planish/stages/curate/",),
    "rich": ("src/planish/show/", "src/planish/submit/local/", "src/planish/__main__.py"),
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
    return part_of(parts[2:] if parts[0] == "src" else parts)


def part_of(names):
    """Return the part of the house for the names below the package; each stage is one."""
    if names[0] == "stages" and len(names) > 1 and names[1] != "__init__":
        return f"stages.{names[1]}"
    return "__version__" if names[0] == "__init__" else names[0]


def target_of(module):
    parts = module.split(".")
    if parts[0] in {"components", "pipelines"}:
        return parts[0]
    if parts[0] != "planish":
        return None
    return part_of(parts[1:]) if len(parts) > 1 else "__version__"


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
        ("records", "import planish.stages.train.update", 1),
        ("records", "from planish.store import base\nfrom planish.base import telemetry", 0),
        ("store", "def f():\n    from planish.records import read_set", 1),
        ("stages.reward", "from planish.stages.rollout.stage import run", 1),
        ("checkpoint", "from planish import base, records", 0),
        ("models", "from planish import checkpoint", 1),
        ("pipelines", "import components.train", 0),
        ("stages.train", "import components.train", 1),
    ],
)
def test_the_check_sees_upward_and_sideways_imports(tmp_path, unit, code, expected):
    (tmp_path / "x.py").write_text(code)
    assert len(list(faults_of(tmp_path / "x.py", unit))) == expected


def door_faults(part, path):
    """Say which imports of a file from another part go past the doors."""
    for module, _ in imported(path):
        words = module.split(".")
        if words[:2] == ["planish", part] and len(words) > 3 and words[2] not in DOORS[part]:
            yield module.removeprefix(f"planish.{part}.")


@pytest.mark.parametrize("part", DOORS)
def test_other_parts_come_in_by_the_doors(part):
    others = [path for path in sources() if unit_of(path) != part]
    found = {module for path in others for module in door_faults(part, path)}
    assert found == set()


def room_faults(part, path, names):
    """Say which imports of a file go to a room that its own room may not use."""
    room = names[0]
    for module, _ in imported(path):
        words = module.split(".")
        target = words[2] if words[:2] == ["planish", part] and len(words) > 2 else room
        if target in ROOMS[part] and target not in {room, *ROOMS[part][room]}:
            yield f"{path} must not import {module}"


@pytest.mark.parametrize("part", ROOMS)
def test_rooms_import_along_allowed_edges_only(part):
    folder = REPOSITORY / "src/planish" / part
    files = {path: path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")}
    assert {names[0] for names in files.values()} == set(ROOMS[part])
    assert [
        fault for path, names in files.items() for fault in room_faults(part, path, names)
    ] == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f():\n    from planish.checkpoint.saving import engine", 1),
        ("from planish.checkpoint.format.geometry import Box", 0),
        ("from planish.checkpoint import api, commit", 1),
    ],
)
def test_the_check_sees_a_room_that_a_loader_may_not_use(tmp_path, code, expected):
    (tmp_path / "x.py").write_text(code)
    assert len(list(room_faults("checkpoint", tmp_path / "x.py", ("loading", "x")))) == expected


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
