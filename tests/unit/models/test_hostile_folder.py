"""Model folders whose JSON files have any shape open, or end in a ConfigError."""

import contextlib
import json
import shutil

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, save_policy
from planish.models.pretrained import load_pretrained
from planish.models.tokens import check_stop_strings, load_tokenizer
from tests.thin import examples

TINY = ModelConfig(num_layers=1, hidden_size=16, intermediate_size=24, head_dim=8)
NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
DEEP = '{"a":' * 3000 + "1" + "}" * 3000
PROMPT = [{"role": "user", "content": "1+2="}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    policy = build_policy(TINY, seed=2)
    save_policy(f"file://{folder}", policy, version=0, parents={}, attributes={})
    return folder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["[]", "5", "null", '"x"', DEEP, "[" * 3000, "\xff", "9" * 5000, "{", ""]
)
def test_a_document_of_another_shape_is_refused(folder, tmp_path, name, text):
    bad = shutil.copytree(folder, tmp_path / "model")
    (bad / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as raised:
        load_pretrained(str(bad))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


def changed(folder, name, changes):
    raw = json.loads((folder / name).read_text("utf-8"))
    return json.dumps(raw | changes)


TOKENIZER_KEYS = (
    "added_tokens_decoder", "additional_special_tokens", "bos_token", "chat_template", "eos_token",
    "extra_special_tokens", "model_max_length", "pad_token", "padding_side", "tokenizer_class",
    "unk_token", "clean_up_tokenization_spaces", "backend", "is_local", "special_tokens_map",
)  # fmt: skip


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokenizer=st.dictionaries(st.sampled_from(TOKENIZER_KEYS), VALUES, max_size=2),
    generation=st.dictionaries(
        st.sampled_from(("eos_token_id", "stop_strings", "bos_token_id")), VALUES, max_size=2
    ),
)
@example({"chat_template": 5}, {})
@example({"chat_template": "{{ messages[9].x.y }}"}, {})
@example({"chat_template": "{% raw"}, {})
@example({"eos_token": []}, {})
@example({"eos_token": None}, {"eos_token_id": [10**30]})
@example({}, {"eos_token_id": -1})
@example({}, {"stop_strings": "\ud800"})
@example({"tokenizer_class": ["x"]}, {})
def test_a_tokenizer_of_any_settings_encodes_or_is_refused(folder, tmp_path, tokenizer, generation):
    bad = tmp_path / "model"
    shutil.copytree(folder, bad, dirs_exist_ok=True)
    for name, changes in (
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", generation),
    ):
        (bad / name).write_text(changed(folder, name, changes), "utf-8")
    with contextlib.suppress(ConfigError):
        tokenizer = load_tokenizer(bad)
        ids = tokenizer.encode_prompt(PROMPT)
        assert isinstance(tokenizer.decode(ids), str)


@pytest.mark.slow
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(
        st.sampled_from(
            ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "dtype",
             "vocab_size", "rope_parameters", "layer_types", "model_type", "head_dim",
             "quantization_config", "auto_map", "transformers_version", "tie_word_embeddings")
        ),
        VALUES.filter(lambda value: not isinstance(value, int) or abs(value) < 1000),
        min_size=1,
        max_size=2,
    )
)  # fmt: skip
@example({"architectures": 5})
@example({"architectures": {"a": 1}})
@example({"num_attention_heads": 0})
@example({"rope_parameters": []})
@example({"quantization_config": []})
def test_a_configuration_of_any_values_opens_or_is_refused(folder, tmp_path, changes):
    bad = tmp_path / "model"
    shutil.copytree(folder, bad, dirs_exist_ok=True)
    (bad / "config.json").write_text(changed(folder, "config.json", changes), "utf-8")
    with contextlib.suppress(ConfigError):
        load_pretrained(str(bad))


def test_stop_strings_that_no_text_can_hold_are_refused():
    with pytest.raises(ConfigError, match="must be Unicode"):
        check_stop_strings(["\ud800"])
