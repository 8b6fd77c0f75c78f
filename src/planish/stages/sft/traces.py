"""Worked traces as token ids, and the order of their mini-batches.

Mini-batches have traces of similar length, so padding is small. Every epoch a seeded shuffle
changes the order of the mini-batches, and of traces of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planish.base.errors import ConfigError
from planish.models.tokens import Tokenizer
from planish.records.prompts import PromptSet, TraceSet
from planish.stages.sft.config import SftConfig

if TYPE_CHECKING:
    from planish.models.policy import Policy

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodedTraces:
    """Prompt and response tokens of worked traces."""

    tokens: list[Ids]
    prompt_lengths: Ids
    """[traces] int64, tokens before the response."""

    @property
    def lengths(self) -> Ids:
        """Tokens of each trace, [traces] int64."""
        return np.array([len(ids) for ids in self.tokens], dtype=np.int64)

    def batch(self, rows: list[int]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return ids [B, S] int64, padded on the right by 0, and the mask of response tokens."""
        width = max(len(self.tokens[row]) for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        select = np.zeros((len(rows), width), dtype=np.bool_)
        for place, row in enumerate(rows):
            length = len(self.tokens[row])
            ids[place, :length] = self.tokens[row]
            select[place, self.prompt_lengths[row] : length] = True
        return ids, select


def probe_rows(prompts: PromptSet, count: int) -> list[int]:
    """Return the rows of the first `count` prompts by id; ids are hashes, so that is a fair draw.

    At most half of the prompts are taken.
    """
    order = sorted(range(prompts.num_rows), key=lambda row: prompts.prompt_id[row])
    return sorted(order[: min(count, max(1, prompts.num_rows // 2))])


def encode_traces(
    traces: TraceSet,
    tokenizer: Tokenizer,
    *,
    without: frozenset[str] = frozenset(),
    max_traces: int = 0,
    max_tokens: int = 0,
) -> EncodedTraces:
    """Tokenise traces in the order of their prompt ids.

    It leaves out traces of the prompt ids `without` and traces of more than `max_tokens`, and
    takes at most `max_traces`; a limit of 0 is no limit.

    Raises:
        ConfigError: no trace is left.
    """
    order = sorted(range(traces.num_rows), key=lambda row: (traces.prompt_id[row], row))
    tokens: list[Ids] = []
    prompt_lengths: list[int] = []
    too_long = 0
    for row in order:
        if traces.prompt_id[row] in without:
            continue
        if max_traces and len(tokens) == max_traces:
            break
        prompt = tokenizer.encode_prompt(traces.messages[row])
        ids = [*prompt, *tokenizer.encode_response(traces.response[row])]
        if max_tokens and len(ids) > max_tokens:
            too_long += 1
            continue
        tokens.append(np.array(ids, dtype=np.int64))
        prompt_lengths.append(len(prompt))
    if not tokens:
        raise ConfigError(
            f"sft needs worked traces, got none of {traces.num_rows} after leaving out "
            f"{len(without)} probe prompts and {too_long} traces of more than {max_tokens} tokens; "
            "give a data set with traces, or a trained model as `model.path`"
        )
    return EncodedTraces(tokens, np.array(prompt_lengths, dtype=np.int64))


def start_traces(
    prompts: PromptSet, traces: TraceSet, policy: Policy, config: SftConfig
) -> tuple[PromptSet, EncodedTraces]:
    """Return the training prompts that the cold start is measured on, and the traces of the others.

    Raises:
        ConfigError: no trace is left.
    """
    probes = prompts.take(probe_rows(prompts, config.probe_prompts))
    return probes, encode_traces(
        traces,
        policy.tokenizer,
        without=frozenset(probes.prompt_id),
        max_traces=config.max_traces,
        max_tokens=int(getattr(policy.model.config, "max_position_embeddings", 0) or 0),
    )


def minibatches(lengths: Ids, size: int, seed: int) -> Iterator[list[int]]:
    """Yield rows of mini-batches of `size` traces without end; every epoch holds each row once.

    The last mini-batch of an epoch may be smaller. Epoch e is a function of (seed, e).
    """
    epoch = 0
    while True:
        generator = np.random.default_rng((seed, epoch))
        shuffled = generator.permutation(len(lengths))
        ordered = shuffled[np.argsort(lengths[shuffled], kind="stable")]
        cuts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        for place in generator.permutation(len(cuts)):
            yield cuts[place].tolist()
        epoch += 1
