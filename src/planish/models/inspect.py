"""Inspection of a pretrained model before a run, without its weights and without torch.

Configuration, tokenizer and the headers of the weights show nearly all faults that would later stop
a run on a machine with accelerators. The weights themselves are not downloaded.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish.base.config import parse_section
from planish.base.errors import ConfigError
from planish.base.inspection import Inspection
from planish.base.text import bytes_text, code_span
from planish.models.adapters import configured, find_layers, num_trained
from planish.models.config import ModelConfig
from planish.models.experts import check_family
from planish.models.headers import (
    MAX_SMALL_BYTES,
    Tensors,
    context_tokens,
    folder_fault,
    language_config,
    read_config,
    read_headers,
    room_fault,
    vocabulary,
)
from planish.models.library import model_class, unread_settings
from planish.models.tokens import Tokenizer, load_tokenizer
from planish.store.sources import SourceFolder, open_folder, parse_source

_SMALL = (".json", ".txt", ".model", ".jinja")


def inspect_model(config: Mapping[str, Mapping[str, Any]], found: Inspection) -> None:
    """Open the configured model, and add its facts and faults to `found`.

    The prompts in `found` are measured in tokens.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    settings = parse_section(ModelConfig, config.get("model", {}), section="model")
    if not settings.path:
        layers, width = settings.num_layers, settings.hidden_size
        found.rows.append(("model", f"from scratch, {layers} layers of {width}"))
        add_adapter_row(settings, built_tensors(settings), found)
        known = set(settings.alphabet)
        texts = ["".join(m["content"] for m in messages) for messages in found.prompts]
        strange = [text for text in texts if not known.issuperset(text)]
        if strange:
            example = sorted(set(strange[0]) - known)[:5]
            found.warnings.append(
                f"{len(strange)} of {len(texts)} prompts hold characters that the built model does "
                f"not know, such as {example}; give a model, or widen `model.alphabet`"
            )
        return
    try:
        folder = open_folder(
            parse_source(settings.path, key="model.path"),
            key="model.path",
            revision=settings.revision,
        )
        rows, tensors = weight_rows(folder, found)
        found.rows += rows
        if tensors:
            add_adapter_row(settings, tensors, found)
        tokenizer = open_tokenizer(folder, settings)
    except ConfigError as error:
        found.faults.append(str(error))
        return
    found.vocabulary = tokenizer.backend.get_vocab()
    known_tokens = vocabulary(found.model_config)
    if known_tokens < tokenizer.vocab_size:
        found.faults.append(
            f"the model must know each of the {tokenizer.vocab_size} tokens of its tokenizer, got "
            f"`vocab_size` {known_tokens} in its config.json; save tokenizer and model together"
        )
    ends = ", ".join(code_span(str(t)) for t in tokenizer.eos_token_ids)
    found.rows.append(
        ("- tokenizer", f"{tokenizer.vocab_size} tokens, chat template, ends with {ends}")
    )
    limit = config.get("rollout", {}).get("max_prompt_tokens")
    limit = limit if isinstance(limit, int) else 0
    lengths = measure_prompts(found, tokenizer, limit)
    longest = max((length for length in lengths if not limit or length <= limit), default=1)
    found.faults += context_faults(config, found.model_config, longest)


def context_faults(
    config: Mapping[str, Mapping[str, Any]], model_config: Mapping[str, Any], prompt_tokens: int
) -> list[str]:
    """Return a message for each stage whose longest response does not fit after the longest
    prompt.
    """
    limit = context_tokens(model_config)
    faults = []
    for stage in ("rollout", "evaluate"):
        response = config.get(stage, {}).get("max_response_tokens", 0)
        fault = room_fault(limit, prompt_tokens, response, f"{stage}.max_response_tokens")
        faults += [fault] if fault else []
    if faults and limit != model_config.get("max_position_embeddings", limit):
        faults[-1] += " (beyond them its rotary scaling depends on the length in use)"
    return faults


def open_tokenizer(folder: SourceFolder, settings: ModelConfig) -> Tokenizer:
    """Return the tokenizer of a model; only the small files are downloaded.

    Raises:
        ConfigError: the folder has no readable tokenizer, no end token or no chat template.
    """
    with tempfile.TemporaryDirectory(prefix="planish-model-") as name:
        local = folder.path or Path(name)
        for file, size in folder.sizes.items():
            if folder.path is None and file.endswith(_SMALL) and size <= MAX_SMALL_BYTES:
                (local / file).write_bytes(folder.read(file, 0, size))
        return load_tokenizer(local, settings)


def add_adapter_row(settings: ModelConfig, tensors: Tensors, found: Inspection) -> None:
    """Add the number of parameters in the adapters, or the reason why adapters do not fit."""
    adapters = configured(settings)
    if adapters is None:
        return
    try:
        shapes = {name: shape for name, (_, shape) in tensors.items()}
        layers = find_layers(shapes, adapters.target_modules)
    except ConfigError as error:
        found.faults.append(str(error))
        return
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    trained = num_trained(layers, adapters.rank)
    total = trained + sum(math.prod(shape) for _, shape in tensors.values())
    found.rows.append(
        (
            "- adapters",
            f"rank {adapters.rank}, alpha {adapters.alpha:g}, on "
            f"{', '.join(code_span(name) for name in names)}: {trained:,} of {total:,} parameters "
            f"are trained ({100 * trained / total:.2g} %)",
        )
    )


def built_tensors(settings: ModelConfig) -> Tensors:
    """Return the tensors in the folder of a policy that is built from scratch."""
    width, head = settings.hidden_size, settings.head_dim
    shapes = {"model.embed_tokens": (settings.vocab_size, width), "model.norm": (width,)}
    for number in range(settings.num_layers):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.{name}_layernorm": (width,) for name in ("input", "post_attention")}
        for name, heads in (("q", settings.num_heads), ("k", settings.num_kv_heads)):
            shapes[f"{layer}.self_attn.{name}_proj"] = (heads * head, width)
            shapes[f"{layer}.self_attn.{name}_norm"] = (head,)
        shapes[f"{layer}.self_attn.v_proj"] = (settings.num_kv_heads * head, width)
        shapes[f"{layer}.self_attn.o_proj"] = (width, settings.num_heads * head)
        blocks = [(f"{layer}.mlp", settings.intermediate_size)]
        if settings.num_experts:
            shapes[f"{layer}.mlp.gate"] = (settings.num_experts, width)
            inner = settings.expert_intermediate_size
            blocks = [(f"{layer}.mlp.experts.{n}", inner) for n in range(settings.num_experts)]
        for block, inner in blocks:
            shapes |= {f"{block}.{name}_proj": (inner, width) for name in ("gate", "up")}
            shapes[f"{block}.down_proj"] = (width, inner)
    return {f"{name}.weight": ("F32", shape) for name, shape in shapes.items()}


def measure_prompts(found: Inspection, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Add the prompt lengths under the model's chat template to `found`; return them, ascending.

    `limit` is `rollout.max_prompt_tokens`; 0 means no limit.
    """
    if not found.prompts:
        return []
    try:
        lengths = sorted(len(tokenizer.encode_prompt(messages)) for messages in found.prompts)
    except ConfigError as error:
        found.faults.append(str(error))
        return []
    long = sum(length > limit for length in lengths) if limit else 0
    middle = lengths[len(lengths) // 2]
    found.rows.append(("- prompts", f"median {middle} tokens, longest {lengths[-1]}"))
    if not long:
        return lengths
    line = (
        f"{long} of {len(lengths)} prompts have more than `rollout.max_prompt_tokens` ({limit}) "
        f"tokens, the longest {lengths[-1]}"
    )
    if long == len(lengths):
        found.faults.append(f"{line}; nothing would be left to sample: raise it")
    else:
        found.warnings.append(f"{line}; they are left out")
    return lengths


def weight_rows(folder: SourceFolder, found: Inspection) -> tuple[list[tuple[str, str]], Tensors]:
    """Return rows with the model's kind and size, and its tensors; faults go into `found`.

    Raises:
        ConfigError: config.json is missing or not a JSON object.
    """
    found.model_config = raw = read_config(folder)
    tensors, faults = read_headers(folder)
    fault = folder_fault(folder.sizes, folder.name)
    found.faults += [*([fault] if fault else []), *faults]
    for check in (lambda: model_class(raw), lambda: check_family(tensors, raw)):
        try:
            check()
        except ConfigError as error:
            found.faults.append(str(error))
    if unread := unread_settings(raw):
        found.faults.append(
            "config.json must have no setting of the mathematics that transformers leaves out for "
            f"a {raw.get('model_type')!r} model, got "
            f"{', '.join(f'{name} = {language_config(raw)[name]!r:.50}' for name in unread)}; "
            "trainer and engine would compute two models: take a model of the family that has it"
        )
    names = raw.get("architectures")
    parameters = sum(math.prod(shape) for _, shape in tensors.values())
    weights = sum(size for name, size in folder.sizes.items() if name.endswith(".safetensors"))
    types = ", ".join(sorted({kind for kind, _ in tensors.values()}))
    for name, (_, shape) in tensors.items():
        known = vocabulary(raw)
        if name.endswith(("embed_tokens.weight", "wte.weight")) and known not in (0, shape[0]):
            found.faults.append(
                f"`{name}` must have {known} rows, `vocab_size` of config.json, got {shape[0]}; "
                "save model and configuration together"
            )
    rows = [
        ("model", f"{code_span(folder.name)}, {code_span(str((names or ['?'])[0]))}"),
        ("- size", f"{parameters:,} parameters, {bytes_text(weights)} of {types or 'nothing'}"),
    ]
    return rows, tensors
