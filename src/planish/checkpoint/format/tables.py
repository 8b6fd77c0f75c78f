"""Tensors of a checkpoint as one table: their names, types and shapes, and its form in bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import I64
from planish.checkpoint.format.packing import (
    PackFault,
    Unsigned,
    column_of,
    pack_choices,
    pack_ragged,
    pack_texts,
    signed,
    unpack_choices,
    unpack_ragged,
    unpack_texts,
)

KINDS = ("model", "optim", "extra")
"""What a tensor belongs to."""
PARTS = (*KINDS, "loader")
"""What a role's state consists of: tensors of the model and of the optimizer, small values, and
the position of the data loader. A load may be restricted to some of them."""
_TYPES = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "C64": (8, "complex64"),
    "C128": (16, "complex128"),
}
"""Type names of safetensors, and ours where it has none (C128) -> bytes, attribute of `torch`."""
ITEM_BYTES: dict[str, int] = {name: size for name, (size, _) in _TYPES.items()}
"""Name of a type -> bytes of one element."""
TORCH_TYPES: dict[str, str] = {name: attribute for name, (_, attribute) in _TYPES.items()}
"""Name of a type -> name of the attribute of `torch`."""
MAX_DIMS = 64
"""More dimensions than any array library holds are refused."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole tensor, whoever holds which part of it.

    Example:
        >>> TensorSpec("main", "model", "model.embed.weight", "BF16", (8, 4)).kind
        'model'
    """

    role: str
    """Which model of the state; `main` where there is only one."""
    kind: str
    """`model`, `optim` or `extra`."""
    fqn: str
    """Canonical name, without the prefixes of wrappers."""
    dtype: str
    """Key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


_KEY = attrgetter("role", "kind", "fqn")
_VALUE = attrgetter("dtype", "shape")


@dataclass(frozen=True)
class TensorTable:
    """Tensors as columns; a tensor is named by (role, kind, fqn), and by its row.

    Example:
        >>> table, rows = TensorTable.from_specs([TensorSpec("main", "model", "w", "F32", (2, 3))])
        >>> table.shapes.tolist(), table.spec(0).fqn, rows.tolist()
        ([[2, 3]], 'w', [0])
    """

    roles: tuple[str, ...]
    """[t]"""
    kinds: tuple[str, ...]
    """[t]"""
    fqns: tuple[str, ...]
    """[t]"""
    dtypes: tuple[str, ...]
    """[t]"""
    dims: I64
    """[t], number of dimensions."""
    shapes: I64
    """[t, n], n = `max_dims`; padded with 1."""

    @classmethod
    def from_specs(cls, specs: Sequence[TensorSpec]) -> tuple[TensorTable, I64]:
        """Build a table of the different tensors in `specs`.

        Returns:
            The table in order of first appearance, and [len(specs)] the row of each spec.

        Raises:
            LayoutMismatch: one name with two types or shapes, an unknown type or a bad shape.
        """
        # Usually every name is there once, and no triple need be made.
        if len({spec.fqn for spec in specs}) == len(specs):
            return cls._of(specs), np.arange(len(specs), dtype=np.int64)
        keys = list(map(_KEY, specs))
        first = dict(zip(reversed(keys), reversed(specs), strict=True))
        if len(first) == len(specs):
            unique, rows = list(specs), np.arange(len(specs), dtype=np.int64)
        else:
            ids = {key: row for row, key in enumerate(dict.fromkeys(keys))}
            unique = [first[key] for key in ids]
            rows = np.array([ids[key] for key in keys], np.int64)
            faults = [
                f"`{spec.fqn}`: {_VALUE(first[key])} and {_VALUE(spec)}"
                for key, spec in zip(keys, specs, strict=True)
                if _VALUE(spec) != _VALUE(first[key])
            ]
            if faults:
                raise LayoutMismatch(
                    "one name must have one type and one shape, got "
                    f"{'; '.join(dict.fromkeys(faults))}"
                )
        return cls._of(unique), rows

    @classmethod
    def _of(cls, specs: Sequence[TensorSpec]) -> TensorTable:
        dtypes = tuple([spec.dtype for spec in specs])
        unknown = set(dtypes) - ITEM_BYTES.keys()
        if unknown:
            raise LayoutMismatch(
                f"a type must be one of {', '.join(ITEM_BYTES)}, got {sorted(unknown)}; "
                "name the types of tensors as safetensors does"
            )
        shapes = [spec.shape for spec in specs]
        dims = np.fromiter(map(len, shapes), np.int64, len(shapes))
        return cls(
            tuple([spec.role for spec in specs]),
            tuple([spec.kind for spec in specs]),
            tuple([spec.fqn for spec in specs]),
            dtypes,
            dims,
            padded(shapes, dims, 1),
        )

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.fqns)

    @property
    def max_dims(self) -> int:
        """Columns of padded shapes and boxes: the most dimensions of any tensor here."""
        return int(self.shapes.shape[1])

    @functools.cached_property
    def ids(self) -> dict[tuple[str, str, str], int]:
        """(role, kind, fqn) -> row."""
        names = zip(self.roles, self.kinds, self.fqns, strict=True)
        return {name: row for row, name in enumerate(names)}

    @functools.cached_property
    def item_bytes(self) -> I64:
        """[t], bytes of one element."""
        return np.array([ITEM_BYTES[dtype] for dtype in self.dtypes], np.int64)

    def spec(self, row: int) -> TensorSpec:
        """Return one tensor."""
        shape = tuple(self.shapes[row, : self.dims[row]].tolist())
        names = self.roles[row], self.kinds[row], self.fqns[row], self.dtypes[row]
        return TensorSpec(*names, shape)

    def pad(self, sides: Sequence[tuple[int, ...]], owners: I64, value: int) -> I64:
        """Return [k, max_dims]: offsets or lengths of boxes, one tuple each, of tensors `owners`.

        Raises:
            LayoutMismatch: a box has another number of dimensions than its tensor.
        """
        dims = np.fromiter(map(len, sides), np.int64, len(sides))
        wrong = np.flatnonzero(dims != self.dims[owners])
        if len(wrong):
            spec = self.spec(int(owners[wrong[0]]))
            raise LayoutMismatch(
                f"a box of `{spec.fqn}` must have the {len(spec.shape)} dimensions of its shape "
                f"{spec.shape}, got {sides[int(wrong[0])]}; the adapter's offsets are wrong"
            )
        return padded(sides, dims, value, width=self.max_dims)


def padded(
    rows: Sequence[tuple[int, ...]], dims: I64, value: int, *, width: int | None = None
) -> I64:
    """Return [len(rows), width] int64, the missing columns of shorter rows filled with `value`."""
    widest = int(dims.max(initial=0)) if width is None else width
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(dims.sum()))
    if len(rows) and int(dims.min()) == widest:
        return flat.reshape(len(rows), widest)
    result = np.full((len(rows), widest), value, np.int64)
    result[np.arange(widest) < dims[:, None]] = flat
    return result


def table_columns(table: TensorTable) -> tuple[dict[str, Any], dict[str, I64 | bytes]]:
    """Return a tensor table as a head and columns for `packing.pack`."""
    count = len(table)
    roles, role = pack_choices(table.roles, count)
    kinds, kind = pack_choices(table.kinds, count)
    dtypes, dtype = pack_choices(table.dtypes, count)
    sizes, names = pack_texts(table.fqns)
    return {"roles": roles, "kinds": kinds, "dtypes": dtypes}, {
        "tensor.role": role,
        "tensor.kind": kind,
        "tensor.dtype": dtype,
        "tensor.dims": table.dims,
        **pack_ragged("tensor.shape", table.shapes, table.dims),
        "tensor.name_size": sizes,
        "tensor.names": names,
    }


def read_table(head: Mapping[str, Any], columns: Mapping[str, Unsigned]) -> TensorTable:
    """Read what `table_columns` wrote.

    Raises:
        PackFault: anything that `table_columns` would not write.
    """
    dims = signed(column_of(columns, "tensor.dims"))
    count = len(dims)
    width = int(dims.max(initial=0))
    if width > MAX_DIMS:
        raise PackFault(f"a tensor must have at most {MAX_DIMS} dimensions, got {width}")
    shapes = unpack_ragged("tensor.shape", columns, dims, width=width, fill=1)
    choices = {
        name: unpack_choices(head.get(f"{name}s"), column_of(columns, f"tensor.{name}", count))
        for name in ("role", "kind", "dtype")
    }
    unknown = set(choices["dtype"]) - ITEM_BYTES.keys()
    if unknown:
        raise PackFault(f"unknown type of tensors {sorted(unknown)!r:.80}")
    names = unpack_texts(
        column_of(columns, "tensor.name_size", count), column_of(columns, "tensor.names")
    )
    table = TensorTable(
        choices["role"], choices["kind"], tuple(names), choices["dtype"], dims, shapes
    )
    if len(table.ids) != count:
        raise PackFault("a tensor appears twice")
    return table


def quoted_name(role: str, kind: str, fqn: str) -> str:
    """Return a tensor's name as messages have it; a state of one role does not name it.

    Example:
        >>> quoted_name("main", "model", "w"), quoted_name("critic", "model", "w")
        ('`model.w`', '`critic: model.w`')
    """
    return f"`{kind}.{fqn}`" if role == "main" else f"`{role}: {kind}.{fqn}`"
