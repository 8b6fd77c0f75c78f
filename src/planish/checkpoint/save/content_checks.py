"""Looks at the values of a state before it is saved: only where the caller asks for it.

Replicas are kept once, so a rank whose copy differs would be lost in silence; and values that are
not finite are saved as they are. Both take a pass over the memory, so neither is on by default.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

from planish.base import telemetry
from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.integrity import block_crcs
from planish.checkpoint.format.records import LocalItem
from planish.checkpoint.ranks import control_errors
from planish.checkpoint.ranks.coordination import Control

logger = logging.getLogger(__name__)

_NAMED = 8
"""Tensors that a message names, at most."""


def compare_replicas(call: Control, items: Sequence[LocalItem]) -> None:
    """Compare what ranks hold of the same part of a tensor; a collective.

    Args:
        call: the operation.
        items: of this rank.

    Raises:
        LayoutMismatch: on every rank, with names and ranks, if replicas differ in a bit.
    """
    gathered = call.gather(json.dumps(checksums(items)).encode(), "replicas")
    error = None
    if gathered is not None:
        wrong = unequal([json.loads(part) for part in gathered])
        if wrong:
            error = LayoutMismatch(
                "replicas must be equal to the bit, got different values of "
                + "; ".join(wrong[:_NAMED])
                + (f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
                + "; has a rank missed an update, or was a buffer never synchronised?"
            )
    call.settle(error, "replicas.verdict", whose=control_errors.EVERYONE)


def checksums(items: Sequence[LocalItem]) -> dict[str, str]:
    """Return one checksum for each item that holds values, by role, kind, name and place."""
    import torch

    found = {}
    for item in items:
        if item.data is None or not item.boxes:
            continue
        values = item.data.detach().resolve_conj().resolve_neg().contiguous().cpu()
        crcs = block_crcs(values.reshape(-1).view(torch.uint8).numpy())
        place = [item.tensor.role, item.tensor.kind, item.tensor.fqn]
        boxes = [[*box.offsets, *box.lengths] for box in item.boxes]
        digest = hashlib.sha256(crcs.tobytes()).hexdigest()[:16]
        found[json.dumps([*place, boxes])] = digest
    return found


def unequal(by_rank: Sequence[dict[str, str]]) -> list[str]:
    """Return which parts ranks disagree about, as text.

    Example:
        >>> part = '["main", "model", "w", [[0, 2]]]'
        >>> unequal([{part: "a"}, {part: "b"}, {part: "a"}])
        ['`w` (main.model): ranks [0, 2] against [1]']
    """
    wrong = []
    for part in sorted({part for mine in by_rank for part in mine}):
        ranks: dict[str, list[int]] = {}
        for rank, mine in enumerate(by_rank):
            if part in mine:
                ranks.setdefault(mine[part], []).append(rank)
        if len(ranks) > 1:
            role, kind, fqn, _ = json.loads(part)
            wrong.append(
                f"`{fqn}` ({role}.{kind}): ranks " + " against ".join(map(str, ranks.values()))
            )
    return wrong


def count_nonfinite(items: Sequence[LocalItem]) -> list[str]:
    """Return the names of this rank's tensors with NaN or infinity; counts and logs them."""
    import torch

    found = []
    for item in items:
        values = item.data
        if values is None or not (values.is_floating_point() or values.is_complex()):
            continue
        if values.element_size() == 1:  # Nothing is computed with 8 bits but conversions.
            values = values.to(torch.float32)
        if not bool(torch.isfinite(values.detach()).all()):
            found.append(item.tensor.fqn)
    if found:
        telemetry.count("planish_checkpoint_nonfinite_total", len(found))
        names = ",".join(found[:_NAMED])
        logger.warning(telemetry.event("nonfinite_tensors", count=len(found), first=names))
    return found
