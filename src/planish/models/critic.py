"""Critics: a separate backbone with a value head, built from a policy or a reward model.

A critic shares no parameter with the policy. Only the train state contains the critic; rollout
engines never load it.

Source: VAPO, arXiv 2504.05118, section 4.1 (initialisation of a value model).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from planish.base.errors import CheckpointError, ConfigError
from planish.models.library import load_transformers
from planish.models.policy import FolderBoxes, empty_model, load_model, without_weights
from planish.models.pretrained import check_folder, find_folder

_HEADS = ("ForSequenceClassification", "ForCausalLM")
_BODY = re.compile(r"[A-Za-z0-9]+Model")


class Critic(nn.Module):
    """Backbone and value head; `planish.models.logprobs.ValueScorer` computes values with them."""

    def __init__(self, body: Any, head: nn.Linear) -> None:
        """Join a decoder of transformers (untyped, hence Any) and a linear head with a bias."""
        super().__init__()
        self.body = body
        self.head = head


def critic_from_policy(model: Any, *, seed: int, head_std: float) -> Critic:
    """Return a critic with a copy of a causal language model's backbone and a new value head.

    Args:
        model: causal language model of transformers; it is not changed.
        seed: seed of the head; the global random state is not changed.
        head_std: standard deviation of the head's weights; its bias is 0.
    """
    body = copy.deepcopy(_body(model))
    return Critic(body, _new_head(body, seed, head_std)).eval()


def random_critic(model: Any, *, seed: int, head_std: float) -> Critic:
    """Return an untrained critic with the sizes of a causal language model; arguments as
    `critic_from_policy`.
    """
    old = _body(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_stream(seed, 1))
        body = type(old)(copy.deepcopy(old.config))
    body = body.to(old.dtype)
    return Critic(body, _new_head(body, seed, head_std)).eval()


def open_critic_model(
    path: str, *, seed: int, head_std: float, vocab_size: int
) -> tuple[Critic, FolderBoxes | None]:
    """Open a pretrained model as a critic, in float32.

    A reward model (`*ForSequenceClassification` with one label) provides backbone and head, a
    causal language model only the backbone. `vocab_size` is the policy's; the critic must have as
    many tokens.

    Returns:
        The critic, and the source of its backbone's weights; None if the weights are loaded
        already, because names in the files differ from those of the model.

    Raises:
        ConfigError: the message says what is wrong with the name or the folder, and the remedy.
    """
    folder = find_folder(path, key="critic.path")
    check_folder(folder)
    model = empty_model(folder, _HEADS)
    boxes: FolderBoxes | None = None
    try:
        boxes = FolderBoxes(folder)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        boxes.check(shapes)
        for name, shape in shapes.items():
            if name.startswith("score."):
                value = boxes.read(name, shape, (0,) * len(shape), shape)
                setattr(model.score, name.removeprefix("score."), nn.Parameter(value.float()))
    except (ConfigError, ValueError, KeyError, TypeError):
        # transformers maps older names of its weights, and reports what is wrong with a file.
        boxes, model = None, load_model(folder, dtype=torch.float32, heads=_HEADS)
    body = _body(model)
    if body.config.vocab_size < vocab_size:
        raise ConfigError(
            f"the model of `critic.path` must know the {vocab_size} tokens of the policy, got "
            f"{body.config.vocab_size} in {path!r}; take one of the policy's family"
        )
    has_head = not type(model).__name__.endswith("ForCausalLM")
    head = _reward_head(model, path) if has_head else _new_head(body, seed, head_std)
    if boxes is not None:
        boxes.body = ("body.", f"{model.base_model_prefix}.")
    return Critic(body, head).eval(), boxes


def describe_critic(critic: Critic) -> dict[str, Any]:
    """Return the JSON that `blank_critic` needs: class and configuration of the backbone."""
    raw = json.loads(critic.body.config.to_json_string(use_diff=False))
    # names with an underscore are private to a session of transformers, e.g. a local path
    config = {name: value for name, value in raw.items() if not name.startswith("_")}
    return {"architecture": type(critic.body).__name__, "config": config}


def blank_critic(description: Mapping[str, Any]) -> Critic:
    """Return a critic without weights, which are loaded later; its original source is not read.

    `description` is the result of `describe_critic`. Parameters of the backbone are on the device
    `meta`, as in `empty_model`.

    Raises:
        CheckpointError: this version of transformers has no such model.
    """
    transformers = load_transformers()
    name, config = description.get("architecture"), description.get("config")
    known = isinstance(name, str) and _BODY.fullmatch(name) and isinstance(config, dict)
    body_class = getattr(transformers, str(name), None) if known else None
    if not isinstance(body_class, type) or not issubclass(body_class, transformers.PreTrainedModel):
        raise CheckpointError(
            "a train state must name the backbone of its critic and its configuration, such as "
            f"'Qwen3Model', got {name!r}, which transformers {transformers.__version__} does not "
            "know; go on with the version that saved it"
        )
    made: Any = body_class
    with without_weights():
        body = made(made.config_class.from_dict(config))
    return Critic(body.float(), _blank_head(int(body.config.hidden_size))).eval()


def _body(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


def _stream(seed: int, number: int) -> int:
    state = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def _new_head(body: Any, seed: int, std: float) -> nn.Linear:
    head = _blank_head(int(body.config.hidden_size))
    generator = torch.Generator().manual_seed(_stream(seed, 0))
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * std)
    return head


def _blank_head(width: int) -> nn.Linear:
    head = nn.Linear(width, 1, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    return head


def _reward_head(model: Any, path: str) -> nn.Linear:
    """Return the head of a reward model, with a bias of 0 if it has none."""
    score: Any = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        seen = score if score is None else tuple(getattr(score, "weight", Tensor()).shape)
        raise ConfigError(
            "the reward model of `critic.path` must have one label and a linear head `score`, got "
            f"{type(model).__name__} with {seen} in {path!r}; take a decoder that scores a whole "
            "response with one number"
        )
    head = _blank_head(score.in_features)
    with torch.no_grad():
        head.weight.copy_(score.weight)
        if score.bias is not None:
            head.bias.copy_(score.bias)
    return head
