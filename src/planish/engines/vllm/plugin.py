"""What vLLM runs in each of its processes before any work: the entry point `vllm.general_plugins`.

A plug-in may be run several times in one process.
"""

from __future__ import annotations

WEIGHT_TRANSFER = "planish"
"""Name of our way to change weights."""


def register() -> None:
    """Make our weight transfer known to this process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER, "planish.engines.vllm.weights", "PolicyTransfer"
        )
