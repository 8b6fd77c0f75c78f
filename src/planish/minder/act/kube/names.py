"""Names that the monitor reads and writes in Kubernetes: labels, annotations, taints, reasons."""

from __future__ import annotations

TRAINING_LABEL = "training.kubeflow.org/job-name"
"""Label of the Kubeflow training operator (PyTorchJob, TFJob, MPIJob v1) and mpi-operator (MPIJob
v2)."""
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""Label of JobSet, and so also of TrainJob in Kubeflow Trainer v2."""
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
"""Label of Argo Workflows, and so also of Kubeflow Pipelines."""
RAY_LABEL = "ray.io/cluster"
"""Label of KubeRay: RayCluster, RayJob, RayService."""
VOLCANO_LABEL = "volcano.sh/job-name"
LEADER_WORKER_LABEL = "leaderworkerset.sigs.k8s.io/name"
BATCH_LABEL = "batch.kubernetes.io/job-name"
"""Label of every Kubernetes Job. Only Indexed Jobs count, since their pods are ranks."""

JOB_LABELS = (
    TRAINING_LABEL,
    JOBSET_LABEL,
    WORKFLOW_LABEL,
    RAY_LABEL,
    VOLCANO_LABEL,
    LEADER_WORKER_LABEL,
    BATCH_LABEL,
)
"""Labels that name the job of a pod; the first label that the pod has counts."""

STAGE_LABEL = "planish/stage"
ROLE_LABELS = {
    TRAINING_LABEL: ("training.kubeflow.org/replica-type", "training.kubeflow.org/job-role"),
    JOBSET_LABEL: ("jobset.sigs.k8s.io/replicatedjob-name",),
    WORKFLOW_LABEL: (STAGE_LABEL,),
    RAY_LABEL: ("ray.io/group",),
    VOLCANO_LABEL: ("volcano.sh/task-spec",),
}
"""Map from label of the job to the labels that name its roles; the first of these that a pod has
counts."""
RANK_ROLES = ("master", "chief", "worker")
"""Roles of the training operators and of Volcano that are ranks of one gang; master is rank 0."""
LAUNCHER_ROLES = ("launcher", "mpimaster")
"""Roles of the training operators and of Volcano that start the ranks from outside and compute
nothing."""
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""Label of a pod of a LeaderWorkerSet; 0 is the leader."""
NODE_NAME = "workflows.argoproj.io/node-name"
"""Annotation of a pod of a workflow: `<workflow>.root.<task>.executor(0)` in Kubeflow Pipelines."""

RUN_ID_LABEL = "pipeline/runid"
ITERATION_LABEL = "planish/iteration"
RANK_LABEL = "batch.kubernetes.io/job-completion-index"
RUN_ROOT = "planish/run-root"
"""Annotation of a pod: URI of the root of its run."""
ANOMALY = "planish/anomaly"
"""Annotation of a workflow: JSON of the last alert."""

KFP_ROLE = "pipelines.kubeflow.org/runtime-role"
"""Annotation of a pod: `driver` or `launcher`."""
MIRROR = "kubernetes.io/config.mirror"
"""Annotation of a static pod, which the kubelet runs from a file."""

ROLE_LABEL = "minder/role"
"""Label of a pod: the role of its machine; only machines of one role are compared."""
PIPELINE_STAGE_LABEL = "minder/stage"
"""Label of a pod: the pipeline-parallel stage that its machine computes."""
OPT_IN_LABEL = "minder/action"
"""Label of a namespace: `mark`, `cordon` or `evict`. On a pod, `observe` forbids any action."""
EXEMPT = "minder/exempt"
"""Label of a node or pod on which the monitor must never act."""

FAULTY_TAINT = "minder/faulty"
CORDONED_BY = "minder/cordoned-by"
OWNER = "minder"
"""Value of `CORDONED_BY` for nodes that the monitor cordoned."""
REASON = "minder/reason"
SINCE = "minder/since"
ALERT_ID = "minder/alert"
JOB = "minder/job"
MANUAL_UNCORDON = "minder/manual-uncordon"
"""Annotation of a node: id of the alert after which a human made it schedulable again."""

OWNED = (CORDONED_BY, REASON, SINCE, ALERT_ID, JOB)
"""Annotations that a cordon sets and its undoing removes."""

POD_REASON = "MachineAnomaly"
FAULTY_MACHINE = "MinderFaultyMachine"
"""Reason of an Event, and type of a node's condition."""
CORDONED = "MinderCordoned"
EVICTION_BLOCKED = "MinderEvictionBlocked"
DRY_RUN = "MinderDryRun"

LEASE = "minder"
"""Name of the Lease that elects the replica that acts."""
STATE = "minder-state"
"""Name of the ConfigMap that keeps the state of the jobs over restarts."""
