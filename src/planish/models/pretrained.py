"""Open a pretrained policy by hub id or folder: safetensors only, no code from the model.

It downloads nothing but configuration, tokenizer and safetensors files, and never loads a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import torch

from planish.base.errors import ConfigError
from planish.models.policy import Policy, load_model, read_model_config
from planish.models.tokens import load_tokenizer
from planish.store import file_path

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What is fetched from the hub: everything that a model without pickles and code needs."""

HUB_TIMEOUT_SECONDS = 10.0
"""Wait for the hub's answer about one file."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def load_pretrained(
    path: str,
    *,
    revision: str = "main",
    chat_template: str = "",
    stop_strings: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> Policy:
    """Load a pretrained causal language model and its tokenizer.

    Args:
        path: folder (absolute, or beginning with `./`, `~/`, `file://`, or existing) or hub id.
        revision: branch, tag or commit on the hub.
        chat_template: used only when the tokenizer has none.
        stop_strings: texts that end a response, beside those of its generation config.
        dtype: of the weights in memory; None keeps the saved one.

    Raises:
        ConfigError: tells what is wrong with the name or the folder, and what to do.
    """
    folder = find_folder(path, revision=revision)
    check_folder(folder)
    model = load_model(folder, dtype=dtype)
    tokenizer = load_tokenizer(folder, chat_template=chat_template, stop_strings=stop_strings)
    return Policy(model=model, tokenizer=tokenizer, version=0, folder=folder)


def find_folder(path: str, *, revision: str = "main", key: str = "model.path") -> Path:
    """Return the local folder of a pretrained model, fetching it from the hub for a hub id.

    Args:
        path: folder or hub id.
        revision: branch, tag or commit on the hub.
        key: where the configuration gives `path`, for messages.

    Raises:
        ConfigError: not a usable name, no such folder, or the hub can not give it.
    """
    text = file_path(path) if path.startswith("file://") else path
    if not text or ".." in PurePosixPath(text).parts or "\0" in text:
        raise ConfigError(
            f"`{key}` must be a hub id or a folder without `..`, got {path!r}; write the "
            "folder's absolute path"
        )
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith(("file://", "/", "./", "~")) or not _HUB_ID.fullmatch(text):
        raise ConfigError(
            f"`{key}` must be an existing folder or a hub id such as 'Qwen/Qwen3-0.6B', got "
            f"{path!r}; check the spelling, or save the model there first"
        )
    return _fetch_from_hub(text, revision, key)


def _fetch_from_hub(hub_id: str, revision: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(HUB_FILES),
            etag_timeout=HUB_TIMEOUT_SECONDS,
        )
    except GatedRepoError:
        remedy = "accept its licence on the hub and log in with `hf auth login`"
    except RevisionNotFoundError:
        remedy = f"`model.revision` {revision!r} does not exist there"
    except RepositoryNotFoundError:
        remedy = "there is no such model, or it is private: check the spelling or log in"
    except HFValidationError as error:
        remedy = f"not a hub id: {error}"
    except HfHubHTTPError as error:
        remedy = (
            f"it answered with HTTP status {error.response.status_code}: log in with "
            f"`hf auth login`, try again later, or give a folder as `{key}`"
        )
    except (LocalEntryNotFoundError, OSError) as error:
        remedy = (
            "the hub can not be reached or failed, and the cache has no copy "
            f"({type(error).__name__}): download it where there is a network and give its folder "
            f"as `{key}`"
        )
    else:
        return Path(folder)
    raise ConfigError(f"`{key}` must be a model that the hub gives, got {hub_id!r}; {remedy}")


def check_folder(folder: Path) -> None:
    """Refuse a folder without configuration or without safetensors weights.

    Raises:
        ConfigError: names what is missing, or the pickled weights that are there instead.
    """
    read_model_config(folder)
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    if pickles:
        raise ConfigError(
            f"a model folder must hold *.safetensors, got only pickled weights {pickles[:4]} in "
            f"{str(folder)!r}; pickles can run code and are never loaded: convert them with "
            "`save_pretrained` on a machine that trusts them"
        )
    raise ConfigError(
        f"a model folder must hold *.safetensors, got no weights in {str(folder)!r}; give the "
        "folder that `save_pretrained` wrote"
    )
