"""Bytes that are counted before a run, against those of real models on the CPU."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planish.algorithms.base import LossOutput
from planish.base.config import load_preset, merge, parse_settings, resolve_config
from planish.base.errors import ConfigError
from planish.base.parallel import SINGLE, Grid
from planish.engines.transformers.kv_cache import ROW_STEP
from planish.models.config import ModelConfig
from planish.models.logprobs import TOKENS_PER_CHUNK
from planish.models.policy import Policy, build_policy
from planish.models.shapes import built_shape, known_shape, shape_of
from planish.stages.prepare import memory
from planish.stages.prepare.memory import (
    Precision,
    Sharing,
    cold_start_parts,
    engine_parts,
    kept_by_layer,
    scores_of_layer,
    train_parts,
)
from planish.stages.sft.traces import EncodedTraces
from planish.stages.sft.training import train_steps
from planish.stages.train.fsdp2 import Fsdp2Sharding
from planish.stages.train.sharded_model import ShardedModel
from tests import thin
from tests.unit.algorithms.batches import make_batch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


def model_config(family, **changes):
    return getattr(transformers, f"{family}Config")(**{**SIZES, **changes})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Llama", {}),
        ("Mistral", {}),
        ("Qwen3Moe", {**EXPERTS, "num_experts": 4}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_the_parameters_of_each_family_are_counted_to_the_last_one(family, more, tied):
    config = model_config(family, tie_word_embeddings=tied, **more)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    shape = shape_of(config.to_dict())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    body = getattr(model, model.base_model_prefix)
    assert shape.body_parameters == sum(p.numel() for p in body.parameters())
    assert shape.layer_parameters == sum(p.numel() for p in body.layers[0].parameters())


def test_the_parameters_of_known_models_are_the_published_ones():
    published = {
        "Qwen/Qwen2.5-0.5B": 494_032_768,
        "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
        "hf://Qwen/Qwen2.5-3B@main": 3_085_938_688,
        "Qwen/Qwen2.5-Math-7B-Instruct": 7_615_616_512,
        "/models/qwen2.5-coder-14b": 14_770_033_664,
        "Qwen/Qwen2.5-32B": 32_763_876_352,
        "Qwen/Qwen2.5-72B": 72_706_203_648,
    }
    for name, parameters in published.items():
        assert known_shape(name).parameters == parameters
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen2.5-9B", "Qwen/Qwen2.5-VL-7B-Instruct", ""):
        assert known_shape(name) is None


def test_a_built_model_has_the_sizes_of_its_settings():
    config = ModelConfig(num_layers=3)
    model = build_policy(config, 0).model
    shape = built_shape(config)
    assert shape == shape_of(model.config.to_dict())
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "wide"}, "`hidden_size`, got 'wide'; correct"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers`, got 0"),
        ({"vocab_size": True}, "`vocab_size`, got True"),
        ({"kv_lora_rank": 512}, "got `kv_lora_rank` in the config.json of a 'qwen2' model"),
    ],
)
def test_a_file_whose_memory_cannot_be_planned_is_told(change, words):
    with pytest.raises(ConfigError, match=words):
        shape_of({**model_config("Qwen2").to_dict(), **change})


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 8)])
def test_a_layer_keeps_the_bytes_that_are_counted(family, dtype, ranks):
    """The difference between two layers and one is what one layer keeps."""
    tokens, kept = 256, []
    for layers in (1, 2):
        config = model_config(family, num_hidden_layers=layers)
        model = getattr(transformers, f"{family}Model")(config).eval()
        # Sharded models get bfloat16 weights, one rank computes by autocast.
        model = model.to(torch.bfloat16) if ranks > 1 else model
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved = {}

        def keep(tensor, known=known, saved=saved):
            # The copies of weights that autocast makes are no activations.
            is_weight = tensor.ndim == 2 and tokens not in tensor.shape
            if not is_weight and tensor.untyped_storage().data_ptr() not in known:
                saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        half = dtype == "bfloat16" and ranks == 1
        ids = torch.zeros((1, tokens), dtype=torch.int64)
        with saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", enabled=half):
            model(input_ids=ids, use_cache=False)
        kept.append(sum(x.untyped_storage().nbytes() for x in saved.values()))
    counted = kept_by_layer(shape_of(config.to_dict()), Precision.of(dtype, gathers=ranks > 1))
    assert (kept[1] - kept[0]) / tokens == counted
    # Of 2 heads of keys and values, 16 wide, four ranks hold one each, and twice what was read.
    wide = 4 if dtype == "float32" else 2
    shared = kept_by_layer(shape_of(config.to_dict()), Precision.of(dtype, gathers=ranks > 1), 4)
    assert shared - counted == wide * (2 * 2 * 16 + 4 * 16)


def scores_kept(dtype, tokens, layers):
    """Return the bytes that decoders of Gemma 2 keep of a row for the backward pass."""
    config = transformers.Gemma2Config(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=64, vocab_size=96,
    )  # fmt: skip
    model = transformers.Gemma2Model(config).eval().to(dtype)
    model.set_attn_implementation("eager")
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def keep(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in known:
            saved[place] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda x: x):
        model(input_ids=torch.zeros((1, tokens), dtype=torch.int64), use_cache=False)
    total = sum(x.untyped_storage().nbytes() for x in saved.values())
    return total, shape_of(config.to_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_under_a_cap_keeps_the_scores_of_all_pairs_of_tokens(dtype):
    """Of what a layer keeps of a token, the part that grows with the row is that of its scores."""
    each = []
    for tokens in (128, 256):
        (two, shape), (one, _) = (scores_kept(dtype, tokens, layers) for layers in (2, 1))
        each.append((two - one) / tokens)
    counted = scores_of_layer(shape, 256) - scores_of_layer(shape, 128)
    assert each[1] - each[0] == pytest.approx(counted, rel=0.01)


def test_scores_are_planned_in_training_cold_start_and_prompts_of_gemma_2():
    config = parse_settings(resolve_config(load_preset("dapo-tiny")))
    capped = shape_of(transformers.Gemma2Config().to_dict())
    plain = replace(capped, keeps_scores=False)
    columns = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens

    def total(make, *arguments, **options):
        sizes = [
            sum(part.num_bytes for part in make(config, shape, *arguments, **options))
            for shape in (capped, plain)
        ]
        return sizes[0] - sizes[1]

    more = total(train_parts, Sharing(1, 1, gathers=False), on_cpu=True)
    tokens = config.train.tokens_per_microbatch
    assert more == tokens * capped.layers * 8 * capped.num_heads * columns
    assert total(cold_start_parts, 1 << 34, on_cpu=True) > more
    prompt, rows = config.rollout.max_prompt_tokens, config.rollout.max_rows
    found = total(engine_parts, "rollout", 1 << 34, on_cpu=True)
    assert found == rows * prompt**2 * 8 * capped.num_heads


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that still live."""

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = 0
        self.keys = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.keys:
            return
        self.keys.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone():
            self.now -= size
            self.keys.discard(key)

        weakref.finalize(storage, gone)


def test_the_chunk_of_logits_is_that_of_the_trainer():
    assert memory.LOGIT_CHUNK == TOKENS_PER_CHUNK


def test_rows_of_the_cache_are_as_wide_as_the_engine_makes_them():
    assert memory.CACHE_STEP == ROW_STEP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "busiest", "checkpointing", "dtype"),
    thin.third(
        [
            (*most, checkpointing, dtype)
            for most in ((96, "a layer"), (8192, "LM head"))
            for checkpointing in (True, False)
            for dtype in ("bfloat16", "float32")
        ]
    ),
)
def test_a_step_takes_the_memory_that_is_planned(vocabulary, busiest, checkpointing, dtype):
    """The trainer's own step: its second micro-batch is as large as the first, with gradients."""
    overrides = [
        f"train.compute_dtype={dtype}",
        f"train.activation_checkpointing={str(checkpointing).lower()}",
        "train.tokens_per_microbatch=2048",
        # Packed attention keeps padded copies on the CPU, and none on accelerators.
        "train.packing=false",
    ]
    config = parse_settings(resolve_config(merge(load_preset("dapo-tiny"), overrides=overrides)))
    torch.manual_seed(0)
    hf = model_config("Qwen2", vocab_size=vocabulary, num_hidden_layers=4, tie_word_embeddings=True)
    model = transformers.Qwen2ForCausalLM(hf).eval()
    # Accelerators compute by the modules of transformers, which a size of 0 leaves in charge here.
    model.model.layers[0].self_attn.sliding_window = 1 << 20
    trainer = ShardedModel(
        model,
        shard=Fsdp2Sharding,
        config=config.train,
        grid=Grid(SINGLE),
        device=torch.device("cpu"),
    )
    mask = torch.ones((16, 256), dtype=torch.bool)
    mask[:, 0] = False
    batch = make_batch(mask)

    def score(micro):
        return trainer.scorer(micro.batch.input_ids, micro.packing, micro.select, 1.0)

    def loss(chosen, entropies, micro):
        return LossOutput(chosen.sum())

    state = [*trainer.parameters.values(), *trainer.moments().values()]
    with Live(*state) as live:
        trainer.step(batch, mask, score, loss, learning_rate=1e-6)
    parts = {
        part.name: part.num_bytes
        for part in train_parts(
            config, shape_of(hf.to_dict()), Sharing(1, 1, gathers=False), on_cpu=True
        )
    }
    held = parts.pop("weights, float32 masters") + parts.pop("AdamW moments, float32")
    assert held == pytest.approx(sum(x.untyped_storage().nbytes() for x in state), rel=0.01)
    if vocabulary > 96 or checkpointing or dtype == "float32":  # else both take nearly the same
        assert list(parts)[-1] == f"busiest moment: {busiest}"
    assert sum(parts.values()) == pytest.approx(live.peak, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "busiest"), [(96, "a layer"), (8192, "LM head")])
def test_a_cold_start_takes_the_memory_that_is_planned(vocabulary, busiest):
    """Two of its own steps: the second finds the moments that the first has made."""
    overrides = ["sft.traces_per_minibatch=8", "sft.max_response_tokens=128"]
    overrides.append("rollout.max_prompt_tokens=128")
    config = parse_settings(resolve_config(merge(load_preset("dapo-tiny"), overrides=overrides)))
    torch.manual_seed(0)
    hf = model_config("Qwen2", vocab_size=vocabulary, num_hidden_layers=4, tie_word_embeddings=True)
    model = transformers.Qwen2ForCausalLM(hf).eval()
    # Accelerators compute by the modules of transformers, which a size of 0 leaves in charge here.
    model.model.layers[0].self_attn.sliding_window = 1 << 20
    ids = [np.arange(256, dtype=np.int64) % vocabulary] * 8
    traces = EncodedTraces(ids, np.ones(8, dtype=np.int64))
    with Live(*model.parameters()) as live:
        steps = train_steps(
            Policy(model, None, 0), traces, config.sft, seed=0, learning_rate=1e-6, warmup_steps=0
        )
        next(steps)
        next(steps)
        steps.close()
    shape = shape_of(hf.to_dict())
    parts = {p.name: p.num_bytes for p in cold_start_parts(config, shape, 1 << 30, on_cpu=True)}
    held = parts.pop("weights, float32")
    assert held == sum(p.nbytes for p in model.parameters())
    del parts["engine that measures"]
    assert list(parts)[-1] == f"busiest moment: {busiest}"
    assert sum(parts.values()) == pytest.approx(live.peak, rel=0.15)
