"""What Kubeflow Pipelines 2.17 and Argo 4 do with the service account of a run, with its source.

Paths are of kubeflow/pipelines at tag 2.17.0 unless another repository stands in front. Left out is
what our pipelines never use: claims of volumes, snapshots, and reading a Workflow, which the driver
does only for placeholders of the time of a run.
"""

from typing import NamedTuple


class Need(NamedTuple):
    group: str
    resource: str
    verb: str
    name: str
    """The only object that is touched; empty for any."""
    source: str


RUNS = "backend/src/apiserver/server/run_server.go, asked by SubjectAccessReview with several users"
NEEDS = (
    Need("", "configmaps", "get", "kfp-launcher", "backend/src/v2/config/env.go: FromConfigMap"),
    Need(
        *("", "secrets", "get", "planish-store"),
        "backend/src/v2/objectstore/object_store.go: getS3BucketCredential",
    ),
    Need(
        *("", "pods", "get", ""),
        "backend/src/v2/component/launcher_v2.go: retryIndexFromPodAnnotation; "
        "backend/src/v2/driver/k8s.go: publishDriverExecution",
    ),
    Need(
        *("argoproj.io", "workflowtaskresults", "create", ""),
        "argoproj/argo-workflows docs/workflow-rbac.md",
    ),
    Need(
        *("argoproj.io", "workflowtaskresults", "patch", ""),
        "argoproj/argo-workflows docs/workflow-rbac.md",
    ),
    Need("pipelines.kubeflow.org", "runs", "create", "", f"{RUNS}: createRun"),
    Need("pipelines.kubeflow.org", "runs", "get", "", f"{RUNS}: getRun"),
    Need("pipelines.kubeflow.org", "runs", "list", "", f"{RUNS}: listRuns"),
)
