"""`planish export`: what it writes, what it refuses, and what a second try does."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planish import store
from planish.__main__ import main
from planish.base.errors import StoreUnavailable
from planish.records import EvalReport, layout, read_manifest, write_files
from planish.records.files import fetch_files
from planish.records.reports import pin_best, write_report
from planish.stages.export import publish as publish_module
from planish.store.documents import write_json
from tests.servers.hub import Hub

REPOSITORY = Path(__file__).resolve().parents[4]
CONFIG = {
    "model": {"path": "org/base", "revision": "", "lora_rank": 8},
    "curate": {"dataset": "/secret/place/mine.jsonl", "verifier": "integer"},
    "algorithm": {"name": "dapo"},
    "run": {"seed": 7},
}
ACCURACIES = {0: 0.25, 4: 0.75, 8: 0.5}


def build_root(root: str) -> str:
    """Write a run with three evaluated policies, the second of which is the best."""
    run = {"config": CONFIG, "config_sha256": "c" * 64, "code_version": "1", "preset": "dapo-tiny"}
    write_json(layout.run_file(root), run)
    conditions = {"temperature": 1.0, "top_p": 0.7, "max_response_tokens": 48}
    for version, accuracy in ACCURACIES.items():
        files = {"config.json": b"{}", "model.safetensors": b"weights %d" % version}
        facts = {"policy_version": version, "config_sha256": "c" * 64}
        parents = {"state": f"{version:064d}"} if version else {}
        ref = write_files(
            layout.policy(root, version), "policy/1", files, parents=parents, attributes=facts
        )
        scalars = {"accuracy": accuracy, "accuracy_standard_error": 0.01, "greedy": accuracy}
        scalars |= {"pass@1": accuracy, "pass@4": 0.875, "num_prompts": 16.0, "num_samples": 8.0}
        attributes = {
            "conditions": conditions,
            "parents": {"policy": ref.manifest_sha256, "prompts": "0" * 64},
        }
        report = EvalReport(scalars, {}, attributes)
        write_report(f"{layout.evaluation(root, version)}/report.json", report)
    assert pin_best(root, report).policy_version == 4
    return root


@pytest.fixture
def root(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(publish_module, "base_licence", lambda config: "apache-2.0")
    return build_root((tmp_path / "run").as_uri())


def export(root: str, target: object, *options: str) -> int:
    return main(["export", root, *(options or ["--best"]), "--to", str(target)])


def test_the_best_policy_is_a_folder_with_a_card(root, tmp_path, capsys):
    target = tmp_path / "exports" / "mine"
    assert export(root, target) == 0
    assert capsys.readouterr().out == f"policy 4 exported: {target}\n"
    uri = layout.policy(root, 4)
    assert (target / "model.safetensors").read_bytes() == b"weights 4"
    # Apart from the card it is the policy itself, manifest included.
    assert read_manifest(target.as_uri()).sha256 == read_manifest(uri).sha256
    assert sorted(p.name for p in target.parent.iterdir()) == ["mine"]
    card = (target / "README.md").read_text()
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\nlicense: apache-2.0\n"
        "base_model: org/base\ntags:\n- planish\n- reinforcement-learning\n- dapo\n---\n# `mine`\n"
    )
    for line in (
        "| base model | `org/base` |",
        "| data | `mine.jsonl` |",
        "| preset | `dapo-tiny` |",
        "| low-rank adapters | `rank 8, merged` |",
        f"| policy | `sha256 {read_manifest(uri).sha256} of manifest.json` |",
        f"| train state | `{4:064d}` |",
        "16 prompts, 8 samples each, temperature 1.0, top-p 0.7, at most tokens 48.",
        "| policy | avg@8 | greedy | pass@4 |",
        "| 0 | 25.0 % +- 1.0 | 25.0 % | 87.5 % |",
        "| **4, this one** | 75.0 % +- 1.0 | 75.0 % | 87.5 % |",
        "| 8 | 50.0 % +- 1.0 | 50.0 % | 87.5 % |",
    ):
        assert line in card
    assert "secret" not in card


@pytest.mark.parametrize(("options", "version"), [(["--policy", "0"], 0), (["--license=mit"], 8)])
def test_another_policy_is_asked_for_by_number_the_newest_is_the_default(
    root, tmp_path, options, version
):
    assert export(root, tmp_path / "out", *options) == 0
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights == b"weights %d" % version


def test_a_second_export_writes_nothing_but_a_card_that_has_changed(root, tmp_path, capsys):
    target = tmp_path / "out"
    assert export(root, target) == 0
    stamp = (target / "model.safetensors").stat()
    assert export(root, target) == 0
    assert "policy 4 lies there already" in capsys.readouterr().out
    assert export(root, target, "--policy", "4", "--license", "MIT") == 0
    assert "license: mit\n" in (target / "README.md").read_text()
    assert (target / "model.safetensors").stat() == stamp


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "manifest.json", "README.md"])
def test_a_folder_with_other_content_is_refused_and_stays(root, tmp_path, capsys, name):
    target = tmp_path / "out"
    target.mkdir()
    (target / name).write_text("mine")
    assert export(root, target) == 2
    assert "must be empty or hold this very policy" in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in target.iterdir()] == [(name, "mine")]


def test_another_policy_in_the_folder_is_refused_and_an_empty_folder_is_not(root, tmp_path, capsys):
    target = tmp_path / "out"
    target.mkdir()
    assert export(root, target, "--policy", "8") == 0
    assert export(root, target) == 2
    assert "choose another, or delete it" in capsys.readouterr().err
    assert (target / "model.safetensors").read_bytes() == b"weights 8"
    (tmp_path / "file").write_text("x")
    assert export(root, tmp_path / "file") == 2


def test_an_export_that_fails_leaves_no_folder(root, tmp_path, monkeypatch):
    def fail(*_):
        raise StoreUnavailable("gone")

    monkeypatch.setattr(publish_module, "publish", fail)
    assert export(root, tmp_path / "exports" / "out") == 75
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_damaged_policy_is_not_exported(root, tmp_path, capsys):
    weights = Path(store.local_path(layout.policy(root, 4))) / "model.safetensors"
    weights.write_bytes(b"weights 5")
    assert export(root, tmp_path / "out") == 1
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_can_not_be_exported_is_refused_with_code_2(root, tmp_path, capsys):
    target = tmp_path / "out"
    assert export((tmp_path / "none").as_uri(), target) == 2
    assert export(root, target, "--policy", "5") == 2
    assert "must hold policy 5, got [0, 4, 8]" in capsys.readouterr().err
    assert export(root, target, "--license", "a b") == 2
    assert export(root, "hf://org/mine/part", "--best") == 2
    assert export(root, "hf://mine", "--best") == 2
    assert export(root, "ftp://org/mine", "--best") == 2
    store.delete(layout.best_policy(root))
    assert export(root, target) == 2
    assert "`--best` needs an evaluation, got none" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.server
def test_in_a_bucket_the_manifest_is_last_and_a_cut_off_export_goes_on(
    root, s3_root, monkeypatch, capsys
):
    target = f"{s3_root}/models/mine"
    write, keys = store.write, []

    def cut_off(uri, data, **options):
        if uri.endswith("manifest.json"):
            raise StoreUnavailable("cut off")
        keys.append(uri)
        write(uri, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", cut_off)
        assert export(root, target) == 75
    assert [key.rpartition("/")[2] for key in keys] == ["README.md"]
    assert not store.exists(f"{target}/manifest.json")
    assert export(root, target) == 0
    manifest = read_manifest(layout.policy(root, 4))
    assert read_manifest(target).sha256 == manifest.sha256
    for shard in manifest.shards:
        data = store.read(f"{target}/{shard.name}")
        assert hashlib.sha256(data).hexdigest() == shard.sha256
    assert export(root, target) == 0
    assert "lies there already" in capsys.readouterr().out
    assert export(root, target, "--policy", "8") == 2
    store.write(f"{s3_root}/alien/config.json", b"[]")
    assert export(root, f"{s3_root}/alien") == 2
    assert store.list_uris(f"{s3_root}/alien/") == [f"{s3_root}/alien/config.json"]


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "hub"
    base = folder / "models" / "org" / "base"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\ntags:\n- x\nlicense: gemma\n---\n# Base\n")
    (base / "config.json").write_text("{}")
    server = Hub(folder, token="hf_sesame")
    yield server
    server.close()


def to_hub(hub, tmp_path, *options, target="hf://org/mine", **environment):
    """Run the command as a user does; return its exit code and its last line."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    kept |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    kept |= {"HF_TOKEN": "hf_sesame", **environment}
    root = (tmp_path / "run").as_uri()
    command = [sys.executable, "-m", "planish", "export", root, *(options or ["--best"])]
    done = subprocess.run(
        [*command, "--to", target],
        env={k: v for k, v in kept.items() if v},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "sesame" not in done.stdout + done.stderr
    return done.returncode, (done.stderr if done.returncode else done.stdout).strip()


@pytest.mark.long
def test_the_hub_gets_one_commit_and_a_second_export_none(hub, tmp_path):
    build_root((tmp_path / "run").as_uri())
    assert to_hub(hub, tmp_path) == (0, "policy 4 exported: hf://org/mine")
    assert hub.commits == ["org/mine"]
    assert hub.visibility == {"org/mine": "private"}
    folder = hub.folder / "models" / "org" / "mine"
    assert "license: gemma\n" in (folder / "README.md").read_text()
    (folder / ".gitattributes").unlink()
    (folder / "README.md").rename(tmp_path / "card")
    # What the hub has is the policy, byte for byte.
    assert fetch_files(folder.as_uri(), schema="policy/1") == folder
    (tmp_path / "card").rename(folder / "README.md")
    assert to_hub(hub, tmp_path) == (0, "policy 4 lies there already: hf://org/mine")
    assert hub.commits == ["org/mine"]
    code, line = to_hub(hub, tmp_path, "--policy", "8")
    assert code == 2
    assert "must be a new or empty repository or hold this very model" in line
    code, line = to_hub(hub, tmp_path, "--best", "--license", "mit")
    assert (code, hub.commits) == (0, ["org/mine"] * 2)
    assert "license: mit\n" in (folder / "README.md").read_text()
    assert json.loads((folder / "config.json").read_text()) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "refused", "code", "words"),
    [
        ({"HF_TOKEN": ""}, {}, 2, "needs a token, got none; set HF_TOKEN"),
        ({"HF_TOKEN": "hf_wrong"}, {}, 2, "refused the token with HTTP status 401"),
        ({}, {"repos/create": 403}, 2, "refused the token with HTTP status 403"),
        ({"HF_HUB_OFFLINE": "1"}, {}, 2, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {}, 75, "can not be reached or failed"),
        ({}, {"/commit/": 412}, 75, "HTTP status 412; try again"),
    ],
)
def test_a_hub_that_does_not_take_it_is_told_in_one_line(
    hub, tmp_path, environment, refused, code, words
):
    build_root((tmp_path / "run").as_uri())
    hub.refused = refused
    # Without its own licence the base model is not asked for.
    found, line = to_hub(hub, tmp_path, "--best", "--license", "mit", **environment)
    assert found == code, line
    assert words in line
    assert hub.commits == []
