"""Opens a pretrained policy by folder or address: safetensors only, no code from the model.

Only configuration, tokenizer and safetensors files are downloaded, and no pickle is loaded.
"""

from __future__ import annotations

from pathlib import Path

from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.models.headers import folder_fault
from planish.models.policy import Policy, load_model, read_model_config
from planish.models.tokens import load_tokenizer
from planish.store.sources import fetch_folder, parse_source

MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Patterns of the files to fetch: all that a model without pickles and code needs."""


def load_pretrained(settings: ModelConfig) -> Policy:
    """Load the causal language model at `settings.path`, and its tokenizer with `load_tokenizer`.

    Raises:
        ConfigError: the message says what is wrong with the name or the folder, and the remedy.
    """
    folder = find_folder(settings.path, revision=settings.revision)
    check_folder(folder)
    return Policy(load_model(folder), load_tokenizer(folder, settings), folder=folder)


def find_folder(path: str, *, revision: str = "main", key: str = "model.path") -> Path:
    """Return the local folder of a pretrained model; download it if it is elsewhere.

    `revision` applies if `path` names none; `key` is the setting of `path`, for messages.

    Raises:
        ConfigError: the address is not usable, there is no such folder, or the hub refuses it.
    """
    return fetch_folder(
        parse_source(path, key=key), key=key, patterns=MODEL_FILES, revision=revision
    )


def check_folder(folder: Path) -> None:
    """Refuse a folder without configuration or safetensors weights, and a folder of adapters.

    Raises:
        ConfigError: the message names the missing files, or the pickled weights in their place.
    """
    read_model_config(folder)
    fault = folder_fault((path.name for path in folder.iterdir()), str(folder))
    if fault:
        raise ConfigError(fault)
