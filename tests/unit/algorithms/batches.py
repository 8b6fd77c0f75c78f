"""Train batches made by hand."""

import numpy as np
import torch

from planish.algorithms.base import Denominators, TrainBatch


def make_batch(mask, *, old=None, rollout=None, advantages=None, reward=None, group=None, **more):
    """A batch with the given mask; everything that is not named is 0.

    `more` names `truncated`, `finished`, `accuracy`, `values`, `returns`, `reference`, and
    `response`: all response tokens, where `mask` holds those of this window only.
    """
    mask = torch.as_tensor(mask).bool()
    rows = mask.shape[0]

    def tokens(x):
        return torch.zeros(mask.shape) if x is None else torch.as_tensor(x, dtype=torch.float32)

    old_logprobs = tokens(old)
    reward = torch.zeros(rows) if reward is None else torch.as_tensor(reward, dtype=torch.float32)
    accuracy = more.get("accuracy")
    return TrainBatch(
        input_ids=torch.zeros(mask.shape, dtype=torch.int64),
        position_ids=torch.zeros(mask.shape, dtype=torch.int64),
        attention_mask=torch.ones_like(mask),
        policy_mask=mask,
        value_mask=torch.as_tensor(more.get("response", mask)).bool(),
        positive_mask=torch.zeros_like(mask),
        rollout_logprobs=old_logprobs if rollout is None else tokens(rollout),
        old_logprobs=old_logprobs,
        reference_logprobs=tokens(more.get("reference")),
        values=tokens(more.get("values")),
        advantages=tokens(advantages),
        returns=tokens(more.get("returns")),
        reward=reward,
        accuracy=(reward > 0).float() if accuracy is None else torch.as_tensor(accuracy).float(),
        group_index=torch.zeros(rows, dtype=torch.int32) if group is None else torch.tensor(group),
        is_truncated=torch.as_tensor(more.get("truncated", [False] * rows)),
        is_finished=torch.as_tensor(more.get("finished", [True] * rows)),
    )


def random_batch(rng, prompts, responses, *, vocabulary, logprob):
    """Rollouts of these lengths in groups of eight, right and wrong ones, whose tokens are random.

    `logprob` is that of every response token.
    """
    ends = prompts + responses
    column = np.arange(ends.max())
    real = column < ends[:, None]
    trained = real & (column >= np.reshape(prompts, (-1, 1)))
    ids = np.where(real, rng.integers(4, vocabulary, real.shape), 0)
    reward = rng.choice([-1.0, 1.0], len(ends))
    batch = make_batch(
        trained, old=np.where(trained, logprob, 0), reward=reward, accuracy=np.zeros(len(ends))
    )
    return batch.updated(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(np.tile(column, (len(ends), 1))),
        attention_mask=torch.from_numpy(real),
        group_index=torch.arange(len(ends), dtype=torch.int32) // 8,
    )


def whole_step(algorithm, batch, num_minibatches=1):
    """Denominators of an optimizer step that holds the whole batch."""
    counts = algorithm.counts(batch)
    return Denominators(counts, counts, num_minibatches)


def value_step(algorithm, batch, num_minibatches=1):
    """Denominators of a critic step that holds the whole batch."""
    counts = algorithm.value_counts(batch)
    return Denominators(counts, counts, num_minibatches)


def ragged_mask(lengths, width):
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]
