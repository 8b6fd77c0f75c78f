"""Low-rank adapters in a model of transformers: add, name and merge them.

The layers are those of peft. Callers decide what is trained, saved and exported.

Source: LoRA, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from planish.models.adapters import SCALE, Adapters, find_layers, is_adapter

_NAME = "default"
"""Name that peft gives to the only adapter of a layer."""


def add_adapters(model: nn.Module, adapters: Adapters, *, seed: Sequence[int]) -> None:
    """Add adapters to a model, in place; its outputs do not change.

    Afterwards only adapters require gradients. A is random, B is 0.

    The model is on the CPU, except weights on `meta`, which stay there. `seed` is the seed of A and
    must be equal on all ranks; the global random state is not changed.

    Raises:
        ConfigError: the model has no such layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name in linear or ".experts." in name
    }
    layers = find_layers(shapes, adapters.target_modules)
    config = LoraConfig(
        r=adapters.rank, lora_alpha=adapters.alpha, target_modules=sorted(layers), lora_dropout=0.0
    )
    stream = np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)
    # peft initialises adapters on the device of their weight; for a weight on `meta` a tensor of
    # one number replaces it meanwhile.
    blank = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for module, name, parameter in blank:
        stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module.register_parameter(name, nn.Parameter(stand_in))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream[0]))
        inject_adapter_in_model(config, model, _NAME)
    for module, name, parameter in blank:
        parameter.requires_grad_(False)
        module.register_parameter(name, parameter)
    model.register_buffer(SCALE, torch.tensor(adapters.scale))


def plain_name(name: str) -> str:
    """Return the name of a parameter in checkpoints and policies, without peft's wrappers.

    Example:
        >>> plain_name("layers.0.q_proj.base_layer.weight")
        'layers.0.q_proj.weight'
        >>> plain_name("layers.0.q_proj.lora_A.default.weight")
        'layers.0.q_proj.lora_A.weight'
    """
    return name.replace(".base_layer.", ".").replace(f".{_NAME}.", ".")


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by their plain names, with adapters added to the weights.

    Weights without adapters are not copied.
    """
    tensors = {plain_name(name): tensor.detach() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        delta: Any = getattr(module, "get_delta_weight", None)
        if delta is not None:
            weight = f"{name}.weight"
            with torch.no_grad():
                tensors[weight] = tensors[weight] + delta(_NAME)
    return {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}


def merge_adapters(model: nn.Module) -> None:
    """Add the adapters of a model to its weights, in place, and remove them."""
    for name, module in list(model.named_modules()):
        layer: Any = module
        if hasattr(layer, "get_delta_weight"):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    delattr(model, SCALE)
    model.requires_grad_(True)
