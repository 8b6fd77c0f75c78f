"""A small GPT of megatron-core on CPU under any tensor and pipeline parallelism.

Modules are the library's own local ones; only its core attention, which wants an accelerator's
fused softmax, is torch's scaled dot-product attention here.
"""

import contextlib
import functools
import logging
import warnings

import torch
import torch.distributed as dist
from torch import nn

SIZES = {"layers": 4, "hidden": 32, "ffn": 48, "heads": 8, "groups": 4, "vocab": 50, "length": 16}
ROWS = ("embedding.", "output_layer.", "linear_qkv.weight", "linear_qkv.bias")
"""Tensors that tensor parallelism cuts along dimension 0; `linear_fc1` each half of it."""
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
"""Tensors that it cuts along dimension 1."""


def quiet():
    """Silence what megatron-core says of libraries that a CPU has no use for."""
    warnings.filterwarnings("ignore", module="megatron.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("megatron").setLevel(logging.ERROR)


class PlainAttention(nn.Module):
    """Causal attention over [s, b, heads, width]."""

    def __init__(self, config, **_):
        super().__init__()
        self.config = config

    def forward(self, query, key, value, attention_mask=None, **_):
        share = query.shape[2] // key.shape[2]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {}


@contextlib.contextmanager
def no_accelerator():
    """Let the two places of the library that move tensors to an accelerator stay on the CPU."""
    before = torch.Tensor.cuda, torch.cuda.current_device
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.cuda.current_device = lambda: "cpu"
    try:
        yield
    finally:
        torch.Tensor.cuda, torch.cuda.current_device = before


class Layout:
    """A tensor- and pipeline-parallel layout of all ranks; the rest is data-parallel.

    The library keeps its groups in globals: each layout has its own set, put in place by `use`.
    Groups of equal ranks are one: the library makes over eighty a layout, each with its threads.
    """

    blank = None
    made = {}  # noqa: RUF012

    def __init__(self, tp, pp):
        from megatron.core import parallel_state, tensor_parallel

        quiet()
        self.tp, self.pp, self.state = tp, pp, parallel_state
        if Layout.blank is None:
            Layout.blank = self._globals()
            parallel_state.create_group = functools.partial(
                self._create_group, parallel_state.create_group
            )
        vars(parallel_state).update(Layout.blank)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
        )
        tensor_parallel.random.initialize_rng_tracker(force_reset=True)
        self.groups = self._globals()
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.first_layer = parallel_state.get_pipeline_model_parallel_rank() * SIZES["layers"] // pp

    @staticmethod
    def _create_group(create, ranks=None, *rest, **options):
        key = tuple(ranks or ())
        if key not in Layout.made:
            Layout.made[key] = create(ranks, *rest, **options)
        return Layout.made[key]

    def _globals(self):
        return {
            name: list(value) if isinstance(value, list) else value
            for name, value in vars(self.state).items()
            if name.startswith("_") and name.isupper()
        }

    def use(self):
        vars(self.state).update(self.groups)
        return self

    def cut(self, whole):
        """Return this rank's part of the tensors of the model of one rank, by local name."""
        found = {}
        for name, tensor in whole.items():
            local = self.local_name(name)
            if local is None:
                continue
            if "linear_fc1.weight" in name and tensor.dim():
                halves = [half.chunk(self.tp)[self.tp_rank] for half in tensor.chunk(2)]
                found[local] = torch.cat(halves)
            elif any(part in name for part in ROWS) and "layernorm" not in name and tensor.dim():
                found[local] = tensor.chunk(self.tp)[self.tp_rank]
            elif any(part in name for part in COLUMNS) and tensor.dim():
                found[local] = tensor.chunk(self.tp, 1)[self.tp_rank]
            else:
                found[local] = tensor
        return found

    def local_name(self, name):
        """Return what this stage calls a tensor, None for one of another stage."""
        start = "decoder.layers."
        if not name.startswith(start):
            first, last = (
                self.state.is_pipeline_first_stage(),
                self.state.is_pipeline_last_stage(),
            )
            return name if (first if name.startswith("embedding.") else last) else None
        layer, _, rest = name.removeprefix(start).partition(".")
        local = int(layer) - self.first_layer
        return f"{start}{local}.{rest}" if 0 <= local < SIZES["layers"] // self.pp else None


def build(layout, seed, *, vocab=64, tied=False, bias=False, qk_norm=False):
    """Return this rank's stage of the model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state = layout.use().state
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=SIZES["layers"],
        hidden_size=SIZES["hidden"],
        ffn_hidden_size=SIZES["ffn"],
        num_attention_heads=SIZES["heads"],
        num_query_groups=SIZES["groups"],
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=bias,
        qk_layernorm=qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=1e-6,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PlainAttention
    with no_accelerator():
        return GPTModel(
            config,
            spec,
            vocab_size=vocab,
            max_sequence_length=SIZES["length"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=10000,
            share_embeddings_and_output_weights=tied,
            parallel_output=False,
        )


def forward(layout, model, tokens):
    """Return logits [b, s, vocab] on the last stage, None elsewhere; stages run one by one."""
    state = layout.use().state
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if not state.is_pipeline_first_stage():
        hidden = torch.empty((tokens.shape[1], tokens.shape[0], SIZES["hidden"]))
        dist.recv(hidden, state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    with no_accelerator():
        out = model(tokens, positions, None)
    if not state.is_pipeline_last_stage():
        dist.send(out.detach().contiguous(), state.get_pipeline_model_parallel_next_rank())
        return None
    return out
