"""vLLM's settings of a request, with every temperature of `Sampling` as it is."""

from __future__ import annotations

from vllm import SamplingParams


class TrueParams(SamplingParams):  # type: ignore[misc]  # vllm is untyped here
    """Without this vLLM raises temperatures below .01 to that, and refuses those above 2.

    Its copies, also those for workers in other processes, go through `__post_init__` again.
    """

    def __post_init__(self) -> None:
        heat = self.temperature  # type: ignore[has-type]
        self.temperature = float(heat > 0)
        super().__post_init__()
        self.temperature = heat
