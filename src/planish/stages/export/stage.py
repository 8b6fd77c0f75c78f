"""Export the policy of a train state as a Hugging Face folder; imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from planish.checkpoint.train_state import Control, export_policy
from planish.records import layout
from planish.records.files import POLICY_SCHEMA
from planish.records.io import finished, read_manifest
from planish.records.refs import Ref, parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute, is_stopped, read_ref


class CheckpointResult(NamedTuple):
    """Output parameters."""

    policy_pin: str


def run(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    policy_pin: str,
    state: Artifact,
    policy: Artifact,
) -> CheckpointResult:
    """Export the policy that an iteration has trained.

    `components/checkpoint.py` describes the parameters.
    """
    root = root.rstrip("/")
    iteration = offset + number

    def work(context: Context) -> Outcome:
        if is_stopped(root, iteration):
            return passed_through(policy_pin)
        return export(context, policy_pin, read_ref(state).pin())

    digest, outputs = config_sha256, {"policy": policy}
    outcome = execute(
        "checkpoint", work, root=root, config_sha256=digest, iteration=iteration, outputs=outputs
    )
    return CheckpointResult(policy_pin=str(outcome.values["policy_pin"]))


def passed_through(policy_pin: str) -> Outcome:
    """Return the unchanged policy as the outcome of an iteration that a stopped run skips."""
    uri, digest = parse_pin(policy_pin)
    return _outcome(read_manifest(uri, sha256=digest).ref(uri), already_done=True)


def export(
    context: Context, policy_pin: str, state_pin: str, call: Control | None = None
) -> Outcome:
    """Export the policy of a train state unless an earlier attempt has.

    `call` is an operation of several ranks, each of which exports a part.
    """
    uri = layout.policy(context.root, context.iteration)
    parents = {"policy": parse_pin(policy_pin)[1], "state": parse_pin(state_pin)[1]}
    done = finished(uri, POLICY_SCHEMA, parents=parents, config_sha256=context.config_sha256)
    if done is not None:
        return _outcome(done, already_done=True)
    made = export_policy(
        state_pin,
        uri,
        policy_pin=policy_pin,
        parents=parents,
        attributes={
            "config_sha256": context.config_sha256,
            "iteration": context.iteration,
            "policy_version": context.iteration,
            "seed": context.seed,
        },
        call=call,
    )
    return _outcome(made, already_done=False)


def _outcome(ref: Ref, *, already_done: bool) -> Outcome:
    manifest = read_manifest(ref.uri, sha256=ref.manifest_sha256)
    size = float(sum(shard.bytes for shard in manifest.shards))
    return Outcome(
        refs={"policy": ref},
        metrics={"policy_bytes": size, "policy_version": float(ref.attributes["policy_version"])},
        values={"policy_pin": ref.pin()},
        already_done=already_done,
    )
