import json
from pathlib import Path

import pytest

from planish.base.config import config_sha256
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.prompts import PromptSet, TraceSet
from planish.records.refs import Ref
from planish.run.stage import PathArtifact, write_json
from planish.stages.curate.stage import run


def start(root, table, seed=0):
    """Write run.json as the prepare stage does; return the digest of the configuration."""
    config = {"run": {"seed": seed}, "curate": table}
    digest = config_sha256(config)
    write_json(layout.run_file(root), {"config": config, "config_sha256": digest})
    return digest


def curate(folder, table, *, root="", seed=0):
    folder.mkdir(exist_ok=True)
    root = root or f"file://{folder}/root"
    outputs = {k: PathArtifact(f"{folder}/{k}") for k in ("prompts", "report")}
    run(root=root, config_sha256=start(root, table, seed), **outputs)
    return root, Ref.from_json(Path(outputs["prompts"].path).read_text()), outputs


def contents(root):
    """Digests of the shards of all three sets."""
    uris = (layout.prompts(root), layout.evaluation_prompts(root), layout.traces(root))
    return [[s.sha256 for s in read_manifest(uri).shards] for uri in uris]


SMALL = {"num_prompts": 300, "evaluation_size": 40, "num_traces": 100}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a finished stage, and what `curate` returned of it."""
    folder = tmp_path_factory.mktemp("small")
    return folder, curate(folder, SMALL)


def test_the_stage_writes_three_sets_a_report_and_metrics(small):
    root, ref, outputs = small[1]
    train = read_set(PromptSet, ref.uri, sha256=ref.manifest_sha256)
    evaluation = read_set(PromptSet, layout.evaluation_prompts(root))
    traces = read_set(TraceSet, layout.traces(root))
    assert (train.num_rows, evaluation.num_rows, traces.num_rows) == (300, 40, 100)
    assert set(traces.prompt_id) <= set(train.prompt_id)
    assert set(train.prompt_id).isdisjoint(evaluation.prompt_id)
    assert train.messages[0] == [{"role": "user", "content": train.messages[0][0]["content"]}]
    assert train.messages[0][0]["content"].endswith("=")
    attributes = {"num_rows": 300, "evaluation_rows": 40, "trace_rows": 100}
    assert attributes.items() <= ref.attributes.items()
    manifest = read_manifest(ref.uri)
    assert manifest.attributes["traces_sha256"] == read_manifest(layout.traces(root)).sha256
    assert outputs["prompts"].metadata["num_train"] == 300
    assert Path(outputs["report"].path).read_text().startswith("# Curation report")


def test_a_second_run_on_the_same_root_is_already_done_and_on_another_is_equal(small, tmp_path):
    folder, (root, ref, outputs) = small
    assert curate(tmp_path, SMALL)[1].manifest_sha256 == ref.manifest_sha256
    before = Path(outputs["report"].path).read_text()
    _, again, outputs = curate(folder, SMALL)
    log = json.loads(
        Path(layout.stage_log(root, "curate", 0, 0).removeprefix("file://")).read_text()
    )
    assert log["already_done"] is True
    assert again == ref
    assert Path(outputs["report"].path).read_text() == before


def write_problems(path, count=60):
    words = [f"word{chr(97 + n)}" for n in range(14)]
    lines = [
        {"question": " ".join([*words[n % 7 :], str(n), *words[: n % 5]]), "answer": str(n)}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_the_result_does_not_depend_on_workers_or_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    for folder in ("x", "y"):
        write_problems(tmp_path / folder / "data.jsonl")
    table = {"dataset": "data.jsonl", "near_duplicate_threshold": 0.6}
    monkeypatch.chdir(tmp_path / "x")
    one = curate(tmp_path / "a", {**table, "workers": 1})
    monkeypatch.chdir(tmp_path / "y")
    three = curate(tmp_path / "b", {**table, "workers": 3})
    assert contents(one[0]) == contents(three[0])
    again = curate(tmp_path / "c", {**table, "workers": 1})
    assert one[1].manifest_sha256 == again[1].manifest_sha256
    assert len(read_manifest(one[1].uri).attributes["source_sha256"]) == 64
    assert (
        str(tmp_path).encode()
        not in Path(f"{one[1].uri}/manifest.json".removeprefix("file://")).read_bytes()
    )


def test_a_changed_data_file_is_curated_again(tmp_path):
    path = tmp_path / "data.jsonl"
    write_problems(path)
    _, first, _ = curate(tmp_path / "a", {"dataset": str(path)})
    write_problems(path, count=70)
    _, second, _ = curate(tmp_path / "a", {"dataset": str(path)})
    assert first.attributes["num_rows"] < second.attributes["num_rows"]


def test_pass_rates_are_measured_on_a_reference_policy(tmp_path):
    pytest.importorskip("torch")
    from planish.models.config import ModelConfig
    from planish.models.policy import build_policy, save_policy

    policy = build_policy(ModelConfig(hidden_size=16, intermediate_size=16, num_layers=1), seed=0)
    ref = save_policy(f"file://{tmp_path}/policy", policy, version=0, parents={}, attributes={})
    table = {"num_prompts": 20, "evaluation_size": 3, "pass_rate_policy": ref.pin(),
             "pass_rate_samples": 2, "pass_rate_max_tokens": 4}  # fmt: skip
    _, prompts, _ = curate(tmp_path / "a", table)
    train = read_set(PromptSet, prompts.uri)
    assert train.pass_rate.tolist() == [0.0] * 20, "an untrained policy solves nothing"
    parents = read_manifest(prompts.uri).parents
    assert parents == {"pass_rate_policy": ref.manifest_sha256}
    with pytest.raises(SystemExit):
        curate(tmp_path / "b", {**table, "pass_rate_min": 0.5})
