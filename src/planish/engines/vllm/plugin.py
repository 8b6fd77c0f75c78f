"""Entry point `vllm.general_plugins`: vLLM calls it in each of its processes before any work.

vLLM may call a plug-in several times in one process.
"""

from __future__ import annotations

import logging

WEIGHT_TRANSFER = "planish"
"""Name of our weight transfer backend."""

LOAD_FORMAT = "planish"
"""Name of our load format, with which vLLM reads weights at the start."""


def _tells_news(record: logging.LogRecord) -> bool:
    """Return False for a log line that vLLM writes at each change of weights; we check dropped
    weights ourselves.
    """
    return not str(record.msg).endswith("Failed to load weights")


def register() -> None:
    """Register our load format and weight transfer with vLLM in this process."""
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_tells_news)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor import model_loader

    from planish.engines.vllm.taken import SeenLoader

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(LOAD_FORMAT)(SeenLoader)

    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER, "planish.engines.vllm.weights", "PolicyTransfer"
        )
