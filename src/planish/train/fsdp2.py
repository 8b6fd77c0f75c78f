"""The FSDP2 trainer: parameters, gradients and moments sharded over data-parallel ranks.

With one rank the model stays as it is, since sharding over one rank is the identity. Gradients
are summed over ranks and micro-batches; the loss divides by counts of the whole optimizer step.

Source: ZeRO-3, arXiv 1910.02054, section 5 (sharded parameters, gradients and optimizer).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.algorithms.base import LossFn, LossOutput, TrainBatch
from planish.checkpoint import api as checkpoint
from planish.logprobs import TokenScorer
from planish.models.policy import load_policy
from planish.parallel import Ranks, data_mesh
from planish.train.batching import (
    gather_rows,
    lengths_of,
    plan_microbatches,
    scatter_tokens,
)
from planish.train.config import TrainConfig


class Fsdp2Trainer:
    """Trains a causal language model of transformers; meets `planish.train.trainer.Trainer`."""

    def __init__(
        self,
        config: TrainConfig,
        policy_pin: str,
        *,
        temperature: float,
        seed: int,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """Load the policy in float32, shard it and build its optimizer."""
        self.config = config
        self.ranks = ranks
        self.device = device
        self.temperature = temperature
        set_up_torch(config, device)
        torch.manual_seed(_stream_seed(seed, ranks.rank))
        model = load_policy(policy_pin, dtype=torch.float32).model
        if config.activation_checkpointing:
            _checkpoint_layers(model)
        self.scorer = TokenScorer(model).to(device)
        if ranks.size > 1:
            self._shard(model)
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.buffers = _persistent_buffers(model)
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Moments exist from the start, so that a load always finds tensors to fill.
        for parameter in self.parameters.values():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _shard(self, model: Any) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": data_mesh(self.ranks, self.device)}
        if self.config.compute_dtype == "bfloat16":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        # The scorer returns a view of what it gathered; nothing below writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        for layer in decoder_layers(model):
            fully_shard(layer, **options)
        fully_shard(self.scorer, **options)

    def load(self, pin: str) -> None:
        """Replace weights, moments and, under the same layout, random states."""
        info = checkpoint.read_state_info(pin)
        state = self.state()
        if (info["num_ranks"], info["device"]) != (self.ranks.size, self.device.type):
            # Streams of other ranks are of no use here; those of this start stay.
            del state["random"]
        checkpoint.load(pin, state, ranks=self.ranks)
        for name, stream in state.get("random", {}).items():
            if name.startswith("torch."):
                torch.set_rng_state(stream)
            else:
                torch.cuda.set_rng_state(stream, self.device)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Score every token in `policy_mask`; ranks share the rows and add up the results."""
        result = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        with torch.no_grad():
            for rows in self._plan(batch):
                micro = gather_rows(batch, rows).to(self.device)
                scored, _ = self._score(micro, with_entropy=False)
                columns = scored.shape[1]
                result[torch.from_numpy(rows), :columns] = scored.cpu()[: len(rows)]
        if self.ranks.size == 1:
            return result
        return self.ranks.sum(result.to(self.device)).cpu()

    def values(self, batch: TrainBatch) -> Tensor:
        """Raise: there is no critic."""
        raise NotImplementedError("this trainer has no critic; choose an algorithm without values")

    def step(
        self, minibatch: TrainBatch, loss_fn: LossFn, *, learning_rate: float
    ) -> dict[str, float]:
        """Accumulate the gradient over micro-batches, clip it and step, unless it is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        tally = Tally()
        for rows in self._plan(minibatch):
            micro = gather_rows(minibatch, rows).to(self.device)
            logprobs, entropy = self._score(micro)
            output = loss_fn(logprobs, entropy, micro)
            # Sharded gradients are averaged over ranks; the parts of the loss are to be summed.
            torch.autograd.backward(output.loss * self.ranks.size)
            tally.add(output)
        metrics = tally.result(self.ranks)
        norm = self._clip()
        metrics |= {"grad_norm": norm, "skipped": 0.0 if math.isfinite(norm) else 1.0}
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def _plan(self, batch: TrainBatch) -> list[Any]:
        plan = plan_microbatches(
            lengths_of(batch), self.config.tokens_per_microbatch, self.ranks.size
        )
        return plan[self.ranks.rank]

    def _score(self, micro: TrainBatch, *, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
        select = micro.policy_mask
        if not bool(select.any()):
            # Sharded models need a forward and backward on every rank, even on one without tokens.
            select = select.clone()
            select[0, 1] = True
        half = self.config.compute_dtype == "bfloat16"
        precision: Any = (
            torch.autocast(self.device.type, torch.bfloat16)
            if half and self.ranks.size == 1
            else contextlib.nullcontext()
        )
        with precision:
            # Rows begin at column 0, so positions are those that the model takes by default, at
            # the price of one row.
            logprobs, entropy = self.scorer(
                micro.input_ids, None, select, self.temperature, with_entropy
            )
        return scatter_tokens(select, logprobs), scatter_tokens(select, entropy)

    def _clip(self) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(
            list(self.parameters.values()), self.config.grad_clip
        )
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Return weights, moments by parameter name, and this rank's random streams."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }
        rank = f"{self.ranks.rank:05d}"
        streams = {f"torch.{rank}": torch.get_rng_state()}
        if self.device.type == "cuda":
            streams[f"cuda.{rank}"] = torch.cuda.get_rng_state(self.device)
        weights = {**self.parameters, **self.buffers}
        return {"model": weights, "optimizer": moments, "random": streams}

    def close(self) -> None:
        """Let go of model and moments."""
        self.optimizer.state.clear()
        self.parameters.clear()
        del self.scorer


class Tally:
    """Sums the metrics of micro-batches; ranks are summed once at the end."""

    def __init__(self) -> None:
        self.loss: list[Tensor] = []
        self.means: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.maxima: dict[str, list[Tensor]] = {}

    def add(self, output: LossOutput) -> None:
        """Take in one micro-batch; nothing is copied from the device yet."""
        self.loss.append(output.loss.detach())
        for name, pair in output.means.items():
            self.means.setdefault(name, []).append(pair)
        for name, value in output.maxima.items():
            self.maxima.setdefault(name, []).append(value)

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Return `loss`, the means of every metric that has a count, and the maxima."""
        names, peaks = sorted(self.means), sorted(self.maxima)
        sums = [_total(self.loss)]
        for name in names:
            sums += [_total(part) for part in zip(*self.means[name], strict=True)]
        packed = ranks.sum(torch.stack(sums)).tolist()
        metrics = {"loss": packed[0]}
        for position, name in enumerate(names):
            total, count = packed[1 + 2 * position : 3 + 2 * position]
            if count > 0:
                metrics[name] = total / count
        if peaks:
            tops = torch.stack([torch.stack(self.maxima[name]).max() for name in peaks])
            metrics |= dict(zip(peaks, ranks.max(tops).tolist(), strict=True))
        return metrics


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum()


def set_up_torch(config: TrainConfig, device: torch.device) -> None:
    """Set the process-wide switches: threads and deterministic kernels."""
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads)
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling fresh memory would cost time, and every kernel here writes all of its output.
        switches: Any = torch.utils.deterministic
        switches.fill_uninitialized_memory = False


def _stream_seed(seed: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder layers of a causal LM of transformers; none where it names no `layers`."""
    body = getattr(model, model.base_model_prefix)
    return list(getattr(body, "layers", []))


def _persistent_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that belong to the saved model."""
    saved = set(model.state_dict().keys())
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _checkpoint_layers(model: Any) -> None:
    """Recompute each decoder layer in the backward pass.

    transformers only does so in training mode, so the layers themselves, and nothing below them,
    are put into it: dropout stays off.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in decoder_layers(model):
        layer.training = True
