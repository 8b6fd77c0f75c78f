"""What planning a save yields: the files of each rank, and where every shard lies in them."""

from __future__ import annotations

from dataclasses import dataclass

from planish.checkpoint.geometry import I64


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file that a rank writes; nothing lies between header and entries."""

    key: str
    """`data/<role>.<kind>/<rank>-<k>.safetensors`, relative to the folder of the attempt."""
    header: bytes
    """First bytes of the file: length word and JSON."""
    size: int
    """Bytes of the file, the header included."""
    items: I64
    """[e], which of the rank's items each entry comes from."""
    starts: I64
    """[e], first byte of the entry in the item's row-major bytes (all its boxes in a row)."""
    stops: I64
    """[e], one past the last byte there."""
    offsets: I64
    """[e], where the entry begins in the file, ascending and without gaps."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes."""

    rank: int
    """Its number."""
    files: tuple[FilePlan, ...]
    """Ascending by role, kind and number; none where others write all that the rank holds."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(plan.size for plan in self.files)
