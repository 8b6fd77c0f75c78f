"""One rank of an engine: `python -m planish.engines.disagg.rank`, started by the engine.

Standard input is the control connection; its first message is the settings. The process ends with
that connection, even if its main thread is busy. On another machine than the coordinator's the host
of the rank starts it, and sets the control connection and the address for rows; standard input then
leads to the host.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planish.base.child import Channel, Message
from planish.base.errors import PlanishError
from planish.base.startup import spare_collections
from planish.engines.disagg.exchange import Inbox
from planish.engines.disagg.m2n.frames import Frame, Transport
from planish.engines.disagg.m2n.nixl import NixlTransport
from planish.engines.disagg.m2n.sockets import SocketTransport
from planish.engines.disagg.settings import RankSettings
from planish.records.files import POLICY_SCHEMA
from planish.records.io import fetch_files
from planish.records.refs import parse_pin


def open_transport(settings: RankSettings, host: str = "127.0.0.1", port: int = 0) -> Transport:
    """Return the transport of this rank.

    The socket transport listens at an address of this machine; port 0 takes any port.
    """
    if settings.transport == "nixl":
        roles = settings.attention_ranks, settings.expert_ranks
        own, peers = roles if settings.role == "attention" else roles[::-1]
        return NixlTransport(
            settings.rank,
            settings.limits,
            settings.token,
            own=own,
            peers=peers,
            device=torch.device(settings.device),
        )
    return SocketTransport(
        settings.rank,
        settings.limits,
        settings.token,
        host=host,
        port=port,
        connect_s=settings.timeout_s,
        device=torch.device(settings.device),
    )


class HeldWeights:
    """Fetches pinned policies and reports to the host which weights are wanted and in use."""

    def __init__(self, host: Channel | None = None) -> None:
        """Start without weights; `host` gets a message at each change, None for no reports."""
        self._host = host
        self._wanted, self._next = "", 0
        self._held: tuple[str, int | None] = "", None

    def want(self, message: Mapping[str, Any]) -> Message:
        """Return the message with its policy folder, if it names one, on this machine.

        The message has settings, with a `pin` if their `folder` is on another machine; or it has
        the address of new `weights`, which the rank itself fetches.
        """
        pin = str(message.get("weights") or message.get("pin", ""))
        self._wanted, self._next = pin, int(message["version"])
        self._tell()
        if not pin or "weights" in message:
            return dict(message)
        uri, digest = parse_pin(pin)
        return {**message, "folder": str(fetch_files(uri, sha256=digest, schema=POLICY_SCHEMA))}

    def hold(self) -> None:
        """Record that the policy wanted last is now in use."""
        self._held = self._wanted, self._next
        self._tell()

    def _tell(self) -> None:
        if self._host is not None:
            held, version = self._held
            self._host.send({"wanted": self._wanted, "held": held, "version": version})


def serve(
    channel: Channel,
    on_end: Callable[[], None],
    new_transport: Callable[[RankSettings], Transport] = open_transport,
    held: HeldWeights | None = None,
    device: str = "",
    *,
    is_alone: bool = False,
) -> None:
    """Run the rank that the first message describes, until `close`; OSError: no coordinator.

    Args:
        channel: connection to the coordinator.
        on_end: called by another thread when the coordinator is gone.
        new_transport: as `open_transport`.
        held: gets the wanted and the current weights; None for no reports.
        device: replaces the coordinator's choice; empty takes that.
        is_alone: this process does nothing else, so its temporary files, such as those of a killed
            vLLM, lie in the coordinator's folder and are removed with it.
    """
    message = channel.receive()
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox, on_end), daemon=True).start()
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
        role.transport = transport = new_transport(settings)
    except Exception as error:
        channel.send({"re": message["id"], **_fault(error)})
        return
    try:
        # The coordinator may have left already, because another rank could not start.
        answer = {"address": transport.address, **role.stats({})}
        channel.send({"re": message["id"], **answer})
        _work(role, channel, inbox, held)
    finally:
        transport.close()
        role.close()


def _listen(channel: Channel, inbox: Inbox, on_end: Callable[[], None]) -> None:
    """Put the coordinator's messages into the inbox; answer a `ping` at once."""
    try:
        while True:
            message = channel.receive()
            if message["op"] == "ping":
                channel.send({"re": message["id"]})
            else:
                inbox.put(message)
    except OSError:
        inbox.put({"op": "close", "id": 0, "reason": "the coordinator is gone"})
        on_end()


def _work(role: Any, channel: Channel, inbox: Inbox, held: HeldWeights) -> None:
    """Serve messages and frames in the order of their arrival, until `close`."""
    while True:
        item = None
        if not role.has_work or not inbox.empty():
            item = inbox.get()
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
                addresses = {int(rank): place for rank, place in item["addresses"].items()}
                role.transport.connect(addresses, inbox.put)
                channel.send({"re": number})
            else:
                answer = getattr(role, item["op"])(
                    held.want(item) if item["op"] == "load" else item
                )
                if item["op"] == "commit":
                    held.hold()
                if answer is not None:
                    channel.send({"re": number, **answer})
        except Exception as error:
            channel.send({"re": number, **_fault(error)})


def _fault(error: Exception) -> Message:
    lost = getattr(error, "per_rank", {})
    text = str(error) if isinstance(error, PlanishError) else f"{type(error).__name__}: {error}"
    return {"fault": text, "lost": {str(rank): reason for rank, reason in lost.items()}}


def main() -> None:
    """Run one rank; JSON in the argument has what the host of a rank sets."""
    given = json.loads(sys.argv[1]) if sys.argv[1:] else {}
    run(partial(open_transport, **given.pop("rows", {})), **given)


def run(
    new_transport: Callable[[RankSettings], Transport], control: int = 0, device: str = ""
) -> None:
    """Run the only rank of this process like `serve`, with the coordinator at a descriptor.

    If that is not standard input, standard input gets the state of the weights.
    """
    spare_collections()
    channel = Channel(socket.socket(fileno=control))
    held = HeldWeights(Channel(socket.socket(fileno=0)) if control else None)
    try:
        serve(channel, lambda: os._exit(1), new_transport, held, device, is_alone=True)
    except OSError as error:  # the coordinator is gone
        sys.exit(str(error))
    finally:
        channel.close()


if __name__ == "__main__":
    main()
