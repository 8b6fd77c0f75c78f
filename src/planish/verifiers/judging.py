"""Verdicts of all verifiers of a run on its responses, as columns of rollouts.

A response is judged when it is sampled; other stages read the verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planish.records.rollouts import VERDICT, RolloutSet
from planish.verifiers import Verdict, VerifierOptions, verify_many

Verdicts = Mapping[str, Verdict]
"""Map from verifier name to verdict, with the row's own verifier first; empty if the row is not
judged."""

_FLAGS = ("invalid", "error", "timeout")


@dataclass(frozen=True)
class Judging:
    """Verifiers and their options for all stages of a run."""

    options: VerifierOptions
    functions: tuple[str, ...] = ()
    """Names of reward functions that judge in addition to the verifier of the row."""

    @classmethod
    def of(cls, reward: Mapping[str, Any]) -> Judging:
        """Return the judging of a run from its resolved section `[reward]`."""
        names = tuple(function["name"] for function in reward.get("functions", ()))
        return cls(VerifierOptions.of(reward), names)

    def judge(self, rows: Sequence[Sequence[str]]) -> list[Verdicts]:
        """Return the verdicts on rows of (verifier, response, answer, extra).

        Raises:
            ConfigError: a verifier is missing on this machine.
            VerifierFailure: a user's verifier has hung too often in a row.
        """
        names = [list(dict.fromkeys((row[0], *self.functions))) for row in rows]
        calls = [(name, *row[1:]) for row, own in zip(rows, names, strict=True) for name in own]
        found = iter(verify_many(calls, self.options))
        return [{name: next(found) for name in own} for own in names]

    def complete(self, rollouts: RolloutSet, rows: Iterable[int]) -> list[Verdicts]:
        """Return the verdicts on all rollouts; judge those of `rows` that have none.

        A verifier that itself failed, e.g. because of a server, is called once more. Raises as
        `judge`.
        """
        verdicts = from_columns(rollouts)
        asked = {row: list(verdicts[row].values()) for row in rows}
        missing = [row for row, own in asked.items() if not own or any(v.error for v in own)]
        every = rollouts.to_verify()
        found = self.judge([every[row] for row in missing])
        for row, own in zip(missing, found, strict=True):
            verdicts[row] = own
        return verdicts


def score_of(verdict: Verdict) -> float:
    """Return the score of a verdict, 0 to 1."""
    return verdict.accuracy if verdict.score is None else verdict.score


def to_columns(verdicts: Sequence[Verdicts]) -> dict[str, Any]:
    """Return the columns of a rollout set for the verdicts on its R rows."""
    every = [list(each.values()) or [Verdict(math.nan)] for each in verdicts]
    own = [found[0] for found in every]
    others = [
        {name: asdict(verdict) for name, verdict in list(each.items())[1:]} for each in verdicts
    ]
    return {
        "accuracy": np.array([verdict.accuracy for verdict in own], np.float32),
        "score": np.array([score_of(verdict) for verdict in own], np.float64),
        "extracted": [verdict.extracted for verdict in own],
        **{name: np.array([getattr(v, name) for v in own], np.bool_) for name in _FLAGS},
        "functions": [json.dumps(part) for part in others] if any(others) else None,
    }


def from_columns(rollouts: RolloutSet) -> list[Verdicts]:
    """Return the verdicts on the rows of a rollout set."""
    columns: dict[str, Any] = rollouts.columns()
    rows = range(rollouts.num_rows)
    if "accuracy" not in columns:
        return [{} for _ in rows]
    parts = [np.asarray(columns[name], object).tolist() for name in VERDICT]
    own = [Verdict(**dict(zip(VERDICT, row, strict=True))) for row in zip(*parts, strict=True)]
    others = columns.get("functions", [""] * len(own))
    return [
        {}
        if math.isnan(own[row].accuracy)
        else {
            rollouts.verifier[row]: own[row],
            **{name: Verdict(**part) for name, part in json.loads(others[row] or "{}").items()},
        }
        for row in rows
    ]
