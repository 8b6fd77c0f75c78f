"""The prepare stage: it checks everything cheap before anything expensive starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from planish import store
from planish.base.config import parse_section, parse_settings
from planish.base.errors import ConfigError
from planish.checkpoint.train_state import read_state_info
from planish.models.adapters import check_same, configured
from planish.models.config import ModelConfig
from planish.records import layout
from planish.records.reference import find_reference
from planish.records.reports import evaluation_names
from planish.run.avoid import WHICH_RUNS, avoided, node_affinity
from planish.run.chain import parse_chain
from planish.run.lock import Holder, acquire, check_free, current_holder, is_alive
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.prepare import devices
from planish.stages.prepare.chain import find_link, is_evaluated, record_link
from planish.stages.prepare.checks import check_run
from planish.stages.prepare.cluster import (
    ClusterApi,
    Findings,
    PodRequests,
    check_cluster,
    inside_cluster,
)
from planish.stages.prepare.inspect import inspect_sources
from planish.stages.prepare.plan import RunPlan, render
from planish.stages.prepare.probe import probe_store
from planish.stages.prepare.run_file import (
    Config,
    StartPins,
    newest_version,
    open_run_file,
    resumed_root,
    start_after,
    write_run_file,
)
from planish.stages.prepare.settings import build_config
from planish.stages.prepare.trained import package_faults, trained_warnings
from planish.store.base import parse_uri

logger = logging.getLogger(__name__)


class PreparedRun(NamedTuple):
    """Output parameters."""

    config_sha256: str
    offset: int
    chain_index: int
    """Place of this run in its chain, 0 or more."""
    node_affinity: dict[str, Any]
    """Node affinity by which the pods of this run avoid faulty machines; empty for none."""
    unfinished: bool


class Wish(NamedTuple):
    """The run parameters."""

    preset: str
    config: str
    overrides: str
    model: str
    dataset: str
    seed: int
    chain: str
    num_iterations: int
    num_shards: int
    requests: str
    max_avoided_nodes: int

    def configuration(self) -> Config:
        """Return the resolved configuration."""
        return build_config(
            preset=self.preset,
            config=self.config,
            overrides=self.overrides,
            model=self.model,
            dataset=self.dataset,
            seed=self.seed,
        )


def run(
    root: str,
    preset: str,
    config: str,
    overrides: str,
    model: str,
    dataset: str,
    seed: int,
    chain: str,
    num_iterations: int,
    num_shards: int,
    requests: str,
    max_avoided_nodes: int,
    summary: Artifact,
) -> PreparedRun:
    """Check everything that needs no GPU, take the lock and write run.json.

    `components/prepare.py` describes the parameters.
    """
    # fmt: off
    wish = Wish(
        preset, config, overrides, model, dataset, seed, chain, num_iterations, num_shards,
        requests, max_avoided_nodes,
    )
    # fmt: on
    outputs = {"summary": summary}

    def work(context: Context) -> Outcome:
        return prepare(context.root, wish)

    outcome = execute("prepare", work, root=root, config_sha256=None, outputs=outputs)
    values: dict[str, Any] = {**outcome.values}
    values["node_affinity"] = json.loads(values["node_affinity"])
    return PreparedRun(**values)


def liveness(api: ClusterApi | None) -> Callable[[Holder], bool | None]:
    """Return a function that returns whether a lock's holder lives, here or in the cluster."""

    def alive(holder: Holder) -> bool | None:
        if holder.kind == "local" or api is None:
            return is_alive(holder)
        return api.run_is_active(holder.run_id)

    return alive


def check_reference(config: Config, start: StartPins) -> None:
    """Check that the reference policy of a KL penalty exists; raises ConfigError.

    `start` is the start of the present run; its train state names the reference.
    """
    pinned = config["train"].get("reference_policy", "")
    # A run without a start policy takes its own first policy as the reference.
    if config["algorithm"].get("kl_coefficient") and (pinned or start.policy):
        find_reference(
            pinned,
            policy_pin=start.policy,
            state_pin=start.state,
            info=read_state_info(start.state) if start.state and not pinned else {},
        )


def check_adapters(config: Config, state: str) -> None:
    """Refuse adapter settings that differ from those of the pinned train state, if any."""
    if state:
        settings = parse_section(ModelConfig, config["model"], section="model")
        check_same(read_state_info(state), configured(settings), pin=state)


def check_not_stopped(root: str) -> None:
    """Refuse a root that an operator has stopped: its tasks would do no work."""
    if store.exists(uri := layout.stop_file(root)):
        raise ConfigError(
            f"the root must not be stopped, got `{uri}`; `planish stop {root} --undo` lets runs on "
            "it go on"
        )


def nodes_to_avoid(root: str, resume_from: str, limit: int, *, api: ClusterApi | None) -> list[str]:
    """Return the first `limit` nodes named on this root and on the root of `resume_from`.

    Raises:
        ConfigError: an operator has named a node, but this pipeline avoids none.
    """
    if limit < 0:
        raise ConfigError(
            f"`max_avoided_nodes` must be 0 or more, got {limit}; it is fixed "
            "when the pipeline is compiled"
        )
    if not limit and api is None:
        return []
    nodes = avoided(root)
    named = [node.name for node in nodes if node.named_by == "operator"]
    if named and not limit:
        raise ConfigError(
            f"this pipeline keeps away from no node, but {', '.join(named)} must be avoided: "
            f"{WHICH_RUNS}; `planish avoid {root} {named[0]} --undo` uses the node again"
        )
    if resume_from:
        nodes = [*nodes, *avoided(resumed_root(resume_from))]
    oldest_first = sorted(nodes, key=lambda node: node.seconds)
    names = list(dict.fromkeys(node.name for node in oldest_first))
    if len(names) > limit:
        logger.warning("more nodes named than may be avoided named=%d max=%d", len(names), limit)
    return names[:limit]


def prepare(root: str, wish: Wish, *, api: ClusterApi | None = None) -> Outcome:
    """Do the work of the stage; without `api`, check a cluster only if this is one of its pods.

    Raises:
        RootInUse: another run uses the root.
        ConfigError: any fault of settings, data or cluster; only the lock may be written by then.
        StoreUnavailable: the store does not answer.
    """
    if not root.startswith("/"):
        # A relative path would be below the working directory of this program.
        parse_uri(root)
    if api is None and inside_cluster():
        api = ClusterApi.connect()
    chain, me = parse_chain(wish.chain), current_holder()
    # This check is first: a refused run must leave nothing on another run's root.
    check_free(root, me, alive=liveness(api))
    check_not_stopped(root)
    config = wish.configuration()
    settings = parse_settings(config)
    findings, pods = Findings(package_faults(settings)), PodRequests.parse(wish.requests)
    requests = devices.this_machine(in_turn=pods.in_turn)
    if api is not None:
        requests = pods.of_training(config["train"])
        findings = check_cluster(api, requests, assume_autoscaling=chain.assume_autoscaling)
    faults = [*check_run(settings, wish.num_shards), *findings.faults]
    if faults := [*faults, *devices.device_faults(settings, requests)]:
        raise ConfigError("; ".join(faults))
    away_from = nodes_to_avoid(root, chain.resume_from, wish.max_avoided_nodes, api=api)
    probe_store(root)
    lock = acquire(root, me, alive=liveness(api))
    run_file, changed, is_new = open_run_file(
        root, config, resume_from=chain.resume_from, allow_config_change=chain.allow_config_change
    )
    link = find_link(root, chain.index, wish.num_iterations)
    preset = wish.preset or run_file.preset
    run_file = replace(run_file, preset=preset, offset=link.offset, num_shards=wish.num_shards)
    if link.offset:
        run_file = replace(run_file, initial=start_after(root, link.offset))
    check_reference(config, run_file.initial)
    newest = newest_version(root)
    if changed:
        start = start_after(root, newest) if newest else run_file.initial
        check_adapters(config, start.state)
    policy = run_file.initial.policy if newest is None else layout.policy(root, newest)
    found = inspect_sources(config, policy=policy, changed=changed)
    memory, tight = devices.memory_rows(settings, found.model_config, requests)
    write_run_file(root, run_file)
    record_link(root, link)
    plan = RunPlan(
        root=root,
        run=run_file,
        link=link,
        num_shards=wish.num_shards,
        is_new=is_new,
        newest_version=newest,
        changed=changed,
        opened=[*found.rows, *memory],
        warnings=[
            *(*findings.warnings, *found.warnings),
            *(*trained_warnings(settings), *devices.device_warnings(settings, requests), *tight),
        ],
        away_from=away_from,
        retries=findings.retries,
        is_evaluated=is_evaluated(root, link.last, evaluation_names(config)),
        is_followed=link.index + 1 < chain.runs,
    )
    return outcome_of(plan, lock.generation)


def outcome_of(plan: RunPlan, lock_generation: int) -> Outcome:
    """Return the outcome of the stage from its plan."""
    text = render(plan)
    logger.info("plan\n%s", text)
    return Outcome(
        documents={"summary": text},
        metrics={
            "offset": float(plan.link.offset),
            "num_iterations": float(plan.link.num_iterations),
            "iterations_finished": float(plan.num_finished),
            "settings_changed": float(len(plan.changed)),
            "lock_generation": float(lock_generation),
            "avoided_nodes": float(len(plan.away_from)),
        },
        values={
            "config_sha256": plan.run.sha256,
            "offset": plan.link.offset,
            "chain_index": plan.link.index,
            "node_affinity": json.dumps(node_affinity(plan.away_from)),
            "unfinished": not plan.is_done,
        },
        already_done=plan.num_finished == plan.link.num_iterations,
    )
