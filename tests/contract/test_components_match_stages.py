"""Components and the stages behind them take the same arguments; the table of them is true."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import components
import planish
from components import images
from planish.run.stage import stage_parser
from tests.contract.pipeline_rules import OPTIONAL_STAGES, PIPELINES

FOLDER = Path(components.__file__).parent
STAGES = {
    "checkpoint": "checkpoint",
    "curate": "curate",
    "evaluate": "evaluate",
    "iterate": "iterate",
    "monitor_check": "monitor_check",
    "next_run": "next",
    "prepare": "prepare",
    "report": "report",
    "reshard": "reshard",
    "reward": "reward",
    "rollout": "rollout",
    "sft": "sft",
    "train": "train",
}
"""Component to stage: the key of the image and resource tables, and the label of its pods."""

SAMPLES = {"str": "x", "int": "3", "float": "0.5", "bool": "true"}


def spec(name):
    return getattr(components, name).component_spec


def source(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("name", sorted(STAGES))
def test_every_input_of_a_component_says_what_it_is(name):
    inputs = {
        key: value.description
        for key, value in (spec(name).inputs or {}).items()
        if value.type != "system.Status@0.0.1" and key != "status"
    }
    assert [key for key, text in inputs.items() if not (text or "").strip()] == []


def call_of(function):
    call = next(n for n in ast.walk(function) if isinstance(n, ast.Call) and _is_run(n))
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


def _is_run(node):
    return isinstance(node.func, ast.Name) and node.func.id == "run"


def stage_run(name):
    module = next(n.module for n in source(name).body if isinstance(n, ast.ImportFrom))
    return importlib.import_module(module).run


def outputs(name):
    """Return (output parameters, output artifacts) of a component."""
    found = spec(name).outputs or {}
    artifacts = [key for key, value in found.items() if value.type.startswith("system.")]
    return [key for key in found if key not in artifacts], artifacts


def test_every_component_is_exported_and_has_a_stage():
    assert components.__all__ == sorted(STAGES)
    assert set(STAGES.values()) == set(images.STAGE_IMAGES)
    for profile in images.PROFILES.values():
        assert set(profile.stages) == set(images.STAGE_IMAGES)


@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_component_is_one_import_and_one_call_by_keywords(name):
    body = source(name).body
    kinds = [type(node).__name__ for node in body]
    assert kinds[1:] in (["ImportFrom", "Return"], ["ImportFrom", "Expr"])
    assert kinds[0] == "Expr"
    assert isinstance(body[0].value, ast.Constant)
    assert not body[2].value.args


@pytest.mark.parametrize("name", sorted(STAGES))
def test_the_arguments_of_a_component_are_those_of_its_stage(name):
    accepted = inspect.signature(stage_run(name)).parameters
    passed = set(call_of(source(name)))
    needed = {k for k, p in accepted.items() if p.default is inspect.Parameter.empty}
    assert passed <= set(accepted)
    assert needed <= passed


@pytest.mark.parametrize("name", sorted(STAGES))
def test_the_arguments_of_a_component_parse_with_the_stages_own_parser(name):
    function = source(name)
    types = {a.arg: ast.unparse(a.annotation) for a in function.args.args}
    words = []
    for argument, value in call_of(function).items():
        sample = SAMPLES.get(types.get(value, ""), "x")
        words += [f"--{argument.replace('_', '-')}", sample]
    parsed = vars(stage_parser(stage_run(name)).parse_args(words))
    for argument, value in call_of(function).items():
        kind = types.get(value, "")
        if kind in SAMPLES:
            assert type(parsed[argument]).__name__ == kind


@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_stage_gives_the_output_parameters_that_its_component_declares(name):
    declared = outputs(name)[0]
    result = inspect.signature(stage_run(name), eval_str=True).return_annotation
    fields = getattr(result, "_fields", ())
    assert list(fields) == declared


@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_component_shows_at_most_two_artifacts(name):
    assert len(outputs(name)[1]) <= 2


@pytest.mark.parametrize("pipeline", sorted(PIPELINES))
def test_no_two_stages_of_a_run_show_an_artifact_of_the_same_name(pipeline):
    shown = [
        artifact
        for component, stage in STAGES.items()
        if stage in PIPELINES[pipeline].stages | {*OPTIONAL_STAGES}
        for artifact in outputs(component)[1]
    ]
    assert sorted(set(shown)) == sorted(shown)


@pytest.mark.parametrize("name", sorted(STAGES))
def test_parameters_are_scalars(name):
    for value in (spec(name).inputs or {}).values():
        allowed = ("String", "Integer", "Float", "Boolean", "system.", "PipelineTaskFinalStatus")
        assert value.type.startswith(allowed)


def test_the_tag_of_the_images_is_the_version_of_the_package():
    assert planish.__version__ == images.VERSION
    for reference in images.IMAGES.values():
        assert reference.endswith(f":{planish.__version__}")


def row(name):
    parameters, artifacts = outputs(name)
    inputs = list(spec(name).inputs or {})
    cells = [
        f"`{name}`",
        STAGES[name],
        images.STAGE_IMAGES[STAGES[name]],
        " ".join(inputs),
        " ".join(parameters),
        " ".join(artifacts),
        "beta",
    ]
    return "| " + " | ".join(cells) + " |"


def test_the_table_in_the_readme_is_the_code():
    text = (FOLDER / "README.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| `[a-z_]+` \|", line)]
    assert rows == [row(name) for name in sorted(STAGES)]


def test_the_resource_table_in_the_readme_is_the_code():
    text = (FOLDER / "README.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| [a-z_]+ \| .*[0-9] s \|$", line)]
    assert rows == [resource_row(stage) for stage in images.STAGE_IMAGES]


def resource_row(stage):
    cells = [stage]
    for profile in (images.CPU_TINY, images.GPU_1X8):
        wanted = profile.stages[stage]
        gpus = f", {wanted.gpus} GPU" if wanted.gpus else ""
        cells.append(f"{wanted.cpu} cpu, {wanted.memory}{gpus}")
        cells.append(f"{wanted.retries} x {wanted.timeout_seconds} s")
    return "| " + " | ".join(cells) + " |"
