"""Pretrained models by folder and by hub id, and every way in which a name can be wrong."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from planish.base.errors import EXIT_TRANSIENT, ConfigError, StoreUnavailable, exit_code
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, policy_tokenizer, save_policy
from planish.models.pretrained import find_folder, load_pretrained
from planish.models.tokens import MINIMAL_CHAT_TEMPLATE, check_stop_strings, load_tokenizer
from tests.servers.scripted_http import Reply, ScriptedServer
from tests.thin import examples

TINY = ModelConfig(num_layers=1, hidden_size=16, intermediate_size=24, head_dim=8)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    policy = build_policy(TINY, seed=2)
    save_policy(f"file://{folder}", policy, version=0, parents={}, attributes={})
    (folder / "manifest.json").unlink()
    return folder


@pytest.fixture
def model_folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_folder_gives_model_and_tokenizer(model_folder, prefix):
    policy = load_pretrained(ModelConfig(path=f"{prefix}{model_folder}"))
    expected = build_policy(TINY, seed=2)
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[name], tensor), name
    assert policy.tokenizer.encode_prompt([{"role": "user", "content": "1"}]) == [1, 5]
    assert policy.version == 0


def test_imported_policy_saves_without_a_trace_of_its_old_place(model_folder, tmp_path):
    policy = load_pretrained(ModelConfig(path=str(model_folder)))
    uri = f"file://{tmp_path}/saved"
    ref = save_policy(uri, policy, version=0, parents={}, attributes={})
    assert ref.attributes["dtype"] == "float32"
    for path in (tmp_path / "saved").iterdir():
        assert str(model_folder).encode() not in path.read_bytes(), path.name


def test_chat_template_of_the_configuration_fills_a_gap(model_folder):
    (model_folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"set `model\.chat_template`"):
        load_pretrained(ModelConfig(path=str(model_folder)))
    policy = load_pretrained(
        ModelConfig(path=str(model_folder), chat_template=MINIMAL_CHAT_TEMPLATE)
    )
    assert policy.tokenizer.encode_prompt([{"role": "user", "content": "1"}]) == [1, 5]


def test_a_saved_policy_renders_as_the_settings_of_its_import_say(model_folder, tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if not x %}2{% endif %}"
    settings = ModelConfig(
        path=str(model_folder), chat_template=template, template_variables={"x": False}
    )
    uri = f"file://{tmp_path}/saved"
    ref = save_policy(uri, load_pretrained(settings), version=0, parents={}, attributes={})
    for tokenizer in (load_policy(ref.pin()).tokenizer, policy_tokenizer(ref.pin())):
        assert tokenizer.encode_prompt([{"role": "user", "content": "1"}]) == [5, 6]


@pytest.mark.parametrize(
    ("name", "instead", "words"),
    [
        ("config.json", "", r"must hold config\.json, got none"),
        ("model.safetensors", "", r"must hold \*\.safetensors, got no weights"),
        (
            "model.safetensors",
            "pytorch_model.bin",
            r"got only pickled weights \['pytorch_model.bin'\]",
        ),
    ],
)
def test_a_folder_without_what_makes_a_model_is_refused(model_folder, name, instead, words):
    (model_folder / name).unlink()
    if instead:
        (model_folder / instead).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ConfigError, match=words):
        load_pretrained(ModelConfig(path=str(model_folder)))


def test_code_that_comes_with_a_model_is_never_run(model_folder, tmp_path):
    mark = tmp_path / "ran"
    (model_folder / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    path = model_folder / "config.json"
    config = json.loads(path.read_text())
    config.update(
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    )
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="code that comes with a model is never run"):
        load_pretrained(ModelConfig(path=str(model_folder)))
    assert not mark.exists()


CLIMBING = ("../model", "/tmp/../etc", "file:///a/../b", "a/../b", "", "..", "a\0b")
ABSENT = ("/no/such/folder", "./none", "a/b/c", "bad name", "file:///none")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        *((path, r"`model\.path` must be a path, .* without `\.\.`") for path in CLIMBING),
        *((path, "must be an existing folder or a hub id") for path in ABSENT),
        ("some--one/model", "not a hub id"),
    ],
)
def test_a_name_of_no_model_is_refused(path, words):
    with pytest.raises(ConfigError, match=words):
        find_folder(path)


def run_apart(code, tmp_path, **environment):
    """Run code in a process of its own: the hub reads its settings when it is imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {**kept, "HF_HOME": str(tmp_path / "hf"), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True
    )


FETCH = """
from planish.base.errors import PlanishError
from planish.models.pretrained import find_folder
for name in ("someone/model", "someone/cached"):
    try:
        print("found", find_folder(name))
    except PlanishError as error:
        print("refused", error)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unreachable", "offline"])
def test_without_a_network_a_cached_hub_id_opens_and_another_is_told_what_to_do(
    model_folder, tmp_path, closed_port, kind
):
    cache = tmp_path / "hf" / "hub" / "models--someone--cached"
    commit = "a" * 40
    shutil.copytree(model_folder, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    places = {
        "offline": {"HF_HUB_OFFLINE": "1"},
        "unreachable": {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port}"},
    }
    done = run_apart(FETCH, tmp_path, **places[kind])
    assert done.stdout.count("\n") == 2, done.stderr
    refused, found = done.stdout.splitlines()
    told = "'someone/model'; the hub can not be reached or failed, and the cache has no copy"
    assert refused.startswith("refused")
    assert told in refused
    assert "give its path as `model.path`" in refused
    assert found.startswith("found")
    assert found.endswith(commit)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that answers every request with its `answer`."""
    from huggingface_hub import constants

    server = ScriptedServer(lambda _: Reply(404))
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (404, "RepoNotFound", "there is no such model, or it is private"),
        (401, "", "it answered with HTTP status 401: log in"),
        (404, "RevisionNotFound", "the revision 'v9' does not exist there"),
        (403, "GatedRepo", "accept its licence on the hub"),
        (400, "", "the hub can not be reached or failed, and the cache has no copy"),
    ],
)
def test_each_refusal_of_the_hub_has_its_own_remedy(hub, status, code, remedy):
    hub.answer = lambda _: Reply(status, headers={"X-Error-Code": code} if code else {})
    with pytest.raises(ConfigError, match="must be a model that the hub gives") as caught:
        find_folder("someone/model", revision="v9")
    assert "'someone/model'" in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_hub_that_fails_for_a_moment_is_asked_again_later(hub, monkeypatch, status):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    hub.answer = lambda _: Reply(status)
    with pytest.raises(StoreUnavailable, match="must be a model that the hub gives") as caught:
        find_folder("someone/model")
    assert exit_code(caught.value) == EXIT_TRANSIENT


def test_a_hub_that_is_not_reached_is_asked_again_later_unless_it_may_not_be(
    hub, monkeypatch, closed_port
):
    from huggingface_hub import constants

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(StoreUnavailable, match="can not be reached or failed"):
        find_folder("someone/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="can not be reached or failed"):
        find_folder("someone/model")


NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
DEEP = '{"a":' * 3000 + "1" + "}" * 3000
PROMPT = [{"role": "user", "content": "1+2="}]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["[]", "5", "null", '"x"', DEEP, "[" * 3000, "\xff", "9" * 5000, "{", ""]
)
def test_a_document_of_another_shape_is_refused(original, tmp_path, name, text):
    bad = shutil.copytree(original, tmp_path / "model")
    (bad / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as raised:
        load_pretrained(ModelConfig(path=str(bad)))
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
def test_a_tokenizer_of_any_settings_encodes_or_is_refused(
    original, tmp_path, tokenizer, generation
):
    bad = tmp_path / "model"
    shutil.copytree(original, bad, dirs_exist_ok=True)
    for name, changes in (
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", generation),
    ):
        (bad / name).write_text(changed(original, name, changes), "utf-8")
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
def test_a_configuration_of_any_values_opens_or_is_refused(original, tmp_path, changes):
    bad = tmp_path / "model"
    shutil.copytree(original, bad, dirs_exist_ok=True)
    (bad / "config.json").write_text(changed(original, "config.json", changes), "utf-8")
    with contextlib.suppress(ConfigError):
        load_pretrained(ModelConfig(path=str(bad)))


def test_stop_strings_that_no_text_can_hold_are_refused():
    with pytest.raises(ConfigError, match="must be Unicode"):
        check_stop_strings(["\ud800"])
