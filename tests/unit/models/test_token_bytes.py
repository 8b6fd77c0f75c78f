"""What tokens add to the text, for the kinds of tokenizer that models come with."""

import json

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, save_policy
from planish.models.tokens import Tokenizer, character_tokenizer, load_tokenizer

CORPUS = [
    "the value is 12 and the answer is 7",
    "na\u00efve caf\u00e9 costs 5 \u20ac",
    "\u7b54\u6848: 42\n\n",
]
TEXTS = [*CORPUS, "  two  spaces\tand \U0001f600 never seen", "Answer: 5</answer>"]


def wrapped(backend: Backend, *added: str) -> Tokenizer:
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template="{{ messages }}", **special
    )
    fast.add_tokens(list(added))
    return Tokenizer(fast)


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(CORPUS * 20, trainer)
    return wrapped(backend, "</answer>", "caf\u00e9!")


def with_byte_fallback() -> Tokenizer:
    """As vocabularies of SentencePiece come: spaces as a sign, unknown characters as bytes."""
    pieces = sorted({c for text in CORPUS for c in text.replace(" ", "\u2581")})
    names = ["<unk>", "<pad>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {name: place for place, name in enumerate(names)}
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return wrapped(backend, "</answer>")


@pytest.mark.parametrize("make", [byte_level, with_byte_fallback])
def test_the_text_of_a_response_is_the_sum_of_its_tokens(make):
    tokenizer = make()
    pieces = tokenizer.token_bytes()
    assert len(pieces) == tokenizer.vocab_size
    draw = np.random.default_rng(0)
    for text in TEXTS:
        ids = tokenizer.encode_response(text)
        assert b"".join(pieces[i] for i in ids) == tokenizer.decode(ids).encode() == text.encode()
    # broken characters are shown as each decoder likes: only whole ones are compared
    whole = [token for token, piece in enumerate(pieces) if is_text(piece)]
    for _ in range(200):
        ids = draw.choice(whole, 20).tolist()
        assert tokenizer.decode(ids) == b"".join(pieces[i] for i in ids).decode()


def is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_special_and_unknown_ids_add_nothing():
    tokenizer = byte_level()
    pieces = tokenizer.token_bytes()
    assert [pieces[i] for i in (*tokenizer.eos_token_ids, tokenizer.pad_token_id)] == [b"", b""]
    assert pieces[tokenizer.backend.convert_tokens_to_ids("</answer>")] == b"</answer>"


def test_the_character_tokenizer_adds_its_characters():
    pieces = character_tokenizer("0a\u20ac").token_bytes()
    assert pieces == [b"", b"", b"", b"", b"0", b"a", "\u20ac".encode()]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Replace(Regex("a+"), "b"), decoders.Fuse()]),
    ],
)
def test_a_tokenizer_whose_text_is_no_sum_is_refused(decoder):
    backend = Backend(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ConfigError, match=r"remove `model\.stop_strings`"):
        wrapped(backend).token_bytes()


def test_stop_strings_of_the_configuration_follow_those_of_the_folder(tmp_path):
    character_tokenizer("ab:").save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": ["a:", "b"]}))
    opened = load_tokenizer(tmp_path, stop_strings=["b", "ab"])
    assert opened.stop_strings == ("a:", "b", "ab")
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": "a"}))
    assert load_tokenizer(tmp_path).stop_strings == ("a",)


def test_an_export_keeps_the_stop_strings_and_one_without_names_none(tmp_path):
    for name, strings in (("with", ["\n\n", "12"]), ("without", [])):
        uri = f"file://{tmp_path}/{name}"
        made = build_policy(ModelConfig(num_layers=1, stop_strings=strings), 0)
        ref = save_policy(uri, made, version=0, parents={}, attributes={})
        assert load_policy(ref.pin()).tokenizer.stop_strings == tuple(strings)
        raw = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert raw.get("stop_strings") == (strings or None)


def test_stop_strings_that_are_off_leave_the_configuration_as_it_was():
    assert "stop_strings" not in ModelConfig().model_dump()
    assert ModelConfig(stop_strings=["a"]).model_dump()["stop_strings"] == ["a"]
    with pytest.raises(ValueError, match="must not be empty"):
        ModelConfig(stop_strings=[""])
