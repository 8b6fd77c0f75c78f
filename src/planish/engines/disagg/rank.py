"""One rank of an instance: `python -m planish.engines.disagg.rank`, started by the engine.

Standard input is one end of the control connection; the first message on it is the settings. The
process ends when that connection does, wherever its main thread is. On another machine than the
coordinator's, the host of the rank starts it, and says where it listens for rows.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planish.base.errors import ConfigError, PlanishError
from planish.base.startup import spare_collections
from planish.engines.config import DEAD_S
from planish.engines.deploy.held import HeldWeights
from planish.engines.disagg.control import Channel
from planish.engines.disagg.inbox import Inbox
from planish.engines.disagg.m2n.frames import Frame, Transport
from planish.engines.disagg.m2n.peers import Timeouts
from planish.engines.disagg.settings import RankSettings


def open_transport(
    settings: RankSettings, host: str = "127.0.0.1", port: int = 0
) -> tuple[Transport, tuple[str, int]]:
    """Return a transport that is not connected, and where its peers find it.

    Args:
        settings: of this rank.
        host: address of this machine, for sockets.
        port: for sockets; 0 takes a free one.

    Raises:
        ConfigError: no transport has this name.
    """
    limits = settings.limits
    timeouts = Timeouts(
        connect_s=settings.timeout_s, send_s=settings.timeout_s, dead_after_s=DEAD_S
    )
    pin_memory = torch.device(settings.device).type == "cuda"
    transport: Transport
    address = ("", 0)
    if settings.transport == "sockets":
        from planish.engines.disagg.m2n.sockets import SocketTransport

        transport = SocketTransport(
            settings.rank,
            limits,
            token=settings.token,
            host=host,
            port=port,
            timeouts=timeouts,
            pin_memory=pin_memory,
        )
        address = transport.address
    elif settings.transport == "gloo":
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from planish.engines.disagg.m2n.gloo import GlooTransport

        num_ranks = settings.num_attention + settings.num_expert
        store = FileStore(f"{settings.scratch}/{settings.token}", num_ranks)
        transport = GlooTransport(
            settings.rank,
            num_ranks,
            limits,
            store=store,
            timeouts=timeouts,
            pin_memory=pin_memory,
        )
    else:
        raise ConfigError(f"`transport` must be 'sockets' or 'gloo', got {settings.transport!r}")
    return emulated(transport, settings), address


def emulated(transport: Transport, settings: RankSettings) -> Transport:
    """Put the link of the settings, where there is one, between a transport and its rank."""
    if settings.link is None:
        return transport
    from planish.engines.disagg.m2n.link import EmulatedLink

    latency_s, bytes_per_s = settings.link
    return EmulatedLink(transport, latency_s=latency_s, bytes_per_s=bytes_per_s)


def serve(
    channel: Channel,
    on_end: Callable[[], None],
    new_transport: Callable[[RankSettings], tuple[Transport, tuple[str, int]]] = open_transport,
    held: HeldWeights | None = None,
    device: str = "",
    *,
    is_alone: bool = False,
) -> None:
    """Be the rank that the first message describes until `close`.

    Args:
        channel: to the coordinator.
        on_end: called by another thread when the coordinator is gone.
        new_transport: as `open_transport`.
        held: told of weights that are wanted and held; None where nobody asks.
        device: in place of the coordinator's; empty takes that.
        is_alone: this process does nothing else, so its temporary files, such as those that vLLM
            leaves when it is killed, go into the folder of the coordinator and with it.

    Raises:
        PeerLost: the coordinator is gone.
    """
    message = channel.receive(None)
    assert message is not None
    inbox = Inbox(channel, on_end)
    held = held or HeldWeights()
    role: Any
    try:
        given = held.want(message["settings"])
        settings = RankSettings.parse({**given, "device": device or given["device"]})
        if is_alone and Path(settings.scratch).is_dir():
            tempfile.tempdir = settings.scratch
        if settings.role == "attention" and settings.vllm is not None:
            from planish.engines.vllm.attention_rank import VllmAttentionRank

            role = VllmAttentionRank(settings, inbox)
        elif settings.role == "attention":
            from planish.engines.disagg.attention_rank import AttentionRank

            role = AttentionRank(settings, inbox)
        else:
            from planish.engines.disagg.expert_rank import ExpertRank

            role = ExpertRank(settings)
        held.hold()
        transport, address = new_transport(settings)
    except Exception as error:
        channel.send({"re": message["id"], **_fault(error)})
        return
    try:
        # The coordinator may have left already, for another rank that could not start.
        channel.send({"re": message["id"], "address": address, **role.handle({"op": "stats"})})
        work(role, transport, channel, inbox, held)
    finally:
        transport.close()


def work(
    role: Any, transport: Transport, channel: Channel, inbox: Inbox, held: HeldWeights
) -> None:
    """Serve messages and frames in the order in which they come, until `close`."""
    while True:
        item = inbox.get(0 if role.has_work else None)
        number = item["id"] if isinstance(item, dict) else None
        try:
            if item is None:
                role.serve()
            elif isinstance(item, PlanishError):
                raise item
            elif isinstance(item, Frame):
                role.take(item)
            elif item["op"] == "close":
                return
            elif item["op"] == "connect":
                addresses = {int(rank): tuple(place) for rank, place in item["addresses"].items()}
                transport.connect(addresses)
                role.transport = transport
                inbox.watch(transport)
                channel.send({"re": number})
            else:
                answer = role.handle(held.want(item) if item["op"] == "load" else item)
                if item["op"] == "commit":
                    held.hold()
                if answer is not None:
                    channel.send({"re": number, **answer})
        except Exception as error:
            channel.send({"re": number, **_fault(error)})


def _fault(error: Exception) -> dict[str, Any]:
    """Return an error as a message."""
    lost = getattr(error, "per_rank", {})
    text = str(error) if isinstance(error, PlanishError) else f"{type(error).__name__}: {error}"
    return {"fault": text, "lost": {str(rank): reason for rank, reason in lost.items()}}


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(prog="python -m planish.engines.disagg.rank")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address of this machine, where rows arrive")
    add("--port", type=int, default=0, help="for rows; 0 takes a free one")
    add("--device", default="", help="torch device in place of the coordinator's")
    add("--held", type=int, metavar="FD", help="gets which weights are wanted and held")
    options = parser.parse_args()
    channel = Channel(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    with ExitStack() as files:
        files.callback(channel.close)
        told = None if options.held is None else files.enter_context(os.fdopen(options.held, "w"))
        try:
            serve(
                channel,
                lambda: os._exit(1),
                partial(open_transport, host=options.host, port=options.port),
                HeldWeights(told),
                options.device,
                is_alone=True,
            )
        except PlanishError as error:  # the coordinator is gone
            sys.exit(str(error))


if __name__ == "__main__":
    spare_collections()
    main()
