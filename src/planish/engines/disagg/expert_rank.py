"""An expert rank: waits for the rows of all participating attention ranks, computes, answers.

It has no state of requests. It serves frames of decoding first; it serves frames of prompts one by
one when no decoding frames are complete.

Source: MegaScale-Infer, arXiv 2504.02263, sections 3 and 4.1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from planish.base.child import Message
from planish.base.errors import PeerLost, ProtocolError
from planish.engines.disagg.exchange import Rank
from planish.engines.disagg.expert_model import ExpertModel, Experts
from planish.engines.disagg.m2n.frames import Frame
from planish.engines.disagg.placement import ExpertLayout
from planish.engines.disagg.settings import RankSettings
from planish.engines.weights import WeightSource

_Key = tuple[int, int]
"""Layer and micro-batch of the iteration in progress."""


class ExpertRank(Rank):
    """The experts of one process, and the frames that wait for them."""

    def __init__(self, settings: RankSettings) -> None:
        """Read the experts that the layout assigns to this rank."""
        self._settings = settings
        self._node = settings.rank - settings.num_attention
        self._model = ExpertModel(settings.path, torch.device(settings.device))
        self.load({**settings.plain(), "weights": settings.folder})
        self.commit({})
        self._iteration = -1
        self._participants: dict[int, list[int]] = {}
        self._early: list[Frame] = []
        self._frames: dict[_Key, dict[int, Frame]] = {}
        self._complete: deque[_Key] = deque()
        self._prompts: deque[Frame] = deque()
        layers = self.layout.layers
        self._counts = torch.zeros((len(layers), layers[0].num_experts), dtype=torch.int64)
        self._busy_s = self._wait_s = 0.0
        self._idle_since = 0.0

    # Weights.

    def _read(self, weights: WeightSource, layout: ExpertLayout) -> list[Experts]:
        return self._model.read(weights, layout.held(self._node))

    def commit(self, _: Mapping[str, Any]) -> Message:
        """Use the weights that `load` read last."""
        self._version, self.layout, experts = self._next
        self._model.write(experts)
        return {}

    def stats(self, _: Mapping[str, Any]) -> Message:
        """Return counters since the start."""
        return {
            "role": "expert",
            "num_bytes": self._model.num_bytes,
            "busy_s": self._busy_s,
            "wait_s": self._wait_s,
            "rows": int(self._counts.sum()),
            "queue": sum(map(len, self._frames.values())) + len(self._prompts),
            "expert_tokens": self._counts.tolist(),
        }

    # Frames.

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        """True if `serve` would compute something."""
        return bool(self._complete or self._prompts)

    def plan(self, message: Mapping[str, Any]) -> None:
        """Begin an iteration, or continue one after the loss of a rank."""
        self._participants = {int(mb): ranks for mb, ranks in message["participants"].items()}
        if message["iteration"] != self._iteration:
            self._iteration = message["iteration"]
            self._idle_since = time.monotonic()
            self._frames.clear()
            self._complete.clear()
            early, self._early = self._early, []
            for frame in early:
                self.take(frame)
            return
        for key, frames in list(self._frames.items()):
            for rank in set(frames) - set(self._participants.get(key[1], ())):
                del frames[rank]
            self._check_complete(key)

    def take(self, frame: Frame) -> None:
        """Store a frame until it can be served.

        Raises:
            ProtocolError: the frame has other weights or another placement, or was sent twice.
        """
        header, own = frame.header, (self._version, self.layout.version)
        if (header.weight_version, header.placement_version) != own:
            raise ProtocolError(
                f"a frame must be of the weights and the placement {own} of this rank, got {header}"
            )
        if header.is_prefill:
            self._prompts.append(frame)
        elif header.iteration > self._iteration:
            self._early.append(frame)
        elif header.iteration == self._iteration and header.source in self._participants.get(
            header.micro_batch, ()
        ):
            key = (header.layer, header.micro_batch)
            if header.source in self._frames.setdefault(key, {}):
                raise ProtocolError(f"a frame must come once, got another {header}")
            self._frames[key][header.source] = frame
            self._check_complete(key)

    def _check_complete(self, key: _Key) -> None:
        wanted = self._participants.get(key[1], ())
        frames = self._frames.get(key, {})
        if wanted and len(frames) == len(wanted) and key not in self._complete:
            self._complete.append(key)

    def serve(self) -> None:
        """Compute the frames that became complete first; if there are none, the first prompt."""
        if self._complete:
            key = self._complete.popleft()
            frames = self._frames.pop(key)
            if frames:
                self._answer([frames[source] for source in sorted(frames)])
        elif self._prompts:
            self._answer([self._prompts.popleft()])

    def _answer(self, frames: list[Frame]) -> None:
        """Compute the rows of some frames of one layer together, and send each sender its
        outputs.
        """
        begin = time.monotonic()
        # vLLM marks all of its steps as prompts, so they count as decoding here.
        is_decode = not frames[0].header.is_prefill or self._settings.vllm is not None
        self._wait_s += begin - self._idle_since if is_decode else 0.0
        layer = frames[0].header.layer
        local = list(self.layout.layers[layer].experts[self._node])
        counts = torch.stack([frame.counts for frame in frames])
        sizes = [frame.header.num_rows for frame in frames]
        room = self.transport.room(frames[0].header.reply(), sum(sizes))
        self._model.compute(layer, counts, [frame.rows for frame in frames], room)
        self._counts[layer, local] += counts.sum(0)[: len(local)]
        left = self._settings.stage_s[1] - (time.monotonic() - begin)
        if left > 0 and is_decode:
            time.sleep(left)
        lost = {}
        for frame, rows in zip(frames, torch.split(room, sizes), strict=True):
            try:
                self.transport.send(frame.header.reply(), None, rows)
            except PeerLost as error:
                lost[frame.header.source] = str(error)
        self._idle_since = time.monotonic()
        if is_decode:
            self._busy_s += self._idle_since - begin
        if lost:
            raise PeerLost(f"replies must reach their ranks, got {lost}", per_rank=lost)
