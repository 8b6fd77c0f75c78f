"""What Kubeflow Pipelines 2.17 and Argo 4 do with the account of a run, and what they request.

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


class Service(NamedTuple):
    name: str
    cpu: str
    """Cores that its pod requests: the larger of all containers and one init container."""
    memory: str
    source: str


KUBERNETES = (
    *(
        Service(name, cpu, "0", "kubernetes/kubernetes cmd/kubeadm/app/phases/controlplane")
        for name, cpu in (("apiserver", "250m"), ("controllers", "200m"), ("scheduler", "100m"))
    ),
    Service("etcd", "100m", "100Mi", "kubernetes/kubernetes cmd/kubeadm/app/phases/etcd/local.go"),
    Service("coredns-1", "100m", "70Mi", "kubernetes/kubernetes cmd/kubeadm/app/phases/addons/dns"),
    Service("coredns-2", "100m", "70Mi", "kubernetes/kubernetes cmd/kubeadm/app/phases/addons/dns"),
    Service("kindnet", "100m", "50Mi", "kubernetes-sigs/kind pkg/build/nodeimage/const_cni.go"),
)
"""Pods of Kubernetes itself on a node that is a whole cluster, as kind makes it; k3s wants less."""

PARTS = "manifests/kustomize"
KUBEFLOW = (
    Service("ml-pipeline", "250m", "500Mi", f"{PARTS}/base/pipeline"),
    Service("ml-pipeline-persistenceagent", "120m", "500Mi", f"{PARTS}/base/pipeline"),
    Service("ml-pipeline-scheduledworkflow", "10m", "16Mi", f"{PARTS}/base/pipeline"),
    Service("ml-pipeline-ui", "10m", "70Mi", f"{PARTS}/base/pipeline"),
    Service("ml-pipeline-visualizationserver", "30m", "500Mi", f"{PARTS}/base/pipeline"),
    Service("metadata-writer", "10m", "16Mi", f"{PARTS}/base/pipeline/metadata-writer"),
    Service("metadata-grpc", "10m", "16Mi", f"{PARTS}/base/metadata/base"),
    Service("workflow-controller", "100m", "500Mi", f"{PARTS}/third-party/argo/base"),
    Service("mysql", "100m", "800Mi", f"{PARTS}/third-party/mysql/base"),
    Service("seaweedfs", "64m", "256Mi", f"{PARTS}/third-party/seaweedfs/base"),
)
"""Pods of `env/platform-agnostic` that request anything."""

LAUNCHER_CPU = "100m"
"""Request of the init container of every task.

Source: `launcherResources` in backend/src/v2/compiler/argocompiler/argo.go.
"""
