"""One iteration as a nested pipeline whose inputs and outputs are parameters only.

Artifacts stay inside: the run page then shows one box an iteration, and the local runner of KFP
2.17 cannot bind an artifact input of a nested pipeline.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from kfp import dsl

from components import checkpoint, iterate, monitor_check, reward, rollout, train
from components.images import Profile, Resources
from components.pod_settings import with_pod_settings
from pipelines.monitor import Monitor
from planish.submit.pipeline import iterations_text


class Pins(NamedTuple):
    """What one iteration hands to the next."""

    policy_pin: str
    """`<uri>#sha256=<digest>` of the policy that samples next."""
    state_pin: str
    """The same for the train state; empty before the first update."""


def build_iteration(
    profile: Profile,
    images: Mapping[str, str],
    label: int,
    monitor: Monitor | None = None,
    *,
    one_machine: bool = False,
) -> Callable[..., Any]:
    """Return the nested pipeline of one iteration.

    Args:
        profile: shards, resources, retries.
        images: image name to reference.
        label: 1, 2, ... within the run.
        monitor: options of a task that looks for faulty machines; None for no such task.
        one_machine: for the local runner, which runs at the same time only turns of a loop.
    """

    @dsl.pipeline(
        name=f"iteration-{label}",
        display_name=f"iteration {label}",
        description="Rollout shards, reward, train, checkpoint.",
    )
    def iteration(
        root: str,
        config_sha256: str,
        number: int,
        offset: int,
        policy_pin: str,
        state_pin: str,
        node_affinity: dict[str, Any],
    ) -> Pins:
        """Sample, reward, train and export.

        Args:
            root: URI of the run.
            config_sha256: Digest of the configuration in run.json.
            number: 1, 2, ... in this run.
            offset: Iterations of the chain before this run.
            policy_pin: URI and digest of the policy before this iteration.
            state_pin: URI and digest of the train state before it; empty before the first update.
            node_affinity: Nodes that pods keep away from; empty for none.
        """
        in_pod = partial(
            with_pod_settings,
            profile=profile,
            images=images,
            node_affinity=node_affinity if monitor and monitor.max_restarts else None,
        )
        of_run = {"root": root, "config_sha256": config_sha256}
        of_iteration = {**of_run, "number": number, "offset": offset}
        of_policy = {**of_iteration, "policy_pin": policy_pin}
        of_batch = {**of_policy, "num_shards": profile.num_shards}
        rolled = _rollouts(in_pod, {**of_batch, "state_pin": state_pin}, one_machine=one_machine)
        rewarded = reward(**of_batch)
        in_pod(rewarded, "reward").after(*rolled)
        rewards = rewarded.outputs["rewards"]
        trained = in_pod(train(**of_batch, state_pin=state_pin, rewards=rewards), "train")
        exported = checkpoint(**of_policy, state=trained.outputs["train_state"])
        in_pod(exported, "checkpoint")
        if monitor is not None:
            checked = _check(monitor, of_iteration, profile.stages["train"])
            in_pod(checked, "monitor_check").after(rewarded)
        return Pins(
            policy_pin=exported.outputs["policy_pin"], state_pin=trained.outputs["state_pin"]
        )

    return iteration  # type: ignore[no-any-return]


def add_block(
    in_pod: partial[dsl.PipelineTask],
    of_run: Mapping[str, Any],
    offset: Any,
    pins: Any,
    first: int,
    count: int,
    monitor: Monitor | None = None,
) -> dsl.PipelineTask:
    """Add the task of several iterations, the first of which is `first`; returns it.

    Args:
        in_pod: sets everything of a task's pod.
        of_run: root and digest of the configuration.
        offset: iterations of the chain before this run.
        pins: task with the outputs of `Pins` before them.
        first: 1, 2, ... within the run.
        count: iterations of the task.
        monitor: options of a task beside it that looks for faulty machines; None for no such task.
    """
    profile: Profile = in_pod.keywords["profile"]
    task = iterate(
        **of_run,
        number=first,
        count=count,
        policy_pin=pins.outputs["policy_pin"],
        state_pin=pins.outputs["state_pin"],
    )
    if monitor is not None:
        of_block = {**of_run, "offset": offset, "number": first}
        checked = _check(monitor, of_block, profile.stages["iterate"])
        in_pod(checked, "monitor_check")
    return in_pod(task, "iterate").set_display_name(iterations_text(first, first + count - 1))


def _check(
    monitor: Monitor, of_iteration: Mapping[str, Any], beside: Resources
) -> dsl.PipelineTask:
    """Return a task that looks for faulty machines, as long as the task beside it may last."""
    return monitor_check(
        **of_iteration,
        settings=monitor.settings,
        trace=monitor.trace,
        job="",
        watch_seconds=beside.timeout_seconds if monitor.watches else 0,
    )


def _rollouts(
    in_pod: partial[dsl.PipelineTask], arguments: Mapping[str, Any], *, one_machine: bool
) -> list[dsl.PipelineTask]:
    """Return the rollout tasks; `profile.parallelism` shards run at a time."""
    profile: Profile = in_pod.keywords["profile"]
    if one_machine:
        shards = list(range(profile.num_shards))
        at_once = profile.parallelism or profile.num_shards
        with dsl.ParallelFor(shards, name="shards", parallelism=at_once) as shard:
            task = rollout(**arguments, shard=shard, num_tasks=profile.num_shards)
            return [in_pod(task, "rollout")]
    # In a cluster a loop costs a driver, and each of its turns another one; what may not run at the
    # same time runs in one pod, which gets so much more time.
    num_tasks = profile.num_rollout_tasks
    resources = profile.stages["rollout"]
    seconds = resources.timeout_seconds * math.ceil(profile.num_shards / num_tasks)
    stages = {**profile.stages, "rollout": dataclasses.replace(resources, timeout_seconds=seconds)}
    longer = dataclasses.replace(profile, stages=stages)
    return [
        in_pod(
            rollout(**arguments, shard=index, num_tasks=num_tasks), "rollout", profile=longer
        ).set_display_name(f"rollout {index}")
        for index in range(num_tasks)
    ]
