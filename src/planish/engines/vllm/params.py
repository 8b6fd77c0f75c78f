"""vLLM's sampling parameters of a request, which keep every temperature of `Sampling`."""

from __future__ import annotations

from vllm import SamplingParams


class TrueParams(SamplingParams):  # type: ignore[misc]  # vllm is untyped here
    """Keeps temperatures below .01, which vLLM would raise to .01, and above 2, which vLLM refuses.

    Copies, also those for workers in other processes, run `__post_init__` again.
    """

    def __post_init__(self) -> None:
        heat = self.temperature  # type: ignore[has-type]
        self.temperature = float(heat > 0)
        super().__post_init__()
        self.temperature = heat
