"""A trainer and a rollout engine on the device of one rank, open from the first use to the end.

One of them uses the device at a time. New weights pass in memory: every rank gathers a tensor of
the trainer and hands it to its own engine. The tensor has the dtype of the policy's files, so an
engine samples from exactly the numbers that are exported. If neighbours share a vLLM
(`engine.tensor_parallel`), the first of them uses it, and the others repeat its calls.

Source: HybridFlow, arXiv 2409.19256, section 5 (colocated ranks).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planish.base.config import parse_section, parse_settings
from planish.base.errors import ConfigError, EngineError
from planish.base.parallel import SINGLE, Ranks
from planish.engines import open_engine
from planish.engines.base import BaseEngine
from planish.engines.config import EngineConfig
from planish.engines.requests import EngineState, ModelRef
from planish.engines.vllm.team import Team
from planish.engines.weights import Index, Names, WeightSource, fetch_weights
from planish.models.experts import on_disk
from planish.models.policy import checksum, read_model_config
from planish.models.shapes import shape_of
from planish.records.files import weights_checksum, weights_name
from planish.records.stream import StreamState
from planish.run.stage_metrics import show_phase
from planish.stages.evaluate.config import EvaluateConfig
from planish.stages.iterate.commit import LIMIT_SECONDS, Made
from planish.stages.prepare.devices import engine_share
from planish.stages.rollout.job import Start, engine_options, rollout_config, start_of
from planish.stages.train.ranks.worker import HeldTrainer
from planish.stages.train.trainer import Trainer

logger = logging.getLogger(__name__)


class SummedWeights(WeightSource):
    """Weights in memory with a checksum, of which every rank computes a part."""

    def __init__(
        self, names: Names, files: WeightSource, ranks: Ranks, mine: Collection[str]
    ) -> None:
        """Take the names of all tensors, and in `mine` of those that this rank sums.

        `files` of an earlier policy may have one of them under two names.
        """
        self._names, self._ranks, self._mine = names, ranks, mine
        # A tied LM head has the checksum of the embedding.
        self._tied = [name for name in files.names() if name not in names]
        self._sums = dict.fromkeys(names, 0)

    def names(self) -> Names:
        """Return shape and dtype by name."""
        return self._names

    def _sum(self, parts: Mapping[str, Tensor]) -> None:
        """Add the tensors that this rank sums to the checksum."""
        self._sums |= {key: checksum(part) for key, part in parts.items() if key in self._mine}

    def checksum(self) -> str:
        """Return the checksum of all weights once they have been read; every rank calls it."""
        sums = self._ranks.sum(torch.tensor(list(self._sums.values()))).tolist()
        found = dict(zip(self._sums, sums, strict=True))
        embedding = next((n for n in found if n.endswith("embed_tokens.weight")), "")
        return weights_checksum(found | dict.fromkeys(self._tied, found.get(embedding, 0)))


class TrainerWeights(SummedWeights):
    """The policy in training by the names of its files; all ranks read in the same order."""

    def __init__(self, trainer: Trainer, files: WeightSource, ranks: Ranks = SINGLE) -> None:
        """Gather nothing yet; `files` of an earlier policy give dtypes and configuration."""
        self._tensors: Mapping[str, Any] = trainer.policy.weights()
        self._config, like = read_model_config(Path(files.address)), files.names()
        self._owner: dict[str, str] = {}
        names: Names = {}
        for owner, tensor in self._tensors.items():
            blank = {owner: torch.empty(tensor.shape, device="meta")}
            for name, part in on_disk(blank, self._config).items():
                self._owner[name] = owner
                names[name] = (tuple(part.shape), like[name][1])
        mine = set(list(self._tensors)[ranks.rank :: ranks.size])
        super().__init__(names, files, ranks, {n for n in names if self._owner[n] in mine})
        self._gathered, self._parts = "", dict[str, Tensor]()

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Return a box of one tensor, which every rank gathers."""
        owner = self._owner[name]
        if self._gathered != owner:
            # An engine loads in inference mode, in which torch gathers no shards.
            with torch.inference_mode(False), torch.no_grad():
                held = self._tensors[owner].detach()
                whole = held.full_tensor() if hasattr(held, "full_tensor") else held
            parts = on_disk({owner: whole}, self._config)
            self._parts = {key: part.to(self._names[key][1]) for key, part in parts.items()}
            self._gathered = owner
            self._sum(self._parts)
        return self._parts[name][index]


def gives_weights(held: HeldTrainer, made: Made) -> bool:
    """Return True if engines can take the weights of `made` from the trainer's memory.

    Only `fsdp2` without adapters gives weights: others have other names, or need a merge.
    """
    trainer = held.trainer
    if trainer is None or made.version is None:
        return False
    return trainer.config.trainer == "fsdp2" and trainer.adapters is None


def check_weights(start: Start, policy_pin: str) -> None:
    """Compare the weights that an engine took from memory with those of the exported policy.

    Raises:
        EngineError: they differ.
    """
    if not start.in_memory:
        return
    exported = weights_name(policy_pin)[1]
    if start.weights != exported:
        raise EngineError(
            f"the weights in memory must be those of `{policy_pin}` with the checksum {exported}, "
            f"got {start.weights}; run the task again, which reads them from the store"
        )


class Residents:
    """Trainer and engine that one rank keeps; all ranks call `refresh` and `rest` alike."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        config: Mapping[str, Mapping[str, Any]],
        *,
        trains: bool = True,
    ) -> None:
        """Open nothing yet; `trains` is False if these ranks only sample."""
        self._ranks, self._device, self._config, self._trains = ranks, device, config, trains
        self.trainer = HeldTrainer()
        self._settings = parse_section(EngineConfig, config.get("engine", {}), section="engine")
        size = self._settings.tensor_parallel
        self.engines = Ranks(ranks.rank // size, ranks.size // size)
        """The engine of this rank among those of all."""
        self._team = Team(ranks, size, LIMIT_SECONDS) if size > 1 else None
        self._engine: BaseEngine | None = None
        self._kind: tuple[Any, ...] = ()
        self._served: tuple[int, str] | None = None
        """Version and checksum of the engine's weights."""
        self._files: WeightSource | None = None
        """Files of the policy with which the engine was opened."""

    def refresh(self, made: Made) -> Start:
        """Return the start of the next iteration, whose weights the engine gets from the trainer.

        If the trainer cannot give them, this waits for the export, and the engine reads its files.
        """
        if not gives_weights(self.trainer, made):
            return self.read(made.pins.result().policy_pin, made.data)
        assert self.trainer.trainer is not None
        files = self.open(made.files_pin)
        source = TrainerWeights(self.trainer.trainer, files, self._ranks)
        return self.take(source, made)

    def read(self, policy_pin: str, data: StreamState, lag: int = 0) -> Start:
        """Return the start from a policy in the store, which the engine reads when it samples.

        A vLLM of several ranks opens here: it makes process groups, in which all ranks take part.
        Its end would destroy the process groups of the trainer too.
        """
        if self._settings.name == "vllm" and self._ranks.size > 1 and self._engine is None:
            self.open(policy_pin)
        return start_of(policy_pin, data, lag=lag)

    def open(self, policy_pin: str) -> WeightSource:
        """Open the engine of the rollouts with a policy; return the files that it was opened with.

        An engine that is open already keeps its weights.
        """
        self._open(self._settings, policy_pin, engine_options(rollout_config(self._config)))
        assert self._files is not None
        return self._files

    def take(self, source: SummedWeights, made: Made, lag: int = 0) -> Start:
        """Give the open engine the weights of a policy in memory; return the start from them."""
        assert self._engine is not None
        assert made.version is not None
        _free_device()
        self._engine.update_weights(source, made.version)
        weights = source.checksum()
        self._served = (made.version, weights)
        return Start(made.version, weights, made.files_pin, made.data, lag, in_memory=True)

    def lead(self, work: Callable[[], None]) -> None:
        """Do `work`, which calls `serve`, on the first rank of each engine.

        The other ranks return when it is done; until then their engines follow that of the first.
        """
        if self._team is None or self._team.leads:
            work()
            if self._team is not None:
                self._team.tell("done")
            return
        show_phase("sampling")
        call, pin = self._team.hear()
        while call == "serve":
            engine: Any
            with self._lend(self._settings, pin, {}) as engine:
                engine.follow()
            call, pin = self._team.hear()

    @contextmanager
    def serve(self, config: EngineConfig, model: ModelRef, **options: Any) -> Iterator[BaseEngine]:
        """Lend the engine with the weights of a policy, in place of `open_engine`.

        A model without a pin means the weights that the engine took from memory.
        """
        if self._team is not None:
            self._team.tell("serve", model.pin)
        with self._lend(config, model.pin, options) as engine:
            yield engine
        if self._team is not None:
            self._team.tell("end")

    @contextmanager
    def _lend(
        self, config: EngineConfig, pin: str, options: Mapping[str, Any]
    ) -> Iterator[BaseEngine]:
        engine = self._open(config, pin, options)
        if pin:
            self._read_weights(engine, pin)
        engine.renew()
        try:
            yield engine
            # Nobody needs groups that entered early for a round that did not follow.
            engine.abort()
            engine.poll(0.0)
        except BaseException:
            self._close_engine()
            raise

    def _open(self, config: EngineConfig, pin: str, options: Mapping[str, Any]) -> BaseEngine:
        """Return the engine with these options; if another one is open, close that first."""
        options = self._vllm_options() if config.name == "vllm" else dict(options)
        if torch.device(options["device"]).type == self._device.type:
            # This process has one of several accelerators.
            options["device"] = str(self._device)
        kind = (config, *sorted(options.items()))
        if self._engine is not None and self._kind != kind:
            self._close_engine()
        torch.use_deterministic_algorithms(False)
        if self._engine is None:
            _free_device()
            self._files = fetch_weights(pin)
            if config.name == "vllm" and self._device.type == "cuda" and self._trains:
                config = self._beside_trainer(config)
            self._engine = open_engine(config, ModelRef(pin=pin), **options)
            self._kind, self._served = kind, weights_name(pin)
        return self._engine

    def _read_weights(self, engine: BaseEngine, pin: str) -> None:
        """Give the engine the exported weights of a policy, unless it has them."""
        name = weights_name(pin)
        # Policies without a checksum cannot be told apart.
        if name != self._served or not name[1] or engine.state is EngineState.ASLEEP:
            engine.update_weights(fetch_weights(pin), name[0])
            self._served = name

    def _vllm_options(self) -> dict[str, Any]:
        """Return options with which one vLLM serves rollouts, and evaluations if there are any."""
        options = engine_options(rollout_config(self._config))
        config = parse_section(EvaluateConfig, self._config.get("evaluate", {}), section="evaluate")
        if config.every:
            options["max_rows"] = max(options["max_rows"], config.max_rows)
            # Its prompts may be as long as the model allows.
            options["max_model_len"] = 0
        options |= {"shares_device": True}
        return options | ({"team": self._team} if self._team is not None else {})

    def _beside_trainer(self, config: EngineConfig) -> EngineConfig:
        """Return the settings of vLLM on a device that keeps weights and moments of the trainer."""
        assert self._files is not None
        try:
            shape = shape_of(read_model_config(Path(self._files.address)))
        except ConfigError as error:
            logger.warning("engine.memory_share taken as it is reason=%s", error)
            return config
        size = torch.cuda.get_device_properties(self._device).total_memory
        share = engine_share(parse_settings(self._config), shape, self._ranks.size, size)
        return config.model_copy(update={"memory_share": share})

    def rest(self) -> None:
        """Leave the device to the trainer."""
        if self._engine is not None and self._engine.state is not EngineState.ASLEEP:
            self._engine.renew()
            self._engine.sleep()
        _free_device()

    def close(self) -> None:
        """Close engine and trainer."""
        self._close_engine()
        self.trainer.close()

    def _close_engine(self) -> None:
        engine, self._engine, self._served = self._engine, None, None
        if engine is not None:
            engine.close()


def _free_device() -> None:
    """Return torch's cached memory to the device, for another allocator."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
