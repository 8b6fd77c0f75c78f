"""Policy folders that no engine may start on: each says why, by name, and leaves nothing."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from planish.base.errors import PlanishError
from planish.engines import APART, ENGINES
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from planish.models.policy import save_policy
from planish.records.io import write_files
from tests.contract.engines.conftest import FAMILIES, HERE
from tests.unit.engines.disagg.instances import ThreadRank
from tests.unit.engines.tiny import qwen3_policy

pytestmark = pytest.mark.slow

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def strange_family(config, tensors, tokens):
    config |= {"architectures": ["StrangeForCausalLM"], "model_type": "strange"}


def strange_type(config, tensors, tokens):
    config |= {"dtype": "float8_e4m3fn"}


def strange_tensor(config, tensors, tokens):
    tensors[EXPERT] = tensors[EXPERT].to(torch.int8)


def quantized(config, tensors, tokens):
    config |= {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}


def missing_expert(config, tensors, tokens):
    del tensors[EXPERT]


def extra_expert(config, tensors, tokens):
    tensors[EXPERT.replace(".3.", ".4.")] = tensors[EXPERT].clone()


def extra_tensor(config, tensors, tokens):
    tensors["model.layers.1.mlp.one_more.weight"] = torch.ones(4)


def extra_layer(config, tensors, tokens):
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name.replace(".1.", ".2.")] = tensors[name].clone()


def other_vocabulary(config, tensors, tokens):
    config |= {"vocab_size": 2}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:2].clone()


def unspelled_stop(config, tensors, tokens):
    tokens |= {"stop_strings": ["\u4e2d\u6587"]}


REFUSED = {
    strange_family: "StrangeForCausalLM",
    strange_type: "`dtype` 'float8_e4m3fn'",
    strange_tensor: EXPERT,
    quantized: "quantization_config",
    missing_expert: EXPERT,
    extra_expert: EXPERT.replace(".3.", ".4."),
    extra_tensor: "layers.1.mlp.one_more",
    extra_layer: "layers.2",
    other_vocabulary: "vocabulary of 2",
    unspelled_stop: "\u4e2d\u6587",
}


def spoiled(folder: Path, spoil) -> str:
    """Publish a policy with experts whose files are changed; return its pin."""
    policy = qwen3_policy(**FAMILIES["experts"])
    save_policy(f"file://{folder}/p", policy, version=0, parents={}, attributes={})
    source = folder / "p"
    (weights,) = source.glob("*.safetensors")
    config, tensors = json.loads((source / "config.json").read_text()), load_file(weights)
    tokens = json.loads((source / "generation_config.json").read_text())
    spoil(config, tensors, tokens)
    save_file(tensors, weights, metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text(json.dumps(tokens))
    files = {path.name: path for path in source.iterdir() if path.name != "manifest.json"}
    facts = json.loads((source / "manifest.json").read_text())["attributes"]
    return write_files(f"file://{folder}/q", "policy/1", files, parents={}, attributes=facts).pin()


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("name", HERE)
def test_a_policy_that_can_not_be_served_is_refused_by_name(name, spoil, tmp_path):
    module, _, cls = ENGINES[name].partition(":")
    settings = {"cache_bytes": 16 << 20} if name.startswith("vllm") else {}
    options = {"launcher": ThreadRank} if name in APART else {}
    engine = getattr(importlib.import_module(module), cls)(
        max_rows=2, config=EngineConfig(name=name, **settings), **options
    )
    with pytest.raises(PlanishError) as caught:
        engine.start(ModelRef(pin=spoiled(tmp_path, spoil)))
    assert REFUSED[spoil] in str(caught.value)
    assert engine.state == "failed"
    engine.close()
