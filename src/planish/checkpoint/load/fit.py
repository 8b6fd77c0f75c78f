"""Whether what a job wants fits what a checkpoint holds: names, shapes, types, over all ranks.

Every rank looks at its own items, rank 0 puts the findings together; no tensor has been touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planish.base.errors import (
    DtypeMismatch,
    LayoutMismatch,
    MissingKeys,
    PlanMismatch,
    ShapeMismatch,
    UnexpectedKeys,
)
from planish.checkpoint.format.records import LocalItem, Metadata
from planish.checkpoint.format.tables import TensorSpec
from planish.checkpoint.load.records import PARTS, LoadOptions
from planish.checkpoint.ranks.messages import ranks_text

Key = tuple[str, str, str]
"""(role, kind, fqn)"""
MIN_HOST_BYTES = 80 << 20
"""One thread's request, a ring of two, and a message in each direction: 16 MiB each."""
_COMPLEX = ("C64", "C128")
_NAMED = 8
"""Faults of one rank that `per_rank` lists."""


@dataclass
class Fit:
    """What one rank found.

    Example:
        >>> Fit().faults
        {'missing': [], 'shape': [], 'dtype': []}
    """

    items: list[LocalItem] = field(default_factory=list)
    """To fill: their tensors are those of the checkpoint, with its names and types."""
    wanted: list[TensorSpec] = field(default_factory=list)
    """The tensor of each item as the target has it."""
    faults: dict[str, list[str]] = field(
        default_factory=lambda: {"missing": [], "shape": [], "dtype": []}
    )
    """Kind of fault to its sentences."""
    absent: list[str] = field(default_factory=list)
    """Tensors of this rank alone (generators) that the checkpoint lacks: never an error."""
    unfit: list[Key] = field(default_factory=list)
    """Tensors of the checkpoint that were asked for in another shape or type."""


def check_options(options: LoadOptions) -> None:
    """Refuse options that mean nothing.

    Raises:
        ValueError: an unknown part, policy or a limit that is not positive.
    """
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown or not options.parts:
        raise ValueError(f"`parts` must be of {PARTS}, got {unknown or options.parts}")
    choices = {
        "verify": ("crc", "none"),
        "dtype_policy": ("exact", "cast"),
        "redundancy": ("auto", "off"),
    }
    for name, allowed in choices.items():
        if getattr(options, name) not in allowed:
            raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(options, name)!r}")
    if options.timeout_s <= 0 or options.max_host_bytes < MIN_HOST_BYTES:
        raise ValueError(
            f"`timeout_s` must be positive and `max_host_bytes` at least {MIN_HOST_BYTES}, got "
            f"{options.timeout_s} and {options.max_host_bytes}"
        )


def told(role: str, kind: str, fqn: str) -> str:
    """Return a tensor's name as messages have it."""
    return f"`{kind}.{fqn}`" if role == "main" else f"`{role}: {kind}.{fqn}`"


def fit_items(metadata: Metadata, items: Iterable[LocalItem], options: LoadOptions) -> Fit:
    """Match the items of one rank with the tensors of a checkpoint, by name, shape and type."""
    fit = Fit()
    ids = metadata.tensor_ids
    for item in items:
        spec = item.tensor
        if spec.kind not in options.parts:
            continue
        fqn = _mapped(spec, options)
        source = spec if fqn == spec.fqn else replace(spec, fqn=fqn)
        row = ids.get((source.role, source.kind, source.fqn))
        if row is None:
            _note_missing(fit, spec, source)
            continue
        stored = metadata.tensors.spec(row)
        fault = _fault(spec, stored, options)
        if fault:
            fit.faults[fault].append(_sentence(fault, spec, stored))
            fit.unfit.append((stored.role, stored.kind, stored.fqn))
            continue
        fit.items.append(LocalItem(stored, item.boxes, item.data))
        fit.wanted.append(spec)
    return fit


def _mapped(spec: TensorSpec, options: LoadOptions) -> str:
    if options.map_fqn is None or spec.kind == "extra":
        return spec.fqn
    if spec.kind == "model":
        return options.map_fqn(spec.fqn)
    # An optimizer's tensors are named by their parameter, which is what callers know.
    parameter, dot, state = spec.fqn.rpartition(".")
    return options.map_fqn(parameter) + dot + state if dot else spec.fqn


def _note_missing(fit: Fit, spec: TensorSpec, source: TensorSpec) -> None:
    name = told(spec.role, spec.kind, spec.fqn)
    if source.fqn != spec.fqn:
        name += f" (as `{source.fqn}`)"
    (fit.absent if spec.kind == "extra" else fit.faults["missing"]).append(name)


def _fault(spec: TensorSpec, stored: TensorSpec, options: LoadOptions) -> str:
    if spec.shape != stored.shape:
        return "shape"
    same_field = (spec.dtype in _COMPLEX) == (stored.dtype in _COMPLEX)
    if spec.dtype != stored.dtype and not (options.dtype_policy == "cast" and same_field):
        return "dtype"
    return ""


def _sentence(fault: str, spec: TensorSpec, stored: TensorSpec) -> str:
    name = told(spec.role, spec.kind, spec.fqn)
    if fault == "shape":
        return f"{name} must have the shape {list(spec.shape)}, got {list(stored.shape)}"
    return f"{name} must be {spec.dtype}, got {stored.dtype}"


def encode_fit(fit: Fit, options: LoadOptions, roles: Sequence[str]) -> bytes:
    """Return the findings of one rank, without its items."""
    same: tuple[object, ...] = (options.strict, options.parts, options.verify)
    same += (options.dtype_policy, options.redundancy, options.store_timings)
    return json.dumps(
        {
            "faults": fit.faults,
            "absent": fit.absent,
            "unfit": fit.unfit,
            "options": repr((*same, options.map_fqn is not None)),
            "roles": list(roles),
            "max_host_bytes": options.max_host_bytes,
        }
    ).encode()


@dataclass(frozen=True)
class Verdict:
    """What all ranks together found, where nothing stands against the load."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    max_host_bytes: int
    """The least of all ranks."""


def judge(
    metadata: Metadata,
    findings: Sequence[bytes],
    wanted: Iterable[Key],
    options: LoadOptions,
) -> Verdict:
    """Put the findings of all ranks together; on rank 0.

    Args:
        metadata: of the checkpoint.
        findings: what `encode_fit` returned on each rank.
        wanted: tensors of the checkpoint that some rank is going to fill.
        options: of rank 0.

    Raises:
        PlanMismatch: the ranks want different things.
        LayoutMismatch: names, shapes or types differ; every offender is listed. `MissingKeys`,
            `UnexpectedKeys`, `ShapeMismatch` or `DtypeMismatch` where there is only that.
    """
    facts = [json.loads(data) for data in findings]
    for name in ("options", "roles"):
        seen = {str(fact[name]): rank for rank, fact in reversed(list(enumerate(facts)))}
        if len(seen) > 1:
            raise PlanMismatch(
                f"all ranks must load with the same {name}, got {sorted(seen.items())}"
            )
    used = {*wanted, *(tuple(key) for fact in facts for key in fact["unfit"])}
    left = sorted(
        key
        for key in metadata.tensor_ids
        if key not in used
        and key[0] in facts[0]["roles"]
        and key[1] in options.parts
        and key[1] != "extra"
    )
    unexpected = tuple(told(*key) for key in left)
    found: dict[str, dict[str, list[int]]] = {"missing": {}, "shape": {}, "dtype": {}}
    for name, holders in found.items():
        for rank, fact in enumerate(facts):
            for text in fact["faults"][name]:
                holders.setdefault(text, []).append(rank)
    _refuse(found, unexpected if options.strict else (), len(facts), strict=options.strict)
    absent = dict.fromkeys(text for fact in facts for text in fact["absent"])
    limits = min(fact["max_host_bytes"] for fact in facts)
    return Verdict((*found["missing"], *absent), unexpected, limits)


def _refuse(
    found: Mapping[str, Mapping[str, Sequence[int]]],
    unexpected: Sequence[str],
    size: int,
    *,
    strict: bool,
) -> None:
    """Refuse what ranks have found: fault to the ranks that have it, named if not all do."""
    kinds = [name for name in found if strict or name != "missing"]
    per_rank: dict[int, list[str]] = {}
    texts: dict[str, list[str]] = {name: [] for name in found}
    for name in kinds:
        for text, ranks in found[name].items():
            some = len(ranks) < size
            texts[name].append(f"{text} (on {ranks_text(ranks)})" if some else text)
            for rank in ranks if some else ():
                per_rank.setdefault(rank, []).append(f"{name}: {text}")
    faults: list[tuple[type[LayoutMismatch], str]] = []
    if texts["missing"]:
        faults.append((MissingKeys, f"the checkpoint lacks {', '.join(texts['missing'])}"))
    if unexpected:
        faults.append((UnexpectedKeys, f"nothing asks for {', '.join(unexpected)}"))
    if texts["shape"]:
        faults.append((ShapeMismatch, "; ".join(texts["shape"])))
    if texts["dtype"]:
        faults.append((DtypeMismatch, "; ".join(texts["dtype"])))
    if faults:
        kind = faults[0][0] if len(faults) == 1 else LayoutMismatch
        error = kind(
            f"a checkpoint must fit the state that loads it, but {'; '.join(t for _, t in faults)};"
            " no tensor has been touched (see `strict`, `parts`, `map_fqn`, `dtype_policy`)"
        )
        error.per_rank = {rank: "; ".join(own[:_NAMED]) for rank, own in per_rank.items()}
        raise error
