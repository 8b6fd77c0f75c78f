"""Runs of successive batching over scripted engines, without training in between."""

from dataclasses import dataclass, field
from typing import Any

from planish.engines import ENGINES
from planish.engines.sampling import request_seed
from planish.models.policy import save_policy
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.prompts import PromptSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.records.stream import StreamState, advance, fresh_cursor
from planish.run.stage import Context
from planish.run.update import Pins
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.job import RolloutJob, Start
from planish.stages.rollout.windows import sample_windows
from tests.unit.stages.rollout.scripted_engine import scripted_length, scripted_token
from tests.unit.stages.rollout.stage_run import easy_policy

SEED = 3
NAME = "scripted"

Key = tuple[int, int]


def register(monkeypatch) -> None:
    monkeypatch.setitem(ENGINES, NAME, "tests.unit.stages.rollout.scripted_engine:ScriptedEngine")


def save_policies(root: str, count: int) -> list[str]:
    """Versions 0..count-1 of the same weights; returns their pins."""
    return [
        save_policy(
            layout.policy(root, v),
            easy_policy(),
            version=v,
            parents={},
            attributes={},
        ).pin()
        for v in range(count)
    ]


@dataclass
class Simulation:
    """A run: each call of `iterate` is one iteration under the next policy version."""

    root: str
    prompts: PromptSet
    policies: list[str]
    config: RolloutConfig
    data: StreamState = field(default_factory=lambda: StreamState(fresh_cursor()))
    number: int = 0
    windows: dict[Key, list[tuple[int, list[int]]]] = field(default_factory=dict)
    """(start, tokens) of every window in the rollout sets, by (ordinal, sample)."""
    finished: dict[Key, int] = field(default_factory=dict)
    """How often a response was finished in a rollout set."""
    carried: dict[Key, list[int]] = field(default_factory=dict)
    """Tokens of what goes on after the newest iteration."""
    drawn: dict[int, int] = field(default_factory=dict)
    """Ordinal to the iteration in which it was drawn."""
    num_generated: int = 0
    given: list[tuple[RolloutSet, list[int]]] = field(default_factory=list)
    """Rollout set and ordinals of its groups, of each shard of the newest iteration."""

    def iterate(self, num_shards: int) -> list[dict[str, float]]:
        """Run all shards; returns their metrics."""
        self.number += 1
        consumed: list[int] = []
        self.carried = {}
        self.given = []
        metrics, carry = [], []
        for shard in range(num_shards):
            task = self.task(shard, num_shards)
            sampled = sample_windows(task, self.prompts)
            sampled.rollouts.validate()
            self.given.append((sampled.rollouts, sampled.attributes["ordinals"]))
            self.collect(sampled.rollouts, sampled.attributes)
            consumed += sampled.attributes["consumed"]
            uri = layout.carry(self.root, self.number, shard)
            assert read_manifest(uri).sha256 == sampled.attributes["carry_sha256"]
            carry.append(f"{uri}#sha256={sampled.attributes['carry_sha256']}")
            self.collect_carry(uri)
            metrics.append(sampled.attributes["metrics"])
        self.drawn |= dict.fromkeys(consumed, self.number)
        self.data = StreamState(advance(self.data.cursor, consumed), carry=carry)
        return metrics

    def task(self, shard: int, num_shards: int) -> RolloutJob:
        pin = self.policies[self.number - 1]
        tables = {"run": {"seed": SEED}, "engine": {"name": NAME}}
        context = Context(self.root, "rollout", self.number, shard, tables, "c" * 64, {})
        start = Start(Pins(pin, ""))
        return RolloutJob(context, self.config, num_shards, start, self.data, "0" * 64)

    def collect(self, rollouts: RolloutSet, attributes: dict[str, Any]) -> None:
        for row in range(rollouts.num_rows):
            ordinal = attributes["ordinals"][rollouts.group_index[row]]
            key = (ordinal, int(rollouts.sample_index[row]))
            start = int(rollouts.window_start[row])
            tokens = rollouts.response_tokens.row(row).tolist()
            known = [token for _, window in self.windows.get(key, []) for token in window]
            # what came before this window is what was handed out then
            assert tokens[:start] == known
            self.windows.setdefault(key, []).append((start, tokens[start:]))
            if rollouts.finish[row] != FinishReason.WINDOW:
                self.finished[key] = self.finished.get(key, 0) + 1
            self.num_generated += len(tokens) - start

    def collect_carry(self, uri: str) -> None:
        carry = read_set(RolloutSet, uri)
        ordinals = read_manifest(uri).attributes["ordinals"]
        for row in range(carry.num_rows):
            key = (ordinals[carry.group_index[row]], int(carry.sample_index[row]))
            assert key not in self.carried
            self.carried[key] = carry.response_tokens.row(row).tolist()

    def script(self, key: Key) -> list[int]:
        """Return all tokens of a response, as its seed has them."""
        seed = self.seed_of(key)
        length = min(scripted_length(seed), self.config.max_response_tokens)
        return [scripted_token(seed, t) for t in range(length)]

    def seed_of(self, key: Key) -> int:
        from planish.records.stream import position

        row = position(key[0], self.prompts.num_rows, SEED)
        name = f"{self.prompts.prompt_id[row]}/{key[0]}"
        return request_seed(SEED, self.drawn[key[0]], name, key[1])


def write_policies_and_prompts(template_root: str, root: str) -> tuple[PromptSet, list[str]]:
    prompts = read_set(PromptSet, layout.prompts(template_root))
    write_set(layout.prompts(root), prompts, parents={}, attributes={})
    return prompts, save_policies(root, 6)
