"""GPUs for the planner: memory, rates, price, watts and links."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, with_config

from planish.base.errors import ConfigError

STORED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Pydantic settings of the planner's documents: strict types, no unknown keys."""


@with_config(STORED)
@dataclass(frozen=True)
class Gpu:
    """One type of GPU; rates are those of the data sheet, in bytes per second."""

    name: str
    memory_bytes: PositiveFloat
    memory_rate: PositiveFloat
    flops: PositiveFloat
    """Dense bfloat16 operations per second; multiply and add count as two."""
    watts: NonNegativeFloat
    """Power at full load in watts; 0 if unknown."""
    link_rate: PositiveFloat
    """Rate in one direction to the other GPUs of the node, over NVLink or PCIe."""
    network_rate: PositiveFloat
    """Rate in one direction to other nodes: the GPU's share of the node's network cards."""
    price: NonNegativeFloat = 0.0
    """Price in units of the price of an L20; 0 if no price is published."""
    per_node: PositiveInt = 8


def _gpu(name: str, *row: float) -> Gpu:
    price, gigabytes, rate, teraflops, watts, link, network = row
    memory = (gigabytes * 1e9, rate * 1e9, teraflops * 1e12)
    return Gpu(name, *memory, watts, link * 1e9, network * 1e9, price)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # name, price, GB, GB/s, TFLOPS, watts, link GB/s, network GB/s
        _gpu("l20", 1.00, 48, 864, 119.5, 275, 32, 12.5),
        _gpu("h800", 5.28, 80, 3430.4, 989, 700, 200, 50),
        _gpu("a800", 2.26, 80, 2039, 312, 400, 200, 25),
        _gpu("h20", 1.85, 96, 4096, 148, 500, 450, 25),
        _gpu("l40s", 1.08, 48, 864, 362, 350, 32, 12.5),
        _gpu("a100", 0.0, 80, 2039, 312, 400, 300, 25),
        _gpu("h100", 0.0, 80, 3350, 989, 700, 450, 50),
        _gpu("h200", 0.0, 141, 4800, 989, 700, 450, 50),
    )
}
"""Price, memory and rates of L20, H800, A800, H20 and L40S, and watts of H20 and L40S, are figures
of the paper; all other figures are the vendors'. The paper's testbeds have these networks: A800 8
cards of 200 Gb/s per node of 8, H20 4 of 400, L40S 2 of 400. We assume the network of L40S for L20,
the network of A800 for A100, and one card of 400 Gb/s per GPU for H800, H100 and H200."""

_LARGEST = 1e18
_CHANGEABLE = tuple(field.name for field in dataclasses.fields(Gpu) if field.name != "name")


def find_gpus(names: str, measured: Gpu | None = None) -> list[Gpu]:
    """Return the GPUs of a comma-separated list, in order, without repetitions; or raise
    ConfigError.

    Names are those of the table, or of the `measured` GPU of a profile.

    Example:
        >>> [gpu.name for gpu in find_gpus("H20,l40s,h20")]
        ['h20', 'l40s']
    """
    table = GPUS if measured is None else {**GPUS, measured.name: measured}
    wanted = dict.fromkeys(name.strip().lower() for name in names.split(",") if name.strip())
    unknown = [name for name in wanted if name not in table]
    if unknown or not wanted:
        raise ConfigError(
            f"a GPU must be one of {', '.join(table)}, got {', '.join(unknown) or 'none'}; "
            "choose one of these, and change its figures with `--gpu-data`"
        )
    return [table[name] for name in wanted]


def changed(gpus: Sequence[Gpu], changes: Sequence[str]) -> list[Gpu]:
    """Return GPUs with changed figures; a change is `<gpu>.<figure>=<number>` in the units of
    `Gpu`.

    Example:
        >>> changed(find_gpus("h100"), ["h100.price=4.5"])[0].price
        4.5
    """
    table = {gpu.name: gpu for gpu in gpus}
    for change in changes:
        target, _, text = change.partition("=")
        name, _, figure = target.strip().lower().partition(".")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        usable = 0 < value <= _LARGEST and (figure != "per_node" or value.is_integer())
        if name not in {**GPUS, **table} or figure not in _CHANGEABLE or not usable:
            raise ConfigError(
                f"a changed figure must be <gpu>.<figure>=<positive number> with a figure of "
                f"{', '.join(_CHANGEABLE)}, got {change!r}; correct `--gpu-data`"
            )
        if name in table:
            exact: Any = int(value) if figure == "per_node" else value
            table[name] = dataclasses.replace(table[name], **{figure: exact})
    return list(table.values())
