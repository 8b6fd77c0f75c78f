"""Small and random records for the tests of this folder."""

from dataclasses import replace

import numpy as np

from planish.records import (
    FinishReason,
    PromptSet,
    Ragged,
    RewardSet,
    RolloutSet,
    TraceSet,
    ValueSet,
    WaitingSet,
    schema,
)
from planish.records.parquet import decode_pieces, encode, row_group_bounds
from planish.records.prompts import prompt_id

ODD_TEXTS = ["", "é\u0000 nul", "line\nbreak", "\U0001f600", "' or 1=1; --", "x" * 1000]


def file_of(record) -> bytes:
    """Return the Parquet file of a record."""
    columns = record.columns()
    return encode(columns, record.COLUMNS, row_group_bounds(columns, record.group_starts()))


def decode(data, specs):
    """Return the columns of a whole Parquet file."""
    return schema.join(list(decode_pieces(data, specs, name="x")), specs)


def rows_of(ragged):
    """Return the rows as lists of numbers."""
    return [ragged.row(row).tolist() for row in range(len(ragged))]


def take_rows(rollouts, chosen):
    """Return the chosen rows in order; groups without rows vanish, others renumber."""
    rows = np.flatnonzero(chosen) if np.asarray(chosen).dtype == np.bool_ else np.sort(chosen)
    groups, index = np.unique(rollouts.group_index[rows], return_inverse=True)
    columns = {
        name: schema.take_rows(data, groups if name == "prompt_tokens" else rows)
        for name, data in vars(rollouts).items()
        if data is not None
    }
    return RolloutSet(**{**columns, "group_index": index.astype(np.int32)})


def take_groups(rollouts, groups):
    """Return whole groups in this order, renumbered from 0."""
    return RolloutSet.concat([take_rows(rollouts, rollouts.group_index == one) for one in groups])


def build_rollouts(prompts, responses, **columns) -> RolloutSet:
    """Return finished responses in groups of one size, or of the given `group_index`.

    Prompts and responses are lists of token ids; other columns have values that mean nothing.
    """
    rows, groups = len(responses), np.arange(len(prompts))
    index = columns.pop("group_index", np.repeat(groups, rows // max(1, len(prompts))))
    sample = columns.pop("sample_index", np.arange(rows) - np.searchsorted(index, index))
    ids = columns.pop("prompt_id", [f"{group:016x}" for group in index])
    lengths = [len(response) for response in responses]
    plain = {
        "prompt_tokens": Ragged.from_lists(prompts, np.int32),
        "response_tokens": Ragged.from_lists(responses, np.int32),
        "rollout_logprobs": Ragged.from_lists([[-1.0] * n for n in lengths], np.float32),
        "policy_version": Ragged.from_lists([[0] * n for n in lengths], np.int32),
        "window_start": np.zeros(rows, np.int32),
        "rollout_id": [f"{name}-{place:03d}" for name, place in zip(ids, sample, strict=True)],
        "response": ["x"] * rows,
        "answer": ["1"] * rows,
        "verifier": ["exact"] * rows,
        **columns,
        "finish": np.asarray(columns.get("finish", [FinishReason.STOP] * rows), np.int8),
    }
    return RolloutSet(
        group_index=np.asarray(index, np.int32),
        sample_index=np.asarray(sample, np.int32),
        prompt_id=ids,
        **plain,
    )


def random_rollouts(seed: int = 0, *, groups: int = 5, group_size: int = 4) -> RolloutSet:
    """Whole groups with responses of 0 to 12 tokens."""
    generator = np.random.default_rng(seed)
    rows = groups * group_size
    lengths = generator.integers(0, 13, rows)
    ids = [f"{generator.integers(1 << 62):016x}" for _ in range(groups)]
    return build_rollouts(
        [generator.integers(0, 50, generator.integers(1, 9)) for _ in ids],
        [generator.integers(0, 50, n) for n in lengths],
        rollout_logprobs=Ragged.from_lists([-generator.random(n) for n in lengths], np.float32),
        policy_version=Ragged.from_lists([[3] * n for n in lengths], np.int32),
        finish=generator.integers(0, len(FinishReason), rows),
        prompt_id=[name for name in ids for _ in range(group_size)],
        response=[ODD_TEXTS[r % len(ODD_TEXTS)] for r in range(rows)],
        answer=[str(r) for r in range(rows)],
        verifier=["math"] * rows,
    )


def routed(seed: int = 0, *, dtype=np.int8, high: int = 120, **sizes) -> RolloutSet:
    """Random rollouts with the two experts of each of three layers, for all tokens but the last."""
    plain = random_rollouts(seed, **sizes)
    generator = np.random.default_rng(seed)
    rows = []
    for count in plain.num_tokens().tolist():
        routing = generator.integers(0, high, (count, 3, 2))
        routing[-1] = -1
        rows.append(routing.reshape(-1))
    per_token = np.full(plain.num_rows, 2, np.int32)
    return changed(plain, routing=Ragged.from_lists(rows, dtype), experts_per_token=per_token)


def random_prompts(seed: int = 0, *, rows: int = 7) -> PromptSet:
    """Prompts of one or two messages, some without a measured pass rate."""
    generator = np.random.default_rng(seed)
    messages = [
        [{"role": "system", "content": ODD_TEXTS[n % len(ODD_TEXTS)]}] * (n % 2)
        + [{"role": "user", "content": f"{generator.integers(1 << 30)}+1={n}"}]
        for n in range(rows)
    ]
    answers = [str(n) for n in range(rows)]
    rates = generator.random(rows).astype(np.float32)
    rates[::3] = np.nan
    return PromptSet(
        prompt_id=[prompt_id(m, a) for m, a in zip(messages, answers, strict=True)],
        messages=messages,
        answer=answers,
        verifier=["math"] * rows,
        source=["sums"] * rows,
        pass_rate=rates,
    )


def random_traces(seed: int = 0, *, rows: int = 6) -> TraceSet:
    """Worked solutions of the prompts above."""
    prompts = random_prompts(seed, rows=rows)
    responses = [ODD_TEXTS[n % len(ODD_TEXTS)] for n in range(rows)]
    return TraceSet(prompts.prompt_id, prompts.messages, responses, prompts.source)


def random_rewards(seed: int = 0, *, rows: int = 9) -> RewardSet:
    """Rewards in {-1, 1} with penalties."""
    generator = np.random.default_rng(seed)
    accuracy = generator.integers(0, 2, rows).astype(np.float32)
    penalty = -generator.random(rows).astype(np.float32)
    outcome = 2 * accuracy - 1
    return RewardSet(
        accuracy=accuracy,
        outcome=outcome,
        length_penalty=penalty,
        reward=outcome + penalty,
        has_reward=generator.random(rows) < 0.5,
        keep=generator.random(rows) < 0.5,
        extracted=[ODD_TEXTS[r % len(ODD_TEXTS)] for r in range(rows)],
    )


def random_values(seed: int = 0, *, rows: int = 8) -> ValueSet:
    """Values of responses of 0 to 12 tokens."""
    generator = np.random.default_rng(seed)
    return ValueSet.from_rows(
        {(n // 3, n % 3): generator.normal(size=generator.integers(0, 13)) for n in range(rows)}
    )


def random_waiting(seed: int = 0, *, rows: int = 6) -> WaitingSet:
    """Finished responses of 1 to 12 tokens."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 13, rows)
    return WaitingSet(
        prompt_tokens=Ragged.from_lists([generator.integers(0, 50, 3) for _ in lengths], np.int32),
        response_tokens=Ragged.from_lists(
            [generator.integers(0, 50, n) for n in lengths], np.int32
        ),
        values=Ragged.from_lists([generator.normal(size=n) for n in lengths], np.float32),
        returns=Ragged.from_lists([[1.0] * n for n in lengths], np.float32),
    )


SAMPLES = {
    "prompts": random_prompts,
    "traces": random_traces,
    "rollouts": random_rollouts,
    "rewards": random_rewards,
    "values": random_values,
    "waiting": random_waiting,
}


def changed(record, **columns):
    """Return the record with other columns."""
    return replace(record, **columns)
