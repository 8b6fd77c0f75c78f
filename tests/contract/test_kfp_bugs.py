"""Traps of kfp 2.17 that the design steps around: a test fails when one is mended upstream.

Each name says what kfp does wrong; when such a test fails, the workaround can go.
"""

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Optional

import pytest
import yaml
from kfp import compiler, dsl, local

from pipelines.local import output_restored

OPTIONS = {"base_image": "python:3.11", "packages_to_install": [], "install_kfp_package": False}

pytestmark = pytest.mark.filterwarnings("ignore")


@dsl.component(**OPTIONS)
def give() -> str:
    """Give a text."""
    return "outer"


@dsl.component(**OPTIONS)
def take(number: int) -> int:
    """Take a number."""
    return number


@dsl.component(**OPTIONS)
def note(folder: str, text: str):
    """Write a text into a folder of its own."""
    import pathlib
    import uuid

    pathlib.Path(folder, uuid.uuid4().hex).write_text(str(text))


def compiled(pipeline, tmp_path):
    path = tmp_path / "pipeline.yaml"
    compiler.Compiler().compile(pipeline, str(path))
    return list(yaml.safe_load_all(path.read_text()))


def run_local(pipeline, tmp_path, **arguments):
    # Tasks that run side by side leave kfp's `print` behind, which indents every line.
    with output_restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local.init(
            local.SubprocessRunner(use_venv=False),
            pipeline_root=str(tmp_path / "root"),
            raise_on_error=True,
        )
        return pipeline(**arguments)


def notes(folder):
    return sorted(path.read_text() for path in Path(folder).iterdir())


def test_b1_resources_from_a_parameter_inside_a_loop_dangle(tmp_path):
    @dsl.pipeline(name="b1")
    def pipeline(memory: str = "1Gi"):
        with dsl.ParallelFor([1, 2]) as item:
            take(number=item).set_memory_limit(memory)

    spec = compiled(pipeline, tmp_path)[0]
    loop = spec["components"]["comp-for-loop-2"]
    declared = set(loop["inputDefinitions"]["parameters"])
    task = loop["dag"]["tasks"]["take"]
    used = {s.get("componentInputParameter") for s in task["inputs"]["parameters"].values()}
    assert "pipelinechannel--memory" in used - declared


def test_b2_retries_of_an_exit_task_are_accepted(tmp_path):
    @dsl.pipeline(name="b2")
    def pipeline():
        last = give()
        last.set_retry(2)
        with dsl.ExitHandler(last):
            take(number=1)

    spec = compiled(pipeline, tmp_path)[0]
    assert spec["root"]["dag"]["tasks"]["give"]["retryPolicy"]["maxRetryCount"] == 2


def test_b6_collected_over_an_empty_loop_fails_locally(tmp_path):
    @dsl.component(**OPTIONS)
    def gather(numbers: list[int]) -> int:
        return len(numbers)

    @dsl.pipeline(name="b6")
    def pipeline(items: list) -> int:
        with dsl.ParallelFor(items) as item:
            taken = take(number=item)
        return gather(numbers=dsl.Collected(taken.output)).output

    with pytest.raises(ValueError, match="not found"):
        run_local(pipeline, tmp_path, items=[])


def test_b7_an_outer_output_inside_a_loop_becomes_the_loop_item(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()

    @dsl.pipeline(name="b7")
    def pipeline(folder: str):
        given = give()
        with dsl.ParallelFor([1, 2]):
            note(folder=folder, text=given.output)

    run_local(pipeline, tmp_path, folder=str(folder))
    assert notes(folder) != ["outer", "outer"]


@pytest.mark.slow
def test_b8_a_condition_on_a_named_output_is_never_true(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    script = f"""
        from typing import NamedTuple
        from kfp import dsl, local
        options = {OPTIONS!r}
        @dsl.component(**options)
        def both() -> NamedTuple("Both", [("a", str), ("b", int)]):
            return ("yes", 1)
        @dsl.component(**options)
        def note(folder: str):
            open(folder + "/ran", "w").write("ran")
        @dsl.pipeline(name="b8")
        def pipeline(folder: str):
            given = both()
            with dsl.If(given.outputs["a"] == "yes"):
                note(folder=folder)
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root={str(tmp_path / "r")!r})
        pipeline(folder={str(folder)!r})
    """
    path = tmp_path / "b8.py"
    path.write_text(textwrap.dedent(script))
    subprocess.run([sys.executable, str(path)], check=True, capture_output=True)
    assert notes(folder) == []


def test_b9_loop_items_given_to_a_text_input_become_floats(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()

    @dsl.pipeline(name="b9")
    def pipeline(folder: str):
        with dsl.ParallelFor([1, 2]) as item:
            note(folder=folder, text=f"shard-{item}")

    run_local(pipeline, tmp_path, folder=str(folder))
    assert notes(folder) == ["shard-1.0", "shard-2.0"]


def test_b10_a_workspace_root_is_deleted_with_everything_in_it(tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "mine").write_text("precious")

    @dsl.pipeline(name="b10")
    def pipeline():
        give()

    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(tmp_path / "root"),
        workspace_root=str(workspace),
    )
    with output_restored():
        pipeline()
    assert not (workspace / "mine").exists()


def test_b11_an_absent_parameter_cannot_be_passed_on(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()

    @dsl.component(**OPTIONS)
    def maybe(folder: str, text: Optional[str] = None):  # noqa: UP045 - kfp knows no unions
        import pathlib

        pathlib.Path(folder, "ran").write_text(str(text))

    @dsl.pipeline(name="b11")
    def pipeline(folder: str, text: Optional[str] = None):  # noqa: UP045
        maybe(folder=folder, text=text)

    with pytest.raises(Exception, match="Unknown value type"):
        run_local(pipeline, tmp_path, folder=str(folder))


def test_b12_secrets_are_ignored_locally(tmp_path):
    from kfp import kubernetes

    folder = tmp_path / "notes"
    folder.mkdir()

    @dsl.component(**OPTIONS)
    def look(folder: str):
        import os
        import pathlib

        pathlib.Path(folder, "ran").write_text(os.environ.get("FROM_SECRET", "nothing"))

    @dsl.pipeline(name="b12")
    def pipeline(folder: str):
        kubernetes.use_secret_as_env(look(folder=folder), "secret", {"key": "FROM_SECRET"})

    run_local(pipeline, tmp_path, folder=str(folder))
    assert notes(folder) == ["nothing"]


def test_b13_the_subprocess_runner_refuses_container_components(tmp_path):
    @dsl.container_component
    def container():
        return dsl.ContainerSpec(image="python:3.11", command=["true"])

    @dsl.pipeline(name="b13")
    def pipeline():
        container()

    with pytest.raises(RuntimeError, match="only supports running Lightweight Python"):
        run_local(pipeline, tmp_path)


def test_b15_integers_in_metadata_come_back_as_floats(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()

    @dsl.component(**OPTIONS)
    def make(data: dsl.Output[dsl.Dataset]):
        data.metadata["step"] = 3
        with open(data.path, "w") as file:
            file.write("x")

    @dsl.component(**OPTIONS)
    def use(folder: str, data: dsl.Input[dsl.Dataset]):
        import pathlib

        pathlib.Path(folder, "ran").write_text(repr(data.metadata["step"]))

    @dsl.pipeline(name="b15")
    def pipeline(folder: str):
        use(folder=folder, data=make().outputs["data"])

    run_local(pipeline, tmp_path, folder=str(folder))
    assert notes(folder) == ["3.0"]


def test_b16_the_subprocess_runner_makes_a_virtual_environment_unless_told():
    assert local.SubprocessRunner().use_venv is True


def test_b17_a_nested_pipeline_with_an_artifact_input_fails_locally(tmp_path):
    @dsl.component(**OPTIONS)
    def make(data: dsl.Output[dsl.Dataset]):
        with open(data.path, "w") as file:
            file.write("x")

    @dsl.component(**OPTIONS)
    def use(data: dsl.Input[dsl.Dataset]):
        pass

    @dsl.pipeline(name="inner")
    def inner(data: dsl.Input[dsl.Dataset]):
        use(data=data)

    @dsl.pipeline(name="b17")
    def pipeline():
        inner(data=make().outputs["data"])

    with pytest.raises(Exception, match=r"data|Parent pipeline input"):
        run_local(pipeline, tmp_path)


def test_equal_names_in_nested_pipelines_mix_up_their_pod_settings(tmp_path):
    from kfp import kubernetes

    def build(label):
        @dsl.pipeline(name="inner")
        def inner(number: int):
            kubernetes.add_pod_label(take(number=number), "label", label)
            kubernetes.add_pod_label(give(), "label", label)

        return inner

    inners = [build("one"), build("two")]

    @dsl.pipeline(name="outer")
    def outer():
        for inner in inners:
            inner(number=1)

    pods = compiled(outer, tmp_path)[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    labels = {name: pod["podMetadata"]["labels"]["label"] for name, pod in pods.items()}
    assert labels["exec-take-2"] == labels["exec-give-2"] == "two"
    assert "two" in (labels["exec-take"], labels["exec-give"])


def test_integers_above_two_to_the_53_lose_digits(tmp_path):
    seed = 2**53 + 1

    @dsl.pipeline(name="large")
    def pipeline():
        take(number=seed)

    spec = compiled(pipeline, tmp_path)[0]
    value = spec["root"]["dag"]["tasks"]["take"]["inputs"]["parameters"]["number"]
    assert int(value["runtimeValue"]["constant"]) == 2**53 != seed


def test_the_process_argument_that_carries_inputs_is_limited():
    size = os.sysconf("SC_PAGE_SIZE") * 32
    assert size == 131_072
    subprocess.run(["true", "x" * (size - 1)], check=True)
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["true", "x" * size], check=True)
