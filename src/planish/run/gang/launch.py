"""Submit a gang or attach to it, wait for its end, and delete it.

The name of a gang is a digest of work that only one gang may do at a time, so a stage that submits
it again finds the existing gang. It waits for a running gang and reads a finished one. It deletes a
gang that has failed, or that does the work with other settings, and creates the next gang when no
pod of the old one exists.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from planish.base.errors import EXIT_TRANSIENT, ClusterError, ConfigError, PeerLost
from planish.base.telemetry import redact
from planish.run.gang.cluster import GangCluster
from planish.run.gang.manifests import (
    GANG_LABEL,
    GRACE_SECONDS,
    RUN_LABEL,
    WORK_ANNOTATION,
    Gang,
    deadline_of,
    job_manifest,
    owned_by,
    service_manifest,
)

logger = logging.getLogger(__name__)

GONE_SECONDS = 0.5
"""Pause between two checks of objects under deletion."""
LAST_SECONDS = 5.0
"""Seconds for which a failed stage tries to delete its gang; else the owner reference deletes
it."""

Job = Mapping[str, Any]


def run_gang(cluster: GangCluster, gang: Gang, *, before: Callable[[], None]) -> None:
    """Run a gang to its end.

    `before` is called before the creation of a new gang, but not if a gang to wait for exists.

    Raises:
        ConfigError: another owner's job or service has the name, or the cluster refuses the
            job.
        PeerLost: a pod failed or was evicted, or the deadline has passed; the gang is deleted.
        ClusterError: the API server stopped answering; the gang continues.
    """
    job = submit(cluster, gang, before)
    try:
        if gang.launcher == "job":
            serve(cluster, gang, job)
        end = wait(cluster, gang, job)
        if end["type"] != "Complete":
            raise failure(cluster, gang, end)
    except BaseException as error:
        # After a signal the stage has only seconds to end.
        is_asked = not isinstance(error, Exception)
        remove(cluster, gang, patience_seconds=LAST_SECONDS, waits=not is_asked)
        raise
    remove(cluster, gang, patience_seconds=cluster.patience_seconds)


def submit(cluster: GangCluster, gang: Gang, before: Callable[[], None]) -> Job:
    """Return the job of a gang, new or existing.

    Raises:
        ConfigError: another owner's job has the name.
    """
    pod, others, is_told = cluster.own_pod(), cluster.with_other_launcher(), False
    while True:
        job, holder = cluster.job(gang.name), cluster
        if job is None:
            # An account without permission for the other kind has made no such job.
            with contextlib.suppress(ConfigError):
                job, holder = others.job(gang.name), others
        if job is None:
            if left := [each["metadata"]["name"] for each in cluster.pods(gang.digest)]:
                if not is_told:
                    logger.warning(
                        "gang waits for the pods of an earlier one to end name=%s pods=%s; a "
                        "machine that is off keeps its pod until somebody deletes it by force",
                        gang.name,
                        left,
                    )
                is_told = True
                time.sleep(GONE_SECONDS)
                continue
            before()
            job = cluster.create_job(job_manifest(gang, pod))
            if job is None:
                continue
            logger.info("gang submitted name=%s nodes=%d", gang.name, gang.num_nodes)
            return job
        check_own(gang, "job", job)
        work = (job["metadata"].get("annotations") or {}).get(WORK_ANNOTATION, "")
        if "deletionTimestamp" in job["metadata"]:
            time.sleep(GONE_SECONDS)
        elif holder is not cluster or work != gang.work:
            logger.warning("gang of other work, removed name=%s", gang.name)
            holder.delete_job(gang.name)
        elif ended(job).get("type") == "Failed":
            logger.warning("gang of an earlier attempt has failed, removed name=%s", gang.name)
            cluster.delete_job(gang.name)
        else:
            others_labels = {k: v for k, v in job["metadata"]["labels"].items() if k != RUN_LABEL}
            owner = {"apiVersion": "v1", "kind": "Pod", **owned_by(pod)}
            cluster.own(gang.name, owner, {**others_labels, **gang.own_labels})
            logger.info("gang attached name=%s", gang.name)
            return job


def serve(cluster: GangCluster, gang: Gang, job: Job) -> None:
    """Create the service that gives the pods of a job their host names."""
    while not cluster.create_service(service_manifest(gang, job)):
        service = cluster.service(gang.name)
        if service is None:
            continue
        check_own(gang, "service", service)
        owners = {each["uid"] for each in service["metadata"].get("ownerReferences") or ()}
        if not owners or job["metadata"]["uid"] in owners:
            break
        # The service belongs to the previous gang and is deleted with its job.
        time.sleep(GONE_SECONDS)


def check_own(gang: Gang, kind: str, found: Mapping[str, Any]) -> None:
    """Raise ConfigError if an object with the name of a gang belongs to another owner."""
    seen = (found["metadata"].get("labels") or {}).get(GANG_LABEL, "")
    if seen != gang.own_labels[GANG_LABEL]:
        raise ConfigError(
            f"the {kind} `{gang.name}` in the namespace of the run must have the label "
            f"`{GANG_LABEL}={gang.own_labels[GANG_LABEL]}`, got {seen!r}: it is not of this run; "
            "delete it, or run in another namespace"
        )


def ended(job: Job) -> Mapping[str, str]:
    """Return the condition by which a job ended; empty while it runs."""
    for condition in job.get("status", {}).get("conditions") or ():
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            end: Mapping[str, str] = condition
            return end
    return {}


def wait(cluster: GangCluster, gang: Gang, job: Job) -> Mapping[str, str]:
    """Wait for the end of a job and return its last condition.

    Raises:
        PeerLost: the job was deleted.
    """
    uid, shown = job["metadata"]["uid"], (-1, -1)
    deadline = time.monotonic() + deadline_of(cluster.own_pod())
    while True:
        now = cluster.job(gang.name)
        if now is None or now["metadata"]["uid"] != uid:
            raise PeerLost(
                f"the gang `{gang.name}` must be there until it ends, but somebody has deleted it; "
                "run the stage again"
            )
        if end := ended(now):
            return end
        if gang.launcher == "trainjob" and time.monotonic() > deadline:
            # A Job has its own deadline; a TrainJob has none.
            return {"type": "Failed", "reason": "DeadlineExceeded"}
        status = now.get("status", {})
        status = next((each for each in status.get("jobsStatus", ())), status)
        counts = (status.get("active", 0), status.get("ready", 0))
        if counts != shown:
            logger.info("gang name=%s pods=%d ready=%d", gang.name, *counts)
            shown = counts
        cluster.wait_for_change(now, deadline - time.monotonic())


def failure(cluster: GangCluster, gang: Gang, end: Mapping[str, str]) -> PeerLost:
    """Log the output of the first failed pod, and return the error for the stage."""
    reason = f"{end.get('reason', '')} {end.get('message', '')}".strip()
    failed = []
    for pod in cluster.pods(gang.digest):
        for container in pod.get("status", {}).get("containerStatuses") or ():
            if code := (over := container["state"].get("terminated", {})).get("exitCode", 0):
                # Among pods that end in the same second, those that got a signal are last.
                asked = code in (EXIT_TRANSIENT, 128 + 15)
                failed.append((over.get("finishedAt") or "", asked, pod["metadata"]["name"], code))
    if not failed:
        return PeerLost(
            f"every pod of the gang `{gang.name}` must end with code 0, but the gang has ended "
            f"with {reason} and no pod of it tells why: a machine was drained or lost, or the "
            "deadline has passed; run the stage again"
        )
    _, _, name, code = min(failed)
    logger.error("log of the first pod that failed pod=%s\n%s", name, redact(cluster.log(name)))
    return PeerLost(
        f"every pod of the gang `{gang.name}` must end with code 0, got {code} from `{name}`, "
        f"whose log stands above ({reason}); run the stage again"
    )


def remove(
    cluster: GangCluster, gang: Gang, *, patience_seconds: float, waits: bool = True
) -> None:
    """Delete a gang and wait until its pods are gone, while the API server answers.

    Kubernetes deletes the rest with the pod of the stage, its owner. The stage that submits the
    next gang waits for pods that do not end in time, as on a machine that is off.
    """
    deadline = time.monotonic() + 2 * GRACE_SECONDS
    patience, cluster.patience_seconds = cluster.patience_seconds, patience_seconds
    try:
        cluster.delete_job(gang.name)
        while waits and (cluster.job(gang.name) is not None or cluster.pods(gang.digest)):
            if time.monotonic() > deadline:
                logger.warning("gang removed, but its pods have not ended name=%s", gang.name)
                return
            time.sleep(GONE_SECONDS)
        logger.info("gang removed name=%s", gang.name)
    except ClusterError as error:
        logger.warning("gang not removed name=%s error=%s", gang.name, error)
    finally:
        cluster.patience_seconds = patience
