"""Errors as bytes, so that every rank raises what one rank found; kinds by name, never pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping

from planish import errors

BUILTIN = {kind.__name__: kind for kind in (TypeError, ValueError, MemoryError)}
"""Kinds outside our own tree that keep their kind on the way."""


def encode(found: Mapping[int, Exception]) -> bytes:
    """Return the errors of some ranks as bytes; empty for none."""
    if not found:
        return b""
    return json.dumps({str(rank): _facts(error) for rank, error in found.items()}).encode()


def _facts(error: Exception) -> dict[str, object]:
    per_rank = {str(k): v for k, v in getattr(error, "per_rank", {}).items()}
    return {
        "kind": type(error).__name__,
        "message": str(error) or repr(error),
        "per_rank": per_rank,
        "file": getattr(error, "file", ""),
        "block": getattr(error, "block", -1),
    }


def decode(data: bytes) -> dict[int, Exception]:
    """Undo `encode`; an unknown kind becomes a `SaveFailed` that names it."""
    if not data:
        return {}
    return {int(rank): _build(facts) for rank, facts in json.loads(data).items()}


def _build(facts: Mapping[str, object]) -> Exception:
    kind, message = str(facts["kind"]), str(facts["message"])
    found = getattr(errors, kind, None) or BUILTIN.get(kind)
    if found is errors.CheckpointCorrupt:
        block = facts["block"]
        assert isinstance(block, int)
        return errors.CheckpointCorrupt(message, file=str(facts["file"]), block=block)
    if found is errors.SaveFailed:
        per_rank = facts["per_rank"]
        assert isinstance(per_rank, dict)
        return errors.SaveFailed(message, per_rank={int(k): str(v) for k, v in per_rank.items()})
    if isinstance(found, type) and issubclass(found, Exception):
        return found(message)
    return errors.SaveFailed(f"{kind}: {message}")


def joined(found: Mapping[int, Exception]) -> Exception:
    """Return one error for all: the lowest rank's kind, every rank's message once."""
    assert found
    ranks: dict[str, list[int]] = {}
    for rank, error in sorted(found.items()):
        ranks.setdefault(str(error), []).append(rank)
    first = found[min(found)]
    if len(found) == 1:
        return first
    message = "; ".join(f"ranks {who}: {text}" for text, who in ranks.items())
    return _build({**_facts(first), "message": message})
