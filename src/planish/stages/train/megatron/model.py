"""A decoder of megatron-core with the call signature of transformers, and its modules.

`Decoder` and `LanguageModel` have the few attributes that `planish.models.logprobs` reads from a
model of transformers, so all trainers share the scorers and every loss. Only `kernels`,
`without_accelerator` and `_Norm` differ between accelerators and the CPU.

Source: Megatron-LM, arXiv 1909.08053, section 3 (tensor parallelism of attention and MLP); arXiv
2205.05198, section 4 (sequence parallelism); GShard, arXiv 2006.16668, section 3 (experts spread
over ranks; here experts have no limit of tokens, and no loss balances them).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from planish.base.errors import ConfigError
from planish.base.parallel import Grid
from planish.models.experts import num_experts, sharing_fault
from planish.models.packing import Context, Packing, attend
from planish.models.policy import DTYPES
from planish.models.routing import RoutingReplay
from planish.models.selected_states import rms_norm
from planish.models.shapes import MEGATRON_FAMILIES, beside_megatron
from planish.stages.train.config import TrainConfig


def join_grid(grid: Grid, timeout_seconds: float) -> Context | None:
    """Make megatron-core's process groups once per process; return its context-parallel ranks.

    Raises:
        ConfigError: the process already has groups for another grid.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if not dist.is_initialized():
        parallel_state.destroy_model_parallel()
        # megatron-core needs process groups, even for one process without a launcher.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.tp,
            pipeline_model_parallel_size=grid.pp,
            context_parallel_size=grid.cp,
            expert_model_parallel_size=grid.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
        )
        # Nothing here is random, and the other tracker needs an accelerator.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
    }
    if sizes != {"tp": grid.tp, "pp": grid.pp, "ep": grid.ep, "cp": grid.cp}:
        raise ConfigError(
            f"a process can be part of one grid only, got {grid.to_json()} in one of {sizes}; "
            "start another process"
        )
    if grid.cp == 1:
        return None
    return Context(parallel_state.get_context_parallel_group(), grid.cp_rank, grid.cp)


@contextlib.contextmanager
def without_accelerator(device: torch.device) -> Iterator[None]:
    """Let megatron-core allocate on `device` if that is the CPU; it assumes an accelerator."""
    if device.type != "cpu":
        yield
        return

    def count_splits(sender: Any, point: str, tokens_per_expert: Tensor) -> Tensor:
        if point == sender.cuda_dtoh_point and sender.ep_size > 1:
            sender.input_splits = sender.input_splits.tolist()
            sender.output_splits = sender.output_splits.tolist()
        return tokens_per_expert

    sender = MoEAlltoAllTokenDispatcher
    held = torch.cuda.current_device, torch.cuda.synchronize, sender._maybe_dtoh_and_synchronize
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    schedules.torch = _Torch
    sender.cuda_dtoh_stream, sender._maybe_dtoh_and_synchronize = _Torch, count_splits
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize, copied = held
        schedules.torch = torch
        sender.cuda_dtoh_stream, sender._maybe_dtoh_and_synchronize = None, copied


class _TorchOnCpu:
    """`torch` with `zeros` on the CPU: schedules allocate their token counter on an accelerator."""

    def __getattr__(self, name: str) -> Any:
        if name == "zeros":
            return lambda *shape, device, **options: torch.zeros(*shape, **options)
        return getattr(torch, name)


_Torch = _TorchOnCpu()


class _Attention(nn.Module):
    """Causal attention by torch's kernels: flash attention on accelerators, a fused one on CPU."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> Tensor:
        """Attend over [S, B, heads, head size]; keys and values have one head per group."""
        if packed_seq_params is not None:
            packing = packed_seq_params.packing
            end = len(packing.own(packing.tokens))
            q, k, v = (part[:end, 0] for part in (query, key, value))
            read = attend(q, k, v, packing)
            # Nobody reads the padding of sequence parallelism behind the last row.
            return functional.pad(read.flatten(1), (0, 0, 0, len(query) - end))[:, None]
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        read = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return read.permute(2, 0, 1, 3).flatten(2)


class _Norm(nn.RMSNorm):
    """RMS norm; with sequence parallelism a rank's gradient covers only its own tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., H]; torch runs a dozen kernels on the CPU, so `rms_norm` is for that."""
        if x.is_cuda or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class _InputNorm(_Norm):
    """Norm before a matrix product, with its output in the dtype of that product.

    megatron-core scatters the product's gradient in the dtype of the input, so both must be equal.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., H] float32; under autocast return its dtype, bfloat16."""
        kind, normed = x.device.type, super().forward(x)
        return (
            normed.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else normed
        )


class _Router(TopKRouter):  # type: ignore[misc]
    """Choice of experts in float32 under any `compute_dtype`.

    The library's own product needs Transformer Engine.
    """

    def gating(self, hidden: Tensor) -> Tensor:
        """Return the score of each expert, [S, B, E] float32 of [S, B, H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), self.weight.float())


class _Experts(nn.Module):
    """One rank's experts of a layer, in two tensors with the layout of transformers."""

    def __init__(self, count: int, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, shares: Tensor
    ) -> tuple[Tensor, None]:
        """Return the outputs for [K, H] tokens, sorted by expert, times `shares`, [K] float32."""
        kind = tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tokens.dtype
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32)

        def product(rows: Tensor, weights: Tensor) -> Tensor:
            return functional.grouped_mm(rows.to(dtype), weights.to(dtype).mT, offs=ends)

        gate, up = product(tokens, self.gate_up_proj).chunk(2, dim=-1)
        read = functional.silu(gate) * up * shares.to(dtype)[:, None]
        return product(read, self.down_proj), None


class RecordedChoice:
    """Choice of a layer's experts by a replay, in place of the library's `RouterReplay`.

    `RouterReplay` supports no unknown choice, and recomputes micro-batches only in the order of
    their forward passes.
    """

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        """Bind a layer by its number in the whole model."""
        self._replay, self._layer = replay, layer

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the chosen experts, [tokens, topk] each.

        `scores` is [tokens, experts]; `choose` makes the router's own choice from the arguments.
        """
        own_scores, own = choose(scores, topk, num_groups, group_topk)
        chosen = self._replay.choose(self._layer, own)
        return (own_scores if chosen is own else scores.gather(1, chosen)), chosen


def replay_in_gpt(gpt: Any, model: Any, *, forces: bool) -> RoutingReplay:
    """Make the routers of a GPTModel ask a new replay; `model` is its decoder's configuration."""
    experts = num_experts(model.to_dict())
    replay = RoutingReplay(model.num_hidden_layers if experts else 0, experts, forces=forces)
    for layer in gpt.decoder.layers if experts else ():
        layer.mlp.router.router_replay = RecordedChoice(replay, layer.layer_number - 1)
    return replay


def kernels(device: torch.device) -> dict[str, Any]:
    """Return the options of a TransformerConfig that depend on the device."""
    return {
        "use_cpu_initialization": True,
        "bias_activation_fusion": device.type == "cuda",
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }


def build_gpt(
    model: Any, *, has_head: bool, config: TrainConfig, grid: Grid, device: torch.device
) -> Any:
    """Return this rank's part of a GPTModel with the sizes of a decoder; its weights are unset.

    Args:
        model: configuration of a decoder of transformers.
        has_head: True if the LM head is not the embedding. Pipeline stages always have a separate
            head; if it is tied, the caller adds up the gradients of both.
        config: settings of the train stage.
        grid: place of this rank.
        device: device to which the caller moves the model.

    Raises:
        ConfigError: a GPTModel would compute the decoder in another way, or the grid does not
            divide its sizes.
    """
    _check(model, config, grid)
    has_qk_norm = model.model_type.startswith("qwen3")
    experts = num_experts(model.to_dict())
    width = getattr(model, "moe_intermediate_size", model.intermediate_size)
    options = TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=width,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=head_size(model),
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        context_parallel_size=grid.cp,
        # A layer gives its sum the type of its products (`_bias_dropout_add_func`).
        pipeline_dtype=DTYPES[config.compute_dtype],
        variable_seq_lengths=grid.pp > 1,
        num_moe_experts=experts or None,
        moe_ffn_hidden_size=width if experts else None,
        moe_router_topk=model.num_experts_per_tok if experts else 2,
        # True: softmax over all experts; False: softmax over the chosen experts.
        moe_router_pre_softmax=not getattr(model, "norm_topk_prob", True),
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall",  # the other one refuses lengths that vary
        sequence_parallel=config.sequence_parallel and grid.tp > 1,
        perform_initialization=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=model.model_type == "qwen2",
        qk_layernorm=has_qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **kernels(device),
    )
    spec = get_gpt_layer_local_spec(
        experts or None, qk_layernorm=has_qk_norm, normalization="RMSNorm"
    )
    parts, attention = spec.submodules, spec.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = _InputNorm
    attention.core_attention = _Attention
    if has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = _Norm
    if experts:
        parts.mlp.submodules.router, parts.mlp.submodules.experts = _Router, _Experts
    block = TransformerBlockSubmodules([spec] * get_num_layers_to_build(options), _Norm)
    with without_accelerator(device):
        return GPTModel(
            options,
            block,
            vocab_size=padded_vocabulary(model.vocab_size, grid.tp),
            max_sequence_length=model.max_position_embeddings,
            position_embedding_type="none",
            pre_process=grid.pp_rank == 0,
            post_process=grid.pp_rank == grid.pp - 1,
            share_embeddings_and_output_weights=not has_head and grid.pp == 1,
        )


def head_size(model: Any) -> int:
    """Return the width of one head of a configuration of transformers."""
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)


def padded_vocabulary(size: int, tp: int) -> int:
    """Return `size` rounded up, so that all `tp` tensor-parallel ranks have equally many rows."""
    return -(-size // tp) * tp


def _check(model: Any, config: TrainConfig, grid: Grid) -> None:
    """Refuse a decoder that a GPTModel would compute in another way."""
    if found := beside_megatron(model.to_dict()):
        raise ConfigError(
            f"a model of the trainer 'megatron' must be one of {', '.join(MEGATRON_FAMILIES)} as "
            f"published, got {', '.join(found)}; train it with `train.trainer = 'fsdp2'`"
        )
    experts = num_experts(model.to_dict())
    fault = sharing_fault(
        experts, grid.ep, tensor_parallel=grid.tp, shares_tokens=config.sequence_parallel
    )
    if fault:
        raise ConfigError(fault)
    sizes = [model.num_attention_heads, model.num_key_value_heads]
    sizes += [] if experts else [model.intermediate_size]
    if model.num_hidden_layers % grid.pp:
        raise ConfigError(
            f"`train.pipeline_parallel` must divide the {model.num_hidden_layers} layers of the "
            f"model, got {grid.pp}"
        )
    if any(size % grid.tp for size in sizes):
        raise ConfigError(
            "`train.tensor_parallel` must divide heads, heads of keys and values, and features "
            f"between the projections of a layer, {sizes} in this model, got {grid.tp}"
        )


class Decoder(nn.Module):
    """Decoder of a GPTModel, with the call signature of transformers."""

    frequencies: Tensor

    def __init__(self, gpt: Any, frequencies: Tensor) -> None:
        """Wrap a GPTModel (untyped, hence Any).

        `frequencies` of the rotation are [head size / 2] float32, radians for each position.
        """
        super().__init__()
        self.gpt = gpt
        self.register_buffer("frequencies", frequencies.clone(), persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        use_cache: bool = False,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Any:
        """Return `last_hidden_state`, [B, S, H], of [B, S] int64 padded on the right, or packed."""
        hidden = self._layers(input_ids, packing)
        if self.gpt.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return SimpleNamespace(last_hidden_state=hidden[: input_ids.shape[1]].transpose(0, 1))

    def stage(self, input_ids: Tensor, packing: Packing | None) -> Tensor:
        """Return the states after the layers of this rank, [S, B, H], or [T, 1, H] packed.

        After the first stage, the layers take the states that the stage before has sent. With
        sequence parallelism S counts this rank's tokens.
        """
        ids = input_ids if packing is None else packing.take(input_ids)[None]
        return self._layers(ids, packing)

    def _layers(self, ids: Tensor, packing: Packing | None) -> Tensor:
        options = self.gpt.config
        positions = torch.arange(ids.shape[1], device=ids.device)
        packed = None
        if packing is not None:
            # The library passes it on, and with a format of None does nothing else with it.
            positions = packing.own(packing.positions)
            packed = SimpleNamespace(qkv_format=None, packing=packing)
        if options.sequence_parallel:
            # Padding at the end gives all ranks equally many tokens; causal attention ignores it.
            ids, positions = (
                functional.pad(x, (0, -ids.shape[1] % options.tensor_model_parallel_size))
                for x in (ids, positions)
            )
        angles = torch.outer(positions, self.frequencies)
        hidden: Tensor = self.gpt.decoder(
            hidden_states=self.gpt.embedding(ids, None) if self.gpt.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            packed_seq_params=packed,
        )
        return hidden


class Vocabulary:
    """This rank's part of the vocabulary; meets `planish.models.logprobs.VocabularyPart`."""

    def __init__(self, size: int, grid: Grid) -> None:
        """Take this rank's tokens: equally many per rank, fewer in the last part."""
        rows = padded_vocabulary(size, grid.tp) // grid.tp
        self.first = grid.tp_rank * rows
        self.size = max(0, min(rows, size - self.first))

    def share(self, hidden: Tensor) -> Tensor:
        """Return the states that all parts read; the backward pass adds up their gradients."""
        shared: Tensor = copy_to_tensor_model_parallel_region(hidden)
        return shared

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over the parts, in place."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Take the largest over the parts, in place."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_reduce(tensor, op=operation, group=group)
        return tensor


class LanguageModel(nn.Module):
    """A decoder and its part of an LM head, with the attributes of a model of transformers."""

    base_model_prefix = "body"

    def __init__(self, body: Decoder, config: Any) -> None:
        """Join a decoder and the configuration with its family's scaling of logits."""
        super().__init__()
        self.body = body
        self.config = config

    def get_output_embeddings(self) -> Any:
        """Return an object with this rank's rows of the head, `weight` [part of vocabulary, H]."""
        gpt = self.body.gpt
        if gpt.share_embeddings_and_output_weights:
            return SimpleNamespace(weight=gpt.shared_embedding_or_output_weight())
        return gpt.output_layer
