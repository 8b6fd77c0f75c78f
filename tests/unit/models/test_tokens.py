"""Tokenizer: ids, round trips, and folders that cannot be opened."""

import json
import string
import time

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, save_policy
from planish.models.tokens import (
    MINIMAL_CHAT_TEMPLATE,
    Tokenizer,
    character_tokenizer,
    load_tokenizer,
)

DIGITS = "0123456789+="


def test_special_tokens_come_before_the_alphabet():
    tokenizer = character_tokenizer(DIGITS)
    assert tokenizer.vocab_size == 4 + len(DIGITS)
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.backend.bos_token_id == 1
    assert tokenizer.backend.unk_token_id == 3


def test_prompt_is_the_begin_token_and_one_token_per_character():
    tokenizer = character_tokenizer(DIGITS)
    assert tokenizer.encode_prompt([{"role": "user", "content": "48+24="}]) == (
        [1, 4 + 4, 4 + 8, 4 + 10, 4 + 2, 4 + 4, 4 + 11]
    )


def test_earlier_assistant_turns_end_with_the_end_token():
    tokenizer = character_tokenizer(DIGITS)
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    assert tokenizer.encode_prompt(messages) == [1, 5, 6, 2, 7]


def test_response_ends_with_one_end_token_and_decodes_to_its_text():
    tokenizer = character_tokenizer(ModelConfig().alphabet)
    text = "8+4+0=12;\n4+2+1=7=72 %"
    ids = tokenizer.encode_response(text)
    assert len(ids) == len(text) + 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([]) == ""


def test_characters_outside_the_alphabet_become_one_unknown_token_each():
    tokenizer = character_tokenizer(DIGITS)
    assert tokenizer.encode_response("\U0001f600é1") == [3, 3, 5, 2]


def test_saved_folder_opens_with_the_automatic_class_and_gives_equal_ids(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = character_tokenizer(DIGITS)
    tokenizer.save(tmp_path)
    opened = AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [{"role": "user", "content": "12+3="}]
    ids = opened.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(ids) == tokenizer.encode_prompt(messages)
    again = load_tokenizer(tmp_path)
    assert again.encode_prompt(messages) == tokenizer.encode_prompt(messages)
    assert again.eos_token_ids == (2,)
    assert opened.pad_token_id == 0


def test_end_tokens_of_the_generation_config_are_added_after_the_own_one(tmp_path):
    character_tokenizer(DIGITS).save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load_tokenizer(tmp_path).eos_token_ids == (2, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(tmp_path).eos_token_ids == (2, 7)


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 2}])
def test_end_tokens_that_the_model_config_alone_names_count(tmp_path, generation):
    character_tokenizer(DIGITS).save(tmp_path)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    for config in ({"eos_token_id": [0, 2]}, {"text_config": {"eos_token_id": 0}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_tokenizer(tmp_path).eos_token_ids == (2, 0)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"^config\.json must be a JSON object"):
        load_tokenizer(tmp_path)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, (2, 17)),
        ("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}", (2,)),
        ("{% for m in messages %}{{ 'User: ' + m['content'] }}{% endfor %}", (2,)),
        ("{{ raise_exception('no assistants here') if messages[1:] else '1' }}", (2,)),
    ],
)
def test_the_token_that_closes_an_assistants_turn_ends_a_response(tmp_path, template, ends):
    backend = character_tokenizer(DIGITS).backend
    backend.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    backend.chat_template = template
    backend.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, ModelConfig()).eos_token_ids == ends
    assert load_tokenizer(tmp_path).eos_token_ids == (2,)
    named = load_tokenizer(tmp_path, ModelConfig(end_tokens=["<|im_end|>"]))
    assert (named.eos_token_ids, named.encode_response("1")) == ((17,), [5, 17])
    with pytest.raises(ConfigError, match=r"`model\.end_tokens` must be tokens of the model"):
        load_tokenizer(tmp_path, ModelConfig(end_tokens=["<|im_stop|>"]))


@pytest.mark.parametrize("is_special", [False, True])
def test_an_end_token_at_the_end_is_no_text_whatever_its_flags(tmp_path, is_special):
    from tokenizers import AddedToken

    backend = character_tokenizer(DIGITS).backend
    backend.add_tokens([AddedToken("<|turn_end|>", special=is_special, normalized=False)])
    end = backend.convert_tokens_to_ids("<|turn_end|>")
    backend.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    tokenizer = load_tokenizer(tmp_path)
    digits = tokenizer.encode_response("1+2=3")[:-1]
    assert tokenizer.decode([*digits, end]) == tokenizer.decode([*digits, end, 2]) == "1+2=3"
    assert tokenizer.decode(digits) == "1+2=3"
    assert tokenizer.decode([end]) == tokenizer.decode([]) == ""


def test_tokenizer_without_end_token_is_refused():
    backend = character_tokenizer(DIGITS).backend
    backend.eos_token = None
    with pytest.raises(ConfigError, match="must have an end token"):
        Tokenizer(backend)


def test_padding_falls_back_to_the_end_token():
    backend = character_tokenizer(DIGITS).backend
    backend.pad_token = None
    assert Tokenizer(backend).pad_token_id == 2


def test_tokenizer_without_chat_template_needs_one_from_the_configuration(tmp_path):
    tokenizer = character_tokenizer(DIGITS)
    tokenizer.backend.chat_template = None
    tokenizer.save(tmp_path)
    with pytest.raises(ConfigError, match=r"`model\.chat_template`"):
        load_tokenizer(tmp_path)
    opened = load_tokenizer(tmp_path, ModelConfig(chat_template=MINIMAL_CHAT_TEMPLATE))
    assert opened.encode_prompt([{"role": "user", "content": "1"}]) == [1, 5]


OWN = "\n  {% if x is defined %}({{ x }}){% endif %}{{ messages[0]['content'] }}"
SET = "{{ messages[0]['content'] }}=[{{ x }}]"
SEVERAL = {"default": OWN, "tool_use": "tools"}


@pytest.mark.parametrize(
    ("own", "chosen", "variables", "expected"),
    [
        (OWN, "", {}, "\n1"),
        (OWN, "", {"x": "a"}, "\n(a)1"),
        (OWN, SET, {}, "1=[]"),
        (OWN, SET, {"x": 3}, "1=[3]"),
        (None, SET, {"x": -0.5}, "1=[-0.5]"),
        (SEVERAL, "", {}, "\n1"),
        (SEVERAL, "", {"x": True}, "\n(True)1"),
        (SEVERAL, SET, {"x": False}, "1=[False]"),
        (OWN, "{{ 'off' if x is false else x }}", {"x": False}, "off"),
        (OWN, "{{ x + 1 }}{{ y }}", {"x": 1e-7, "y": 10**20}, f"{1 + 1e-7}{10**20}"),
        (OWN, "{% macro m() %}{{ x }}{% endmacro %}{% for i in [1, 2] %}{{ m() }}{% endfor %}",
         {"x": "a"}, "aa"),
        (OWN, """{{- strftime_now("%%d") + strftime_now( '%%"') }}""", {}, '%d%"'),
        (OWN, "{% if strftime_now is defined %}{{ x }}{% endif %}", {"x": "a"}, "a"),
        *(
            (OWN, SET, {"x": text}, f"1=[{text}]")
            for text in ("", "'", '"', "'\"\\", "}}", "%}{{ 1 }}", "{% raw %}", "{# ", "a\nb",
                         "\n", "\r\n", "\\n", "\\u0041", "\x00\x7f\x85", "\u2028", "\u00e9\u7b54",
                         "\U0001f600")
        ),
    ],
)  # fmt: skip
def test_an_export_renders_the_chosen_template_wherever_it_is_opened(
    tmp_path, own, chosen, variables, expected
):
    from transformers import AutoTokenizer

    tokenizer = byte_level()
    tokenizer.backend.chat_template = own
    tokenizer.save(tmp_path / "model")
    settings = ModelConfig(chat_template=chosen, template_variables=variables)
    opened = load_tokenizer(tmp_path / "model", settings)
    opened.save(tmp_path / "policy")
    messages = [{"role": "user", "content": "1"}]
    again = load_tokenizer(tmp_path / "policy")
    assert again.decode(again.encode_prompt(messages)) == expected
    assert again.encode_prompt(messages) == opened.encode_prompt(messages)
    plain = AutoTokenizer.from_pretrained(str(tmp_path / "policy"))
    assert plain.apply_chat_template(messages, tokenize=False) == expected


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("{{ strftime_now('%d %b %Y %H:%M:%S') }}", "31 Jan 2001 01:02:03"),
        ("{% set form = '%d.%m.' ~ '%y' %}{{ strftime_now(form) }}", "31.01.01"),
        ("{{ strftime_now(messages[0].content | replace('1', '%A')) }}", "Wednesday"),
        ("{{ strftime_now(form) }}", "01/31/01"),
        ("{{ strftime_now('%-d %-m') ~ strftime_now(format='%F %T') }}", "31 12001-01-31 01:02:03"),
        ("{% macro m(f) %}{{ strftime_now(f)[:4] }}{% endmacro %}{{ m('%Y-%m') }}", "2001"),
        ("{% for f in ['%H', '%%H', '%j'] %}{{ strftime_now(f) }},{% endfor %}", "01,%H,031,"),
        ("{{ strftime_now is defined }}{{ '%d' }}", "True%d"),
        ("no date", "no date"),
    ],
)
def test_the_date_of_a_template_is_that_of_its_import(tmp_path, own, told, monkeypatch):
    tokenizer = byte_level()
    tokenizer.backend.chat_template = own
    tokenizer.save(tmp_path)
    then = time.struct_time((2001, 1, 31, 1, 2, 3, 2, 31, 0))
    real = time.strftime
    monkeypatch.setattr("time.strftime", lambda form: real(form, then))
    settings = ModelConfig(template_variables={"form": "%D"} if "(form)" in own else {})
    load_tokenizer(tmp_path, settings).save(tmp_path)
    monkeypatch.undo()
    opened = load_tokenizer(tmp_path)
    assert opened.decode(opened.encode_prompt([{"role": "user", "content": "1"}])) == told
    assert ("macro strftime_now" in opened.backend.chat_template) == ("strftime" in own)


def test_variables_decide_what_closes_an_assistants_turn(tmp_path):
    backend = character_tokenizer(DIGITS).backend
    backend.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    backend.chat_template = CHATML.replace("'<|im_end|>\n'", "close")
    backend.save_pretrained(tmp_path)
    for close, ends in (("<|im_end|>", (2, 17)), ("\n", (2,))):
        settings = ModelConfig(template_variables={"close": close})
        assert load_tokenizer(tmp_path, settings).eos_token_ids == ends


@pytest.mark.parametrize(
    "variables",
    [{"a b": 1}, {"": 1}, {"1a": 1}, {"a = 1 %}": 1}, {"a\n": 1}, {"a": [1]}, {"a": {}},
     {"a": None}, {"a": float("inf")}, {"a": float("nan")}],
)  # fmt: skip
def test_variables_are_names_with_plain_values(variables):
    with pytest.raises(ValueError, match="template_variables"):
        ModelConfig(template_variables=variables)
    assert "template_variables" not in ModelConfig().model_dump()


def test_a_variable_that_no_template_can_hold_is_told_by_its_setting(tmp_path):
    character_tokenizer(DIGITS).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path, ModelConfig(template_variables={"true": 1}))
    with pytest.raises(ConfigError, match=r"mend .*`model\.template_variables`"):
        tokenizer.encode_prompt([{"role": "user", "content": "1"}])


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": "{}"}, {"tokenizer.json": "{"}])
def test_folder_without_a_readable_tokenizer_is_refused(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="must hold a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("alphabet", ["", "aa", "0120"])
def test_alphabet_with_repeats_or_nothing_is_refused(alphabet):
    with pytest.raises(ValueError, match="each only once"):
        ModelConfig(alphabet=alphabet)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="must divide `num_heads`"):
        ModelConfig(num_heads=3, num_kv_heads=2)


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
    opened = load_tokenizer(tmp_path, ModelConfig(stop_strings=["b", "ab"]))
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


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("1+1=<think>\n", "<think>\n"),
        ("Assistant: <think>", "<think>"),
        ("1[THINK]", "[THINK]"),
        ("<think>\n\n</think>\n\n", ""),
        ("Begin with <think>.\nAssistant:", ""),
        ("", ""),
    ],
)
def test_a_prompt_opens_a_thought_at_its_end_only(prompt, opened):
    tokenizer = character_tokenizer(string.printable)
    tokens = tokenizer.encode_prompt([{"role": "user", "content": prompt}])
    assert tokenizer.opened_thought(tokens) == opened


def test_marks_of_a_thought_stay_in_a_text_also_where_they_are_special():
    backend = character_tokenizer(string.printable).backend
    backend.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "<|x|>"]})
    tokenizer = Tokenizer(backend)
    text = "[THINK]1+1[/THINK]<|x|>2"
    ids = tokenizer.encode_response(text)
    assert tokenizer.decode(ids) == "[THINK]1+1[/THINK]2"
    assert tokenizer.decode(ids[:3] * 50) == "[THINK]1+" * 50
    assert tokenizer.decode(ids[:1] * 5000) == "[THINK]" * 5000
