"""Light modules stay light: process start is most of a small stage's time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from planish.run.__main__ import STAGES as STAGE_MODULES

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "vllm", "megatron", "sklearn", "pandas", "datasets", "sympy")

PACKAGE = REPOSITORY / "src/planish"
CONFIGS = sorted(
    ".".join(("planish", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in PACKAGE.rglob("config.py")
)
LIGHT = [
    "planish.checkpoint",
    "planish.records",
    "planish.store",
    "planish.store.s3",
    "planish.run.stage",
    "planish.verifiers",
    "planish.verifiers.shaping",
    "planish.base.telemetry",
    "planish.algorithms",
    "planish.show.command",
    "planish.show.doctor",
    "planish.__main__",
    *CONFIGS,
    # An attempt that finds its work done, or refused for good, ends before torch is imported.
    *STAGE_MODULES.values(),
]


def modules_after(statement):
    """Return the names of all modules in a fresh process after `statement`."""
    code = f"{statement}\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def heavy_after(statement):
    return modules_after(statement) & {*HEAVY, "kfp", "minio", "prometheus_client"}


def test_light_modules_import_no_heavy_package():
    if heavy_after("\n".join(f"import {module}" for module in LIGHT)):
        assert {m: found for m in LIGHT if (found := heavy_after(f"import {m}"))} == {}


def test_components_and_pipelines_import_no_heavy_package_and_no_stage():
    modules = modules_after("import components, pipelines.post_train")
    assert modules & set(HEAVY) == set()
    assert {
        name for name in modules if name.startswith("planish.") and name.endswith("stage")
    } == set()


def test_every_configuration_class_is_found_without_heavy_packages():
    statement = (
        "from planish.base.config import SECTIONS, section_class\n"
        "tables = {'algorithm': {'name': 'dapo'}}\n"
        "[section_class(name, tables.get(name, {})) for name in SECTIONS]"
    )
    assert modules_after(statement) & set(HEAVY) == set()


def test_the_check_sees_a_heavy_package():
    assert heavy_after("import sys; sys.modules['torch'] = sys") == {"torch"}


def test_writing_and_reading_a_set_imports_no_pandas(tmp_path):
    statement = (
        "from planish.records import read_set, write_set\n"
        "from tests.unit.records.samples import SAMPLES\n"
        f"root = 'file://{tmp_path}/'\n"
        "refs = [(type(r), write_set(root + k, r, parents={}, attributes={}))\n"
        "        for k, f in SAMPLES.items() for r in [f()]]\n"
        "[read_set(cls, ref.uri) for cls, ref in refs]"
    )
    assert modules_after(statement) & set(HEAVY) == set()


def test_no_code_of_a_task_imports_kfp():
    # Inside a task kfp is imported in part: it has no client there (`_KFP_RUNTIME=true`).
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if "kfp" in {name.partition(".")[0] for name in names}:
                found.add(str(path.relative_to(PACKAGE)))
    assert found == set()
