"""Light modules stay light: process start is most of a small stage's time."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planish.__main__ import IN_PIECES
from planish.run.__main__ import STAGES as STAGE_MODULES
from planish.submit import command as submit_command

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
    "planish.run.stage",
    "planish.models.tokens",
    "planish.verifiers",
    "planish.verifiers.shaping",
    "planish.base.telemetry",
    "planish.algorithms",
    "planish.show.command",
    "planish.show.doctor",
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


def test_the_command_line_imports_no_heavy_package():
    assert heavy_after("from planish.__main__ import parser; parser()") == set()


def test_clients_and_the_monitor_import_what_the_base_brings():
    commands = {*IN_PIECES.values(), "planish.show.command", "planish.checkpoint.cli.actions"}
    commands |= {"planish.minder.cli.service", "planish.minder.cli.traces"}
    modules = modules_after("\n".join(f"import {module}" for module in sorted(commands)))
    assert modules & {*HEAVY, "pyarrow", "matplotlib"} == set()


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

# A shell that starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from planish.__main__ import main
sys.exit(main({words!r}))
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("rich.console", ["doctor"]),
        ("planish.checkpoint.cli.command", ["--help"]),
        ("planish.submit.command", ["show", "/absent"]),
        ("planish.stages.prepare.devices", ["plan", "dapo-tiny"]),
        ("kubernetes", ["status", "some-run"]),
    ],
)
def test_ctrl_c_while_packages_are_imported_is_one_line(module, words):
    code = INTERRUPTED.format(module=module, words=words)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    told = (done.returncode, done.stdout, done.stderr)
    assert told == (130, "", "planish: interrupted; the same command resumes\n")


def test_what_is_imported_before_ctrl_c_is_answered_is_little():
    ours = {m for m in modules_after("import planish.__main__") if m.startswith("planish")}
    assert ours == {"planish", "planish.__main__"}
    assert "rich" not in modules_after("import planish.__main__")


def test_the_commands_that_yield_pieces_are_those_of_their_modules():
    submitted = {n for n, module in IN_PIECES.items() if module == submit_command.__name__}
    assert submitted == set(submit_command.COMMANDS)
    assert all(callable(importlib.import_module(name).run) for name in IN_PIECES.values())


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


def test_a_checkpoint_is_saved_and_read_without_pandas(tmp_path):
    statement = (
        "from planish.checkpoint.format import metafile\n"
        "from planish.checkpoint.format.items import pack_columns, unpack_columns\n"
        "from tests.unit.checkpoint.format.metadata_samples import small\n"
        "import numpy as np\n"
        "metafile.decode(metafile.encode(small()))\n"
        "unpack_columns(pack_columns({}, {'a': np.arange(3), 'b': ['x', 'y']}))"
    )
    assert "pandas" not in modules_after(statement)


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


@pytest.mark.parametrize(
    ("typed", "wanted"), [("planish swe", "sweep"), ("planish run --dataset-", "--dataset-map")]
)
def test_a_shell_completes_commands_and_options(typed, wanted):
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    done = subprocess.run(
        # What it prints goes to descriptor 8.
        ["bash", "-c", '"$@" 8>&1 9>/dev/null', "bash", sys.executable, "-m", "planish"],
        env={**os.environ, **asked, "_ARGCOMPLETE_SUPPRESS_SPACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == wanted, done.stderr
