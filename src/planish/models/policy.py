"""Policies: a causal language model, its tokenizer and its version, as Hugging Face folders.

A saved policy is a folder that `AutoModelForCausalLM.from_pretrained` opens, with a manifest
written last. Weights are safetensors only; no model brings its own code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import Tensor

from planish.base.errors import ConfigError, RecordError
from planish.models.config import ModelConfig
from planish.models.experts import on_disk
from planish.models.headers import dtype_name, parse_config
from planish.models.library import load_transformers, model_class
from planish.models.tokens import Tokenizer, character_tokenizer, load_tokenizer
from planish.records.files import WEIGHTS, weights_checksum
from planish.records.io import fetch_files, read_manifest, write_files
from planish.records.refs import Ref, parse_pin

SCHEMA = "policy/1"

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Policy:
    """A policy in memory."""

    model: Any
    """Causal LM of transformers (untyped, hence Any), in evaluation mode."""
    tokenizer: Tokenizer
    version: int = 0
    """`policy_version`: the iteration after which it was exported, 0 before the first."""
    folder: Path | None = None
    """Where it was read from; None when it was built in memory."""


def build_policy(config: ModelConfig, seed: int) -> Policy:
    """Build an untrained Qwen3 or Qwen3-MoE policy; the same seed gives the same weights.

    The global random state is left as it was.
    """
    transformers = load_transformers()

    tokenizer = character_tokenizer(config.alphabet, stop_strings=config.stop_strings)
    family, experts = "Qwen3", {}
    if config.num_experts:
        family = "Qwen3Moe"
        experts = {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_intermediate_size,
            "norm_topk_prob": True,
        }
    model_config = getattr(transformers, f"{family}Config")(
        vocab_size=tokenizer.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        initializer_range=config.initializer_range,
        max_position_embeddings=config.max_model_tokens,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.backend.bos_token_id,
        eos_token_id=tokenizer.eos_token_ids[0],
        **experts,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(model_config)
    model = model.to(DTYPES[config.dtype]).eval()
    model.config.dtype = DTYPES[config.dtype]
    return Policy(model=model, tokenizer=tokenizer)


def load_policy(
    pin: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    sets_weights: bool = True,
) -> Policy:
    """Load a saved policy and check every file of it against its manifest.

    `dtype` is that of the weights in memory, None the saved one. Without `sets_weights` they stay
    unset, in float32, and no file of weights is read: for those that have others to put there.

    Raises:
        RecordError: damaged, or not a policy.
        ObjectMissing: nothing there.
    """
    uri, digest = parse_pin(pin)
    without = "" if sets_weights else ".safetensors"
    folder = fetch_files(uri, sha256=digest, schema=SCHEMA, without=without)
    version = read_manifest(uri, sha256=digest).attributes.get("policy_version")
    if not isinstance(version, int):
        raise RecordError(
            f"a policy's manifest must hold `policy_version` as an integer, got {version!r} at "
            f"{uri!r}; export the policy again"
        )
    model = load_model(folder, dtype=dtype) if sets_weights else empty_model(folder, "cpu")
    return Policy(model.to(device), load_tokenizer(folder), version, folder)


def load_model(
    folder: Path, *, dtype: torch.dtype | None = None, heads: Sequence[str] = ("ForCausalLM",)
) -> Any:
    """Load the model of a checked local folder, in evaluation mode.

    Only the class that config.json names is imported: the automatic classes cost seconds more.

    `dtype` is as for `load_policy`, `heads` as for `model_class`.

    Raises:
        ConfigError: unreadable config.json, unknown architecture, or weights that do not fit.
    """
    from transformers.utils.logging import disable_progress_bar

    made = model_class(read_model_config(folder), heads)
    disable_progress_bar()
    try:
        model, report = made.from_pretrained(
            str(folder),
            output_loading_info=True,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except Exception as error:
        # What a strange configuration breaks inside of transformers can raise anything.
        raise ConfigError(
            "a model folder must hold a model that this version of transformers opens, got "
            f"{str(folder)!r} ({type(error).__name__}: {str(error)[:300]}); check its config.json "
            "and *.safetensors"
        ) from None
    absent = sorted(str(key) for key in report["missing_keys"])
    if absent:
        # transformers would fill them with noise and only warn.
        raise ConfigError(
            f"the weights of a model must be complete, got none for {absent[:4]} ({len(absent)} "
            f"tensors) in {str(folder)!r}; download or export it again"
        )
    return model.eval()


def empty_model(folder: Path, device: str = "meta") -> Any:
    """Return the model that config.json of a folder describes, in evaluation mode, without weights.

    On the device `meta` no tensor has storage; elsewhere buffers are computed, and nobody has set
    the weights. No file of weights is opened.

    Raises:
        ConfigError: as `load_model`.
    """
    made = model_class(read_model_config(folder))
    from transformers.initialization import no_init_weights

    try:
        # It switches all threads at once, and on `meta` there is nothing to set.
        with nullcontext() if device == "meta" else no_init_weights(), torch.device(device):
            model = made(made.config_class.from_pretrained(str(folder))).eval()
    except Exception as error:
        raise ConfigError(
            "a model folder must hold a configuration that this version of transformers builds, "
            f"got {type(error).__name__}: {str(error)[:300]}; check its config.json"
        ) from None
    model.tie_weights()
    return model


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model folder.

    Raises:
        ConfigError: missing, or not a JSON object.
    """
    path = folder / "config.json"
    return parse_config(path.read_bytes() if path.is_file() else None, str(folder))


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32C of the bytes of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return int(google_crc32c.extend(0, flat.view(torch.uint8).numpy()))


def save_policy(
    uri: str,
    policy: Policy,
    *,
    version: int,
    parents: Mapping[str, str],
    attributes: Mapping[str, Any],
) -> Ref:
    """Write a policy from memory: model, generation config and tokenizer, then the manifest.

    Weights keep their type; `attributes` are further ones of the manifest, such as `config_sha256`.
    """
    from huggingface_hub import save_torch_state_dict

    with tempfile.TemporaryDirectory(prefix="planish-policy-") as name:
        folder = Path(name)
        policy.model.config.architectures = [type(policy.model).__name__]
        policy.model.config.dtype = policy.model.dtype
        policy.model.config.save_pretrained(folder)
        generation = policy.model.generation_config
        if generation is not None:
            generation.eos_token_id = list(policy.tokenizer.eos_token_ids)
            generation.stop_strings = list(policy.tokenizer.stop_strings) or None
            generation.save_pretrained(folder)
        policy.tokenizer.save(folder)
        config = read_model_config(folder)
        dtype = dtype_name(config)
        tied = "lm_head.weight" if config.get("tie_word_embeddings") else None
        weights = {
            # The writer refuses a part of a larger storage, which one expert of many is.
            key: tensor.detach()
            .to(
                "cpu", getattr(torch, dtype), copy=tensor.nbytes < tensor.untyped_storage().nbytes()
            )
            .contiguous()
            for key, tensor in sorted(on_disk(policy.model.state_dict(), config).items())
            if key != tied
        }
        save_torch_state_dict(weights, folder, metadata={"format": "pt"})
        files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
        facts = {**attributes, "policy_version": version, "dtype": dtype, "layout": "hf"}
        facts[WEIGHTS] = weights_checksum({key: checksum(part) for key, part in weights.items()})
        return write_files(uri, SCHEMA, files, parents=parents, attributes=facts)
