"""Pods and nodes of the API server as values; jobs by label."""

import json

import pytest

from planish.minder.act.config import KubernetesConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.objects import group_jobs, parse_pod, pods_on

CONFIG = KubernetesConfig()


def raw_pod(name="p", node="n1", *, labels=None, annotations=None, spec=None, phase="Running"):
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "labels": {names.JOB_LABELS[0]: "job"} if labels is None else labels,
            "annotations": annotations or {},
        },
        "spec": {"nodeName": node, **(spec or {})},
        "status": {"phase": phase, "startTime": "1970-01-01T00:01:00Z"},
    }


def jobs_of(*pods):
    return group_jobs(pod for pod in (parse_pod(raw, CONFIG) for raw in pods) if pod)


def test_the_first_label_counts_and_pods_without_any_do_not():
    both = {names.JOB_LABELS[2]: "workflow", names.JOB_LABELS[0]: "operator"}
    assert [job.name for job in jobs_of(raw_pod(labels=both), raw_pod(labels={"app": "x"}))] == [
        "operator"
    ]
    mine = KubernetesConfig(job_labels=("team/job",))
    assert parse_pod(raw_pod(labels={"team/job": "x"}), mine).job == "x"


def test_only_running_pods_on_a_node_count_and_no_drivers():
    driver = raw_pod("d", "n9", annotations={names.KFP_ROLE: "driver"})
    launcher = raw_pod("l", "n1", annotations={names.KFP_ROLE: "launcher"})
    ended = [raw_pod(phase, phase, phase=phase) for phase in ("Pending", "Succeeded", "Unknown")]
    (job,) = jobs_of(driver, launcher, raw_pod("w", ""), *ended)
    assert job.machines == ("n1",)


def test_stages_of_a_workflow_are_roles_where_no_label_says_otherwise():
    def labels(stage):
        return {names.WORKFLOW_LABEL: "run", names.STAGE_LABEL: stage}

    every, rollout = jobs_of(
        raw_pod("a", labels=labels("rollout")),
        raw_pod("b", labels={**labels("train"), names.ROLE_LABEL: "all"}),
    )
    assert (every.key, every.full_name, every.role) == ("team/run/all", "team/run", "all")
    assert rollout.key == "team/run/rollout"


TRAINING = "training.kubeflow.org"
LEADER_WORKER = "leaderworkerset.sigs.k8s.io"
LABELLED = {
    # kubeflow/training-operator: pkg/controller.v1/common, labels of GenLabels and the replica
    "PyTorchJob": [
        ({f"{TRAINING}/job-name": "j", f"{TRAINING}/operator-name": "pytorchjob-controller",
          f"{TRAINING}/replica-type": kind, f"{TRAINING}/replica-index": index, **role}, {})
        for kind, index, role in [
            ("master", "0", {f"{TRAINING}/job-role": "master"}), ("worker", "0", {}),
            ("worker", "1", {}),
        ]
    ],
    "TFJob": [
        ({f"{TRAINING}/job-name": "j", f"{TRAINING}/replica-type": kind}, {})
        for kind in ("chief", "worker", "ps")
    ],
    # kubeflow/mpi-operator: pkg/controller, defaultLabels
    "MPIJob": [
        ({f"{TRAINING}/job-name": "j", f"{TRAINING}/operator-name": "mpi-operator",
          f"{TRAINING}/job-role": role}, {})
        for role in ("launcher", "worker", "worker")
    ],
    # kubernetes-sigs/jobset: api/jobset/v1alpha2; its pods are those of Indexed Jobs
    "JobSet": [
        ({"jobset.sigs.k8s.io/jobset-name": "j", "jobset.sigs.k8s.io/replicatedjob-name": name,
          "batch.kubernetes.io/job-name": f"j-{name}-0", names.RANK_LABEL: index}, {})
        for name, index in [("trainer", "0"), ("trainer", "1"), ("rollout", "0")]
    ],
    # ray-project/kuberay: ray-operator/controllers/ray/utils/constant.go
    "RayCluster": [
        ({"ray.io/cluster": "j", "ray.io/node-type": kind, "ray.io/group": group}, {})
        for kind, group in [("head", "headgroup"), ("worker", "gpu"), ("worker", "gpu")]
    ],
    # volcano-sh/volcano: pkg/controllers/job, createJobPod
    "Volcano": [
        ({"volcano.sh/job-name": "j", "volcano.sh/task-spec": task, "volcano.sh/task-index": "0"},
         {"volcano.sh/task-spec": task})
        for task in ("master", "worker", "mpimaster", "ps")
    ],
    # kubernetes-sigs/lws: api/leaderworkerset/v1
    "LeaderWorkerSet": [
        ({f"{LEADER_WORKER}/name": "j", f"{LEADER_WORKER}/group-index": group,
          f"{LEADER_WORKER}/worker-index": worker}, {})
        for group, worker in [("0", "0"), ("0", "1"), ("1", "0")]
    ],
    "Indexed Job": [
        ({"batch.kubernetes.io/job-name": "j", "batch.kubernetes.io/controller-uid": "u",
          names.RANK_LABEL: index}, {names.RANK_LABEL: index})
        for index in ("0", "1")
    ],
    "Job": [({"batch.kubernetes.io/job-name": "j"}, {})] * 2,
    # kubeflow/pipelines: backend/src/v2/compiler/argocompiler/dag.go
    "Kubeflow Pipelines": [
        ({names.WORKFLOW_LABEL: "j", "pipelines.kubeflow.org/v2_component": "true"},
         {names.NODE_NAME: f"j.root.{path}.executor{retry}"})
        for path, retry in [
            ("loop.iteration-iterations(0:0).iteration-item.fit", ""),
            ("loop.iteration-iterations(1:1).iteration-item.fit", "(0)"), ("score", "(0)"),
        ]
    ],
    "Argo": [
        ({names.WORKFLOW_LABEL: "j"}, {names.NODE_NAME: name})
        for name in ("j[0].fit(0:a.b)", "j[0].fit(1:c)", "j")
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("PyTorchJob", {"team/j": "012"}),
        ("TFJob", {"team/j": "01", "team/j/ps": "2"}),
        ("MPIJob", {"team/j": "12"}),
        ("JobSet", {"team/j/trainer": "01", "team/j/rollout": "2"}),
        ("RayCluster", {"team/j/headgroup": "0", "team/j/gpu": "12"}),
        ("Volcano", {"team/j": "01", "team/j/ps": "3"}),
        ("LeaderWorkerSet", {"team/j/leader": "02", "team/j/worker": "1"}),
        ("Indexed Job", {"team/j": "01"}),
        ("Job", {}),
        ("Kubeflow Pipelines", {"team/j/fit": "01", "team/j/score": "2"}),
        ("Argo", {"team/j/fit": "01", "team/j": "2"}),
    ],
)
def test_jobs_are_grouped_as_their_controllers_label_them(kind, groups):
    pods = [
        raw_pod(f"p{number}", str(number), labels=labels, annotations=annotations)
        for number, (labels, annotations) in enumerate(LABELLED[kind])
    ]
    assert {job.key: "".join(job.machines) for job in jobs_of(*pods)} == groups


def test_a_launcher_on_a_machine_belongs_to_its_job_though_it_is_no_rank():
    pods = [
        parse_pod(raw_pod(f"p{number}", "n1", labels=labels), CONFIG)
        for number, (labels, _) in enumerate(LABELLED["MPIJob"])
    ]
    (job,) = group_jobs(pods)
    assert [pod.name for pod in job.pods] == ["p1", "p2"]
    assert [pod.name for pod in pods_on(pods, job, "n1")] == ["p0", "p1", "p2"]


@pytest.mark.parametrize(
    ("given", "is_observed"), [({}, True), ({"minder/action": "evict"}, False)]
)
def test_engines_that_serve_are_only_observed_unless_a_label_says_otherwise(given, is_observed):
    labels = {**LABELLED["LeaderWorkerSet"][0][0], **given}
    (job,) = jobs_of(raw_pod(labels=labels))
    assert job.is_observed_only is is_observed


def test_a_pod_tells_its_run_stage_iteration_and_pipeline_stage():
    labels = {
        names.WORKFLOW_LABEL: "run-x",
        names.RUN_ID_LABEL: "1234",
        names.STAGE_LABEL: "train",
        names.ITERATION_LABEL: "7",
        names.PIPELINE_STAGE_LABEL: "first",
    }
    (job,) = jobs_of(raw_pod(labels=labels))
    (pod,) = job.pods
    assert (job.run_id, job.stage, job.iteration) == ("1234", "train", 7)
    assert (pod.workflow, dict(job.stages)) == ("run-x", {"n1": "first"})


@pytest.mark.parametrize(
    ("place", "iteration"),
    [
        ("run-x.root.exit-handler-1.iteration-12.train.executor(0)", 12),
        ("run-x(0).root(0).exit-handler-1(0).iteration-3(0).rollout-2.executor(1)", 3),
        ("run-x.root.exit-handler-1.curate.executor(0)", 0),
        ("run-x.root.my-iteration-3.train", 0),
    ],
)
def test_kubeflow_tells_the_iteration_by_the_place_of_the_task(place, iteration):
    pod = raw_pod(labels={names.WORKFLOW_LABEL: "run-x"})
    pod["metadata"]["annotations"] = {names.NODE_NAME: place}
    assert parse_pod(pod, CONFIG).iteration == iteration


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 400])
def test_a_label_that_is_no_number_is_none(text):
    labels = {names.JOB_LABELS[0]: "j", names.ITERATION_LABEL: text}
    pod = parse_pod(raw_pod(labels=labels), CONFIG)
    assert pod.iteration == 0


EXECUTOR = json.dumps({"inputs": {"parameterValues": {"root": "s3://b/kfp/"}}})


@pytest.mark.parametrize(
    ("container", "root"),
    [
        ({"args": ["--root=s3://b/r", "--x=1"]}, "s3://b/r"),
        ({"args": ["--x", "1", "--root", "s3://b/r"]}, "s3://b/r"),
        ({"command": ["launch", "--executor_input", EXECUTOR, "--"]}, "s3://b/kfp"),
        ({"command": ["launch", "--executor_input", "{"]}, ""),
        ({"command": ["launch", "--executor_input"]}, ""),
        ({"args": ["--root=relative"]}, ""),
        ({}, ""),
    ],
)
def test_the_root_of_the_run_is_read_from_the_arguments(container, root):
    pod = parse_pod(raw_pod(spec={"containers": [container]}), CONFIG)
    assert pod.run_root == root
    named = raw_pod(spec={"containers": [container]}, annotations={names.RUN_ROOT: "file:///r"})
    assert parse_pod(named, CONFIG).run_root == "file:///r"


def test_the_last_start_of_a_container_is_the_start_of_the_job():
    raw = raw_pod()
    raw["status"]["containerStatuses"] = [
        {"state": {"running": {"startedAt": "1970-01-01T01:00:00Z"}}},
        {"state": {"waiting": {}}},
        *({"state": {"running": {"startedAt": odd}}} for odd in ("", None, 5, "yesterday")),
    ]
    (job,) = jobs_of(raw, raw_pod("q", "n2"))
    assert (job.started, [pod.started for pod in job.pods]) == (3600, [3600, 60])


def test_daemons_and_mirrors_are_never_evicted():
    daemon = raw_pod()
    daemon["metadata"]["ownerReferences"] = [{"kind": "DaemonSet"}]
    assert not parse_pod(daemon, CONFIG).is_evictable
    assert not parse_pod(raw_pod(annotations={names.MIRROR: "x"}), CONFIG).is_evictable
    assert parse_pod(raw_pod(), CONFIG).is_evictable
