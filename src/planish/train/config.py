"""Configuration of the train stage; the defaults are DAPO's published values."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planish.config import Section


class TrainConfig(Section):
    """How the policy is updated; what the loss is belongs to `[algorithm]`."""

    trainer: str = "fsdp2"
    """Key in the table of trainers."""
    num_processes: int = Field(default=1, ge=1)
    """Training processes on this machine; above 1 they are started under torchrun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; `auto` takes an accelerator where there is one."""
    num_threads: int = Field(default=1, ge=1)
    """torch threads of each process on CPU; more than one hurts where cores are shared."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products; master weights and optimizer moments are always float32."""
    learning_rate: float = Field(default=1e-6, gt=0.0)
    """Constant after warm-up (DAPO section 4.1)."""
    warmup_iterations: int = Field(default=20, ge=0)
    """Linear warm-up over this many rollout batches (DAPO section 4.1); 0 is none."""
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of AdamW's second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0.0)
    """Added to the root of AdamW's second moment."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay on every parameter."""
    grad_clip: float = Field(default=1.0, gt=0.0)
    """Largest global gradient norm of an optimizer step."""
    rollouts_per_minibatch: int = Field(default=512, ge=1)
    """Rollouts of one optimizer step, over all ranks (DAPO section 4.1: 16 steps a batch)."""
    num_passes: int = Field(default=1, ge=1)
    """How often each rollout is trained on; 1 as published."""
    tokens_per_microbatch: int = Field(default=24_576, ge=1)
    """Padded tokens of one forward pass on one rank; a longer sequence goes alone."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    deterministic: bool = True
    """Ask torch for deterministic kernels, so that a run again gives equal bits."""
    alarm_after_skipped: int = Field(default=3, ge=1)
    """Optimizer steps skipped in a row for non-finite gradients before an error is logged."""
    timeout_seconds: float = Field(default=1800.0, gt=0.0)
    """How long a rank waits for its peers."""
