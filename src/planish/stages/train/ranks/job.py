"""One train task as plain data: its inputs, its outputs, and the check for a finished result.

This module imports no torch, so a finished task costs nothing and a launcher stays small.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar

from planish import store
from planish.algorithms import build_algorithm
from planish.base.config import parse_section
from planish.base.errors import ConfigError, RecordError
from planish.base.parallel import num_trainers
from planish.checkpoint.train_state import STATE_SCHEMA, read_state_info
from planish.models.adapters import Adapters, configured
from planish.models.config import ModelConfig
from planish.records import layout
from planish.records.io import finished, read_manifest, read_set
from planish.records.reference import find_reference
from planish.records.refs import Ref, parse_pin
from planish.records.rewards import RewardSet
from planish.records.rollouts import RolloutSet
from planish.records.schema import RecordT
from planish.records.stream import StreamState, advance, fresh_cursor, parse_data, state_root
from planish.records.values import ValueSet
from planish.records.waiting import WaitingSet
from planish.stages.train.config import CriticConfig, TrainConfig


@dataclass(frozen=True)
class TrainJob:
    """Inputs of the training processes of one iteration.

    Example:
        >>> job = TrainJob("file:///r", {}, "0" * 64, 1, 2, "p", "", "r")
        >>> TrainJob.from_json(job.to_json()) == job
        True
    """

    root: str
    """URI of the run."""
    config: Mapping[str, Mapping[str, Any]]
    """Resolved tables."""
    config_sha256: str
    """Digest of `config`."""
    iteration: int
    num_shards: int
    """Rollout sets of the iteration."""
    policy_pin: str
    """Policy that sampled the rollouts, and that training starts from without a state."""
    state_pin: str
    """Train state before the iteration; empty before the first."""
    rewards_pin: str

    def to_json(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.config["run"]["seed"])

    @property
    def train(self) -> TrainConfig:
        """Configuration of the stage."""
        return parse_section(TrainConfig, self.config.get("train", {}), section="train")

    @property
    def critic(self) -> CriticConfig:
        """Configuration of the critic, for algorithms with one."""
        return parse_section(CriticConfig, self.config.get("critic", {}), section="critic")

    @property
    def adapters(self) -> Adapters | None:
        """Adapters that are trained in place of all weights."""
        return configured(parse_section(ModelConfig, self.config.get("model", {}), section="model"))

    @property
    def temperature(self) -> float:
        """Temperature that the rollouts were sampled at."""
        return float(self.config["rollout"]["temperature"])

    @property
    def max_staleness(self) -> int:
        """Largest age of a surplus group in policy versions; 0 is no reuse."""
        return int(self.config.get("rollout", {}).get("max_staleness", 0))

    @property
    def is_ahead(self) -> bool:
        """True if separate processes sample one iteration ahead."""
        return bool(self.config.get("rollout", {}).get("ahead"))

    def num_trainers(self, size: int) -> int:
        """Return the number of processes that train, out of `size`."""
        return num_trainers(self.train.split, size) if self.is_ahead else size

    def parents(self) -> dict[str, str]:
        """Return the digests of the inputs by name."""
        pins = {
            "policy": self.policy_pin,
            "rewards": self.rewards_pin,
            "state": self.state_pin,
            "reference": self.reference_pin,
        }
        return {name: parse_pin(pin)[1] for name, pin in pins.items() if pin}

    @cached_property
    def info(self) -> dict[str, Any]:
        """Return the JSON part of the state before the iteration; empty before the first."""
        return read_state_info(self.state_pin) if self.state_pin else {}

    @cached_property
    def reference_pin(self) -> str:
        """Pin of the reference policy; empty for an algorithm without one.

        Raises:
            ConfigError: the train state names no reference, or the policy was deleted.
        """
        if not build_algorithm(self.config.get("algorithm", {})).needs_reference:
            return ""
        return find_reference(
            self.train.reference_policy,
            policy_pin=self.policy_pin,
            state_pin=self.state_pin,
            info=self.info,
        )


JobT = TypeVar("JobT", bound=TrainJob)


@dataclass(frozen=True)
class JobResult:
    """The new train state, and scalars of the iteration."""

    state: Ref | None
    """None in a resident task, which commits the state beside the next rollouts."""
    metrics: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the result as JSON, with Python's `NaN` and `Infinity`."""
        assert self.state is not None
        return json.dumps({"state": self.state.to_json(), "metrics": self.metrics})

    @classmethod
    def from_json(cls, text: str) -> JobResult:
        """Read what `to_json` wrote."""
        raw = json.loads(text)
        return cls(Ref.from_json(raw["state"]), raw["metrics"])


def write_job(job: TrainJob) -> str:
    """Write a job below the root of the run, for its processes; return its pin."""
    data = job.to_json().encode()
    digest = hashlib.sha256(data).hexdigest()
    uri = f"{layout.train_job(job.root, job.iteration, digest)}/job.json"
    store.write(uri, data)
    return f"{uri}#sha256={digest}"


def read_job(pin: str, kind: type[JobT]) -> JobT:
    """Return the job that `write_job` has written.

    Raises:
        ObjectMissing: the job is gone.
        RecordError: the bytes differ from the written ones.
    """
    uri, digest = parse_pin(pin)
    data = store.read(uri)
    if hashlib.sha256(data).hexdigest() != digest:
        raise RecordError(
            f"`{uri}` must be the job that the stage has written ({digest[:12]}), got "
            f"{len(data)} other bytes; run the stage again, it writes the job anew"
        )
    return kind.from_json(data.decode())


@dataclass(frozen=True)
class Inputs:
    """Records that an iteration of training reads, all shards together."""

    rollouts: RolloutSet
    """Rollouts in the order of their shards."""
    rewards: RewardSet
    """Row `r` scores row `r` of the rollouts."""
    stream: StreamState
    """Cursor, surplus and carry after the iteration; `values` and `waiting` are not yet set."""
    ordinals: list[int] | None
    """Place of each group's prompt in the stream; None if no window cuts responses."""
    places: list[int]
    """Number of each group that orders groups as in the prompt stream, for any number of shards."""
    values: ValueSet
    """Values of the tokens that earlier iterations sampled; empty if none were stored."""
    waiting: WaitingSet
    """Finished responses on which the critic has not trained yet."""


def read_inputs(job: TrainJob) -> Inputs:
    """Read the rollouts of all shards and their rewards; compute the cursor after the iteration.

    Raises:
        RecordError: a set is damaged, or the rewards score other rollouts.
        ConfigError: `train.replay_routing` needs experts that the rollouts do not record.
    """
    uri, digest = parse_pin(job.rewards_pin)
    scored = read_manifest(uri, sha256=digest).parents
    rewards = read_set(RewardSet, uri, sha256=digest)
    sets: list[RolloutSet] = []
    consumed: list[int] = []
    surplus: list[str] = []
    carry: list[str] = []
    ordinals: list[int] = []
    for shard in range(job.num_shards):
        place = layout.rollouts(job.root, job.iteration, shard)
        digest = scored.get(f"rollouts-{shard:02d}", "none")
        manifest = read_manifest(place)
        if manifest.sha256 != digest:
            raise RecordError(
                f"`{uri}` must score the rollouts at `{place}` ({manifest.sha256[:12]}), got "
                f"rewards of {digest[:12]}; run the reward stage of iteration {job.iteration} again"
            )
        sets.append(read_set(RolloutSet, place, sha256=manifest.sha256))
        facts = manifest.attributes
        consumed += facts["consumed"]
        if side_digest := facts.get("surplus_sha256"):
            side = layout.surplus(job.root, job.iteration, shard)
            # The next state names a set only if its newest group is young enough to train on.
            newest = max(read_manifest(side, sha256=side_digest).attributes["versions"])
            if job.iteration - newest <= job.max_staleness:
                surplus.append(relative_pin(job, side, side_digest))
        if side_digest := facts.get("carry_sha256"):
            side = layout.carry(job.root, job.iteration, shard)
            carry.append(relative_pin(job, side, read_manifest(side, sha256=side_digest).sha256))
            ordinals += facts["ordinals"]
    rollouts = RolloutSet.concat(sets)
    if job.train.replay_routing and rollouts.num_rows and rollouts.routing is None:
        raise ConfigError(
            "rollouts must have the column `routing` with `train.replay_routing = true`, got "
            f"{rollouts.num_rows} rollouts without it in iteration {job.iteration}; the rollout "
            "stage keeps it under this setting, and `train.replay_routing = false` needs none"
        )
    # The rollouts took over all surplus and carry of the state before; the next names its own sets.
    before = parse_data(job.info.get("data", fresh_cursor()))
    places = ordinals if carry else draw_order([part.num_groups for part in sets])
    return Inputs(
        rollouts=rollouts,
        rewards=rewards,
        stream=StreamState(advance(before.cursor, consumed), surplus, carry),
        ordinals=ordinals if carry else None,
        places=places,
        values=_stored(job, ValueSet, before.values) or ValueSet.from_rows({}),
        waiting=_stored(job, WaitingSet, before.waiting) or WaitingSet.empty(),
    )


def draw_order(counts: Sequence[int]) -> list[int]:
    """Return the place of each group, shard after shard, for shards that draw groups in turns.

    Example:
        >>> draw_order([3, 2])
        [0, 2, 4, 1, 3]
    """
    return [k * len(counts) + shard for shard, count in enumerate(counts) for k in range(count)]


def _stored(job: TrainJob, record: type[RecordT], pin: str) -> RecordT | None:
    """Read a set that the state before the iteration names; None for ""."""
    if not pin:
        return None
    path, digest = parse_pin(pin)
    return read_set(record, f"{state_root(job.state_pin)}/{path}", sha256=digest)


def relative_pin(job: TrainJob, place: str, digest: str) -> str:
    """Return a pin without the root of the run, so that equal runs have equal states."""
    return f"{place.removeprefix(f'{job.root}/')}#sha256={digest}"


def already_done(job: TrainJob, next_step: int) -> Ref | None:
    """Return the state that an earlier attempt of the same job has finished; None without one."""
    uri = layout.state(job.root, next_step)
    report = layout.update(job.root, job.iteration)
    if not store.exists(report):
        return None
    return finished(uri, STATE_SCHEMA, parents=job.parents(), config_sha256=job.config_sha256)
