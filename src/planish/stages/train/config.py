"""Configuration of the train stage; the defaults are the published values of DAPO and VAPO."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from planish.base.config import Section
from planish.base.errors import ConfigError, LayoutMismatch
from planish.base.parallel import DeviceName, Grid, Ranks, grid_fault
from planish.records.refs import is_pin
from planish.store.sources import parse_source

PLACEMENT = (
    *("trainer", "tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel"),
    *("context_parallel", "replicas", "offload"),
    *("num_processes", "num_nodes", "split", "launcher", "queue", "device", "num_threads"),
    *("tokens_per_microbatch", "packing", "activation_checkpointing", "compile"),
    "timeout_seconds",
)
"""Settings of `TrainConfig` that distribute the work over ranks. They change results by rounding
only, so the digest of a run leaves them out."""


class TrainConfig(Section):
    """How the policy is updated; what the loss is belongs to `[algorithm]`."""

    trainer: str = "fsdp2"
    """`fsdp2` shards whole models over all ranks; `megatron` (megatron-core) also cuts matrices."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share every matrix of a model; divides heads, groups of keys and the number of
    processes. Needs the trainer `megatron`."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Stages of consecutive layers, each on ranks of its own; divides the layers and the number of
    processes. Needs the trainer `megatron`."""
    expert_parallel: int = Field(default=1, ge=1)
    """Neighbouring ranks of a stage that share the experts of every layer, whole ones each; divides
    the experts and the ranks of a stage. Needs the trainer `megatron` and a model with experts."""
    sequence_parallel: bool = False
    """Ranks that share matrices also share the tokens between them: less memory. Needs
    `tensor_parallel` above 1, and models with experts need it there."""
    context_parallel: int = Field(default=1, ge=1)
    """Neighbouring ranks that share the tokens of every row, for responses whose activations one
    device does not hold; in attention each has a part of the heads (DeepSpeed Ulysses, arXiv
    2309.14509). Divides the heads and the number of processes, and divides the heads of keys and
    values or is a multiple of them. Needs `packing`."""
    replicas: int = Field(default=1, ge=1)
    """Groups of neighbouring ranks that hold a whole model each, sharded inside of the group, as
    many as machines where one machine holds it: gradients cross their borders once a step. Divides
    the number of processes; 1 shards over all of them. Needs the trainer `fsdp2`; `megatron` has a
    copy of its part on each data-parallel rank anyway."""
    offload: bool = False
    """Keep parameters, gradients and moments in host memory, and step the optimizer there: a device
    holds the layers at work alone, and each pass waits for the bus. Needs the trainer `fsdp2`."""
    num_processes: int = Field(default=0, ge=0)
    """Training processes on this machine; above 1 they are started under torchrun. 0 is one for
    each accelerator that the stage sees, and one on the CPU."""
    num_nodes: int = Field(default=0, ge=0)
    """Machines that train together, each in a pod of its own with `num_processes` processes; the
    pod of the stage submits them as one job and waits. 0 is as many as the profile was made for
    (`gpu-4x8`: 4), in other profiles and outside a cluster 1."""
    split: str = "3:1"
    """With `rollout.ahead`: processes that sample to processes that train, over all machines, whose
    number is a multiple of their sum. Parallel ranks and `replicas` divide those that train."""
    launcher: Literal["job", "trainjob"] = "job"
    """Form of those pods: `job` is an Indexed Job with a Service, which every cluster has;
    `trainjob` is a TrainJob of Kubeflow Trainer 2.1 on the runtime of `manifests/trainer`."""
    queue: str = ""
    """Queue of Kueue that lets the pods of `num_nodes` start together; empty is none."""
    device: DeviceName = "auto"
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
    grad_clip: float | None = Field(default=1.0, gt=0.0)
    """Largest global gradient norm of an optimizer step; None is no limit."""
    rollouts_per_minibatch: int = Field(default=512, ge=1)
    """Rollouts of one optimizer step, over all ranks (DAPO section 4.1: 16 steps a batch)."""
    num_passes: int = Field(default=1, ge=1)
    """How often each rollout is trained on; 1 as published."""
    selection: Literal["all", "mixed_first"] = "all"
    """Groups of an iteration that train the policy, with the positive part of its loss.
    `mixed_first` takes up to `max_groups`, first groups with right and wrong responses, then groups
    with many unfinished responses, as in the public code of T-PPO's authors. The other groups keep
    their slots and train the critic; mini-batches count all rollouts."""
    max_groups: int | None = Field(default=None, ge=1)
    """Groups of an iteration that train the policy; None is no limit. Needed by `mixed_first`; the
    public code of T-PPO's authors: 510 of 1536."""
    tokens_per_microbatch: int = Field(default=24_576, ge=1)
    """Tokens of one forward pass on one rank, with padding where there is any; a sequence with more
    (of all ranks that share its tokens) goes alone."""
    packing: bool = True
    """Lay sequences end to end in place of padding them to the longest of the micro-batch;
    attention never crosses them. Decoders whose attention can not be told so are padded."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Fuse the steps between matrix products by torch.compile, in the LM head and, with
    `context_parallel = 1`, in dense decoder layers, which then keep half of the memory without
    checkpointing. The first step takes a minute longer. The trainer `fsdp2` alone does it."""
    replay_routing: bool = False
    """Send each token to the experts that the engine sent it to, in every forward pass of the
    policy; their weights come from the present router. The rollouts then keep these experts, as
    with `rollout.keep_routing`. Critic and reference policy choose by themselves. Rollout Routing
    Replay, arXiv 2510.11370."""
    deterministic: bool = True
    """Take deterministic kernels alone, so that a run again gives equal bits; a model that needs an
    operation without one ends with torch's error, which names it."""
    timeout_seconds: float = Field(default=1800.0, gt=0.0)
    """How long a rank waits for its peers."""
    reference_policy: str = ""
    """Pin (`<uri>#sha256=<digest>`) of the policy that `algorithm.kl_coefficient` holds the policy
    near; empty is the one that training began with, after the supervised start: its train states
    name it, so chained and forked runs keep it."""

    def grid(self, ranks: Ranks) -> Grid:
        """Return the grid of the training processes, with the place of this one.

        Raises:
            ConfigError: the sizes of the grid do not divide the number of processes.
        """
        tp, pp, ep = self.tensor_parallel, self.pipeline_parallel, self.expert_parallel
        sizes = {"tp": tp, "pp": pp, "ep": ep, "cp": self.context_parallel}
        if fault := grid_fault(ranks.size, **sizes, replicas=self.replicas):
            raise ConfigError(fault)
        return Grid(ranks, **sizes)

    def num_steps(self, num_rows: int) -> int:
        """Return the increase of `Progress.step` in an iteration with `num_rows` kept rollouts."""
        return max(1, self.num_passes * -(-num_rows // self.rollouts_per_minibatch))

    def _off(self) -> list[str]:
        off = [] if self.selection != "all" else ["selection", "max_groups"]
        off += [] if self.tensor_parallel > 1 else ["tensor_parallel", "sequence_parallel"]
        alone = (
            *("pipeline_parallel", "expert_parallel", "context_parallel", "replicas", "offload"),
            *("replay_routing", "packing", "compile", "split", "reference_policy"),
        )
        fields = type(self).model_fields
        return off + [name for name in alone if getattr(self, name) == fields[name].default]

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.reference_policy and not is_pin(self.reference_policy):
            raise ValueError(
                "`reference_policy` must read `<uri>#sha256=<64 hex digits>`, got "
                f"{self.reference_policy!r}; the report of a run names its policies like that"
            )
        if not re.fullmatch(r"[1-9]\d{0,3}:[1-9]\d{0,3}", self.split):
            raise ValueError(
                "`split` must read `samplers:trainers`, two numbers from 1 to 9999 such as '3:1', "
                f"got {self.split!r}"
            )
        sizes = (self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)
        if max(sizes) > 1 and self.trainer == "fsdp2":
            raise ValueError(
                "`tensor_parallel`, `pipeline_parallel` and `expert_parallel` must be 1 for the "
                f"trainer 'fsdp2', got {sizes}; `trainer = 'megatron'` cuts matrices"
            )
        if (self.replicas, self.offload) != (1, False) and self.trainer != "fsdp2":
            raise ValueError(
                "`replicas` must be 1 and `offload` false for a trainer other than 'fsdp2', got "
                f"{self.replicas} and {self.offload} for {self.trainer!r}"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "`sequence_parallel` must be false with `tensor_parallel = 1`, got true; tokens "
                "are shared by the ranks that share matrices"
            )
        if self.context_parallel > 1 and not self.packing:
            raise ValueError(
                "`packing` must be true with `context_parallel` above 1, got false; ranks share "
                "the tokens of rows that lie end to end"
            )
        if self.num_processes % self.tensor_parallel:
            raise ValueError(
                f"`num_processes` must be a multiple of `tensor_parallel` ({self.tensor_parallel}),"
                f" got {self.num_processes}"
            )
        if (self.selection == "all") != (self.max_groups is None):
            raise ValueError(
                "`max_groups` must be given for selection 'mixed_first' and for no other, got "
                f"{self.max_groups!r} for {self.selection!r}"
            )
        return self


DEFAULT_PLACEMENT: dict[str, Any] = {
    name: TrainConfig().model_dump().get(name) for name in PLACEMENT
}
"""Value of each setting in a dump of the defaults; None if the dump leaves it out."""


class CriticConfig(Section):
    """The value model: where it comes from and how it is trained.

    It is used by algorithms with a critic only. AdamW's decays, weight decay, the limit of the
    gradient norm and the size of mini-batches are those of `[train]`.
    """

    init: Literal["policy", "model", "random", "state"] = "policy"
    """Backbone of a new critic: `policy` copies the policy's; `model` opens `path`, a reward model
    (the published choice, VAPO section 5.1) or a causal language model; `random` is untrained, of
    the policy's sizes; `state` takes the critic of another run's train state."""
    path: str = ""
    """Address of a model, as `model.path`, for `model`; pin of a train state
    (`<uri>#sha256=<digest>`) for `state`."""
    head_std: float = Field(default=0.01, ge=0.0)
    """Standard deviation of the weights of a new value head; 0 begins with values of 0."""
    learning_rate: float = Field(default=2e-6, gt=0.0)
    """Constant after warm-up (VAPO section 5.1)."""
    warmup_iterations: int = Field(default=20, ge=0)
    """Linear warm-up over this many rollout batches that train the critic; 0 is none."""
    min_finished: int = Field(default=1, ge=1)
    """Fewest finished responses of a critic step. An iteration that comes to fewer, with those
    that wait, leaves them all to the next; 1 steps on the finished responses of each mini-batch,
    as published."""
    pretrain_iterations: int = Field(default=50, ge=0)
    """Rollout batches that train the critic alone, before the policy's first update (VAPO section
    5.1: 50 steps); 0 is none."""
    pretrain_learning_rate: float | None = Field(default=None, gt=0.0)
    """Rate of value pretraining; None is `learning_rate`."""
    pretrain_passes: int = Field(default=1, ge=1)
    """How often value pretraining uses each rollout."""
    pretrain_explained_variance: float | None = Field(default=None, le=1.0)
    """Value pretraining ends early once the explained variance reaches this; None is no rule."""
    pretrain_value_loss: float | None = Field(default=None, gt=0.0)
    """Value pretraining ends early once the value loss is not above this; None is no rule."""
    pretrain_patience: int = Field(default=1, ge=1)
    """Rollout batches in a row on which every given rule must hold, each before it is trained on;
    the last of them trains the policy already."""

    def check_new(self, pin: str) -> None:
        """Check that a new critic may start beside a train state without one.

        Raises:
            LayoutMismatch: `init` is neither 'model' nor 'state'. Without this error a critic that
                was lost on the way would start anew unnoticed.
        """
        if self.init not in ("model", "state"):
            raise LayoutMismatch(
                "the train state before an iteration must hold a critic, since the algorithm has "
                f"one, got none in {pin!r}; go on with the algorithm that saved it, or name a "
                f"critic by `critic.init` ('model' or 'state', got {self.init!r}) and `critic.path`"
            )

    def _off(self) -> list[str]:
        return [] if self.min_finished > 1 else ["min_finished"]

    @model_validator(mode="after")
    def _has_its_path(self) -> CriticConfig:
        if (self.init in ("model", "state")) != bool(self.path):
            raise ValueError(
                "`path` must be given for init 'model' and 'state' and for no other, got "
                f"{self.path!r} for {self.init!r}"
            )
        if self.init == "model":
            parse_source(self.path, key="critic.path")
        return self
