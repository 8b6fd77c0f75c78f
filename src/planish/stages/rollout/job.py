"""One shard of the rollouts: its inputs, and the engine that serves it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from planish.base.config import parse_section
from planish.engines import OpenEngine, open_engine
from planish.records import layout
from planish.records.files import WEIGHTS, weights_name
from planish.records.prompts import PromptSet
from planish.records.refs import parse_pin
from planish.records.rollouts import RolloutSet
from planish.records.stream import StreamState, fresh_cursor, parse_data, state_root
from planish.run.stage import Context
from planish.stages.rollout.commits import Commits
from planish.stages.rollout.config import RolloutConfig
from planish.verifiers.judging import Judging

if TYPE_CHECKING:
    from planish.stages.rollout.generate import GroupSampler


@dataclass(frozen=True)
class Start:
    """The policy from which an iteration samples, and the data part of the train state before it.

    Rollouts name their policy by version and checksum of the weights. Both are known as soon as
    the weights are, so sampling waits for no export.
    """

    version: int
    weights: str
    """Checksum of the weights (`records.files.weights_checksum`); "" if the policy records none."""
    files_pin: str
    """Pinned policy folder with the tokenizer, and with the weights unless they are `in_memory`."""
    data: StreamState
    """Prompt cursor and sets of the train state; pins are whole URIs."""
    lag: int = 0
    """Versions by which the policy that trains on these rollouts is newer than the sampling one."""
    in_memory: bool = False
    """True if an engine took the weights from a trainer; the weights of `files_pin` are older."""


def start_of(policy_pin: str, data: StreamState, *, lag: int = 0) -> Start:
    """Return the start from a policy in the store."""
    version, weights = weights_name(policy_pin)
    return Start(version, weights, policy_pin, data, lag)


@dataclass(frozen=True)
class RolloutJob:
    """The inputs of one shard of an iteration."""

    context: Context
    """Run, iteration and shard."""
    config: RolloutConfig
    num_shards: int
    start: Start
    prompts_sha256: str
    opened: OpenEngine = open_engine
    """Function that opens the engine."""

    @property
    def data(self) -> StreamState:
        """Prompt cursor and sets of the train state; pins are whole URIs."""
        return self.start.data

    @property
    def parents(self) -> dict[str, str]:
        """Digests of the sets that the shard reads; `facts` name the policy."""
        return {"prompts": self.prompts_sha256}

    @property
    def judging(self) -> Judging:
        """Judging of responses, the same in every stage."""
        return Judging.of(self.context.config.get("reward", {}))

    @property
    def num_groups(self) -> int:
        """Groups that this shard has room for."""
        return shard_groups(self.config.prompts_per_iteration, self.context.shard, self.num_shards)

    @property
    def num_slots(self) -> int:
        """Responses that this shard has room for."""
        return self.num_groups * self.config.group_size

    @property
    def has_surplus(self) -> bool:
        """True if surplus groups may enter or leave."""
        return self.config.max_staleness > 0 or bool(self.data.surplus)

    def facts(self) -> dict[str, Any]:
        """Return the attributes that the output of an earlier attempt must have for reuse."""
        facts: dict[str, Any] = {
            "config_sha256": self.context.config_sha256,
            "iteration": self.context.iteration,
            "seed": self.context.seed,
            "shard": self.context.shard,
            "num_shards": self.num_shards,
            "cursor": dict(self.data.cursor),
            "policy_version": self.start.version,
            WEIGHTS: self.start.weights,
        }
        if self.has_surplus:
            facts["surplus_sources"] = [parse_pin(pin)[1] for pin in self.data.surplus]
        if self.config.window_tokens or self.data.carry:
            facts["carry_sources"] = [parse_pin(pin)[1] for pin in self.data.carry]
        return facts

    def commits(self) -> Commits:
        """Return the commits of this shard."""
        context = self.context
        uri = layout.commits(context.root, context.iteration, context.shard)
        return Commits(uri, parents=self.parents, facts=self.facts())

    @contextmanager
    def serve(self, prompts: PromptSet) -> Iterator[Session]:
        """Open the engine for the length of a `with` block."""
        import torch

        from planish.engines.config import EngineConfig
        from planish.engines.requests import ModelRef
        from planish.models.policy import policy_tokenizer
        from planish.stages.rollout.generate import GroupSampler

        config = self.config
        torch.set_num_threads(config.threads)
        tokenizer = policy_tokenizer(self.start.files_pin)
        begin = time.monotonic()
        settings = self.context.section(EngineConfig, "engine")
        pin = "" if self.start.in_memory else self.start.files_pin
        model, options = ModelRef(pin=pin), engine_options(config)
        with self.opened(settings, model, **options) as engine:
            loaded = time.monotonic()
            sampler = GroupSampler(
                engine,
                tokenizer,
                prompts,
                config,
                self.commits(),
                seed=self.context.seed,
                iteration=self.context.iteration,
                judging=self.judging,
            )
            session = Session(sampler)
            yield session
            session.stats = sampler.flight.stats()
            session.load_seconds = loaded - begin
            session.sample_seconds = time.monotonic() - loaded


def rollout_config(tables: Mapping[str, Mapping[str, Any]]) -> RolloutConfig:
    """Return the settings of `[rollout]`; `train.replay_routing` turns on `keep_routing`."""
    config = parse_section(RolloutConfig, tables.get("rollout", {}), section="rollout")
    if tables.get("train", {}).get("replay_routing"):
        config = config.model_copy(update={"keep_routing": True})
    return config


def engine_options(config: RolloutConfig) -> dict[str, Any]:
    """Return the options of `open_engine` that follow from the settings."""
    from planish.base.parallel import pick_device

    return {
        "max_rows": config.max_rows,
        "max_model_len": config.max_prompt_tokens + config.max_response_tokens,
        "device": str(pick_device(config.device)),
        **({"routing": True} if config.keep_routing else {}),
    }


@dataclass
class Session:
    """A sampler and its engine; the numbers are there after the `with` block."""

    sampler: GroupSampler
    stats: dict[str, Any] = field(default_factory=dict)
    """Counters of the engine."""
    load_seconds: float = 0.0
    """Time until the engine has weights."""
    sample_seconds: float = 0.0
    """Time from then to the last token."""

    def timing(self, num_tokens: int) -> dict[str, float]:
        """Return timings, which are metrics but no part of a record.

        An engine with ranks adds `expert_imbalance`, the rows of the busiest expert over the mean,
        and `bubble_ratio/<role>_<rank>`, the share of step time in which a rank was not busy.
        """
        timing = {
            "load_seconds": self.load_seconds,
            "sample_seconds": self.sample_seconds,
            "tokens_per_second": num_tokens / max(self.sample_seconds, 1e-9),
            "engine_occupancy": float(self.stats.get("occupancy", 0.0)),
        }
        if "imbalance" in self.stats:
            timing["expert_imbalance"] = float(self.stats["imbalance"])
        for rank in self.stats.get("ranks", ()):
            busy = rank["busy_s"] / max(self.stats["step_seconds"], 1e-9)
            timing[f"bubble_ratio/{rank['role']}_{rank['rank']}"] = max(0.0, 1.0 - busy)
        return timing


@dataclass(frozen=True)
class Sampled:
    """The rollouts of a shard, whole or by windows."""

    rollouts: RolloutSet
    attributes: dict[str, Any]
    """Attributes of their manifest, beside the facts of the job."""
    timing: dict[str, float]


def read_data(state_pin: str) -> StreamState:
    """Return cursor and sets of a train state, with whole pins; a fresh start for ""."""
    if not state_pin:
        return StreamState(fresh_cursor())
    from planish.checkpoint.train_state import read_state_info

    return whole_pins(parse_data(read_state_info(state_pin)["data"]), state_root(state_pin))


def whole_pins(data: StreamState, root: str) -> StreamState:
    """Return the data part of a train state with whole pins, below `root`."""
    return replace(
        data,
        surplus=[f"{root}/{pin}" for pin in data.surplus],
        carry=[f"{root}/{pin}" for pin in data.carry],
    )


def shard_groups(num_groups: int, shard: int, num_shards: int) -> int:
    """Return the number of groups of a shard; the first shards take the remainder.

    Example:
        >>> [shard_groups(7, shard, 3) for shard in range(3)]
        [3, 2, 2]
    """
    return num_groups // num_shards + (shard < num_groups % num_shards)
