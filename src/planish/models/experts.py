"""Names and layout of weights in other forms than a policy folder's; this module imports no torch.

transformers keeps all experts of a layer in two tensors, `experts.gate_up_proj` [E, 2F, H] and
`experts.down_proj` [E, H, F], for E experts with intermediate size F and hidden size H. A policy
folder has one tensor per expert, under the names with which the family was published. The GPTModel
of megatron-core has names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from planish.base.errors import ConfigError

TOP_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Name in megatron-core's GPTModel -> name in transformers, for tensors outside the layers."""
LAYER_NAMES = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""The same for those tensors of a layer that become one weight with the same rows."""


class DiskTensor(NamedTuple):
    """One tensor of a policy folder, and its box in the tensor in memory."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    """First index of the box along each dimension."""
    extent: tuple[int, ...]
    """Size of the box along each dimension; the elements have the same order."""


class _Names(NamedTuple):
    """Names in a policy folder for the experts of a layer, for one family."""

    block: str
    """Name on disk of the block that is `mlp` in memory."""
    gate: str
    up: str
    down: str


FAMILIES = {
    "qwen2_moe": _Names("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": _Names("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": _Names("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
}
"""`model_type` of config.json to the names of the family."""

_FUSED = re.compile(r"(.+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.+\.)mlp\.gate\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.\w+\.weight")
_EXPERTS = re.compile(r"\.(mlp|block_sparse_moe)\.experts\.")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer in a config.json; 0 for a dense model.

    Raises:
        ConfigError: the number is not a whole number.

    Example:
        >>> num_experts({"num_local_experts": 8}), num_experts({})
        (8, 0)
    """
    count = next((config[key] for key in _COUNTS if config.get(key)), 0)
    if not isinstance(count, int):
        raise ConfigError(
            f"config.json must have a whole number of experts, got {count!r:.100}; correct the file"
        )
    return count


def routing_dtype(config: Mapping[str, Any]) -> str:
    """Return the name of the smallest integer type for -1 and the id of every expert.

    Raises:
        ConfigError: the model is dense and has no routing.
    """
    count = num_experts(config)
    if not count:
        raise ConfigError(
            "`rollout.keep_routing` and `train.replay_routing` must be false for a model without "
            f"experts, got true for one of {config.get('model_type')!r}"
        )
    return "int8" if count <= 128 else "int16"


def is_expert(name: str) -> bool:
    """Return whether a tensor of a policy folder belongs to one routed expert.

    Example:
        >>> is_expert("model.layers.0.mlp.experts.3.up_proj.weight")
        True
        >>> is_expert("model.layers.0.mlp.shared_experts.up_proj.weight")
        False
    """
    return _EXPERT.fullmatch(name) is not None


def spread_fault(experts: int, ranks: int, redundant: int) -> str:
    """Return why the experts of a layer cannot be distributed over ranks; "" if they can.

    `redundant` is the number of replicas on each rank in addition to its share.
    """
    if not experts:
        return (
            "a model with experts is needed, got a dense one; take the engine `transformers` or "
            "`vllm`"
        )
    if experts % ranks:
        return f"`engine.expert_ranks` must divide the {experts} experts of a layer, got {ranks}"
    if redundant > experts - experts // ranks:
        return (
            "`engine.redundant_experts` must be at most the "
            f"{experts - experts // ranks} experts that a rank does not hold, got {redundant}"
        )
    return ""


def sharing_fault(experts: int, ranks: int, *, tensor_parallel: int, shares_tokens: bool) -> str:
    """Return why ranks of the trainer `megatron` cannot share experts; "" if they can.

    Args:
        experts: routed experts of a layer, 0 in a dense model.
        ranks: `train.expert_parallel`.
        tensor_parallel: ranks that split every other matrix.
        shares_tokens: `train.sequence_parallel`.
    """
    if not experts:
        return (
            f"`train.expert_parallel` must be 1 for a model without experts, got {ranks}; "
            "`train.tensor_parallel` cuts its matrices"
            if ranks > 1
            else ""
        )
    if experts % ranks:
        return f"`train.expert_parallel` must divide the {experts} experts of a layer, got {ranks}"
    if tensor_parallel > 1 and not shares_tokens:
        return (
            "`train.sequence_parallel` must be true for a model with experts and "
            f"`train.tensor_parallel` above 1, got false and {tensor_parallel}; each token goes to "
            "its experts from one rank"
        )
    return ""


def check_family(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Refuse experts of a family whose names in a policy folder are unknown.

    `names` are the tensors' names in memory or in a folder.

    Raises:
        ConfigError: there are experts of an unknown family.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES and any(map(_EXPERTS.search, names)):
        raise ConfigError(
            f"a model with experts must be of {sorted(FAMILIES)}, got the `model_type` {kind!r}; "
            "choose another model"
        )


def disk_tensors(
    name: str, shape: Sequence[int], config: Mapping[str, Any]
) -> Iterator[DiskTensor]:
    """Yield the tensors of a policy folder into which one tensor in memory is split.

    Raises:
        ConfigError: the tensor has experts of an unknown family.

    Example:
        >>> moe = {"model_type": "qwen3_moe", "num_experts": 1}
        >>> for part in disk_tensors("model.layers.0.mlp.experts.gate_up_proj", (1, 4, 3), moe):
        ...     print(part.name, part.shape, part.start, part.extent)
        model.layers.0.mlp.experts.0.gate_proj.weight (2, 3) (0, 0, 0) (1, 2, 3)
        model.layers.0.mlp.experts.0.up_proj.weight (2, 3) (0, 2, 0) (1, 2, 3)
    """
    family = FAMILIES.get(str(config.get("model_type")))
    fused = _FUSED.fullmatch(name)
    if fused is None:
        router = _ROUTER.fullmatch(name)
        if family is not None and router is not None:
            name = f"{router[1]}{family.block}.gate.{router[2]}"
        yield DiskTensor(name, tuple(shape), (0,) * len(shape), tuple(shape))
        return
    if family is None:
        check_family([name], config)
    assert family is not None
    experts, rows, columns = shape
    if fused[2] == "down_proj":
        parts = [(family.down, 0, rows)]
    else:
        parts = [(family.gate, 0, rows // 2), (family.up, rows // 2, rows)]
    for expert in range(experts):
        for short, start, stop in parts:
            yield DiskTensor(
                f"{fused[1]}{family.block}.experts.{expert}.{short}.weight",
                (stop - start, columns),
                (expert, start, 0),
                (1, stop - start, columns),
            )


def expert_names(
    names: Collection[str], config: Mapping[str, Any]
) -> list[list[tuple[str, str, str]]]:
    """Return the names (gate [F, H], up [F, H], down [H, F]) of each expert of each sparse layer.

    `names` are those of all tensors in a policy folder; layers and experts are ascending.

    Example:
        >>> moe = {"model_type": "mixtral", "num_local_experts": 1}
        >>> expert_names(["model.layers.2.block_sparse_moe.gate.weight"], moe)[0][0][1]
        'model.layers.2.block_sparse_moe.experts.0.w3.weight'
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return []
    router = f".{family.block}.gate.weight"
    layers = [name.removesuffix(".gate.weight") for name in names if name.endswith(router)]
    layers.sort(key=lambda layer: [int(part) for part in layer.split(".") if part.isdigit()])
    gate, up, down = (f"{part}.weight" for part in (family.gate, family.up, family.down))
    return [
        [
            (f"{expert}.{gate}", f"{expert}.{up}", f"{expert}.{down}")
            for expert in (f"{layer}.experts.{number}" for number in range(num_experts(config)))
        ]
        for layer in layers
    ]


def expert_faults(names: Collection[str], config: Mapping[str, Any]) -> list[str]:
    """Return a message for each missing or surplus expert tensor of a policy folder.

    Example:
        >>> moe = {"model_type": "qwen3_moe", "num_experts": 1}
        >>> expert_faults(["model.layers.0.mlp.gate.weight"], moe)[0]
        'model.layers.0.mlp.experts.0.gate_proj.weight is missing'
    """
    names = set(names)
    wanted = [name for layer in expert_names(names, config) for one in layer for name in one]
    known = str(config.get("model_type")) in FAMILIES
    faults = [f"{name} is missing" for name in wanted if name not in names]
    return faults + [
        f"{name} is of none of the {num_experts(config)} experts"
        for name in sorted(names.difference(wanted))
        if known and is_expert(name)
    ]


def on_disk(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by their names in a policy folder, as views of the tensors in memory."""
    return {
        part.name: tensor[
            tuple(slice(a, a + n) for a, n in zip(part.start, part.extent, strict=True))
        ].reshape(part.shape)
        for name, tensor in tensors.items()
        for part in disk_tensors(name, tuple(tensor.shape), config)
    }
