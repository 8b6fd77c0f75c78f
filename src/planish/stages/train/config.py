"""Configuration of the train stage; the defaults are the published values of DAPO and VAPO."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from planish.base.config import Needs, Section, setting
from planish.base.errors import ConfigError, LayoutMismatch
from planish.base.parallel import DeviceName, Grid, Ranks, grid_fault
from planish.engines.config import RETURNS_EXPERTS
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

_MEGATRON = Needs("train.trainer", "megatron", "it cuts matrices and layers")
_FSDP2 = Needs(
    "train.trainer", "fsdp2", "megatron has a copy of its part on each data-parallel rank"
)


class TrainConfig(Section):
    """How the policy is updated; what the loss is belongs to `[algorithm]`."""

    trainer: Literal["fsdp2", "megatron"] = "fsdp2"
    """`fsdp2` shards whole models over all ranks; `megatron` (megatron-core) also cuts matrices."""
    tensor_parallel: PositiveInt = setting(1, _MEGATRON, quiet="tensor_parallel")
    """Ranks that share every matrix of a model; divides heads, groups of keys and the number of
    processes."""
    pipeline_parallel: PositiveInt = setting(1, _MEGATRON, quiet="pipeline_parallel")
    """Stages of consecutive layers, each on ranks of its own; divides the layers and the number of
    processes."""
    expert_parallel: PositiveInt = setting(1, _MEGATRON, quiet="expert_parallel")
    """Neighbouring ranks of a stage that share the experts of every layer, whole ones each; divides
    the experts and the ranks of a stage. The model must have experts."""
    sequence_parallel: bool = setting(
        False,
        Needs("train.tensor_parallel", why="tokens are shared by the ranks that share matrices"),
        quiet="tensor_parallel",
    )
    """Ranks that share matrices also share the tokens between them: less memory. Models with
    experts need it with `tensor_parallel`."""
    context_parallel: PositiveInt = setting(
        1,
        Needs("train.packing", True, "ranks share the tokens of rows that lie end to end"),
        quiet="context_parallel",
    )
    """Neighbouring ranks that share the tokens of every row, for responses whose activations one
    device does not hold; in attention each has a part of the heads (DeepSpeed Ulysses, arXiv
    2309.14509). Divides the heads and the number of processes, and divides the heads of keys and
    values or is a multiple of them."""
    replicas: PositiveInt = setting(1, _FSDP2, quiet="replicas")
    """Groups of neighbouring ranks that hold a whole model each, sharded inside of the group, as
    many as machines where one machine holds it: gradients cross their borders once a step. Divides
    the number of processes; 1 shards over all of them."""
    offload: bool = setting(
        False, Needs("train.trainer", "fsdp2", "it alone steps on the host"), quiet="offload"
    )
    """Keep parameters, gradients and moments in host memory, and step the optimizer there: a device
    holds the layers at work alone, and each pass waits for the bus."""
    num_processes: NonNegativeInt = 0
    """Training processes on this machine; above 1 they are started under torchrun. 0 is one for
    each accelerator that the stage sees, and one on the CPU."""
    num_nodes: NonNegativeInt = 0
    """Machines that train together, each in a pod of its own with `num_processes` processes; the
    pod of the stage submits them as one job and waits. 0 is as many as the profile was made for
    (`gpu-4x8`: 4), in other profiles and outside a cluster 1."""
    split: str = setting("3:1", quiet="split")
    """With `rollout.ahead`: processes that sample to processes that train, over all machines, whose
    number is a multiple of their sum. Parallel ranks and `replicas` divide those that train."""
    launcher: Literal["job", "trainjob"] = "job"
    """Form of those pods: `job` is an Indexed Job with a Service, which every cluster has;
    `trainjob` is a TrainJob of Kubeflow Trainer 2.1 on the runtime of `manifests/trainer`."""
    queue: str = ""
    """Queue of Kueue that lets the pods of `num_nodes` start together; empty is none."""
    device: DeviceName = "auto"
    """Where the model lives; `auto` takes an accelerator where there is one."""
    num_threads: PositiveInt = 1
    """torch threads of each process on CPU; more than one hurts where cores are shared."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products; master weights and optimizer moments are always float32."""
    learning_rate: PositiveFloat = 1e-6
    """Constant after warm-up (DAPO section 4.1)."""
    warmup_iterations: NonNegativeInt = 20
    """Linear warm-up over this many rollout batches (DAPO section 4.1); 0 is none."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of AdamW's second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay on every parameter."""
    grad_clip: float | None = Field(1.0, gt=0.0)
    """Largest global gradient norm of an optimizer step; None is no limit."""
    rollouts_per_minibatch: PositiveInt = 512
    """Rollouts of one optimizer step, over all ranks (DAPO section 4.1: 16 steps a batch)."""
    num_passes: PositiveInt = 1
    """How often each rollout is trained on; 1 as published."""
    selection: Literal["all", "mixed_first"] = setting(
        "all", Needs("train.max_groups", why="say how many groups it takes"), quiet="selection"
    )
    """Choice of the groups of an iteration on which the policy trains; the likelihood loss on
    correct responses has the same choice. `mixed_first` takes up to `max_groups`, first groups with
    right and wrong responses, then groups with many unfinished responses, as in the public code of
    T-PPO's authors. The other groups keep their slots and train the critic; mini-batches count all
    rollouts."""
    max_groups: int | None = setting(
        None,
        Needs("train.selection", "mixed_first", "`all` trains on every group"),
        quiet="selection",
        ge=1,
    )
    """Groups of an iteration that train the policy; None is no limit. The public code of
    T-PPO's authors: 510 of 1536."""
    tokens_per_microbatch: PositiveInt = 24_576
    """Tokens of one forward pass on one rank, with padding where there is any; a sequence with more
    (of all ranks that share its tokens) goes alone."""
    packing: bool = setting(True, quiet="packing")
    """Lay sequences end to end in place of padding them to the longest of the micro-batch;
    attention never crosses them. Decoders whose attention can not be told so are padded."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    compile: bool = setting(False, quiet="compile")
    """Fuse the steps between matrix products by torch.compile, in the LM head and, with
    `context_parallel = 1`, in dense decoder layers, which then keep half of the memory without
    checkpointing. The first step takes a minute longer. The trainer `fsdp2` alone does it."""
    replay_routing: bool = setting(False, RETURNS_EXPERTS, quiet="replay_routing")
    """Send each token to the experts that the engine sent it to, in every forward pass of the
    policy; their weights come from the present router. The rollouts then keep these experts, as
    with `rollout.keep_routing`. Critic and reference policy choose by themselves. Rollout Routing
    Replay, arXiv 2510.11370."""
    deterministic: bool = True
    """Take deterministic kernels alone, so that a run again gives equal bits; a model that needs an
    operation without one ends with torch's error, which names it."""
    timeout_seconds: PositiveFloat = 1800.0
    """How long a rank waits for its peers."""
    reference_policy: str = setting(
        "",
        Needs("algorithm.kl_coefficient", why="without a penalty no reference is used"),
        quiet="reference_policy",
    )
    """Pin (`<uri>#sha256=<digest>`) of the policy that `algorithm.kl_coefficient` holds the policy
    near; empty is the one that training began with, after the supervised start: its train states
    name it, so chained and forked runs keep it."""

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of tensor, pipeline, expert and context parallelism, by axis of the grid."""
        tp, pp, ep = self.tensor_parallel, self.pipeline_parallel, self.expert_parallel
        return {"tp": tp, "pp": pp, "ep": ep, "cp": self.context_parallel}

    def grid(self, ranks: Ranks) -> Grid:
        """Return the grid of the training processes, with the place of this one.

        Raises:
            ConfigError: the sizes of the grid do not divide the number of processes.
        """
        if fault := grid_fault(ranks.size, **self.degrees, replicas=self.replicas):
            raise ConfigError(fault)
        return Grid(ranks, **self.degrees)

    def num_steps(self, num_rows: int) -> int:
        """Return the increase of `Progress.step` in an iteration with `num_rows` kept rollouts."""
        return max(1, self.num_passes * -(-num_rows // self.rollouts_per_minibatch))

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
        if self.num_processes % self.tensor_parallel:
            raise ValueError(
                f"`num_processes` must be a multiple of `tensor_parallel` ({self.tensor_parallel}),"
                f" got {self.num_processes}"
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

    init: Literal["policy", "model", "random", "state"] = setting(
        "policy", Needs("critic.path", why="name what it begins with", when=("model", "state"))
    )
    """Backbone of a new critic: `policy` copies the policy's; `model` opens `path`, a reward model
    (the published choice, VAPO section 5.1) or a causal language model; `random` is untrained, of
    the policy's sizes; `state` takes the critic of another run's train state."""
    path: str = setting("", Needs("critic.init", ("model", "state"), "no other `init` reads it"))
    """Address of a model, as `model.path`, for `model`; pin of a train state
    (`<uri>#sha256=<digest>`) for `state`."""
    head_std: NonNegativeFloat = 0.01
    """Standard deviation of the weights of a new value head; 0 begins with values of 0."""
    learning_rate: PositiveFloat = 2e-6
    """Constant after warm-up (VAPO section 5.1)."""
    warmup_iterations: NonNegativeInt = 20
    """Linear warm-up over this many rollout batches that train the critic; 0 is none."""
    min_finished: PositiveInt = setting(1, quiet="min_finished")
    """Fewest finished responses of a critic step. An iteration that comes to fewer, with those
    that wait, leaves them all to the next; 1 steps on the finished responses of each mini-batch,
    as published."""
    pretrain_iterations: NonNegativeInt = 50
    """Rollout batches that train the critic alone, before the policy's first update (VAPO section
    5.1: 50 steps); 0 is none."""
    pretrain_learning_rate: float | None = Field(None, gt=0.0)
    """Rate of value pretraining; None is `learning_rate`."""
    pretrain_passes: PositiveInt = 1
    """How often value pretraining uses each rollout."""
    pretrain_explained_variance: float | None = Field(None, le=1.0)
    """Value pretraining ends early once the explained variance reaches this; None is no rule."""
    pretrain_value_loss: float | None = Field(None, gt=0.0)
    """Value pretraining ends early once the value loss is not above this; None is no rule."""
    pretrain_patience: PositiveInt = 1
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

    @model_validator(mode="after")
    def _is_address(self) -> CriticConfig:
        if self.init == "model" and self.path:
            parse_source(self.path, key="critic.path")
        return self
