"""Names that the monitor reads and writes in Kubernetes: labels, annotations, taints, reasons.

Plain strings; imports nothing, so that every other module may use it.
"""

from __future__ import annotations

JOB_LABELS = (
    "training.kubeflow.org/job-name",
    "jobset.sigs.k8s.io/jobset-name",
    "workflows.argoproj.io/workflow",
)
"""Label that names the job of a pod; the first one that a pod has counts."""

WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
RUN_ID_LABEL = "pipeline/runid"
STAGE_LABEL = "planish/stage"
ITERATION_LABEL = "planish/iteration"
RANK_LABEL = "batch.kubernetes.io/job-completion-index"
RUN_ROOT = "planish/run-root"
"""Annotation of a pod: URI under which its run lives."""
ANOMALY = "planish/anomaly"
"""Annotation of a workflow: JSON of the last alert; with consent also a taint of the node."""

KFP_ROLE = "pipelines.kubeflow.org/runtime-role"
"""Annotation of a pod: `driver` or `launcher`."""
MIRROR = "kubernetes.io/config.mirror"
"""Annotation of a pod that the kubelet runs from a file."""

ROLE_LABEL = "minder/role"
"""Label of a pod: only machines of one role are compared."""
PIPELINE_STAGE_LABEL = "minder/stage"
"""Label of a pod: stage of pipeline parallelism that its machine computes."""
OPT_IN_LABEL = "minder/action"
"""Label of a namespace: `cordon` or `evict`. On a pod `observe` forbids any action."""
EXEMPT = "minder/exempt"
"""Label of a node or a pod that must never be acted upon."""

FAULTY_TAINT = "minder/faulty"
CORDONED_BY = "minder/cordoned-by"
REASON = "minder/reason"
SINCE = "minder/since"
WAS_UNSCHEDULABLE = "minder/was-unschedulable"
ALERT_ID = "minder/alert"
JOB = "minder/job"
MANUAL_UNCORDON = "minder/manual-uncordon"
"""Annotation of a node: the alert after which a human made it schedulable again."""

OWNED = (CORDONED_BY, REASON, SINCE, WAS_UNSCHEDULABLE, ALERT_ID, JOB)
"""Annotations that a cordon of ours leaves, and its undoing removes."""

POD_REASON = "MachineAnomaly"
CANDIDATE = "MinderCandidate"
FAULTY_MACHINE = "MinderFaultyMachine"
CORDONED = "MinderCordoned"
EVICTION_BLOCKED = "MinderEvictionBlocked"
DRY_RUN = "MinderDryRun"
BREAKER_OPEN = "MinderBreakerOpen"
