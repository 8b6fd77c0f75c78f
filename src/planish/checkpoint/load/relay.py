"""Messages that several ranks of another machine need alike cross the network once.

The reader names one of those ranks their relay. A relay takes on what its memory has room for, lays
it there for the others, and says so; they copy it in the round after its arrival, once all ranks
have reached that round. What a relay has no room for goes to each rank by itself. Two halves of the
memory take turns, so that nothing is overwritten that somebody still copies.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (redundant reads are eliminated); relays are
ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from planish.checkpoint.format.geometry import I64
from planish.checkpoint.plan.reads import Messages, Pieces, RankReads

if TYPE_CHECKING:
    from planish.checkpoint.load.exchange import Mesh

DIRECT = -1
"""In place of a relay: none."""
_ALIGNED = 16


@dataclass
class Relays:
    """What the relays have agreed to, as far as it concerns one rank; messages by their rows.

    Example:
        >>> Relays().num_bytes
        0
    """

    skipped: set[int] = field(default_factory=set)
    """Own messages that a relay hands on: not sent."""
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Messages for this rank that a relay hands on: to the relay and the place in its memory."""
    kept: dict[int, int] = field(default_factory=dict)
    """Messages for this rank that it hands on: to their place in its own memory."""
    num_bytes: int = 0
    """Of this rank's memory for others, both halves."""


def is_useful(mesh: Mesh) -> bool:
    """Return whether a message can have several receivers on another machine."""
    hosts = [mesh.hosts[rank] for rank in mesh.members]
    return 1 < len(set(hosts)) < len(hosts)


def propose(mesh: Mesh, reads: RankReads) -> I64:
    """Return [s], for every message that this rank sends: the relay it could go through."""
    sends = reads.sends
    relays = np.full(len(sends), DIRECT, np.int64)
    alike: dict[tuple[int, int, bytes], list[int]] = defaultdict(list)
    hosts = np.array(mesh.hosts, np.int64)[sends.peer]
    for message in np.flatnonzero(hosts != mesh.hosts[mesh.rank]).tolist():
        content = _content(sends, message, reads.send_pieces)
        alike[int(sends.request[message]), int(hosts[message]), content].append(message)
    for (request, _, _), messages in alike.items():
        if len(messages) > 1:
            # One after the other, so that all ranks of a machine share the work.
            chosen = messages[(request + mesh.rank) % len(messages)]
            relays[messages] = sends.peer[chosen]
    return relays


def _content(messages: Messages, message: int, pieces: Pieces) -> bytes:
    """Return what makes two messages of one request equal byte by byte."""
    rows = slice(
        int(messages.first[message]), int(messages.first[message] + messages.count[message])
    )
    columns = pieces.source[rows], pieces.strides[rows], pieces.lengths[rows], pieces.itemsize[rows]
    return b"".join(np.ascontiguousarray(column).tobytes() for column in columns)


def agree(
    mesh: Mesh, reads: RankReads, proposed: I64, offered: I64, turns: I64, half_bytes: int
) -> Relays:
    """Settle what goes through relays; a collective of the members.

    Args:
        mesh: of the members.
        reads: of this rank.
        proposed: what `propose` returned here.
        offered: [r], for every message that this rank receives: what its reader proposed.
        turns: [r], the round in which each of them arrives.
        half_bytes: what this rank may keep for others in one round.
    """
    receives = reads.receives
    found = Relays()
    filled: dict[int, int] = defaultdict(int)
    mine = np.flatnonzero(offered == mesh.rank)
    for message in mine[np.argsort(turns[mine], kind="stable")].tolist():
        turn, size = int(turns[message]), int(receives.nbytes[message])
        if filled[turn] + size <= half_bytes:
            found.kept[message] = filled[turn]
            filled[turn] += -(-size // _ALIGNED) * _ALIGNED
    half = max(filled.values(), default=0)
    found.num_bytes = 2 * half
    for message in found.kept:
        found.kept[message] += int(turns[message]) % 2 * half
    heard = mesh.trade(_told(mesh, receives, found.kept))
    rows = {
        (peer, request): message
        for message, (peer, request) in enumerate(
            zip(receives.peer.tolist(), receives.request.tolist(), strict=True)
        )
    }
    accepted: set[tuple[int, int]] = set()
    for relay, table in heard.items():
        for reader, request, place in table.reshape(-1, 3).tolist():
            message = rows.get((reader, request), DIRECT)
            if reader == mesh.rank:
                accepted.add((request, relay))
            elif message != DIRECT and offered[message] == relay:
                found.taken[message] = relay, place
    sends = reads.sends
    columns = (sends.request.tolist(), proposed.tolist(), sends.peer.tolist())
    found.skipped = {
        message
        for message, (request, relay, peer) in enumerate(zip(*columns, strict=True))
        if relay != peer and (request, relay) in accepted
    }
    return found


def _told(mesh: Mesh, receives: Messages, kept: Mapping[int, int]) -> dict[int, I64]:
    """Return, for every member: reader, request and place of what this rank keeps for others.

    Ranks of this machine are told all, readers what is theirs.
    """
    rows = [
        (int(receives.peer[message]), int(receives.request[message]), place)
        for message, place in kept.items()
    ]
    own = mesh.hosts[mesh.rank]
    return {
        peer: np.array([r for r in rows if mesh.hosts[peer] == own or r[0] == peer], np.int64)
        for peer in mesh.members
        if peer != mesh.rank
    }
