"""Pretrained models by folder and by hub id, and every way in which a name can be wrong."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, save_policy
from planish.models.pretrained import find_folder, load_pretrained
from planish.models.tokens import MINIMAL_CHAT_TEMPLATE

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
    policy = load_pretrained(f"{prefix}{model_folder}")
    expected = build_policy(TINY, seed=2)
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[name], tensor), name
    assert policy.tokenizer.encode_prompt([{"role": "user", "content": "1"}]) == [1, 5]
    assert policy.version == 0


def test_imported_policy_saves_without_a_trace_of_its_old_place(model_folder, tmp_path):
    policy = load_pretrained(str(model_folder), dtype=torch.bfloat16)
    uri = f"file://{tmp_path}/saved"
    ref = save_policy(uri, policy, version=0, parents={}, attributes={})
    assert ref.attributes["dtype"] == "bfloat16"
    for path in (tmp_path / "saved").iterdir():
        assert str(model_folder).encode() not in path.read_bytes(), path.name


def test_chat_template_of_the_configuration_fills_a_gap(model_folder):
    (model_folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"set `model\.chat_template`"):
        load_pretrained(str(model_folder))
    policy = load_pretrained(str(model_folder), chat_template=MINIMAL_CHAT_TEMPLATE)
    assert policy.tokenizer.encode_prompt([{"role": "user", "content": "1"}]) == [1, 5]


def test_pickled_weights_are_never_loaded(model_folder):
    (model_folder / "model.safetensors").unlink()
    (model_folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ConfigError, match=r"got only pickled weights \['pytorch_model.bin'\]"):
        load_pretrained(str(model_folder))


def test_folder_without_weights_is_refused(model_folder):
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"must hold \*\.safetensors, got no weights"):
        load_pretrained(str(model_folder))


def test_folder_without_configuration_is_refused(model_folder):
    (model_folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"must hold config\.json, got none"):
        load_pretrained(str(model_folder))


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
        load_pretrained(str(model_folder))
    assert not mark.exists()


@pytest.mark.parametrize(
    "path", ["../model", "/tmp/../etc", "file:///a/../b", "a/../b", "", "..", "a\0b"]
)
def test_names_that_climb_out_are_refused(path):
    with pytest.raises(ConfigError, match=r"`model\.path` must be a path, .* without `\.\.`"):
        find_folder(path)


@pytest.mark.parametrize("path", ["/no/such/folder", "./none", "a/b/c", "bad name", "file:///none"])
def test_missing_folders_and_impossible_hub_ids_are_refused(path):
    with pytest.raises(ConfigError, match="must be an existing folder or a hub id"):
        find_folder(path)


def run_apart(code, tmp_path, **environment):
    """Run code in a process of its own: the hub reads its settings when it is imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {**kept, "HF_HOME": str(tmp_path / "hf"), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True
    )


FETCH = """
from planish.base.errors import ConfigError
from planish.models.pretrained import find_folder
for name in ("someone/model", "someone/cached"):
    try:
        print("found", find_folder(name))
    except ConfigError as error:
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
