"""Experts of each token in training: replay of the rollout's choices, or a count of differences.

A router that scores two experts nearly alike may choose one in the engine and the other in the
trainer, since their kernels add in another order or precision. The log-probabilities of the token
then differ. With replay the trainer uses the recorded experts. Only their weights come from the
current scores of the router, so the router keeps its gradient.

This module supports the routers of transformers; other routers call `RoutingReplay.choose`.

Source: Rollout Routing Replay, arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planish.base.errors import RecordError

ROUTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Qwen3MoeTopKRouter": partial(torch.softmax, dim=-1, dtype=torch.float32),
    "MixtralTopKRouter": partial(torch.softmax, dim=-1, dtype=torch.float32),
    "DeepseekV3TopkRouter": torch.sigmoid,
}
"""Map from router class of transformers to its function of the logits [tokens, experts]. A router
returns the logits, and the weights and ids of the chosen experts, [tokens, experts per token]
each."""


class RoutingReplay:
    """Recorded choices of experts for the forward passes of one model.

    Example:
        >>> replay = RoutingReplay(num_layers=1, num_experts=4, forces=True)
        >>> own = torch.tensor([[0, 1], [2, 3]])
        >>> with replay.using(torch.tensor([[[1, 2]], [[-1, -1]]])), torch.no_grad():
        ...     replay.choose(0, own).tolist()
        [[1, 2], [2, 3]]
        >>> replay.counts.tolist()
        [1, 2]
    """

    def __init__(self, num_layers: int, num_experts: int, *, forces: bool) -> None:
        """Set the sizes of the model.

        Args:
            num_layers: number of layers with experts, on all ranks.
            num_experts: number of experts of one layer.
            forces: recorded choices replace those of the routers; otherwise they are only compared.
        """
        self._sizes = (num_layers, num_experts)
        self._forces = forces
        self._recorded: Tensor | None = None
        self.counts = torch.zeros(2, dtype=torch.int64)
        """[2]: recorded choices that a router would not have made, and all recorded choices, in
        forward passes without gradients."""

    def check(self, recorded: Tensor) -> None:
        """Refuse choices of another model.

        Args:
            recorded: [..., layers, experts per token] of any integer type, on the CPU.

        Raises:
            RecordError: layers or experts do not match.
        """
        layers, highest = recorded.shape[-2], int(recorded.max()) if recorded.numel() else -1
        if layers != self._sizes[0] or highest >= self._sizes[1]:
            raise RecordError(
                f"`routing` of the rollouts must choose among {self._sizes[1]} experts in each of "
                f"the {self._sizes[0]} layers of the policy that have some, got {layers} layers "
                f"and the expert {highest}; another policy has sampled these rollouts"
            )

    @contextmanager
    def using(self, recorded: Tensor | None) -> Iterator[None]:
        """Use recorded choices in the forward passes of the block.

        Args:
            recorded: [tokens, layers, experts per token] of any integer type, in the order in
                which the routers get the tokens; -1 where unknown. None: there are no choices.
        """
        before, self._recorded = self._recorded, recorded
        try:
            yield
        finally:
            self._recorded = before

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for torch's activation checkpointing: the repeated forward pass uses the
        choices of the first pass.

        For its argument `context_fn`; other micro-batches may run in between.
        """
        return nullcontext(), self.using(self._recorded)

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts of each token in one layer.

        Args:
            layer: number of the layer among those with experts, from 0.
            own: [tokens, experts per token] int64, the choice of the router.

        Returns:
            Like `own`; `own` itself if nothing is replayed.
        """
        learns = torch.is_grad_enabled()
        if self._recorded is None or (learns and not self._forces):
            return own
        recorded = self._recorded[:, layer]
        known = (recorded >= 0).all(-1, keepdim=True)
        if not learns:
            others = known & (recorded[:, :, None] != own[:, None, :]).all(-1)
            counts = torch.stack([others.sum(), known.sum() * own.shape[-1]])
            self.counts = self.counts.to(own.device) + counts
        return recorded.to(own.dtype).where(known, own) if self._forces else own


def replay_in(model: Any, *, forces: bool) -> RoutingReplay:
    """Return a new `RoutingReplay` that the routers of a model call.

    This must happen before the model is sharded; `forces` is as in `RoutingReplay`.
    """
    routers = [module for module in model.modules() if type(module).__name__ in ROUTERS]
    replay = RoutingReplay(
        len(routers), max((router.num_experts for router in routers), default=0), forces=forces
    )
    for layer, router in enumerate(routers):
        weigh = ROUTERS[type(router).__name__]
        router.register_forward_hook(partial(choose_again, replay, layer, weigh))
    return replay


def choose_again(
    replay: RoutingReplay,
    layer: int,
    weigh: Callable[[Tensor], Tensor],
    router: Any,
    _: Any,
    given: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward hook of a router: replace its experts by those of `replay`, with weights from the
    router's logits.
    """
    logits, weights, own = given
    chosen = replay.choose(layer, own)
    if chosen is own:
        return given
    scores = weigh(logits).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        scores = scores / scores.sum(-1, keepdim=True)
    scores = scores * getattr(router, "routed_scaling_factor", 1.0)
    return logits, scores.to(weights.dtype), chosen
