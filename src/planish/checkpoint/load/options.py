"""What the caller of a load asks for, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from planish.checkpoint.adapters.loader_state import LoaderState
from planish.checkpoint.format.tables import PARTS
from planish.checkpoint.watch.timings import CheckpointInfo

MIN_HOST_BYTES = 80 << 20
"""One thread's request, a ring of two, and a message in each direction: 16 MiB each."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load; equal on all ranks but for `map_fqn`, which may be any function.

    Example:
        >>> LoadOptions(parts=("model",)).strict
        True
    """

    strict: bool = True
    """Refuse tensors that only one side has; otherwise they stay as they are and are reported."""
    parts: tuple[str, ...] = PARTS
    """Which of `PARTS` to load; the bytes of others are never read."""
    verify: Literal["crc", "none"] = "crc"
    """Whether each block is checked against its checksum before it is used."""
    map_fqn: Callable[[str], str] | None = None
    """Name in the target to name in the checkpoint, of model and optimizer tensors alike."""
    dtype_policy: Literal["exact", "cast"] = "exact"
    """`cast` converts where the types differ; the default refuses."""
    redundancy: Literal["auto", "off"] = "auto"
    """`auto`: bytes that several ranks need are read once and exchanged; `off`: each rank reads
    all that it needs."""
    max_host_bytes: int = 256 << 20
    """Limit on buffers of one rank, beside the tensors themselves."""
    timeout_s: float = 1800.0
    """Limit on the whole load."""
    store_timings: bool = False
    """Keep the timings of all ranks beside those of the save, if the store can be written;
    `planish checkpoint report --load` shows them."""
    allow_pickle: bool = False
    """Whether small values that were saved with `allow_pickle` may be read."""

    def check(self) -> None:
        """Refuse options that mean nothing.

        Raises:
            ValueError: an unknown part or policy, or a limit that is too low.
        """
        unknown = sorted(set(self.parts) - set(PARTS))
        if unknown or not self.parts:
            raise ValueError(f"`parts` must be of {PARTS}, got {unknown or self.parts}")
        choices = {
            "verify": ("crc", "none"),
            "dtype_policy": ("exact", "cast"),
            "redundancy": ("auto", "off"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(self, name)!r}")
        if self.timeout_s <= 0 or self.max_host_bytes < MIN_HOST_BYTES:
            raise ValueError(
                f"`timeout_s` must be positive and `max_host_bytes` at least {MIN_HOST_BYTES}, got "
                f"{self.timeout_s} and {self.max_host_bytes}"
            )


class LoadKeywords(TypedDict, total=False):
    """Types of the keywords of `checkpoint.api.load`, which are the fields of `LoadOptions`."""

    strict: bool
    parts: tuple[str, ...]
    verify: Literal["crc", "none"]
    map_fqn: Callable[[str], str] | None
    dtype_policy: Literal["exact", "cast"]
    redundancy: Literal["auto", "off"]
    max_host_bytes: int
    timeout_s: float
    store_timings: bool
    allow_pickle: bool


@dataclass
class Loaded:
    """What a load has brought besides the tensors, which were filled in place."""

    info: CheckpointInfo
    """Which checkpoint it was, and this rank's timings."""
    header: Mapping[str, Any]
    """Of the global metadata: step, roles, layout, parents, attributes."""
    shared: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Role to the small values that are equal on all ranks."""
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Role to the values of the saving rank of the same number, where there was one."""
    loader: dict[str, LoaderState] = field(default_factory=dict)
    """Role to the loader state of all saving ranks, where there is one."""
    missing: tuple[str, ...] = ()
    """Without `strict`: tensors of the target that the checkpoint lacks, left untouched."""
    unexpected: tuple[str, ...] = ()
    """Without `strict`: tensors of the checkpoint that nothing asked for."""
    bytes_from_store: int = 0
    """Read by all ranks together."""
    bytes_over_network: int = 0
    """Received by all ranks together from ranks of other machines."""
    unique_bytes_needed: int = 0
    """Of the checkpoint's tensor bytes: those that at least one rank needs, each counted once."""
    sharing: Literal["all", "none"] = "none"
    """Whether ranks exchanged bytes that several of them need, equal on all ranks."""
    replication: float = 1.0
    """How many ranks need a block of the checkpoint on average."""
