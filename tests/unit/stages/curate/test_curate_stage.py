import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.base.config import config_sha256, parse_toml, resolve_config
from planish.base.errors import ConfigError
from planish.base.inspection import Inspection
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.prompts import PromptSet, TraceSet
from planish.records.refs import Ref
from planish.run.stage import Context, PathArtifact
from planish.stages.curate import records
from planish.stages.curate.config import BOXED, KNOWN_SETS, CurateConfig
from planish.stages.curate.inspect import inspect_data
from planish.stages.curate.problem import CurationLedger
from planish.stages.curate.select import set_problems
from planish.stages.curate.stage import make_prompts, read_set_tables, run
from planish.stages.prepare.command import toml_text
from planish.store.documents import write_json
from planish.verifiers import verify


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


PUBLISHED = {
    "aime-2024": (
        {
            "id": 60,
            "problem": "A walker needs $s$ hours. Find the minutes of the walk.",
            "solution": "It takes $\\boxed{204}$ minutes.",
            "answer": "204",
            "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I_Problems/Problem_1",
            "year": "2024",
        },
        "204",
        "integer/box",
        ["so \\boxed{204}", "\\boxed{\\text{204}}"],
        ["so \\boxed{205}", "\\boxed{20.4}"],
    ),
    "aime-2025": (
        {
            "problem": "Find the sum of all bases $b>9$ with $17_b | 97_b$.",
            "answer": "70",
            "id": "0",
        },
        "70",
        "integer/box",
        ["\\boxed{70}", "\\boxed{070}"],
        ["\\boxed{7}"],
    ),
    "math-500": (
        {
            "problem": "Convert the point $(0,3)$ to polar coordinates.",
            "solution": "It is $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.$",
            "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/807.json",
        },
        "\\left( 3, \\frac{\\pi}{2} \\right)",
        "math/box",
        ["\\boxed{(3, \\frac{\\pi}{2})}", "\\boxed{\\left(3, \\pi/2\\right)}"],
        ["\\boxed{(3, \\pi)}", "\\boxed{3}"],
    ),
    "gsm8k": (
        {
            "question": "A farm sells 1080 eggs a week. How many dollars are 2 weeks worth at $1?",
            "answer": "It sells 1080*2=<<1080*2=2160>>2160 eggs.\n#### 2,160",
        },
        "2160",
        "integer/box",
        ["\\boxed{2160}", "\\boxed{\\$2,160}"],
        ["\\boxed{1080}", "2160 or \\boxed{216}"],
    ),
}
"""Name to a row as it is published, its ground truth, its verifier, right and wrong responses."""


def problems_of(*sets, **settings):
    config = CurateConfig(evaluation_sets=list(sets), **settings)
    ledger = CurationLedger()
    return set_problems(config, read_set_tables(config, ledger), ledger), ledger


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", KNOWN_SETS)
def test_a_known_set_is_read_and_graded_in_its_published_form(tmp_path, name, kind):
    row, answer, verifier, right, wrong = PUBLISHED[name]
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        write(path, [row])
    found, _ = problems_of({"name": name, "dataset": str(path)})
    (problem,) = found[name]
    text = row.get("problem") or row["question"]
    assert problem.messages == [{"role": "user", "content": f"{text}{BOXED}"}]
    assert (problem.answer, problem.verifier) == (answer, verifier)
    assert problem.source == {"math-500": "Precalculus", "gsm8k": "gsm8k"}.get(name, "dataset")
    graded = {text: verify(verifier, text, answer).accuracy for text in (*right, *wrong)}
    assert graded == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


def test_known_sets_are_asked_of_the_hub_by_their_own_settings(monkeypatch):
    asked = []

    def read_hub(source, **options):
        asked.append((source.place, options["config"], options["split"], options["revision"]))
        return [PUBLISHED["gsm8k"][0]]

    monkeypatch.setattr(records, "read_hub", read_hub)
    sets = [*KNOWN_SETS, {"name": "gsm8k", "hub_revision": "v2"}]
    config = CurateConfig(
        dataset="mine/data", hub_config="mine", hub_split="all", hub_revision="v1",
        evaluation_sets=sets[:4],
    )  # fmt: skip
    read_set_tables(config, CurationLedger())
    read_set_tables(CurateConfig(evaluation_sets=sets[4:]), CurationLedger())
    assert asked == [
        ("HuggingFaceH4/aime_2024", "", "train", ""),
        ("math-ai/aime25", "", "test", ""),
        ("HuggingFaceH4/MATH-500", "", "test", ""),
        ("openai/gsm8k", "main", "test", ""),
        ("openai/gsm8k", "main", "test", "v2"),
    ]


def test_a_set_is_kept_whole_but_for_equal_prompts_and_what_nothing_judges(tmp_path):
    near = [
        f"A gardener plants {n} rows of seven tulips each in the bed behind the house; count them."
        for n in range(5, 9)
    ]
    rows = [{"prompt": text, "label": 7 * n} for n, text in enumerate(near, 5)]
    rows += [rows[0], {"prompt": "And what is left?", "label": ""}]
    path = write(tmp_path / "My Set.jsonl", rows)
    table = {"dataset": path, "dataset_map": "answer=label"}
    found, ledger = problems_of(table, evaluation_size=1, prompt_suffix=" Say `Answer: <answer>`.")
    assert [p.answer for p in found["my-set"]] == ["35", "42", "49", "56"]
    assert found["my-set"][0].messages[0]["content"].endswith("count them. Say `Answer: <answer>`.")
    assert {f.name: f.num_dropped for f in ledger.filters} == {
        "my-set, rows of the data set": 0,
        "my-set, readable problems": 0,
        "my-set, verifiable answer": 1,
        "my-set, equal prompts": 1,
    }
    with pytest.raises(ConfigError, match="the evaluation set 'my-set' must hold a prompt"):
        problems_of({"dataset": write(tmp_path / "my-set.jsonl", [{"prompt": "?", "answer": ""}])})


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["math500"], "one of aime-2024, aime-2025, math-500, gsm8k, a file, .* you mean `math-50"),
        ([{"name": "mine"}], "got 'mine'"),
        (["gsm8k", "gsm8k"], "`evaluation_sets` must have different names"),
        ([{"dataset": "a/b", "hub_splitt": "x"}], "sets.0.hub_splitt` is not .* mean `hub_split`"),
        ([{"dataset": "a/b", "dataset_map": "prompt"}], "`dataset_map` must read name=column"),
        (["https://host/x.jsonl"], "`curate.evaluation_sets.dataset` must end with `#sha256="),
        ([3], "curate.evaluation_sets.0`: Input should be a valid dictionary"),
    ],
)
def test_a_set_that_can_not_be_is_refused(sets, words):
    with pytest.raises(ConfigError, match=words):
        resolve_config({"curate": {"evaluation_sets": sets}})


def test_a_run_without_sets_keeps_its_digest_and_one_with_them_holds_what_names_stand_for():
    assert "evaluation_sets" not in resolve_config({})["curate"]
    (table,) = resolve_config({"curate": {"evaluation_sets": ["gsm8k"]}})["curate"][
        "evaluation_sets"
    ]
    assert {"name": "gsm8k", **KNOWN_SETS["gsm8k"]}.items() <= table.items()
    # What `planish config show` prints is TOML that says the same.
    resolved = resolve_config({"curate": {"evaluation_sets": ["math-500", "mine.jsonl"]}})
    assert resolve_config(parse_toml(toml_text(resolved), name="shown")) == resolved


SUMS = [{"prompt": f"{a} + {b} =", "answer": a + b} for a in range(4) for b in range(9)]


def test_the_stage_writes_each_set_and_trains_on_nothing_that_is_in_one(tmp_path):
    data = write(tmp_path / "data.jsonl", SUMS)
    sets = [write(tmp_path / "first.jsonl", SUMS[:5]), write(tmp_path / "second.jsonl", SUMS[7:9])]
    raw = {"dataset": data, "evaluation_size": 3, "evaluation_sets": sets}
    config = resolve_config({"curate": raw})
    context = Context(f"file://{tmp_path}/root", "curate", 0, 0, config, "c" * 64, {})
    made = make_prompts(context)
    train = read_set(PromptSet, layout.prompts(context.root))
    trained = {m[0]["content"] for m in train.messages}
    for name, rows in (("first", SUMS[:5]), ("second", SUMS[7:9])):
        prompts = read_set(PromptSet, layout.evaluation_prompts(context.root, name))
        assert prompts.answer == [str(row["answer"]) for row in rows]
        assert trained.isdisjoint(m[0]["content"] for m in prompts.messages)
    assert read_manifest(layout.prompts(context.root)).parents.keys() == {
        "source", "set_first", "set_second",
    }  # fmt: skip
    assert "in `first`, " in made.documents["report"]
    assert made.metrics["dropped_contamination"] >= 5.0
    assert make_prompts(context).already_done
    write(tmp_path / "second.jsonl", SUMS[7:10])
    assert not make_prompts(context).already_done
    prompts = read_set(PromptSet, layout.evaluation_prompts(context.root, "second"))
    assert prompts.num_rows == 3


def test_prepare_opens_the_sets_and_tells_their_faults(tmp_path):
    good = write(tmp_path / "good.jsonl", SUMS)
    found = Inspection()
    inspect_data({"curate": {"evaluation_sets": [good, str(tmp_path / "none.jsonl")]}}, found)
    assert dict(found.rows)["good"].endswith("good.jsonl`, 36 rows")
    (fault,) = found.faults
    assert "`curate.evaluation_sets.dataset` must be" in fault
    assert "which is no file" in fault
