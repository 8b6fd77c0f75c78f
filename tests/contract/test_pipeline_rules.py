"""The lint accepts what we compile; the sizes that pipelines are planned with are true."""

import tempfile
from pathlib import Path

import pytest
import yaml
from kfp import compiler

from components.images import PROFILES
from pipelines.compile import BUILDERS, GOLDEN, compile_text, file_name
from pipelines.compile import main as compile_main
from pipelines.compiled import (
    MAX_OBJECT_BYTES,
    POD_STATUS_BYTES,
    TASK_BYTES,
    Compiled,
    object_bytes,
    pods_of,
    spec_bytes,
)
from pipelines.monitor import Monitor
from pipelines.post_train import build_post_train, profile_named
from tests.contract.pipeline_rules import lint

pytestmark = pytest.mark.usefixtures("quick_kfp")


@pytest.fixture(scope="module")
def text():
    monitor = Monitor("s3://b/minder.toml", max_restarts=2)
    return compile_text(profile_named("gpu-1x8", num_iterations=2), monitor=monitor)


@pytest.mark.parametrize("pipeline", sorted(BUILDERS))
@pytest.mark.parametrize("name", sorted(PROFILES))
def test_the_golden_files_have_no_fault(name, pipeline):
    assert lint((GOLDEN / file_name(PROFILES[name], pipeline)).read_text()) == []


def test_an_order_of_keys_and_whole_floats_change_nothing(text):
    assert lint(text) == []
    documents = yaml.load_all(text, yaml.CSafeLoader)
    assert lint(yaml.dump_all(documents, Dumper=yaml.CSafeDumper, sort_keys=False, width=20)) == []


@pytest.mark.slow
def test_a_release_takes_digests_only(text):
    images = {n: f"example.org/{n}@sha256:{'a' * 64}" for n in ("core", "rollout", "train")}
    pinned = compile_text(profile_named("cpu-tiny", num_iterations=1), images)
    assert lint(pinned, images=images, release=True) == []
    faults = lint(text, release=True)
    assert faults
    assert all("image of a release must be pinned, got" in fault for fault in faults)
    moving = {"core": "example.org/core:latest"}
    faults = lint(compile_text(profile_named("cpu-tiny", num_iterations=1), moving), images=moving)
    assert faults
    assert all("image must be of the table and stand still" in fault for fault in faults)


def compiled_of(name, **changes):
    text = compile_text(profile_named(name, **changes))
    documents = list(yaml.load_all(text, yaml.CSafeLoader))
    return Compiled.from_documents(documents)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        # Its own driver, two pods a shard, two for each of reward, train and checkpoint.
        ("cpu-tiny", {}, 1 + 2 * 2 + 3 * 2),
        ("gpu-16x8", {"num_shards": 1, "iterations_per_task": 0}, 1 + 2 + 3 * 2),
    ],
)
def test_pods_of_an_iteration(name, changes, expected):
    compiled = compiled_of(name, num_iterations=2, **changes)
    assert pods_of(compiled, "comp-iteration-1") == expected
    # Root, exit handler and condition have a driver each, the six tasks of a run two pods each.
    assert pods_of(compiled) == 3 + 6 * 2 + 2 * expected
    # A run that is done: three drivers, prepare and report.
    assert pods_of(compiled) - pods_of(compiled, "comp-condition-2") + 1 == 3 + 2 * 2


@pytest.mark.parametrize("name", [n for n in sorted(PROFILES) if PROFILES[n].iterations_per_task])
def test_tasks_of_several_iterations_need_two_pods_each(name):
    compiled = compiled_of(name, num_iterations=100)
    num_tasks = -(-100 // PROFILES[name].iterations_per_task)
    assert pods_of(compiled) == 3 + 6 * 2 + num_tasks * 2
    assert object_bytes(compiled) <= 300_000


@pytest.mark.slow
def test_what_tasks_of_every_iteration_run_stands_once():
    short, long = (compiled_of("cpu-tiny", num_iterations=count) for count in (2, 5))
    more = {f"comp-iteration-{number}" for number in (3, 4, 5)}
    assert set(short.components) | more == set(long.components)
    assert set(short.executors) == set(long.executors) == set(long.pods)
    # Graphs of five tasks each differ in their names; what the tasks run does not.
    added = (spec_bytes(long) - spec_bytes(short)) / 3
    assert added == pytest.approx(6 * TASK_BYTES, rel=0.02)


MEASURED = [(12, 351_000), (30, 777_000)]
"""Iterations of two shards and bytes of the specification on Kubeflow Pipelines 2.17, Argo 4.0, as
that pipeline was compiled: with loops and with all iterations written out. Since then settings and
descriptions have been added, about 17 kB whatever the number of iterations."""


def written_out(count):
    """Return a pipeline with the loops and the copies of the one that was measured."""
    profile = profile_named("cpu-tiny", num_iterations=count)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pipeline.yaml"
        compiler.Compiler().compile(build_post_train(profile, one_machine=True), path)
        documents = list(yaml.load_all(Path(path).read_text(), yaml.CSafeLoader))
    return Compiled.from_documents(documents)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "measured"), MEASURED)
def test_the_size_of_a_specification_is_that_of_the_back_end(count, measured, monkeypatch):
    # Of so many iterations only the specification was measured.
    monkeypatch.setattr("pipelines.post_train.MAX_OBJECT_BYTES", 2 * MAX_OBJECT_BYTES)
    assert spec_bytes(written_out(count)) == pytest.approx(measured + 17_000, rel=0.03)


def test_the_size_of_a_status_is_that_of_the_back_end():
    # Twelve iterations of two shards, 182 pods, and one more iteration, 14 pods.
    assert pytest.approx(398_000, rel=0.06) == 182 * POD_STATUS_BYTES
    assert pytest.approx(32_000, rel=0.01) == 14 * POD_STATUS_BYTES


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_run_of_a_profile_ends_within_the_limit_of_an_object(name):
    documents = yaml.load_all((GOLDEN / file_name(PROFILES[name])).read_text(), yaml.CSafeLoader)
    compiled = Compiled.from_documents(list(documents))
    assert object_bytes(compiled) <= MAX_OBJECT_BYTES == 900_000


@pytest.mark.slow
def test_a_run_that_outgrows_the_object_is_refused_with_a_remedy():
    (fault,) = lint(
        compile_text(profile_named("gpu-16x8", num_iterations=3, iterations_per_task=0))
    )
    assert "chain several runs" in fault
    with pytest.raises(ValueError, match=r"must be 1 to 3, got 4; .* 71 pods an iteration"):
        profile_named("gpu-16x8", num_iterations=4, iterations_per_task=0)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_the_table_of_profiles_in_the_readme_is_true(name):
    profile = PROFILES[name]
    documents = yaml.load_all((GOLDEN / file_name(profile)).read_text(), yaml.CSafeLoader)
    compiled = Compiled.from_documents(list(documents))
    row = (
        f"| {name} | {profile.num_iterations} | {profile.iterations_per_task or 'apart'} | "
        f"{profile.num_shards} | "
        f"{pods_of(compiled)} | {round(object_bytes(compiled) / 1000)} kB |"
    )
    assert row in (GOLDEN.parents[3] / "pipelines" / "README.md").read_text()


def test_a_file_that_is_no_pipeline_is_refused():
    with pytest.raises(ValueError, match="one document with `root`, got 0"):
        lint("a: 1\n")


@pytest.mark.slow
def test_compile_refuses_moving_images_of_a_release_and_runs_that_are_too_large(tmp_path, capsys):
    words = ["--pipeline", "post-train", "--out", str(tmp_path), "--profile"]
    pinned = [
        f"--image={n}=r/{n}@sha256:{'a' * 64}" for n in ("core", "monitor", "rollout", "train")
    ]
    assert compile_main([*words, "cpu-tiny", "--iterations", "1", "--release", *pinned]) == 0
    assert compile_main([*words, "cpu-tiny", "--iterations", "1", "--release"]) == 1
    assert "must end with @sha256" in capsys.readouterr().err
    assert (
        compile_main([*words, "cpu-tiny", "--iterations", "1", "--image", "core=r/c:latest"]) == 1
    )
    assert compile_main([*words, "gpu-16x8", "--resident", "0", "--iterations", "3"]) == 1
    assert "chain several runs" in capsys.readouterr().err
