"""Chat template and tokenizer in one place; every token id of the program comes from here.

Importing this module loads neither torch nor transformers; opening a tokenizer loads the
tokenizer part of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.errors import ConfigError

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
"""Special tokens of the from-scratch tokenizer; their ids are 0, 1, 2 and 3."""

MINIMAL_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""One token more than the text: a tiny model spends its context on the task."""

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Tokenizer:
    """A tokenizer with its chat template and the ids that end a response.

    Example:
        >>> tokenizer = character_tokenizer("0123456789+=")
        >>> tokenizer.encode_prompt([{"role": "user", "content": "1+2="}])
        [1, 5, 14, 6, 15]
        >>> tokenizer.decode(tokenizer.encode_response("3"))
        '3'
    """

    def __init__(self, backend: Any, eos_token_ids: Sequence[int] = ()) -> None:
        """Wrap `backend`, a fast tokenizer of transformers.

        Args:
            backend: holds the chat template and the special tokens.
            eos_token_ids: further ids that end a response, e.g. of a generation config.

        Raises:
            ConfigError: no end token, or no chat template.
        """
        own = [] if backend.eos_token_id is None else [int(backend.eos_token_id)]
        ids = tuple(dict.fromkeys([*own, *(int(i) for i in eos_token_ids)]))
        if not ids:
            raise ConfigError(
                "a tokenizer must have an end token, got none; set `eos_token` in its "
                "tokenizer_config.json or `eos_token_id` in generation_config.json"
            )
        if not backend.chat_template:
            raise ConfigError(
                "a tokenizer must have a chat template, got none; set `model.chat_template`, "
                "or save a chat_template.jinja beside the tokenizer"
            )
        self.backend = backend
        self.eos_token_ids: tuple[int, ...] = ids
        pad = backend.pad_token_id
        self.pad_token_id: int = ids[0] if pad is None else int(pad)
        self.vocab_size: int = len(backend)
        self._plain_decoder = _plain_decoder(backend)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of `messages` under the chat template, ready for a response."""
        text = self.backend.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return self._encode(text)

    def encode_response(self, text: str) -> list[int]:
        """Return the token ids of `text` with the end token after it."""
        return [*self._encode(text), self.eos_token_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        tokens = [int(i) for i in ids]
        if self._plain_decoder is not None:
            return str(self._plain_decoder.decode(tokens, skip_special_tokens=True))
        text = self.backend.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def save(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` opens into `folder`."""
        self.backend.save_pretrained(folder)

    def _encode(self, text: str) -> list[int]:
        ids = self.backend(text, add_special_tokens=False)["input_ids"]
        return [int(i) for i in ids]


def _plain_decoder(backend: Any) -> Any:
    """Return what decodes for a fast tokenizer, without the checks that cost most of the time.

    None where the tokenizer's class has a way of its own to decode.
    """
    from transformers import PreTrainedTokenizerFast as Plain

    own = type(backend)
    plain = isinstance(backend, Plain) and (own.decode, own._decode) == (
        Plain.decode,
        Plain._decode,
    )
    return backend.backend_tokenizer if plain else None


def character_tokenizer(alphabet: str) -> Tokenizer:
    """Build a tokenizer with one token per character of `alphabet`, after the special ones."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *alphabet])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=PAD,
            bos_token=BOS,
            eos_token=EOS,
            unk_token=UNK,
            padding_side="right",
            clean_up_tokenization_spaces=False,
            chat_template=MINIMAL_CHAT_TEMPLATE,
        )
    )


def load_tokenizer(folder: Path, *, chat_template: str = "") -> Tokenizer:
    """Open the tokenizer of a model folder; end tokens of its generation config count too.

    Args:
        folder: local model folder.
        chat_template: used only when the tokenizer has none.

    Raises:
        ConfigError: no readable tokenizer, no end token or no chat template.
    """
    try:
        if not any((folder / name).is_file() for name in _VOCABULARIES):
            # transformers would hand out an empty tokenizer of the model's family.
            raise FileNotFoundError(f"none of {', '.join(_VOCABULARIES)}")
        backend = _backend_class(folder).from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(
            f"a model folder must hold a tokenizer that opens without its own code, got "
            f"{str(folder)!r} ({_first_line(error)}); save tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from None
    if not backend.chat_template and chat_template:
        backend.chat_template = chat_template
    return Tokenizer(backend, _generation_eos(folder))


def _backend_class(folder: Path) -> Any:
    """Return the plain fast class where the folder asks for it: `AutoTokenizer` costs seconds."""
    path = folder / "tokenizer_config.json"
    if path.is_file() and (folder / "tokenizer.json").is_file():
        name = json.loads(path.read_text("utf-8")).get("tokenizer_class", "")
        if str(name) in _PLAIN_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _generation_eos(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text("utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"generation_config.json must be a JSON object, got {str(path)!r} ({error}); "
            "save the model again"
        ) from None
    ids = found if isinstance(found, list) else [found]
    return [i for i in ids if isinstance(i, int)]


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {text[:200]}"
