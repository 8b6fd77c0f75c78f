"""Policies: a causal language model with tokenizer and version, as Hugging Face folders.

A saved policy is a folder that `AutoModelForCausalLM.from_pretrained` opens, with a manifest that
is written last. Weights are safetensors only; a model with its own code is refused.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import google_crc32c
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_parameter_registration_hook

from planish.base.errors import ConfigError, RecordError
from planish.models.config import ModelConfig
from planish.models.experts import disk_tensors, on_disk
from planish.models.headers import dtype_name, parse_config
from planish.models.library import load_transformers, model_class
from planish.models.tokens import ALL_ENDS, Tokenizer, character_tokenizer, load_tokenizer
from planish.records.files import POLICY_SCHEMA, WEIGHTS, weights_checksum
from planish.records.io import fetch_files, read_manifest, write_files
from planish.records.refs import Ref, parse_pin

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Sizes = tuple[int, ...]
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Map from type in a file header to the torch type."""
_tokenizers: dict[tuple[tuple[str, str], ...], Tokenizer] = {}
"""The tokenizer of the last policy, by names and digests of its files."""


@dataclass
class Policy:
    """A policy in memory."""

    model: Any
    """Causal language model of transformers (untyped, hence Any) in evaluation mode."""
    tokenizer: Tokenizer
    version: int = 0
    """`policy_version`: the iteration after which the policy was exported, 0 before the first."""
    folder: Path | None = None
    """Folder from which the policy was read; None if it was built in memory."""


def build_policy(config: ModelConfig, seed: int) -> Policy:
    """Build an untrained Qwen3 or Qwen3-MoE policy; equal seeds give equal weights.

    The global random state is not changed.
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


def name_head_dtype(config: Any, wanted: ModelConfig) -> None:
    """Write the type of the LM head into a configuration of transformers, if it is set."""
    if (wanted.dtype, wanted.head_dtype) != ("float32", "float32") or hasattr(config, "head_dtype"):
        config.head_dtype = wanted.head_dtype


def head_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the type of a model's scores in trainers and engines; float32 if it names none."""
    return cast(torch.dtype, getattr(torch, config.get("head_dtype") or "float32"))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices of one type, with sums and result in float32.

    Tensor cores multiply bfloat16 numbers exactly and sum in float32; on the CPU a cast does it.

    Source: `LogitsProcessor._apply_head` of vLLM 0.32.
    """
    if left.device.type == "cpu" or left.dtype == torch.float32:
        return left.float() @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of two matrices to a float32 matrix; float32 operands need no other matrix."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += product(left, right)


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the scores of hidden states in `dtype`.

    Args:
        hidden: [K, H].
        weight: [V, H]; operands of bfloat16 stay so under float32 scores.
        bias: [V], or None.
        dtype: result of `head_dtype`.

    Returns:
        [K, V] in `dtype`.
    """
    bias = None if bias is None else bias.to(dtype)
    if dtype == torch.float32 and hidden.dtype == weight.dtype != dtype:
        scores = product(hidden, weight.mT)
        return scores if bias is None else scores + bias
    return functional.linear(hidden.to(dtype), weight.to(dtype), bias)


class TypedHead(nn.Linear):
    """An LM head that computes in its own type, as in vLLM (`LogitsProcessor`, 0.32)."""

    dtype: torch.dtype

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scores of [..., H] hidden states in the head's type."""
        scores = project(hidden.flatten(0, -2), self.weight, self.bias, self.dtype)
        return scores.view(*hidden.shape[:-1], -1)


def _type_head(model: Any) -> None:
    """Let the LM head compute in the type of its configuration."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        # A class, other than a hook, is kept in copies of the model.
        head.__class__ = TypedHead
        typed: Any = head
        typed.dtype = head_dtype(vars(model.config))


def load_policy(
    pin: str, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Policy:
    """Load a saved policy, and check all of its files against its manifest.

    `dtype` is the type of the weights in memory; None takes the saved type.

    Raises:
        RecordError: the folder is damaged, or not a policy.
        ObjectMissing: there is no policy.
    """
    folder, version = _fetch(pin)
    model = load_model(folder, dtype=dtype)
    return Policy(model.to(device), load_tokenizer(folder), version, folder)


def frame_policy(pin: str, *, with_weights: bool) -> Policy:
    """Open a saved policy like `empty_model`, for callers that load weights by parts.

    Args:
        pin: as for `load_policy`; errors are the same.
        with_weights: also fetch and check the weight files; otherwise none of them is read.
    """
    folder, version = _fetch(pin, "" if with_weights else ".safetensors")
    return Policy(empty_model(folder), load_tokenizer(folder), version, folder)


def policy_tokenizer(pin: str) -> Tokenizer:
    """Open the tokenizer of a saved policy without its weights; errors are those of `load_policy`.

    A later policy with the same files gets the same tokenizer. Each new tokenizer would keep a
    cache of words in memory as long as its thread lives (`BPE` of tokenizers 0.23).
    """
    uri, digest = parse_pin(pin)
    shards = read_manifest(uri, sha256=digest).shards
    files = tuple((s.name, s.sha256) for s in shards if not s.name.endswith(".safetensors"))
    if files not in _tokenizers:
        folder = fetch_files(uri, sha256=digest, schema=POLICY_SCHEMA, without=".safetensors")
        tokenizer = load_tokenizer(folder)
        _tokenizers.clear()
        _tokenizers[files] = tokenizer
    return _tokenizers[files]


def _fetch(pin: str, without: str = "") -> tuple[Path, int]:
    """Return the local folder of a policy and its version; `without` as in `fetch_files`."""
    uri, digest = parse_pin(pin)
    folder = fetch_files(uri, sha256=digest, schema=POLICY_SCHEMA, without=without)
    version = read_manifest(uri, sha256=digest).attributes.get("policy_version")
    if not isinstance(version, int):
        raise RecordError(
            f"a policy's manifest must hold `policy_version` as an integer, got {version!r} at "
            f"{uri!r}; export the policy again"
        )
    return folder, version


def load_model(
    folder: Path, *, dtype: torch.dtype | None = None, heads: Sequence[str] = ("ForCausalLM",)
) -> Any:
    """Load the model of a checked local folder, in evaluation mode.

    Only the class that config.json names is imported, since transformers' automatic classes take
    seconds longer. `dtype` is as for `load_policy`, `heads` as for `model_class`.

    Raises:
        ConfigError: config.json is unreadable, the architecture is unknown, or weights do not fit.
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
        # A strange configuration can make transformers raise any exception.
        raise ConfigError(
            "a model folder must hold a model that this version of transformers opens, got "
            f"{str(folder)!r} ({type(error).__name__}: {str(error)[:300]}); check its config.json "
            "and *.safetensors"
        ) from None
    absent = sorted(str(key) for key in report["missing_keys"])
    if absent:
        # transformers would initialise missing weights at random and only warn.
        raise ConfigError(
            f"the weights of a model must be complete, got none for {absent[:4]} ({len(absent)} "
            f"tensors) in {str(folder)!r}; download or export it again"
        )
    _type_head(model)
    return model.eval()


def empty_model(folder: Path, heads: Sequence[str] = ("ForCausalLM",)) -> Any:
    """Return the model of a folder's config.json, in evaluation mode, without weights.

    Its parameters are float32 on the device `meta`, without storage; its buffers are computed on
    the CPU. No weight file is opened.

    Raises:
        ConfigError: as `load_model`.
    """
    made = model_class(read_model_config(folder), heads)
    try:
        with without_weights():
            model = made(made.config_class.from_pretrained(str(folder))).eval()
        model.config.dtype = torch.float32
    except Exception as error:
        raise ConfigError(
            "a model folder must hold a configuration that this version of transformers builds, "
            f"got {type(error).__name__}: {str(error)[:300]}; check its config.json"
        ) from None
    model.tie_weights()
    _type_head(model)
    return model


class _Blank(threading.local):
    """Flag of each thread: True while it builds modules without weights."""

    is_on = False


_blank = _Blank()


def _without_storage(_: nn.Module, __: str, param: nn.Parameter | None) -> nn.Parameter | None:
    if param is None or param.is_meta or not _blank.is_on:
        return None
    return nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)


@functools.cache
def _install_hook() -> None:
    """Install the hook once. It is never removed, since torch fails if a hook is removed while
    another thread builds a module.
    """
    # The hook may return another parameter, which its declared type does not allow.
    register_module_parameter_registration_hook(_without_storage)  # type: ignore[arg-type]


@contextmanager
def without_weights() -> Iterator[None]:
    """Put the parameters of every module that this thread builds in the block on the device `meta`.

    Modules keep the buffers that they compute, as with accelerate's `include_buffers=False`.
    """
    _install_hook()
    _blank.is_on = True
    try:
        yield
    finally:
        _blank.is_on = False


class _Entry(NamedTuple):
    """One tensor of a file."""

    path: Path
    begin: int
    """Offset of the first byte in the file."""
    dtype: str
    shape: Sizes


class FolderBoxes:
    """Weights of a transformers model in `*.safetensors` files, by their names in memory.

    A file is read and never mapped, so a process has only the requested box in memory. Every rank
    of a host can therefore open its part of a model that would not fit into the host once per rank.

    Source: the safetensors format: 8 bytes of length, a JSON header, the bytes of the tensors.
    """

    def __init__(self, folder: Path, body: tuple[str, str] = ("", "")) -> None:
        """Read the headers of complete files.

        `body` is the prefix of a decoder's names in memory and its prefix in the files; the two
        differ for a critic.
        """
        self._folder, self.body = folder, body
        self._config = read_model_config(folder)
        self._entries: dict[str, _Entry] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin = 8 + length + entry["data_offsets"][0]
                self._entries[name] = _Entry(path, begin, entry["dtype"], tuple(entry["shape"]))

    def check(self, shapes: Mapping[str, Sizes]) -> None:
        """Refuse a folder that lacks weights, or has weights in other shapes or types.

        Args:
            shapes: name in memory to the shape of the whole weight.

        Raises:
            ConfigError: a weight is missing, or has another shape or type.
        """
        absent, others = [], []
        for name, shape in shapes.items():
            for part in disk_tensors(self._on_disk(name), shape, self._config):
                entry = self._entries.get(part.name)
                if entry is None:
                    absent.append(part.name)
                elif entry.shape != part.shape or entry.dtype not in _DTYPES:
                    others.append(f"{part.name} of {entry.dtype} {entry.shape}")
        if absent or others:
            raise ConfigError(
                f"the weights of a model must be complete, got none for {absent[:4]} "
                f"({len(absent)} tensors) and other shapes for {others[:4]} ({len(others)}) in "
                f"{str(self._folder)!r}; download or export it again"
            )

    def has(self, name: str, shape: Sizes) -> bool:
        """Return whether the files have a tensor of the model, such as a saved buffer."""
        parts = disk_tensors(self._on_disk(name), shape, self._config)
        return all(part.name in self._entries for part in parts)

    def read(self, name: str, shape: Sizes, start: Sizes, extent: Sizes) -> Tensor:
        """Return a box of a weight, in the type of the files.

        Args:
            name: name in memory.
            shape: shape of the whole weight.
            start: first index of the box along each dimension.
            extent: size of the box along each dimension; it must not be empty.
        """
        found = None
        for part in disk_tensors(self._on_disk(name), shape, self._config):
            first = tuple(map(max, start, part.start))
            ends = (
                min(a + n, b + m)
                for a, n, b, m in zip(start, extent, part.start, part.extent, strict=True)
            )
            lengths = tuple(end - begin for begin, end in zip(first, ends, strict=True))
            if min(lengths, default=1) <= 0:
                continue
            # The tensor of a single expert lacks the first dimension.
            index = tuple(
                slice(a - b, a - b + n) for a, b, n in zip(first, part.start, lengths, strict=True)
            )[len(shape) - len(part.shape) :]
            tensor = self._read(part.name, index).reshape(lengths)
            if lengths == extent:
                return tensor
            found = tensor.new_empty(extent) if found is None else found
            inside = zip(first, start, lengths, strict=True)
            found[tuple(slice(a - b, a - b + n) for a, b, n in inside)] = tensor
        assert found is not None
        return found

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return a box of a tensor of a file; the read covers whole rows."""
        path, begin, dtype, shape = self._entries[name]
        rows = index[0] if index else slice(0, 1)
        tensor = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=_DTYPES[dtype])
        if not shape:
            tensor = tensor.reshape(())
        row_bytes = math.prod(shape[1:]) * tensor.itemsize
        with path.open("rb") as file:
            file.seek(begin + rows.start * row_bytes)
            count = file.readinto(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        assert count == tensor.nbytes
        return tensor[(slice(None), *index[1:])] if index else tensor

    def _on_disk(self, name: str) -> str:
        there = self.body[1] + name.removeprefix(self.body[0])
        return there if name.startswith(self.body[0]) else name


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model folder.

    Raises:
        ConfigError: the file is missing, or not a JSON object.
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

    Weights keep their type; `attributes` are further attributes of the manifest, such as
    `config_sha256`.
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
            if policy.tokenizer.has_all_ends:
                setattr(generation, ALL_ENDS, generation.eos_token_id)
            generation.stop_strings = list(policy.tokenizer.stop_strings) or None
            generation.save_pretrained(folder)
        policy.tokenizer.save(folder)
        config = read_model_config(folder)
        dtype = dtype_name(config)
        tied = "lm_head.weight" if config.get("tie_word_embeddings") else None
        weights = {
            # safetensors refuses a view of a larger storage, such as one expert of many.
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
        return write_files(uri, POLICY_SCHEMA, files, parents=parents, attributes=facts)
