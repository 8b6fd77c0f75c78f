"""Collection of one role's state by an adapter: items, small values, and the end of a load."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from planish.checkpoint.adapters.placement import Placed, check_not_expanded, name_of
from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.items import PARTS, Collected, Finish, LocalItem, TensorSpec, renamed
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.strict_json import Values

OPTIMIZER = "optimizer"
"""Part of a state, and key of its small values."""


class Stored:
    """The tensors of one role in the checkpoint to load; none without `metadata`.

    `rename` maps the name of a parameter or buffer in the state to the stored name.
    """

    def __init__(
        self, metadata: Metadata | None, role: str, rename: Callable[[str], str] | None = None
    ) -> None:
        self.is_known = metadata is not None
        self._metadata, self._role, self._rename = metadata, role, rename
        facts = metadata.header.get("facts", {}) if metadata is not None else {}
        mine = facts.get(role, {}) if isinstance(facts, Mapping) else {}
        aliases = mine.get("aliases", {}) if isinstance(mine, Mapping) else {}
        known = isinstance(aliases, Mapping) and rename is None
        self.aliases: dict[str, str] = dict(aliases) if known else {}
        """Further name of a tied tensor -> its stored name."""

    def find(self, kind: str, fqn: str) -> TensorSpec | None:
        """Return the stored tensor for a name in the state, None if there is none."""
        if self._metadata is None:
            return None
        key = self._role, kind, renamed(kind, fqn, self._rename)
        row = self._metadata.tensor_ids.get(key)
        return None if row is None else self._metadata.tensors.spec(row)

    def name_of(self, fqn: str) -> str:
        """Return the stored name of a parameter or buffer."""
        return renamed("model", fqn, self._rename)

    def states_of(self, fqn: str) -> list[str]:
        """Return the keys of a parameter's stored optimizer state."""
        return self._states.get(self.name_of(fqn), [])

    @functools.cached_property
    def _states(self) -> dict[str, list[str]]:
        """Stored name of a parameter -> keys of its optimizer state."""
        found = defaultdict[str, list[str]](list)
        for name in self.names.get("optim", []):
            parameter, _, key = name.rpartition(".")
            found[parameter].append(key)
        return found

    @functools.cached_property
    def names(self) -> dict[str, list[str]]:
        """Kind -> stored names."""
        found: dict[str, list[str]] = {}
        if self._metadata is not None:
            for role, kind, fqn in self._metadata.tensor_ids:
                if role == self._role:
                    found.setdefault(kind, []).append(fqn)
        return found


class Gathering:
    """Collects one role's state into `result`; `after` adds functions for the part `part`."""

    def __init__(
        self,
        role: str,
        framework: str,
        *,
        for_load: bool,
        metadata: Metadata | None,
        rename: Callable[[str], str] | None = None,
        parts: Collection[str] = PARTS,
    ) -> None:
        self.parts, self.part = parts, "model"
        self.role, self.framework, self.for_load = role, framework, for_load
        self.stored = Stored(metadata if for_load else None, role, rename)
        self._items: list[LocalItem] = []
        self.result = Collected(self._items)
        self._seen: dict[tuple[str, str], list[tuple[Box, ...]]] = {}

    def add(self, kind: str, fqn: str, placed: Placed) -> None:
        """Add a local value of kind model, optim or extra."""
        if kind not in self.parts:
            return
        before = self._seen.setdefault((kind, fqn), [])
        if placed.boxes in before:
            raise ValueError(
                f"names of one state must differ, got `{fqn}` twice in its {kind} part; rename "
                "one (nested keys are joined by dots)"
            )
        before.append(placed.boxes)
        data = target = placed.data
        check_not_expanded(fqn, data)
        if data.is_conj() or data.is_neg():
            # The tensor is a lazy view: torch has not applied the conjugation or the sign yet.
            data = target.resolve_conj().resolve_neg()

            def put(values: Values) -> None:
                target.copy_(data)

            self.after(put)
        self.add_alias(kind, fqn, placed._replace(data=data))

    def add_alias(self, kind: str, fqn: str, placed: Placed) -> None:
        """Add a destination for a stored tensor that another item may load, too."""
        if kind not in self.parts:
            return
        spec = TensorSpec(self.role, kind, fqn, name_of(placed.data.dtype, fqn), placed.shape)
        self._items.append(LocalItem(spec, placed.boxes, placed.data if placed.boxes else None))

    def after(self, finish: Finish, part: str = "") -> None:
        """Register a function for the end of a load of the part; ignore it for a save."""
        if self.for_load and (part or self.part) in self.parts:
            self.result.finish.append(finish)

    def share(self, part: str, **values: Any) -> None:
        """Add small values that all ranks share; skip empty values and extend lists."""
        said = {name: value for name, value in values.items() if value}
        if not said or self.for_load:
            return
        held = self.result.shared.setdefault(part, {})
        for name, value in said.items():
            held[name] = [*held.get(name, []), *value] if isinstance(value, list) else value


def unite(values: Iterable[Any]) -> list[Any]:
    """Return modules or optimizers as one list; each value is one, a list or a dict of them."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Mapping):
            found += list(value.values())
        elif isinstance(value, (list, tuple)):
            found += value
        else:
            found.append(value)
    return found


def torch_optimizers(value: Any) -> list[torch.optim.Optimizer]:
    """Return one torch optimizer, a list or a dict of them as a list, unwrapped; else []."""
    found = [getattr(one, "optimizer", one) for one in unite([value])]
    return found if all(isinstance(one, torch.optim.Optimizer) for one in found) else []
