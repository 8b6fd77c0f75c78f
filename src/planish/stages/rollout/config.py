"""Settings of the rollout stage; defaults are those of DAPO.

Source: DAPO, arXiv 2503.14476, sections 3.2 and 4.1, and its public training script.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from planish.base.config import Needs, Section, setting
from planish.base.parallel import DeviceName
from planish.engines.config import OLDER_TOKENS, RETURNS_EXPERTS, TEMPERATURES
from planish.records.rewards import MAX_ITERATIONS_WITHOUT_SIGNAL

Unfinished = Literal["train", "hold", "hold_group"]
"""Part of an unfinished response that train gets; see `RolloutConfig.unfinished`."""

_ONE_VERSION = "tokens would be trained on that are older than one policy version"
_CORRECTED = Needs("algorithm.correction", why=OLDER_TOKENS)


class RolloutConfig(Section):
    """How many prompts are sampled, how, and which groups are kept."""

    prompts_per_iteration: PositiveInt = 512
    """Groups of one iteration over all shards. DAPO, section 4.1: 512."""
    group_size: int = Field(16, ge=1, le=999)
    """Responses per prompt. DAPO, section 4.1: 16."""
    max_response_tokens: PositiveInt = 20480
    """Longest response in tokens. DAPO, section 4.1: 16384 + 4096."""
    max_prompt_tokens: PositiveInt = 2048
    """Prompts with more tokens are dropped and counted. DAPO's script: 2048."""
    temperature: float = Field(1.0, ge=TEMPERATURES[0], le=TEMPERATURES[1])
    """Divides the logits. DAPO's script: 1."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Share of probability that is sampled from; runs that train refuse others. DAPO's script:
    1."""
    top_k: NonNegativeInt = 0
    """Number of tokens that is sampled from; 0 is off, runs that train refuse others. DAPO's
    script: off."""
    dynamic_sampling: bool = True
    """Keep only groups with right and wrong responses, and draw until the batch is full. DAPO,
    section 3.2."""
    generation_prompts_factor: float = Field(3.0, gt=0.0, le=64.0)
    """Prompts of one generation round over the groups that are to be drawn. DAPO's script:
    1536 / 512."""
    shrink_rounds: bool = False
    """Let later rounds draw only what the share of kept groups so far makes likely to be needed,
    plus a quarter. False is the published recipe; true samples less and trains on the same."""
    max_generation_rounds: NonNegativeInt = 10
    """Rounds until the starvation policy applies; with 0 it applies after one pass over the prompts
    without a further group, and one that finds none at all ends the run. DAPO's script: 10."""
    starvation_policy: Literal["train_partial", "relax", "raise"] = setting(
        "train_partial",
        Needs(
            "reward.keep_uniform_groups",
            True,
            "rollout would fill the batch with groups that reward throws away",
            when="relax",
        ),
    )
    """When the rounds are over and groups are missing: train on what there is, fill up with groups
    that carry no signal, or fail."""
    max_iterations_without_signal: int = setting(
        MAX_ITERATIONS_WITHOUT_SIGNAL, quiet="max_iterations_without_signal", ge=0
    )
    """Iterations in a row from which nothing can be learnt, every group all wrong or all right,
    that end the run with exit code 2; 0 is no limit."""
    max_staleness: NonNegativeInt = setting(0, _CORRECTED, quiet="max_staleness")
    """Policy versions that a surplus group of dynamic sampling may be old when it is trained on.
    With 1 or more, such groups fill the next batch first and rounds draw for the room that is
    left; 0 draws their prompts again. DAPO, algorithm 1: 0."""
    window_tokens: NonNegativeInt = setting(
        0,
        Needs("rollout.dynamic_sampling", False, "slots are not thrown away"),
        Needs("rollout.max_staleness", 0, "carried responses need no surplus"),
        Needs(
            "reward.keep_uniform_groups",
            True,
            "the responses of a group finish in different iterations, so that none of them shows "
            "whether the group carries a signal",
            beside={"rollout.unfinished": ("train", "hold")},
        ),
        quiet="window_tokens",
    )
    """Most tokens that a response grows by in one iteration; one that is not finished then keeps
    its slot and goes on in the next iteration under the newer policy. Slots are
    `prompts_per_iteration` x `group_size`. 0 generates whole responses. T-PPO, arXiv 2506.15050;
    its authors' public code: 8192."""
    unfinished: Unfinished = setting(
        "train",
        Needs("rollout.window_tokens", why="whole responses are always finished"),
        quiet="window_tokens",
    )
    """With `window_tokens`, what train gets: `train`, the window of every response (T-PPO);
    `hold`, each response once it is finished, with all its tokens of several policy versions;
    `hold_group`, the same once its whole group is finished, for advantages that compare a group."""
    ahead: int = setting(
        0,
        Needs("rollout.window_tokens", 0, _ONE_VERSION),
        Needs("rollout.max_staleness", 0, _ONE_VERSION),
        _CORRECTED,
        quiet="ahead",
        ge=0,
        le=1,
    )
    """Iterations that rollouts are ahead of training. With 1, in tasks of several iterations, some
    processes sample the next iteration while the others train this one (`train.split`): responses
    come from the policy before the one that trains on them, and `algorithm.correction` weighs
    them. 0 samples and trains in turn, as published."""
    sample_retries: int = Field(1, ge=0, le=10)
    """How often a response that the engine failed on is tried again before its group is dropped."""
    commit_steps: NonNegativeInt = 2048
    """Decode steps of the engine from one commit to the next: all that is sampled by then is kept
    for a retry, at the price of one prefill of what goes on. 0 commits whole shards only."""
    keep_routing: bool = setting(False, RETURNS_EXPERTS, quiet="keep_routing")
    """Keep which experts each token of prompt and response was sent to, one or two bytes for each
    choice of each layer, beside the rollouts. The model must have experts; `train.replay_routing`
    needs them, and keeps them by itself."""
    max_rows: PositiveInt = 256
    """Responses that the engine generates at once."""
    device: DeviceName = "auto"
    """Where the engine computes; `auto` takes an accelerator where there is one."""
    threads: PositiveInt = 1
    """Torch threads of the process."""

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                "`group_size` must be at least 2 with `dynamic_sampling`, got "
                f"{self.group_size}; one response is never both right and wrong"
            )
        return self
