"""A trainer and a rollout engine on the device of one rank, open from the first use to the end.

One of them has the device at a time. New weights pass in memory: every rank gathers a tensor of the
trainer and hands it to its own engine, in the type of the policy's files, so that an engine samples
from the very numbers that are exported.

Source: colocated ranks are HybridFlow's, arXiv 2409.19256, section 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planish.base.parallel import Ranks
from planish.engines import open_engine
from planish.engines.base import BaseEngine
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from planish.engines.weights import Index, Names, WeightSource, fetch_weights
from planish.models.experts import on_disk
from planish.records.io import read_manifest
from planish.records.refs import parse_pin
from planish.stages.train.ranks.worker import HeldTrainer
from planish.stages.train.trainer import Trainer


class TrainerWeights(WeightSource):
    """The policy in training under the names of its files; all ranks read alike, in one order."""

    def __init__(self, trainer: Trainer, files: WeightSource) -> None:
        """Gather nothing yet; `files` of an earlier policy give types and configuration."""
        self._tensors: Mapping[str, Any] = trainer.policy.weights()
        self._config = json.loads((Path(files.address) / "config.json").read_text("utf-8"))
        like = files.names()
        self._owner: dict[str, str] = {}
        self._names: Names = {}
        for owner, tensor in self._tensors.items():
            blank = {owner: torch.empty(tensor.shape, device="meta")}
            for name, part in on_disk(blank, self._config).items():
                self._owner[name] = owner
                self._names[name] = (tuple(part.shape), like[name][1])
        self._gathered, self._parts = "", dict[str, Tensor]()

    def names(self) -> Names:
        """Return shape and dtype by name."""
        return self._names

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Return a box of one tensor, which every rank gathers."""
        owner = self._owner[name]
        if self._gathered != owner:
            # An engine loads in inference mode, in which torch gathers no shards.
            with torch.inference_mode(False), torch.no_grad():
                held = self._tensors[owner].detach()
                whole = held.full_tensor() if hasattr(held, "full_tensor") else held
            self._gathered, self._parts = owner, on_disk({owner: whole}, self._config)
        return self._parts[name][index].to(self._names[name][1])


class Residents:
    """What one rank keeps; all ranks call `refresh` and `rest` alike."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.trainer = HeldTrainer()
        self._engine: BaseEngine | None = None
        self._kind: tuple[Any, ...] = ()
        self._served = ""
        self._files: WeightSource | None = None
        self._exported = ("", "")

    def exported(self, policy_pin: str, state_pin: str) -> None:
        """Note that a policy holds the weights of a train state."""
        self._exported = (policy_pin, state_pin)

    def refresh(self, policy_pin: str) -> None:
        """Give the engine the weights in training, if they are those of a policy."""
        trainer = self.trainer.trainer
        # Other shards have other names or are to be merged: engines read their export.
        if (
            trainer is None
            or self._exported != (policy_pin, self.trainer.state_pin)
            or trainer.adapters is not None
            or trainer.config.trainer != "fsdp2"
        ):
            return
        lacks_engine = torch.tensor([float(self._engine is None)])
        if bool(self._ranks.max(lacks_engine)):
            return
        assert self._engine is not None
        assert self._files is not None
        _free_device()
        source = TrainerWeights(trainer, self._files)
        self._engine.update_weights(source, _version(policy_pin))
        self._served = policy_pin

    @contextmanager
    def serve(self, config: EngineConfig, model: ModelRef, **options: Any) -> Iterator[BaseEngine]:
        """Lend the engine with the weights of a policy, as `open_engine` opens one."""
        kind = (config, *sorted(options.items()))
        if self._engine is not None and self._kind != kind:
            self._close_engine()
        torch.use_deterministic_algorithms(False)
        if self._engine is None:
            _free_device()
            shared = {"shares_device": True} if config.name == "vllm" else {}
            self._engine = open_engine(config, model, **options, **shared)
            self._kind, self._files = kind, fetch_weights(model.pin)
        elif self._served != model.pin:
            self._engine.update_weights(fetch_weights(model.pin), _version(model.pin))
        self._served = model.pin
        self._engine.renew()
        try:
            yield self._engine
        except BaseException:
            self._close_engine()
            raise

    def rest(self) -> None:
        """Leave the device to the trainer."""
        if self._engine is not None:
            self._engine.renew()
            self._engine.sleep()
        _free_device()

    def close(self) -> None:
        """Let go of both."""
        self._close_engine()
        self.trainer.close()

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _version(policy_pin: str) -> int:
    uri, digest = parse_pin(policy_pin)
    return int(read_manifest(uri, sha256=digest).attributes["policy_version"])


def _free_device() -> None:
    """Give what torch keeps for reuse back to the device, whose memory another allocator takes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
