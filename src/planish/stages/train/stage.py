"""The train stage: it makes a new train state from the rollouts and rewards of one iteration.

It may start several training processes under torchrun, on this machine or as a gang of pods, and
then reads their result.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from planish import store
from planish.algorithms import build_algorithm
from planish.base import errors, telemetry
from planish.base.errors import ConfigError, PeerLost, PlanishError
from planish.base.parallel import Ranks, leave, num_devices, package_fault
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.refs import Ref, parse_pin
from planish.records.reports import UpdateReport, read_report
from planish.records.rewards import RewardSet
from planish.records.stream import state_root
from planish.run.events import record_event
from planish.run.gang.cluster import GangCluster
from planish.run.gang.launch import run_gang
from planish.run.gang.manifests import RUN_LABEL, STAGE_LABEL, Gang, GangPods
from planish.run.stage import Artifact, Context, Outcome, execute, is_stopped, read_ref
from planish.stages.train.ranks.job import (
    JobResult,
    TrainJob,
    already_done,
    write_job,
)
from planish.store.documents import read_json

logger = logging.getLogger(__name__)

WORKER = "planish.stages.train.ranks.worker"
"""Program of a rank."""


class TrainResult(NamedTuple):
    """Output parameters: the pinned URI of the train state after the iteration."""

    state_pin: str


def run(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    num_shards: int,
    policy_pin: str,
    state_pin: str,
    rewards: Artifact,
    state: Artifact,
    metrics: Artifact,
) -> TrainResult:
    """Update the policy on one rollout batch.

    Args:
        root: URI of the run.
        config_sha256: digest of the resolved configuration.
        number: iteration within this run, from 1.
        offset: iterations before this run.
        num_shards: rollout sets of the iteration.
        policy_pin: policy that sampled the rollouts.
        state_pin: train state before the iteration; empty before the first.
        rewards: Ref of the rewards.
        state: gets the Ref of the new train state.
        metrics: gets the scalars of the update.
    """
    root = root.rstrip("/")
    iteration = offset + number

    def work(context: Context) -> Outcome:
        job = TrainJob(
            root=root,
            config=context.config,
            config_sha256=config_sha256,
            iteration=iteration,
            num_shards=num_shards,
            policy_pin=policy_pin,
            state_pin=state_pin,
            rewards_pin=read_ref(rewards).pin(),
        )
        return train(job)

    outcome = execute(
        "train",
        work,
        root=root,
        config_sha256=config_sha256,
        iteration=iteration,
        outputs={"state": state, "metrics": metrics},
    )
    return TrainResult(state_pin=str(outcome.values["state_pin"]))


def train(job: TrainJob, cluster: GangCluster | None = None) -> Outcome:
    """Do the job once: in one process, in several, or in several pods.

    `cluster` is that of this stage's pod; None looks it up if pods are needed.
    """

    def work() -> JobResult:
        if (told := in_ranks(job, WORKER, cluster)) is not None:
            return JobResult.from_json(told)
        from planish.stages.train.ranks.worker import train_iteration

        try:
            return train_iteration(job)
        finally:
            leave()

    return train_once(job, work)


def train_once(job: TrainJob, work: Callable[[], JobResult]) -> Outcome:
    """Do the work of a job unless an earlier attempt has, or the run was stopped before it."""
    if is_stopped(job.root, job.iteration):
        # The state passes through.
        refs: dict[str, Ref] = {}
        if job.state_pin:
            uri, digest = parse_pin(job.state_pin)
            refs["state"] = read_manifest(uri, sha256=digest).ref(uri)
        return Outcome(refs=refs, values={"state_pin": job.state_pin}, already_done=True)
    done = already_done(job, _next_step(job))
    if done is None:
        result = work()
    else:
        report = read_report(UpdateReport, layout.update(job.root, job.iteration))
        result = JobResult(done, report.scalars)
    return Outcome(
        refs={"state": result.state} if result.state else {},
        metrics=result.metrics,
        values={"state_pin": result.state.pin()} if result.state else {},
        already_done=done is not None,
    )


def in_ranks(job: TrainJob, module: str, cluster: GangCluster | None = None) -> str | None:
    """Run a job in the processes or pods that it asks for, each as `python -m module PIN`.

    Returns:
        The result that the first rank has written; None if this process must do the job alone.
    """
    pods = GangPods.of_this_pod()
    num_nodes = job.train.num_nodes or (pods.num_nodes if pods else 1)
    if pods or num_nodes > 1:
        cluster = cluster or GangCluster.from_pod(job.train.launcher)
        return launch_gang(job, cluster, num_nodes, pods or GangPods(), module)
    processes = job.train.num_processes or num_devices(job.train.device)
    return launch(job, processes, module) if processes > 1 else None


def _next_step(job: TrainJob) -> int:
    """Return `Progress.step` after the iteration, which names the new state.

    Raises:
        ConfigError: the state is of this run, but not of an earlier iteration.
    """
    version = job.info.get("policy_version", 0)
    if job.state_pin and state_root(job.state_pin) == job.root and version >= job.iteration:
        raise ConfigError(
            f"the train state before iteration {job.iteration} must be of an earlier policy "
            f"version, got {version}; pass the state of the iteration before"
        )
    uri, digest = parse_pin(job.rewards_pin)
    kept = int(np.count_nonzero(read_set(RewardSet, uri, sha256=digest).keep))
    return int(job.info.get("step", 0)) + job.train.num_steps(kept)


def launch(job: TrainJob, processes: int, module: str = WORKER) -> str:
    """Run a job in several processes of this machine.

    Raises:
        PlanishError: the error of the first rank that wrote one.
        PeerLost: a process ended without writing its error.
    """
    pin = write_job(job)
    forget_result(pin)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", str(processes)]
    line += ["-m", module, pin]
    # Only the ranks make progress; this process waits for them.
    telemetry.forget("planish_stage_progress_timestamp_seconds")
    logger.info("launching processes=%d", processes)
    with subprocess.Popen(line) as process:
        try:
            code = process.wait()
        except BaseException:
            # Each rank has its own session, so only torchrun, on SIGTERM, ends them.
            process.terminate()
            raise
    lost = PeerLost(
        f"every training process must end with code 0, got {code} from torchrun; its output "
        "above names the rank: a lost machine or too little memory is the usual cause, run the "
        "stage again"
    )
    return result_of(pin, lost if code else None)


def launch_gang(
    job: TrainJob, cluster: GangCluster, num_nodes: int, pods: GangPods, module: str = WORKER
) -> str:
    """Run a job in a gang of pods, or wait for the gang that an earlier attempt has submitted.

    It removes a gang of a terminated run that trains the iteration in another way.

    Raises:
        PlanishError: the error of the first rank that wrote one.
        PeerLost: a pod failed or was taken away.
        ConfigError: a job of somebody else has the name of the gang, or the image of this pod,
            which the gang uses too, lacks the trainer.
        LayoutMismatch: the state before the iteration lacks the critic that the algorithm needs.
    """
    if fault := package_fault("train.trainer", job.train.trainer):
        raise ConfigError(fault)
    has_critic = build_algorithm(job.config.get("algorithm", {})).needs_values
    if has_critic and job.state_pin and not job.info.get("critic"):
        job.critic.check_new(job.state_pin)
    pin = write_job(job)
    processes = job.train.num_processes or pods.gpus or 1
    # The digest names no sizes, so only one gang at a time trains an iteration.
    iteration, work = f"{job.root} {job.iteration}", f"{pin} {num_nodes} {processes}"
    run_id = os.environ.get("RUN_ID", "")
    gang = Gang(
        digest=hashlib.sha256(iteration.encode()).hexdigest(),
        work=hashlib.sha256(work.encode()).hexdigest(),
        num_nodes=num_nodes,
        num_processes=processes,
        words=(module, pin),
        pods=pods,
        labels={
            STAGE_LABEL: "train",
            "planish/iteration": str(job.iteration),
            **({RUN_LABEL: run_id} if run_id else {}),
        },
        annotations={"planish/run-root": job.root},
        queue=job.train.queue,
        launcher=job.train.launcher,
    )
    telemetry.forget("planish_stage_progress_timestamp_seconds")
    lost, end, began = None, "left by the stage", time.time()
    grid = job.train.grid(Ranks(0, job.num_trainers(num_nodes * processes))).to_json()
    facts: dict[str, Any] = {"name": gang.name, "nodes": num_nodes, "trainer": job.train.trainer}
    facts |= grid
    record_event(job.root, "gang", job.iteration, begin_seconds=began, **facts)
    try:
        run_gang(cluster, gang, before=lambda: forget_result(pin))
        end = "complete"
    except PeerLost as error:
        lost, end = error, str(error)
    finally:
        facts |= {"end_seconds": time.time(), "end": end}
        record_event(job.root, "gang", job.iteration, begin_seconds=began, **facts)
    return result_of(pin, lost)


def forget_result(pin: str) -> None:
    """Delete result and error of an earlier attempt at a job."""
    folder = parse_pin(pin)[0].rpartition("/")[0]
    for name in ("result.json", "error.json", "behind.json"):
        store.delete(f"{folder}/{name}")


def result_of(pin: str, lost: PeerLost | None) -> str:
    """Return the result of the first rank; raise the error that a rank wrote, else `lost`.

    If ranks gave up waiting for another rank, the error names that rank.
    """
    folder = parse_pin(pin)[0].rpartition("/")[0]
    if store.exists(f"{folder}/error.json"):
        fault = read_json(f"{folder}/error.json")
        kind: type[PlanishError] = getattr(errors, fault["error"], PlanishError)
        raise kind(fault["message"])
    if lost is not None:
        if store.exists(f"{folder}/behind.json"):
            lost = PeerLost(f"{read_json(f'{folder}/behind.json')['message']}; {lost}")
        raise lost
    return store.read(f"{folder}/result.json").decode()
