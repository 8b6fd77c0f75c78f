"""Errors as bytes, so that every rank raises what one rank found; kinds by name, never pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from planish.base import errors

BUILTIN = {kind.__name__: kind for kind in (TypeError, ValueError, MemoryError)}
"""Kinds outside our own tree that keep their kind on the way."""
EVERYONE = -1
"""In place of a rank: what the ranks have brought does not go together, or the save as a whole."""


def encode(found: Mapping[int, Exception]) -> bytes:
    """Return the errors of some ranks as bytes; empty for none."""
    if not found:
        return b""
    return json.dumps({str(rank): _facts(error) for rank, error in found.items()}).encode()


def _facts(error: Exception) -> dict[str, object]:
    return {
        "kind": type(error).__name__,
        "message": str(error) or repr(error),
        "per_rank": dict(getattr(error, "per_rank", {})),
        "file": getattr(error, "file", ""),
        "block": getattr(error, "block", -1),
    }


def decode(data: bytes) -> dict[int, Exception]:
    """Undo `encode`; an unknown kind becomes a `SaveFailed` that names it."""
    if not data:
        return {}
    return {int(rank): _build(facts) for rank, facts in json.loads(data).items()}


def _build(facts: Mapping[str, Any]) -> Exception:
    kind, message = str(facts["kind"]), str(facts["message"])
    found = getattr(errors, kind, None) or BUILTIN.get(kind)
    error: Exception
    if found is errors.CheckpointCorrupt:
        error = errors.CheckpointCorrupt(message, file=facts["file"], block=facts["block"])
    elif isinstance(found, type) and issubclass(found, Exception):
        error = found(message)
    else:
        error = errors.SaveFailed(f"{kind}: {message}")
    per_rank = {int(rank): str(text) for rank, text in facts["per_rank"].items()}
    error.per_rank = per_rank  # type: ignore[attr-defined]
    return error


def joined(found: Mapping[int, Exception], size: int) -> Exception:
    """Return one error for all: the lowest rank's kind, every message once, by rank.

    Args:
        found: By rank, or by `EVERYONE`. An error that has `per_rank` names its ranks already.
        size: Ranks in all; the only one is not named.
    """
    first = found[min(found)]
    if size == 1:
        return first
    per_rank: dict[int, str] = {}
    said: dict[str, list[int]] = {}
    for rank, error in sorted(found.items()):
        own = getattr(error, "per_rank", {})
        ranks = said.setdefault(str(error), [])
        if rank != EVERYONE and not own:
            ranks.append(rank)
            own = {rank: str(error)}
        per_rank |= own
    message = "; ".join(f"{told_ranks(who)}: {text}" if who else text for text, who in said.items())
    return _build({**_facts(first), "message": message, "per_rank": per_rank})


def told_ranks(ranks: Sequence[int]) -> str:
    """Name ranks for an error: the first few, and how many there are."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
