"""The lint accepts what we compile, and notices each thing that it is there to notice."""

import copy
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
from tests.contract.pipeline_rules import RULES, lint, lint_documents

pytestmark = pytest.mark.usefixtures("quick_kfp")


@pytest.fixture(scope="module")
def documents():
    monitor = Monitor("s3://b/minder.toml", max_restarts=2)
    text = compile_text(profile_named("gpu-1x8", num_iterations=2), monitor=monitor)
    return list(yaml.load_all(text, yaml.CSafeLoader))


def rules_broken(documents, **options):
    return {fault.rule for fault in lint_documents(documents, **options)}


def exit_dag(spec):
    return spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]


def work(spec):
    return spec["components"]["comp-condition-2"]["dag"]["tasks"]


def iteration(spec):
    return spec["components"]["comp-iteration-1"]["dag"]["tasks"]


def undeclared_input(spec, _):
    # What KFP 2.17 compiles for a run parameter as a resource request inside a loop.
    del spec["components"]["comp-iteration-1"]["inputDefinitions"]["parameters"]["policy_pin"]


def undeclared_secret(_, pods):
    reference = pods["exec-rollout"]["secretAsEnv"][0]["secretNameParameter"]
    reference["componentInputParameter"] = "pipelinechannel--nothing"


def unknown_producer(spec, _):
    source = iteration(spec)["train-i1"]["inputs"]["artifacts"]["rewards"]
    source["taskOutputArtifact"]["producerTask"] = "reward-9"


def producer_without_edge(spec, _):
    iteration(spec)["train-i1"]["dependentTasks"] = []


def unknown_producer_of_a_pod(_, pods):
    source = {"producerTask": "prepare-9", "outputParameterKey": "node_affinity"}
    pods["exec-curate"]["nodeAffinity"] = [{"nodeAffinityJson": {"taskOutputParameter": source}}]


def output_of_a_missing_task(spec, _):
    outputs = spec["components"]["comp-iteration-1"]["dag"]["outputs"]["parameters"]
    outputs["state_pin"]["valueFromParameter"]["producerSubtask"] = "nobody"


def cycle(spec, _):
    iteration(spec)["reward-i1"]["dependentTasks"].append("checkpoint-i1")


def stage_before_prepare(spec, _):
    task = exit_dag(spec)["condition-2"]
    task["dependentTasks"] = []
    task["inputs"]["parameters"] = {}


def missing_stage(spec, _):
    del work(spec)["evaluate"]
    work(spec)["next-run"]["dependentTasks"].remove("evaluate")


def cached_stage(spec, _):
    iteration(spec)["train-i1"]["cachingOptions"] = {"enableCache": True}


def gpu_without_toleration(_, pods):
    del pods["exec-train"]["tolerations"]


def gpu_without_selector(_, pods):
    del pods["exec-train"]["nodeSelector"]


def gpu_without_shared_memory(_, pods):
    del pods["exec-rollout"]["emptyDirMounts"][0]


def cpu_with_accelerator(spec, _):
    container = spec["deploymentSpec"]["executors"]["exec-reward"]["container"]
    container["resources"]["accelerator"] = {"resourceType": "nvidia.com/gpu"}


def no_timeout(_, pods):
    del pods["exec-reward"]["activeDeadlineSeconds"]


def no_memory_limit(spec, _):
    container = spec["deploymentSpec"]["executors"]["exec-reward"]["container"]
    del container["resources"]["resourceMemoryLimit"]


def foreign_image(spec, _):
    spec["deploymentSpec"]["executors"]["exec-reward"]["container"]["image"] = "python:3.11"


def image_pulled_each_time(_, pods):
    pods["exec-train"]["imagePullPolicy"] = "Always"


def no_run_id(_, pods):
    pods["exec-reward"]["fieldPathAsEnv"].pop(0)


def no_stage_label(_, pods):
    del pods["exec-curate"]["podMetadata"]["labels"]["planish/stage"]


def no_secret(_, pods):
    del pods["exec-curate"]["secretAsEnv"]


def plain_secret(spec, _):
    container = spec["deploymentSpec"]["executors"]["exec-reward"]["container"]
    container["env"] = [{"name": "MINIO_SECRET_KEY", "value": "hunter2hunter2"}]


def secret_in_a_parameter(spec, _):
    exit_dag(spec)["prepare"]["inputs"]["parameters"]["requests"] = {
        "runtimeValue": {"constant": "https://me:hunter2@example.org"}
    }


def no_retries(spec, _):
    del iteration(spec)["reward-i1"]["retryPolicy"]


def retried_graph(spec, _):
    tasks = work(spec)
    tasks["iteration-1"]["retryPolicy"] = dict(tasks["curate"]["retryPolicy"])


def first_task_that_says_nothing(spec, _):
    del exit_dag(spec)["prepare"]["retryPolicy"]


def short_backoff(spec, _):
    iteration(spec)["train-i1"]["retryPolicy"]["backoffMaxDuration"] = "3600s"


def retried_exit_task(spec, _):
    spec["root"]["dag"]["tasks"]["report"]["retryPolicy"] = {"maxRetryCount": 1}


def exit_task_for_success_only(spec, _):
    del spec["root"]["dag"]["tasks"]["report"]["triggerPolicy"]


def argument_that_no_stage_takes(spec, _):
    container = spec["deploymentSpec"]["executors"]["exec-reward"]["container"]
    container["command"][-1] = container["command"][-1].replace(
        "num_shards=num_shards", "shards=num_shards"
    )


def argument_of_another_type(spec, _):
    container = spec["deploymentSpec"]["executors"]["exec-reward"]["container"]
    container["command"][-1] = container["command"][-1].replace("number: int", "number: str")


def input_not_given(spec, _):
    del iteration(spec)["checkpoint-i1"]["inputs"]["parameters"]["offset"]


def loop(spec, raw="[0, 1]", limit=2):
    task = iteration(spec)["rollout-i1"]
    task["parameterIterator"] = {"itemInput": "shard", "items": {"raw": raw}}
    task["iteratorPolicy"] = {"parallelismLimit": limit}
    return task


def loop_over_texts(spec, _):
    loop(spec, '["a", "b"]')


def loop_over_artifacts(spec, _):
    loop(spec)["artifactIterator"] = {}


def loop_without_limit(spec, _):
    loop(spec, limit=0)


def too_large(spec, _):
    spec["components"]["comp-curate"]["padding"] = "x" * MAX_OBJECT_BYTES


def too_many_pods(spec, _):
    loop(spec, str(list(range(400))))


def pod_without_executor(_, pods):
    pods["exec-ghost"] = copy.deepcopy(pods["exec-curate"])


def executor_without_pod(_, pods):
    del pods["exec-evaluate"]


def hidden_parameter(spec, _):
    del spec["root"]["inputDefinitions"]["parameters"]["overrides"]


def one_pod_that_goes_anywhere(_, pods):
    del pods["exec-rollout"]["nodeAffinity"]


def a_second_alternative(_, pods):
    other = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
    pods["exec-train"]["nodeAffinity"].append(other)


def an_affinity_of_its_own(_, pods):
    constant = {"nodeAffinityJson": {"runtimeValue": {"constant": {}}}}
    pods["exec-train"]["nodeAffinity"] = [constant]


def an_exit_task_that_keeps_away(_, pods):
    pods["exec-report"]["nodeAffinity"] = pods["exec-curate"]["nodeAffinity"]


def undescribed_parameter(spec, _):
    del spec["root"]["inputDefinitions"]["parameters"]["seed"]["description"]


def retyped_parameter(spec, _):
    spec["root"]["inputDefinitions"]["parameters"]["seed"]["parameterType"] = "STRING"


MUTATIONS = [
    *((1, undeclared_input), (1, undeclared_secret)),
    *((2, unknown_producer), (2, producer_without_edge), (2, output_of_a_missing_task)),
    (2, unknown_producer_of_a_pod),
    *((3, cycle), (3, stage_before_prepare), (3, missing_stage)),
    (4, cached_stage),
    *((5, gpu_without_toleration), (5, gpu_without_selector), (5, gpu_without_shared_memory)),
    *((5, cpu_with_accelerator), (5, no_timeout), (5, no_memory_limit)),
    *((6, foreign_image), (6, image_pulled_each_time)),
    *(
        (7, no_run_id),
        (7, no_stage_label),
        (7, no_secret),
        (7, plain_secret),
    ),
    (7, secret_in_a_parameter),
    *((8, no_retries), (8, short_backoff), (8, retried_exit_task)),
    *((8, retried_graph), (8, first_task_that_says_nothing)),
    (8, exit_task_for_success_only),
    *((9, argument_that_no_stage_takes), (9, argument_of_another_type), (9, input_not_given)),
    *((10, loop_over_texts), (10, loop_over_artifacts), (10, loop_without_limit)),
    *((11, too_large), (11, too_many_pods)),
    *((12, pod_without_executor), (12, executor_without_pod)),
    *((13, hidden_parameter), (13, undescribed_parameter), (13, retyped_parameter)),
    *((14, one_pod_that_goes_anywhere), (14, a_second_alternative)),
    *((14, an_affinity_of_its_own), (14, an_exit_task_that_keeps_away)),
]


@pytest.mark.parametrize("pipeline", sorted(BUILDERS))
@pytest.mark.parametrize("name", sorted(PROFILES))
def test_the_golden_files_have_no_fault(name, pipeline):
    assert lint((GOLDEN / file_name(PROFILES[name], pipeline)).read_text()) == []


def reshard_documents():
    text = (GOLDEN / file_name(PROFILES["cpu-tiny"], "reshard")).read_text()
    return list(yaml.load_all(text, yaml.CSafeLoader))


@pytest.mark.parametrize(
    ("rule", "words", "mutate"),
    [
        (3, "pipeline must be one of", lambda spec: spec["pipelineInfo"].update(name="resharp")),
        (
            *(3, "must come after the first stage"),
            lambda spec: exit_dag(spec)["reshard"].update(dependentTasks=[], inputs={}),
        ),
        (8, "exactly the exit task", lambda spec: spec["root"]["dag"]["tasks"]["checkpoint-retain"]
         .pop("triggerPolicy")),
        (8, "must have retries", lambda spec: exit_dag(spec)["reshard"].pop("retryPolicy")),
        (13, "`layout` is missing", lambda spec: spec["root"]["inputDefinitions"]["parameters"]
         .pop("layout")),
    ],
)  # fmt: skip
def test_the_reshard_pipeline_has_rules_of_its_own(rule, words, mutate):
    documents = reshard_documents()
    mutate(documents[0])
    found = [fault for fault in lint_documents(documents) if fault.rule == rule]
    assert any(words in str(fault) for fault in found), found


@pytest.mark.parametrize(("rule", "mutate"), MUTATIONS, ids=[m.__name__ for _, m in MUTATIONS])
def test_a_broken_pipeline_breaks_its_rule(documents, rule, mutate):
    broken = copy.deepcopy(documents)
    mutate(broken[0], broken[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"])
    assert rule in rules_broken(broken)


def test_every_rule_has_a_mutation():
    assert {rule for rule, _ in MUTATIONS} == set(RULES) == set(range(1, 15))


def test_an_order_of_keys_and_whole_floats_change_nothing(documents):
    assert rules_broken(documents) == set()
    text = yaml.dump_all(documents, Dumper=yaml.CSafeDumper, sort_keys=False, width=20)
    assert lint(text) == []


@pytest.mark.slow
def test_a_release_takes_digests_only(documents):
    images = {n: f"example.org/{n}@sha256:{'a' * 64}" for n in ("core", "rollout", "train")}
    text = compile_text(profile_named("cpu-tiny", num_iterations=1), images)
    assert lint(text, images=images, release=True) == []
    assert rules_broken(documents, release=True) == {6}
    moving = {"core": "example.org/core:latest"}
    text = compile_text(profile_named("cpu-tiny", num_iterations=1), moving)
    assert {fault.rule for fault in lint(text, images=moving)} == {6}


def compiled_of(name, **changes):
    text = compile_text(profile_named(name, **changes))
    documents = list(yaml.load_all(text, yaml.CSafeLoader))
    return Compiled.from_documents(documents)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        # Its own driver, two pods a shard, two for each of reward, train and checkpoint.
        ("cpu-tiny", {}, 1 + 2 * 2 + 3 * 2),
        ("cpu-tiny", {"compact": True}, 1 + 2 * 2 + 2),
        ("gpu-1x8", {"num_shards": 1}, 1 + 2 + 3 * 2),
    ],
)
def test_pods_of_an_iteration(name, changes, expected):
    compiled = compiled_of(name, num_iterations=2, **changes)
    assert pods_of(compiled, "comp-iteration-1") == expected
    # Root, exit handler and condition have a driver each, the six tasks of a run two pods each.
    assert pods_of(compiled) == 3 + 6 * 2 + 2 * expected
    # A run that is done: three drivers, prepare and report.
    assert pods_of(compiled) - pods_of(compiled, "comp-condition-2") + 1 == 3 + 2 * 2


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
    (fault,) = lint(compile_text(profile_named("gpu-4x8", num_iterations=3)))
    assert fault.rule == 11
    assert "chain several runs" in fault.message
    with pytest.raises(ValueError, match=r"must be 1 to 3, got 4; .* 71 pods an iteration"):
        profile_named("gpu-4x8", num_iterations=4)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_the_table_of_profiles_in_the_readme_is_true(name):
    profile = PROFILES[name]
    documents = yaml.load_all((GOLDEN / file_name(profile)).read_text(), yaml.CSafeLoader)
    compiled = Compiled.from_documents(list(documents))
    row = (
        f"| {name} | {profile.num_iterations} | {profile.num_shards} | "
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
    assert compile_main([*words, "gpu-4x8", "--iterations", "3"]) == 1
    assert "chain several runs" in capsys.readouterr().err
