"""One table: stage to image, resources, retries and timeouts for each profile.

Everything here is fixed when a pipeline is compiled: the compiler of KFP 2.17 loses resource
requests that come from run parameters. What is science is a run parameter instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

VERSION = "0.1.0"
"""Tag of the images; equals the version of the package that they install."""

IMAGES: dict[str, str] = {
    "core": f"planish/core:{VERSION}",
    "rollout": f"planish/rollout:{VERSION}",
    "train": f"planish/train:{VERSION}",
    "monitor": f"planish/monitor:{VERSION}",
}
"""Image name to reference; `planish submit --image NAME=REFERENCE` replaces one."""

STAGE_IMAGES: dict[str, str] = {
    "prepare": "core",
    "curate": "rollout",
    "sft": "rollout",
    "rollout": "rollout",
    "reward": "core",
    "train": "train",
    "iterate": "rollout",
    "checkpoint": "train",
    "evaluate": "rollout",
    "next": "core",
    "report": "core",
    "reshard": "core",
    "monitor_check": "monitor",
}
"""Stage to image name; one image holds one set of dependencies and serves several stages."""

FETCHING_STAGES = ("prepare", "curate", "sft", "train", "iterate")
"""Stages that open models or data sets from outside the run root."""

MODEL_STAGES = ("curate", "sft", "rollout", "train", "evaluate")
"""Stages that run a model."""

GPU = "nvidia.com/gpu"
"""Extended resource that a GPU stage asks for, and the key of the taint that it tolerates."""

GPU_NODE_LABEL = ("nvidia.com/gpu.present", "true")
"""Node selector of GPU stages, as the label that GPU feature discovery sets."""

MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR


@dataclass(frozen=True)
class Resources:
    """What one task of a stage gets.

    Example:
        >>> Resources("2", "4Gi", timeout_seconds=600, retries=2).backoff_max_seconds
        5400
    """

    cpu: str
    memory: str
    """Memory request and limit, in units that Kubernetes knows (`Gi`, not `GB`)."""
    timeout_seconds: int
    retries: int = 0
    """Attempts after the first one."""
    backoff_seconds: int = 30
    """Pause before the first retry; doubles each time."""
    gpus: int = 0
    shared_memory: str = ""
    """Size of `/dev/shm` for GPU stages; counts against `memory`."""

    @property
    def backoff_max_seconds(self) -> int:
        """Limit on the time since the first attempt began, beyond which nothing is retried.

        Its default of one hour would silently leave long stages without retries, so it is all
        attempts at full length and one hour for the pauses.
        """
        return (self.retries + 1) * self.timeout_seconds + HOUR


@dataclass(frozen=True)
class Profile:
    """One size of the pipeline."""

    name: str
    """`[a-z0-9-]+`; part of the file name of the compiled pipeline."""
    num_iterations: int
    num_shards: int
    """Parallel rollout tasks of one iteration."""
    parallelism: int
    """Shards that may run at the same time, each in its pod; 0 is all of them. With fewer than
    shards, a pod runs several of them in turn."""
    stages: Mapping[str, Resources]
    """Resources by stage; every stage is named."""
    deadline_seconds: int
    retention_seconds: int
    """How long the cluster keeps the workflow of an ended run."""
    iterations_per_task: int = 0
    """Iterations of one task, whose ranks keep trainer and engine in memory, on the resources of
    `iterate`; 0 gives every stage of an iteration a task of its own."""
    env: Mapping[str, str] = field(default_factory=dict)
    num_nodes: int = 1
    """Pods that train together, each with the resources of `train`. Above 1 the train task itself
    has those of `WAITING`: it submits them as one job and waits."""

    @property
    def iteration_limit_seconds(self) -> int:
        """Sum of the deadlines of one iteration: one that lasts longer has stalled or repeats."""
        return sum(self.stages[stage].timeout_seconds for stage in ITERATION_STAGES)

    @property
    def num_rollout_tasks(self) -> int:
        """Rollout tasks of an iteration in a cluster."""
        return self.parallelism or self.num_shards

    store_secret: str = "planish-store"
    """Name of the secret with endpoint, access_key and secret_key; its key `webhook`, if there is
    one, is the URL that gets the summary at the end."""
    hub_secret: str = "planish-hub"
    """Name of the secret whose key `token` opens private models and data sets of the hub; it need
    not exist."""
    gpu_memory_gb: int = 80
    """Memory of one GPU in 10**9 bytes; what does not fit is refused before a pod asks for it."""


WAITING = {"cpu": "500m", "memory": "4Gi"}
"""Requests of a train task that waits for the pods of a job; it reads rewards, and no model."""

ITERATION_STAGES = ("rollout", "reward", "train", "checkpoint")
"""Stages of one iteration, which follow each other."""

METRICS_PORT = 9464
"""TCP port at which the scrape configuration in `monitoring/` looks for the tasks of a run."""

_SCRAPED = {"PLANISH_METRICS_PORT": str(METRICS_PORT)}

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

# A task has no CPU limit and takes what is free. The requests are small, so that the tasks of one
# moment fit on two cores beside Kubernetes, Kubeflow and the store.
_TINY_LIGHT = Resources("100m", "1Gi", timeout_seconds=10 * MINUTE, retries=1, backoff_seconds=1)
_TINY_HEAVY = Resources("100m", "2Gi", timeout_seconds=30 * MINUTE, retries=1, backoff_seconds=1)

CPU_TINY = Profile(
    name="cpu-tiny",
    num_iterations=12,
    num_shards=2,
    parallelism=2,
    stages={
        "prepare": Resources("100m", "1Gi", timeout_seconds=5 * MINUTE),
        "curate": _TINY_HEAVY,
        "sft": _TINY_HEAVY,
        "rollout": _TINY_HEAVY,
        "reward": _TINY_LIGHT,
        "train": _TINY_HEAVY,
        "iterate": _TINY_HEAVY,
        "checkpoint": _TINY_LIGHT,
        "evaluate": _TINY_HEAVY,
        "next": Resources("100m", "512Mi", timeout_seconds=5 * MINUTE, retries=1),
        "report": Resources("100m", "1Gi", timeout_seconds=10 * MINUTE),
        "reshard": _TINY_LIGHT,
        "monitor_check": Resources(
            "100m", "2Gi", timeout_seconds=30 * MINUTE, retries=1, backoff_seconds=1
        ),
    },
    deadline_seconds=6 * HOUR,
    retention_seconds=7 * DAY,
    env=_ONE_THREAD,
)
"""The 0.1 M parameter default: one CPU machine, no accelerator, a few minutes."""


def _gpu_stages(gpus_per_engine: int = 1) -> dict[str, Resources]:
    """Return stages for machines of 8 GPUs, 96 cores and 1 TB, beside what runs on every node."""
    light = Resources("4", "32Gi", timeout_seconds=4 * HOUR, retries=3)
    engine = Resources(
        cpu=str(10 * gpus_per_engine),
        memory=f"{100 * gpus_per_engine}Gi",
        timeout_seconds=12 * HOUR,
        retries=3,
        gpus=gpus_per_engine,
        shared_memory=f"{16 * gpus_per_engine}Gi",
    )
    eight_gpus = Resources(
        "80", "800Gi", timeout_seconds=DAY, retries=3, gpus=8, shared_memory="128Gi"
    )
    return {
        "prepare": Resources("500m", "2Gi", timeout_seconds=10 * MINUTE),
        # With a given model neither runs one, unless the pipeline is compiled for it.
        "curate": replace(engine, gpus=0, shared_memory=""),
        "sft": replace(engine, gpus=0, shared_memory=""),
        "rollout": engine,
        "reward": light,
        "train": eight_gpus,
        "iterate": replace(eight_gpus, timeout_seconds=4 * (DAY + 12 * HOUR)),
        "checkpoint": light,
        "evaluate": engine,
        "next": Resources("500m", "1Gi", timeout_seconds=10 * MINUTE, retries=3),
        "report": Resources("500m", "4Gi", timeout_seconds=30 * MINUTE),
        "reshard": light,
        "monitor_check": Resources("2", "8Gi", timeout_seconds=DAY, retries=3),
    }


GPU_1X8 = Profile(
    name="gpu-1x8",
    num_iterations=32,
    num_shards=8,
    parallelism=8,
    stages=_gpu_stages(),
    deadline_seconds=14 * DAY,
    retention_seconds=30 * DAY,
    iterations_per_task=8,
    env=_SCRAPED,
)
"""One machine with eight GPUs, each of which samples and trains in turn."""

GPU_4X8 = Profile(
    name="gpu-4x8",
    num_iterations=32,
    num_shards=32,
    parallelism=32,
    stages=_gpu_stages(),
    deadline_seconds=14 * DAY,
    retention_seconds=30 * DAY,
    iterations_per_task=4,
    env=_SCRAPED,
    num_nodes=4,
)
"""Four machines with eight GPUs: a gang of four pods, whose GPUs sample and train in turn."""

GPU_16X8 = Profile(
    name="gpu-16x8",
    num_iterations=32,
    num_shards=32,
    parallelism=32,
    stages=_gpu_stages(gpus_per_engine=4),
    deadline_seconds=14 * DAY,
    retention_seconds=30 * DAY,
    iterations_per_task=4,
    env=_SCRAPED,
    num_nodes=16,
)
"""16 machines with eight GPUs, for models that one GPU does not hold: a gang of 16 pods, in which
four neighbouring GPUs share an engine (`engine.tensor_parallel=4`)."""

PROFILES: dict[str, Profile] = {p.name: p for p in (CPU_TINY, GPU_1X8, GPU_4X8, GPU_16X8)}


def resolve_images(replaced: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the image table with some references replaced.

    Raises:
        ValueError: a name that the table lacks, or an empty reference.
    """
    replaced = dict(replaced or {})
    unknown = sorted(set(replaced) - set(IMAGES))
    if unknown:
        raise ValueError(f"an image must be one of {sorted(IMAGES)}, got {unknown}")
    empty = sorted(name for name, reference in replaced.items() if not reference.strip())
    if empty:
        raise ValueError(f"an image reference must not be empty, got '' for {empty}")
    return {**IMAGES, **replaced}
