"""One iteration as a nested pipeline whose inputs and outputs are parameters only.

Artifacts stay inside: the run page then shows one box an iteration, and the local runner of KFP
2.17 cannot bind an artifact input of a nested pipeline.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from kfp import dsl

from components import checkpoint, monitor_check, reward, rollout, train
from components.images import Profile
from components.pod_settings import with_pod_settings
from pipelines.monitor import Monitor


class Pins(NamedTuple):
    """What one iteration hands to the next."""

    policy_pin: str
    """`<uri>#sha256=<digest>` of the policy that samples next."""
    state_pin: str
    """The same for the train state; empty before the first update."""


def _numbered(component: Any, label: int) -> Any:
    """Return the component under a name of its own for each iteration.

    Where two nested pipelines hold a component of the same name, the compiler of kfp 2.17 renames
    the second one but has by then overwritten the pod settings of the first.
    """
    spec = dataclasses.replace(
        component.component_spec, name=f"{component.component_spec.name}-{label}"
    )
    return type(component)(component_spec=spec, python_func=component.python_func)


def build_iteration(
    profile: Profile, images: Mapping[str, str], label: int, monitor: Monitor | None = None
) -> Callable[..., Any]:
    """Return the nested pipeline of one iteration.

    Args:
        profile: shards, resources, retries.
        images: image name to reference.
        label: 1, 2, ... within the run; pod labels are fixed at compile time.
        monitor: options of a task that looks for faulty machines; None for no such task.
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
        in_pod = partial(
            with_pod_settings,
            profile=profile,
            images=images,
            iteration=label,
            node_affinity=node_affinity if monitor and monitor.max_restarts else None,
        )
        of_run = {"root": root, "config_sha256": config_sha256}
        of_iteration = {**of_run, "number": number, "offset": offset}
        of_policy = {**of_iteration, "policy_pin": policy_pin}
        of_batch = {**of_policy, "num_shards": profile.num_shards}
        at_once = profile.parallelism or profile.num_shards
        shards = list(range(profile.num_shards))
        with dsl.ParallelFor(shards, name="shards", parallelism=at_once) as shard:
            rolled = _numbered(rollout, label)(**of_batch, shard=shard, state_pin=state_pin)
            in_pod(rolled, "rollout")
        rewarded = _numbered(reward, label)(**of_batch)
        in_pod(rewarded, "reward").after(rolled)
        trained = _numbered(train, label)(
            **of_batch, state_pin=state_pin, rewards=rewarded.outputs["rewards"]
        )
        in_pod(trained, "train")
        if monitor is not None:
            watch_seconds = profile.stages["train"].timeout_seconds if monitor.watches else 0
            checked = _numbered(monitor_check, label)(
                **of_iteration,
                settings=monitor.settings,
                trace=monitor.trace,
                job="",
                watch_seconds=watch_seconds,
            )
            in_pod(checked, "monitor_check").after(rewarded)
        exported = _numbered(checkpoint, label)(**of_policy, state=trained.outputs["state"])
        in_pod(exported, "checkpoint")
        return Pins(
            policy_pin=exported.outputs["policy_pin"], state_pin=trained.outputs["state_pin"]
        )

    return iteration  # type: ignore[no-any-return]
