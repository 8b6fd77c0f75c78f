"""Settings of the supervised cold start; no paper publishes them, they fit the embedded model."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from planish.base.config import Fraction, Section
from planish.base.parallel import DeviceName


class SftConfig(Section):
    """How a policy learns from worked traces until it can begin reinforcement learning."""

    force: bool = False
    """Train on the traces although `model.path` gives a trained model."""
    learning_rate: PositiveFloat = 5e-3
    """Rate of AdamW, constant after the warm-up."""
    warmup_steps: NonNegativeInt = 50
    """Linear warm-up, optimizer steps."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay on every parameter."""
    grad_clip: float | None = Field(1.0, gt=0.0)
    """Largest global gradient norm of an optimizer step; None is no limit."""
    traces_per_minibatch: PositiveInt = 32
    """Traces of one optimizer step, of similar length."""
    max_traces: NonNegativeInt = 0
    """Learn from only so many traces, the first by prompt id; 0 takes all."""
    max_steps: PositiveInt = 4000
    """End after so many optimizer steps whatever the accuracy: a cap in steps, not in seconds,
    so that a run again gives equal bits."""
    target_accuracy: Fraction = 0.22
    """End when avg@n on the probe prompts reaches this; 1 trains to the cap."""
    measure_every: PositiveInt = 100
    """Optimizer steps between measurements."""
    measure_after: NonNegativeInt = 0
    """No measurement before this step."""
    probe_prompts: PositiveInt = 128
    """Training prompts to measure on, the first by id; their traces are not learnt."""
    probe_samples: int = Field(4, ge=1, le=999)
    """Responses to each probe prompt, n."""
    max_response_tokens: PositiveInt = 48
    """Longest response while measuring, in tokens."""
    probe_memory_share: float = Field(0.3, gt=0.0, lt=1.0)
    """Share of the accelerator's memory that the engine `vllm` takes while measuring, in place of
    `engine.memory_share`: the model that is trained, its gradients and AdamW's moments need the
    rest."""
    max_rows: PositiveInt = 256
    """Responses that the engine generates at once."""
    device: DeviceName = "auto"
    """Where the model lives; `auto` takes an accelerator where there is one."""
    num_threads: PositiveInt = 1
    """torch threads on CPU; more than one hurts where cores are shared."""
