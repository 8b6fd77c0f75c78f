"""Chat template and tokenizer; every token id of the program comes from this module.

Importing this module loads neither torch nor transformers; opening a tokenizer loads the tokenizer
part of transformers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from planish.base.errors import ConfigError
from planish.models.headers import MAX_SIZE
from planish.verifiers.thoughts import CLOSING, OPENING, OPENS

if TYPE_CHECKING:
    from planish.models.config import ModelConfig

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
"""Special tokens of the from-scratch tokenizer; their ids are 0, 1, 2 and 3."""

MINIMAL_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template that adds only one token to the text, so that a tiny model spends its context on
the task."""

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

ALL_ENDS = "all_eos_token_ids"
"""Key of a policy's generation_config.json for all end tokens; it overrides the policy's other
files."""

PROMPT_TAIL = 32
"""Number of tokens at the end of a prompt in which a thought may begin."""

MAX_STOP_BYTES = 256
"""Most bytes of all stop strings of a policy together, in UTF-8."""

_OPENED = re.compile(rf"(?:{OPENS})\s*$", re.IGNORECASE)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ADDING_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
"""Decoders of `tokenizers` for which the text is the concatenation of the tokens' texts."""


Entry = TypeVar("Entry", int, str)


class Tokenizer:
    """A tokenizer with its chat template and the ids that end a response.

    Example:
        >>> tokenizer = character_tokenizer("0123456789+=")
        >>> tokenizer.encode_prompt([{"role": "user", "content": "1+2="}])
        [1, 5, 14, 6, 15]
        >>> tokenizer.decode(tokenizer.encode_response("3"))
        '3'
    """

    def __init__(
        self,
        backend: Any,
        eos_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        *,
        has_all_ends: bool = False,
    ) -> None:
        """Wrap `backend`, a fast tokenizer of transformers.

        Args:
            backend: tokenizer with a chat template and special tokens.
            eos_token_ids: further ids that end a response, e.g. of a generation config.
            stop_strings: texts that end a response; it ends with the token that completes the text.
            has_all_ends: `eos_token_ids` are all end tokens; the backend's own does not count.

        Raises:
            ConfigError: there is no end token or no chat template, or a stop string is unusable.
        """
        check_stop_strings(stop_strings)
        own = [] if has_all_ends else [backend.eos_token_id]
        ids = tuple(dict.fromkeys(int(i) for i in [*own, *eos_token_ids] if i is not None))
        if not ids:
            raise ConfigError(
                "a tokenizer must have an end token, got none; set `eos_token` in its "
                "tokenizer_config.json or `eos_token_id` in generation_config.json"
            )
        if not backend.chat_template:
            raise ConfigError(
                "a tokenizer must have a chat template, got none, as base models do; set "
                "`model.chat_template`, such as \"{% for m in messages %}{{ m['content'] }}\\n"
                '{% endfor %}", or save a chat_template.jinja beside the tokenizer'
            )
        self.backend = backend
        self.eos_token_ids: tuple[int, ...] = ids
        self.has_all_ends = has_all_ends
        self.stop_strings: tuple[str, ...] = tuple(dict.fromkeys(stop_strings))
        pad = backend.pad_token_id
        self.pad_token_id: int = ids[0] if pad is None else int(pad)
        self.vocab_size: int = len(backend)
        self._decode = _decoding(backend)
        # Special tokens are removed from a text, except marks of a thought.
        self._kept = {
            token: str(entry)
            for token, entry in backend.added_tokens_decoder.items()
            if entry.special and str(entry) in f"{OPENING} {CLOSING}"
        }

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of `messages` under the chat template; a response follows them."""
        try:
            text = self.backend.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # A chat template is a program that comes with the model, so it may raise anything.
            raise ConfigError(
                f"a chat template must render every prompt, got {_first_line(error)}; choose "
                "another tokenizer, or mend `model.chat_template` or `model.template_variables`"
            ) from None
        return self._encode(text)

    def encode_response(self, text: str) -> list[int]:
        """Return the token ids of `text` with the end token after it."""
        return [*self._encode(text), self.eos_token_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens and without trailing end tokens.

        Special tokens that open or close a thought stay.
        """
        tokens = [int(i) for i in ids]
        # Not every end token is marked as special.
        while tokens and tokens[-1] in self.eos_token_ids:
            tokens.pop()
        parts = [(token, list(run)) for token, run in groupby(tokens, self._kept.get)]
        return "".join((kept or "") * len(run) or self._text(run) for kept, run in parts)

    def opened_thought(self, prompt_ids: Sequence[int]) -> str:
        """Return the mark that opens a thought at the end of a prompt; "" if there is none."""
        found = _OPENED.search(str(self.backend.decode(list(prompt_ids[-PROMPT_TAIL:]))))
        return found[0] if found else ""

    def _text(self, tokens: list[int]) -> str:
        return str(self._decode(tokens, skip_special_tokens=True))

    def token_bytes(self) -> list[bytes]:
        """Return the UTF-8 bytes that each token adds to the text, by id; b"" for special tokens.

        Raises:
            ConfigError: the text of this tokenizer is not the concatenation of its tokens.
        """
        core = self.backend.backend_tokenizer
        steps = _decoder_steps(core)
        if steps is None:
            raise ConfigError(
                "stop strings need a tokenizer whose text is the sum of its tokens, got the "
                f"decoder {core.decoder!r:.200}; remove `model.stop_strings`, or give end tokens "
                "as `eos_token_id` of generation_config.json"
            )
        special = {t for t, entry in self.backend.added_tokens_decoder.items() if entry.special}
        names = [core.id_to_token(token) for token in range(self.vocab_size)]
        return [
            b"" if name is None or token in special else _text_bytes(name, steps)
            for token, name in enumerate(names)
        ]

    def save(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` opens into `folder`."""
        self.backend.save_pretrained(folder)

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self.backend(text, add_special_tokens=False)["input_ids"]]


def check_stop_strings(texts: Sequence[str]) -> None:
    """Check the stop strings.

    Raises:
        ConfigError: a string is empty, or the strings have too many bytes together.
    """
    together = "".join(texts)
    data = together.encode("utf-8", "ignore")
    if not all(texts) or data.decode() != together or len(data) > MAX_STOP_BYTES:
        raise ConfigError(
            "stop strings must be Unicode, must not be empty and have at most "
            f"{MAX_STOP_BYTES} bytes together, got {list(texts)!r:.200} with {len(data)}; give "
            "fewer or shorter ones"
        )


def _decoder_steps(core: Any) -> list[dict[str, Any]] | None:
    """Return the decoders of a fast tokenizer in order; None if they do more than concatenate."""
    if core.decoder is None:
        return None
    state = json.loads(core.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    plain = all(
        step["type"] in _ADDING_DECODERS
        and (step["type"] != "Replace" or "String" in step["pattern"])
        for step in steps
    )
    return steps if plain else None


def _text_bytes(token: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the bytes of one ordinary token; spaces that `Strip` would remove at the ends stay."""
    for step in steps:
        if step["type"] == "ByteLevel":
            known = all(character in _BYTE_ALPHABET for character in token)
            return bytes(_BYTE_ALPHABET[c] for c in token) if known else token.encode()
        if step["type"] == "ByteFallback" and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
        if step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
    return token.encode()


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(_OTHERS)
}
"""Byte of each character in byte-level vocabularies.

Source: the vocabulary of GPT-2: printable Latin-1 stands for itself, the others follow 255."""


def _decoding(backend: Any) -> Any:
    """Return the decode function of a tokenizer, without the checks that take most of the time.

    A class that overrides decoding keeps its own function.
    """
    from transformers import PreTrainedTokenizerFast as Plain

    own = type(backend)
    if isinstance(backend, Plain) and (own.decode, own._decode) == (Plain.decode, Plain._decode):
        return backend.backend_tokenizer.decode
    return partial(backend.decode, clean_up_tokenization_spaces=False)


def character_tokenizer(alphabet: str, *, stop_strings: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with the special tokens and then one token per character of `alphabet`."""
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
        ),
        stop_strings=stop_strings,
    )


def load_tokenizer(folder: Path, settings: ModelConfig | None = None) -> Tokenizer:
    """Open the tokenizer of a model folder, with the end tokens of its two configs.

    With `settings` None the folder is used unchanged, as for folders that a run exported. Otherwise
    the chat template of `settings` replaces the folder's own, and the template then contains its
    variables and today's date. `stop_strings` are added to those of the generation config.
    `end_tokens` replace all end tokens. If they are empty, the token with which the chat template
    closes an assistant's turn is added to the end tokens of the folder.

    Raises:
        ConfigError: the folder has no readable tokenizer, no end token or no chat template.
    """
    ends, texts, has_all = _generation_ends(folder)
    try:
        if not any((folder / name).is_file() for name in _VOCABULARIES):
            # transformers would return an empty tokenizer of the model's family.
            raise FileNotFoundError(f"none of {', '.join(_VOCABULARIES)}")
        _check_ids(folder)
        backend = _backend_class(folder).from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        if settings is not None:
            texts += settings.stop_strings
            _choose_template(backend, settings)
            if settings.end_tokens:
                ends, has_all = _token_ids(backend, settings.end_tokens), True
            elif not has_all:
                ends += _closing_tokens(backend)
        tokenizer = Tokenizer(backend, ends, texts, has_all_ends=has_all)
        # Some wrong settings fail only at the first use.
        tokenizer.decode(tokenizer.encode_response("1"))
    except ConfigError:
        raise
    except Exception as error:
        # `tokenizers` raises plain exceptions, and damaged files may make any line of transformers
        # fail.
        raise ConfigError(
            f"a model folder must hold a tokenizer that opens without its own code, got "
            f"{str(folder)!r} ({_first_line(error)}); save tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from None
    return tokenizer


def _choose_template(backend: Any, settings: ModelConfig) -> None:
    """Set the chat template that renders equally at any time and place."""
    backend.chat_template = settings.chat_template or backend.chat_template
    if backend.chat_template:
        # The template would lose an empty first line to a block directly before it.
        sets = [f"set {name} = {value!r}" for name, value in settings.template_variables.items()]
        template = backend.get_chat_template()
        if "strftime_now" in template:
            parts = zip(_DATE.split("|"), time.strftime(_DATE).split("|"), strict=True)
            date = "".join(f"|replace{part}" for part in parts)
            sets.append(
                "macro strftime_now(format) %}{{ format|replace('%%', '\\0')"
                f"{date}|replace('\\0', '%') }}}}{{% endmacro"
            )
        backend.chat_template = "".join(f"{{% {each} %}}\n" for each in sets) + template


_DATE = (
    "%-d|%-m|%-y|%-H|%-I|%-M|%-S|%-j|%a|%A|%b|%B|%c|%C|%d|%D|%e|%F|%g|%G|%h|%H|%I|%j|%k|%l|%m|%M|%p"
    "|%P|%r|%R|%s|%S|%T|%u|%U|%V|%w|%W|%x|%X|%y|%Y|%z|%Z"
)
"""Directives of `strftime` in glibc."""


def _check_ids(folder: Path) -> None:
    """Refuse ids that no vocabulary has; `tokenizers` allocates memory up to the largest id, or
    aborts.
    """
    for name in ("tokenizer.json", "vocab.json"):
        path = folder / name
        if path.is_file():
            raw = json.loads(path.read_text("utf-8"))
            vocabulary = raw["model"]["vocab"] if name == "tokenizer.json" else raw
            ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
            if any(type(token) is not int or not 0 <= token < MAX_SIZE for token in ids):
                raise ValueError(f"{name} must number tokens from 0 to {MAX_SIZE}")


def _backend_class(folder: Path) -> Any:
    """Return the plain fast class if the folder names it, because `AutoTokenizer` takes seconds."""
    path = folder / "tokenizer_config.json"
    if path.is_file() and (folder / "tokenizer.json").is_file():
        raw = json.loads(path.read_text("utf-8"))
        if not isinstance(raw, dict):
            raise TypeError(f"{path.name} must be an object, got {raw!r:.80}")
        if str(raw.get("tokenizer_class", "")) in _PLAIN_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _token_ids(backend: Any, tokens: Sequence[str]) -> list[int]:
    """Return the ids of `model.end_tokens`."""
    vocabulary = backend.get_vocab()
    if strange := [token for token in tokens if token not in vocabulary]:
        raise ConfigError(
            f"`model.end_tokens` must be tokens of the model, got {strange[:4]!r:.200}; its "
            f"special ones are {sorted(backend.all_special_tokens)!r:.200}"
        )
    return [vocabulary[token] for token in tokens]


def _closing_tokens(backend: Any) -> list[int]:
    """Return the token after an assistant's text in the chat template; empty if text follows."""
    content = "planish"
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": content}]
    try:
        rendered = backend.apply_chat_template(turns, tokenize=False)
    except Exception:
        # The template requires other conversations.
        return []
    behind = rendered.rpartition(content)[2].lstrip()
    ids = backend(behind, add_special_tokens=False)["input_ids"]
    return [int(i) for i in ids[:1] if i in backend.added_tokens_decoder]


def _generation_ends(folder: Path) -> tuple[list[int], list[str], bool]:
    """Return end tokens and stop strings of a folder's generation and model configs.

    The last value is True if these are all end tokens, i.e. if a run has written the policy.
    """
    ids: list[int] = []
    texts: list[str] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            raw = json.loads(path.read_text("utf-8"))
            texts += _listed(raw.get("stop_strings"), str)
            if ALL_ENDS in raw:
                return _listed(raw[ALL_ENDS], int), texts, True
            # Models with several modalities have a separate table for text.
            for table in (raw, raw.get("text_config") or {}):
                ids += _listed(table.get("eos_token_id"), int)
            if not all(0 <= token < 2**31 for token in ids):
                raise ValueError(f"ids of tokens can not be {ids!r:.80}")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{name} must be a JSON object with ids of tokens and texts, got {str(path)!r} "
                f"({error}); save the model again"
            ) from None
    return ids, texts, False


def _listed(found: Any, kind: type[Entry]) -> list[Entry]:
    return [one for one in (found if isinstance(found, list) else [found]) if type(one) is kind]


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {text[:200]}"
