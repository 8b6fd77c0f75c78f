"""A trainer of a few lines, so that numbers can be worked by hand."""

import math

import torch

from planish.algorithms.base import LossOutput
from planish.stages.train.config import TrainConfig
from tests.unit.algorithms.batches import make_batch, ragged_mask


class TableTrainer:
    """A policy and a critic with one free number per column; plain gradient descent."""

    def __init__(self, width, norms=None, value_norms=None, value=0.0, reference=-1.0):
        self.table = torch.full((width,), -1.0, requires_grad=True)
        self.value_table = torch.full((width,), value, requires_grad=True)
        self.norms = norms
        self.value_norms = value_norms
        self.rates = []
        self.value_rates = []
        self.order = []
        self.scored = []
        self.reference = reference
        self.referred = []

    def logprobs(self, batch):
        self.scored.append(len(batch))
        logprobs = (self.table.detach() * batch.policy_mask).float()
        return logprobs, torch.full_like(logprobs, 0.5) * batch.policy_mask, {}

    def reference_logprobs(self, batch, pin):
        self.referred.append((len(batch), pin))
        self.order.append("reference")
        return torch.full(batch.policy_mask.shape, self.reference) * batch.policy_mask

    def values(self, batch):
        return (self.value_table.detach() * batch.value_mask).float()

    def step(self, minibatch, loss_fn, *, learning_rate, still=None):
        self.rates.append(learning_rate)
        self.order.append("policy")
        batches = [minibatch] if still is None else [minibatch, still.batch]
        outputs = []
        for batch in batches:
            logprobs = self.table * (batch.policy_mask | batch.positive_mask)
            outputs.append(loss_fn(logprobs, torch.zeros_like(logprobs), batch))
        output = added(outputs)
        return self.descend(self.table, output, learning_rate, self.norms)

    def value_step(self, minibatch, loss_fn, *, learning_rate):
        self.value_rates.append(learning_rate)
        self.order.append("critic")
        output = loss_fn(self.value_table * minibatch.value_mask, minibatch)
        return self.descend(self.value_table, output, learning_rate, self.value_norms)

    def descend(self, table, output, rate, norms):
        (gradient,) = torch.autograd.grad(output.loss, table)
        norm = norms.pop(0) if norms else gradient.norm().item()
        if math.isfinite(norm):
            with torch.no_grad():
                table -= rate * gradient
        means = {k: (s / n).item() for k, (s, n) in output.means.items() if n > 0}
        maxima = {k: v.item() for k, v in output.maxima.items()}
        skipped = 0.0 if math.isfinite(norm) else 1.0
        return {"loss": output.loss.item(), "grad_norm": norm, "skipped": skipped} | means | maxima


def added(outputs):
    """Return one loss with the metrics of several."""
    means = {
        name: tuple(sum(output.means[name][k] for output in outputs) for k in (0, 1))
        for name in outputs[0].means
    }
    maxima = {
        name: torch.stack([output.maxima[name] for output in outputs]).max()
        for name in outputs[0].maxima
    }
    return LossOutput(sum(output.loss for output in outputs), means, maxima)


def table_config(**changes):
    return TrainConfig(
        **{"learning_rate": 0.1, "warmup_iterations": 0, "rollouts_per_minibatch": 2} | changes
    )


def batch_of(rows=4, **more):
    """Return groups of two: one right response of three tokens, one wrong of two.

    `more` may name other rewards; the rest is as for `make_batch`.
    """
    reward = more.pop("reward", [1.0, -1.0] * (rows // 2))
    group = [k // 2 for k in range(rows)]
    return make_batch(ragged_mask([3, 2] * (rows // 2), 3), reward=reward, group=group, **more)
