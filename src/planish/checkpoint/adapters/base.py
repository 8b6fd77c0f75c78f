"""The framework-neutral view of a state: `collect` before a save or load, `apply` after a load.

Kind `model` has parameters and persistent buffers, under names without wrappers; kind `optim` has
`<parameter>.<state>`; kind `extra` has tensors of one rank. The module copies and sends no tensor.

Source: ByteCheckpoint, arXiv 2407.20143, section 3 (one planner per framework, one engine).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.checkpoint.adapters import megatron, models
from planish.checkpoint.adapters.gathering import Gathering
from planish.checkpoint.adapters.loader_state import LoaderShard, LoaderState, reshard
from planish.checkpoint.adapters.placement import place, restore, unpacked
from planish.checkpoint.format.items import PARTS as LOADED
from planish.checkpoint.format.items import Collected
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.strict_json import Fields, Values

FRAMEWORKS: dict[str, Callable[[Gathering, Values], None]] = {
    **dict.fromkeys(("plain", "ddp", "fsdp2", "flat"), models.gather_tensors),
    "megatron": megatron.gather_tensors,
}
"""Name of a framework -> function that collects the tensors of a role's state."""
PARTS = ("model", "optimizer", "scheduler", "dataloader", "random", "extra")
"""Keys of one role's state."""
MAIN = "main"

Framework = str | Mapping[str, str]
"""One of `FRAMEWORKS`, or one per role."""


def split_roles(
    state: Values, framework: Framework, role: str | None = None
) -> dict[str, tuple[Values, str]]:
    """Return role -> (its state, its framework); `ValueError` for unknown parts or frameworks.

    A state has several roles if none of its keys is a part; else its only role is `role` or `main`.
    """
    parts = [key for key in state if key in PARTS]
    many = bool(state) and not parts and all(isinstance(v, Mapping) for v in state.values())
    if not many:
        unknown = sorted(str(key) for key in set(state) - set(PARTS))
        if unknown:
            raise ValueError(
                f"a state must have only the parts {list(PARTS)}, or only roles, got {unknown}; "
                "put further values into `extra`"
            )
        name = role or MAIN
        return {name: (state, _framework_of(name, framework))}
    found = {}
    for name, inner in state.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"a role must be named by text, got {name!r}")
        found.update(split_roles(inner, _framework_of(name, framework), name))
    return found


def _framework_of(role: str, framework: Framework) -> str:
    chosen = framework if isinstance(framework, str) else framework.get(role, "")
    if chosen not in FRAMEWORKS:
        raise ValueError(
            f"the framework of role `{role}` must be one of {list(FRAMEWORKS)}, got {chosen!r}"
        )
    return chosen


def collect_roles(
    state: Values, framework: Framework, role: str | None = None
) -> dict[str, Collected]:
    """Return role -> its tensors and small values on this rank, for a save; see `collect`."""
    return {
        name: collect(name, inner, kind, for_load=False)
        for name, (inner, kind) in split_roles(state, framework, role).items()
    }


def collect(
    role: str,
    state: Values,
    framework: str,
    *,
    for_load: bool,
    metadata: Metadata | None = None,
    map_fqn: Callable[[str], str] | None = None,
    parts: Collection[str] = LOADED,
) -> Collected:
    """Return a role's tensors and small values on this rank, without copying any.

    Args:
        for_load: items are destinations; `collect` creates optimizer states that are missing, and
            `apply` puts them into the optimizer.
        metadata: metadata of the checkpoint to load; without it a load fills only existing tensors.
        map_fqn: function from a parameter's or buffer's name here to its name in the checkpoint.
        parts: some of model, optim, extra and loader; the other parts keep their values.

    Raises:
        TypeError: a tensor cannot be stored: sparse, quantised, meta, nested ...
        ValueError: names are ambiguous, or a parameter of an optimizer has none.
        LayoutMismatch: a shard is not a box.
    """
    gathering = Gathering(
        role, framework, for_load=for_load, metadata=metadata, rename=map_fqn, parts=parts
    )
    FRAMEWORKS[framework](gathering, state)
    gathering.part = "extra"
    _gather_values(gathering, state)
    _gather_random(gathering, state.get("random"))
    if state.get("dataloader") is not None and "loader" in parts:
        gathering.result.loader = _loader_of(state["dataloader"], for_load=for_load)
    return gathering.result


def _gather_values(gathering: Gathering, state: Values) -> None:
    """Collect scheduler and extra, which are equal on all ranks."""
    for part in ("scheduler", "extra"):
        value = state.get(part)
        if value is not None and not gathering.for_load:
            gathering.result.shared[part] = unpacked(value)

    def finish(values: Values) -> None:
        is_absent = "extra" in values and state.get("extra") is None
        if is_absent and isinstance(state, MutableMapping):
            state["extra"] = {}
        for part in ("scheduler", "extra"):
            if state.get(part) is not None and part in values:
                restore(state[part], values[part])

    gathering.after(finish)


def _gather_random(gathering: Gathering, value: Any) -> None:
    """Collect the random states of this rank: `RandomStreams`, or tensors by name."""
    if isinstance(value, RandomStreams):
        if not gathering.for_load:
            gathering.result.own["random"] = value.capture()
        report = gathering.result.report

        def finish(values: Values) -> None:
            report["rng"] = value.restore(values.get("random", {}))

        gathering.after(finish)
        return
    for name, tensor in (value or {}).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"`random.{name}` must be a tensor, got {type(tensor).__name__}; pass "
                "RandomStreams, or the states of generators as tensors"
            )
        gathering.add("extra", f"random.{name}", place(f"random.{name}", tensor))


def _loader_of(loader: Any, *, for_load: bool) -> LoaderState:
    """Return the state of a data loader; for a load only its rank and sizes."""
    if hasattr(loader, "ckpt_shards"):
        wanted = LoaderState(
            dp_rank=loader.dp_rank, dp_size=loader.dp_size, num_readers=loader.num_readers
        )
        if not for_load:
            wanted.common = unpacked(loader.ckpt_common())
            wanted.shards = list(loader.ckpt_shards()) if getattr(loader, "is_owner", True) else []
    elif hasattr(loader, "state_dict"):
        wanted = LoaderState(
            dp_rank=getattr(loader, "dp_rank", 0), dp_size=getattr(loader, "dp_size", 1)
        )
        if not for_load:
            opaque = {"state": unpacked(loader.state_dict())}
            wanted.shards = [LoaderShard(wanted.dp_rank, 0, opaque=opaque)]
    else:
        raise TypeError(
            "`dataloader` must have ckpt_common/ckpt_shards/ckpt_restore or state_dict, got "
            f"{type(loader).__name__}"
        )
    return wanted


def apply(
    state: Values,
    collected: Collected,
    values: Values,
    loader: LoaderState | None = None,
    *,
    loader_policy: str = "exact",
) -> dict[str, str]:
    """Finish a load: restore everything except the tensors, which are already filled in place.

    Args:
        collected: result of `collect(..., for_load=True)`, with filled items.
        values: small values of the role, and those that the rank of the same number saved.
        loader: saved loader state of all ranks; None if there is none.

    Returns:
        `rng`: exact or reseeded; `loader`: exact, resharded or restarted; if the state has them.
    """
    for finish in collected.finish:
        finish(values)
    report = dict(collected.report)
    wanted = collected.loader
    if loader is None or wanted is None:
        return report
    mine, target = reshard(loader, wanted, policy=loader_policy), state["dataloader"]
    if hasattr(target, "ckpt_restore"):
        target.ckpt_restore(mine.common, mine.shards)
    elif mine.shards:
        target.load_state_dict(restore(None, mine.shards[0].opaque["state"]))
    if (loader.dp_size, loader.num_readers) == (wanted.dp_size, wanted.num_readers):
        report["loader"] = "exact"
    else:
        opaque = any(shard.opaque is not None for shard in loader.shards)
        report["loader"] = "restarted" if opaque else "resharded"
    return report


@dataclass
class RandomStreams:
    """Random generators of this process: Python, NumPy, torch and the accelerator."""

    seed: int
    step: int = 0
    """Number of optimizer steps done; derived streams depend on it."""
    coordinate: Mapping[str, int] = field(default_factory=dict)
    """Axis of the layout -> this rank's index on it."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Axis of the layout -> its size."""
    outcome: str = "absent"
    """Outcome of the last load: `exact`, `reseeded`, or `absent` before any."""

    def capture(self) -> Fields:
        """Return the state of every generator, with coordinate and layout of this rank."""
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        streams: Fields = {
            "python": random.getstate(),
            "numpy": (kind, np.asarray(keys), int(position), int(has_gauss), float(cached)),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            streams["cuda"] = torch.cuda.get_rng_state()
        return {
            "coordinate": dict(self.coordinate),
            "layout": dict(self.layout),
            "streams": streams,
        }

    def restore(self, saved: Values) -> str:
        """Set the generators to the saved states, or reseed them; return `exact` or `reseeded`.

        `exact` needs the saved layout and coordinate, and the same kinds of generators.
        """
        streams = saved.get("streams", {})
        here = (dict(self.coordinate), dict(self.layout))
        same = (saved.get("coordinate"), saved.get("layout")) == here
        if same and ("cuda" in streams) == torch.cuda.is_available():
            version, keys, gauss = streams["python"]
            random.setstate((version, tuple(keys), gauss))
            np.random.set_state(tuple(streams["numpy"]))
            torch.set_rng_state(torch.as_tensor(streams["torch"], dtype=torch.uint8))
            if "cuda" in streams:
                torch.cuda.set_rng_state(torch.as_tensor(streams["cuda"], dtype=torch.uint8))
            self.outcome = "exact"
        else:
            self.derive()
            self.outcome = "reseeded"
        return self.outcome

    def derive(self) -> None:
        """Reseed all generators from (seed, step, coordinate)."""
        place = zlib.crc32(repr(sorted(self.coordinate.items())).encode())
        words = np.random.SeedSequence([self.seed, self.step, place]).generate_state(6, np.uint32)
        wide = [int(words[k]) << 32 | int(words[k + 1]) for k in (0, 2)]
        random.seed(wide[0])
        np.random.seed(words[4:])
        torch.manual_seed(wide[1] >> 1)
