"""`planish show` on everything that a run leaves, sound, damaged and hostile."""

import contextlib
import io
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import save as save_tensors

from planish import store
from planish.__main__ import main
from planish.base.errors import ObjectMissing, PlanishError, RecordError
from planish.records import (
    EvalReport,
    Ragged,
    UpdateReport,
    layout,
    write_files,
    write_report,
    write_set,
)
from planish.show.command import show
from planish.show.text import cell
from planish.store.documents import read_json
from tests.thin import examples
from tests.unit.records.bombs import peak_megabytes
from tests.unit.records.samples import (
    SAMPLES,
    build_rollouts,
    changed,
    random_prompts,
    random_rollouts,
)


def shown(text, *, rows=1):
    stream = io.StringIO()
    show(text, Console(file=stream, width=250), rows=rows)
    return stream.getvalue()


def lines_with(output, *words):
    """Return the cells of the lines that hold all words."""
    found = [line for line in output.splitlines() if all(word in line for word in words)]
    return [[cell.strip() for cell in line.split("│")] for line in found]


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_record_set_shows_its_manifest_columns_and_rows(store_root, kind):
    record = SAMPLES[kind]()
    parents = {"policy": "ab" * 32}
    attributes = {"config_sha256": "c0", "consumed": [4, 5]}
    ref = write_set(f"{store_root}/set", record, parents=parents, attributes=attributes)
    output = shown(ref.uri, rows=2)
    assert lines_with(output, "schema")[0][1] == record.SCHEMA
    assert lines_with(output, "manifest sha256")[0][1] == ref.manifest_sha256
    assert lines_with(output, "parent policy")[0][1] == "ab" * 32
    assert lines_with(output, "consumed")[0][1] == "[4, 5]"
    assert [cells[0] for cells in lines_with(output, "│")].count(record.COLUMNS[0].name) == 3
    assert f"row 1 of {record.num_rows}" in output
    assert shown(ref.pin(), rows=2) == output


def test_numbers_are_summarised_rightly(file_root):
    rollouts = random_rollouts()
    ref = write_set(f"{file_root}/set", rollouts, parents={}, attributes={})
    output = shown(ref.uri)
    lengths = rollouts.response_tokens.lengths
    expected = f"{lengths.sum()} in rows of {lengths.min()}..{lengths.max()}"
    assert lines_with(output, "response_tokens", "list")[0][2] == expected
    assert lines_with(output, "group_index", "int32")[0][2] == "0..4, mean 2"
    assert lines_with(output, "verifier", "text")[0][2] == "math: 20"
    assert lines_with(output, "answer", "text")[0][2] == "20 different"


def test_a_set_of_no_rows_and_unmeasured_rates_can_be_shown(file_root):
    empty = write_set(f"{file_root}/a", random_prompts(rows=0), parents={}, attributes={})
    assert lines_with(shown(empty.uri), "pass_rate")[0][2] == "none"
    prompts = random_prompts(rows=2)
    unknown = changed(prompts, pass_rate=np.full(2, np.nan, np.float32))
    ref = write_set(f"{file_root}/b", unknown, parents={}, attributes={})
    assert lines_with(shown(ref.uri, rows=0), "pass_rate")[0][2] == "not measured"


def test_hostile_text_can_not_drive_the_terminal_or_the_markup(file_root):
    evil = "\x1b]0;title\x07\x1b[31m[bold]x[/bold]\r\n\u202e\x9b"
    prompts = changed(random_prompts(rows=1), answer=[evil], source=[evil])
    ref = write_set(f"{file_root}/set", prompts, parents={}, attributes={"note": evil})
    output = shown(ref.uri)
    assert r"\x1b]0;title\x07\x1b[31m[bold]x[/bold]\r\n\u202e\x9b" in output
    assert not set(output) & set("\x1b\x07\r\u202e\x9b")
    assert cell("ab" * 50, width=10).plain == "abababa..."


def test_a_policy_shows_its_files_and_tensors(store_root):
    tensors = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}
    files = {"model.safetensors": save_tensors(tensors), "config.json": b"{}"}
    ref = write_files(
        f"{store_root}/policies/00001", "policy/1", files, parents={}, attributes={"step": 7}
    )
    output = shown(ref.uri)
    assert lines_with(output, "step")[0][1] == "7"
    assert lines_with(output, "config.json")[0][1] == "2 B"
    assert lines_with(output, "model.safetensors", "F16")[0][1:] == ["2", "17", "F16: 1, F32: 1"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\x05\0\0\0\0\0\0\0hello",
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x08\0\0\0\0\0\0\0{"a":{}}',
    ],
)
def test_what_is_not_safetensors_is_refused(file_root, data):
    files = {"model.safetensors": data}
    ref = write_files(f"{file_root}/p", "policy/1", files, parents={}, attributes={})
    with pytest.raises(RecordError, match=r"model\.safetensors"):
        shown(ref.uri)


def test_reports_show_scalars_sources_and_mini_batches(file_root):
    write_report(
        f"{file_root}/update.json",
        UpdateReport({"loss": 0.25}, [{"grad_norm": 1.5}, {"loss": 2.0}], {"iteration": 3}),
    )
    output = shown(f"{file_root}/update.json")
    assert lines_with(output, "iteration")[0][1] == "3"
    assert lines_with(output, "0.25")[0] == ["loss", "0.25"]
    assert [c[1:] for c in lines_with(output, "-", "│")] == [["1.5", "-"], ["-", "2"]]
    digest = write_report(
        f"{file_root}/eval.json", EvalReport({"accuracy": 0.5}, {"sums": {"pass_at_4": 0.75}}, {})
    )
    output = shown(f"{file_root}/eval.json#sha256={digest}")
    assert lines_with(output, "sums")[0][1] == "pass_at_4 0.75"
    with pytest.raises(RecordError, match="must have the sha256"):
        shown(f"{file_root}/eval.json#sha256={'0' * 64}")


def test_other_documents_show_as_they_are(file_root):
    store.write(f"{file_root}/x.json", b'{"b": [1], "a": "\\u001b"}')
    assert shown(f"{file_root}/x.json").splitlines()[1] == '  "a": "\\u001b",'
    store.write(f"{file_root}/report.md", b"# Title\n\x1b[31m\xff")
    assert shown(f"{file_root}/report.md").splitlines() == ["# Title", "\\x1b[31m\ufffd"]


@pytest.fixture
def run_root(store_root):
    """A run of two iterations with everything that stages leave."""
    run = {"config": {"run": {"seed": 0}}, "config_sha256": "c0", "code_version": "0"}
    store.write(layout.run_file(store_root), json.dumps(run).encode())
    facts = {"config_sha256": "c0", "policy_version": 1}
    for number in (1, 2):
        for shard in (0, 1):
            rollouts = random_rollouts(shard, groups=number)
            write_set(
                layout.rollouts(store_root, number, shard), rollouts, parents={}, attributes={}
            )
        entry = {"iteration": number, "stage": "reward", "shard": 0, "state": "done"}
        entry |= {"start_seconds": 1.0, "seconds": 2.0, "metrics": {"accuracy_mean": number / 4}}
        store.write(layout.stage_log(store_root, "reward", number, 0), json.dumps(entry).encode())
    write_report(layout.update(store_root, 1), UpdateReport({"loss": 0.75, "mismatch_k3": 0.01}))
    write_files(layout.policy(store_root, 1), "policy/1", {"a": b"1"}, parents={}, attributes=facts)
    write_report(f"{layout.evaluation(store_root, 1)}/report.json", EvalReport({"accuracy": 0.5}))
    store.write(f"{layout.evaluation(store_root, 1)}/notes.json", b"{}")
    pin = f"{layout.policy(store_root, 1)}#sha256={'0' * 64}"
    best = {"schema": "best-policy/1", "pin": pin, "policy_version": 1}
    best |= {"accuracy": 0.5, "evaluated": [0, 1]}
    store.write(layout.best_policy(store_root), json.dumps(best).encode())
    entry = {"iteration": 2, "stage": "train", "shard": 0, "state": "failed", "error": "[red]boom"}
    store.write(layout.stage_log(store_root, "train", 2, 0), json.dumps(entry).encode())
    return store_root


def test_a_run_root_shows_iterations_policies_evaluations_and_stages(run_root):
    output = shown(run_root)
    assert lines_with(output, "config_sha256")[0][1] == "c0"
    assert lines_with(output, "seed")[0] == ["run", '{"seed": 0}']
    rows = output.splitlines()
    # The course of the run comes first: accuracy, reward, loss, ..., k3, held-out accuracy.
    assert rows[0] == "iterations"
    assert [line.replace("│", "").split() for line in rows[3:5]] == [
        ["1", "0.25", "-", "0.75", "-", "-", "-", "0.01", "0.5"],
        ["2", "0.5", "-", "-", "-", "-", "-", "-", "-"],
    ]
    assert lines_with(output, "policies/00001")[0][1:] == ["policy/1", '{"policy_version": 1}']
    assert lines_with(output, "accuracy 0.5")[0][0] == "evals/00001/report.json"
    best = lines_with(output, "best of the policies 0, 1: ")[0]
    assert best[0] == "policies/best.json"
    assert best[1].endswith(f"policies/00001#sha256={'0' * 64}")
    assert lines_with(output, "boom")[0] == ["2", "train", "0", "failed", "-", "-", "[red]boom"]


def test_a_folder_of_sets_lists_them_and_a_damaged_one(run_root):
    folder = layout.iteration(run_root, 1)
    store.write(f"{folder}/rewards/manifest.json", b"{")
    output = shown(folder)
    assert lines_with(output, "rollouts/01")[0] == ["rollouts/01", "rollouts/2", "4"]
    assert lines_with(output, "damaged")[0][0] == "rewards"
    assert lines_with(shown(layout.logs(run_root)), "train")[0][0] == "00002-train-00.json"


def test_nothing_at_a_uri_is_told(store_root):
    with pytest.raises(ObjectMissing, match="nothing is there"):
        shown(f"{store_root}/none")
    store.write(f"{store_root}/run.json", b"[]")
    with pytest.raises(RecordError, match="must be a JSON object"):
        shown(store_root)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "file:///no/such/place"], 1, "nothing is there"),
        (["show", "s3://bucket/../x"], 2, "`..` segment"),
        (["show", "ftp://x/y"], 2, "must begin with"),
        (["show", "file:///x#sha256=1"], 1, "a pinned URI must read"),
        (["show", " "], 2, "must be a URI or a path"),
        (["show", "a\0b"], 2, "must not hold"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(capsys, arguments, code, words):
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("planish: ")
    assert words in printed.err


def test_a_parquet_file_of_any_origin_shows_its_columns_and_rows(store_root, tmp_path):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", "\x1b[31m"]}), sink)
    store.write(f"{store_root}/x.parquet", sink.getvalue().to_pybytes())
    output = shown(f"{store_root}/x.parquet", rows=2)
    assert lines_with(output, "a", "int64")
    assert lines_with(output, "x1b")[0] == ["b", r"\x1b[31m"]
    store.write(f"{store_root}/y.parquet", b"PAR1 and no more")
    with pytest.raises(RecordError, match="must be a Parquet"):
        shown(f"{store_root}/y.parquet")


def test_a_text_of_many_lines_is_cut(file_root):
    store.write(f"{file_root}/log.txt", b"ab\n" * 4_000)
    assert shown(f"{file_root}/log.txt").splitlines()[1_998:] == [
        "ab",
        "ab",
        "... 6000 characters more",
    ]
    for depth in (300, 900, 5000):
        store.write(f"{file_root}/deep.json", b"[" * depth + b"]" * depth)
        assert shown(f"{file_root}/deep.json").startswith("[")


@pytest.mark.long
def test_a_large_shard_is_shown_in_bounded_memory(tmp_path):
    rows, tokens = 2_500, 4_000
    generator = np.random.default_rng(0)
    lists = np.arange(0, rows * tokens + 1, tokens)
    rollouts = build_rollouts(
        [[1]] * rows,
        [[]] * rows,
        response_tokens=Ragged(generator.integers(0, 150_000, rows * tokens, np.int32), lists),
        rollout_logprobs=Ragged(-generator.random(rows * tokens, np.float32), lists),
        policy_version=Ragged(np.ones(rows * tokens, np.int32), lists),
        response=[generator.bytes(1_000).hex() for _ in range(rows)],
    )
    ref = write_set(f"file://{tmp_path}/set", rollouts, parents={}, attributes={})
    shard = tmp_path / "set" / "shard-00000.parquet"
    assert shard.stat().st_size > 60e6
    for place in (ref.uri, str(shard)):
        code = f"from planish.__main__ import main\nassert main(['show', {place!r}]) == 0"
        megabytes, printed = peak_megabytes(code)
        assert f"row 0 of {rows}" in printed
        assert megabytes < 450, place


@pytest.mark.slow
def test_the_program_can_be_piped_into_one_that_stops_reading(file_root):
    ref = write_set(f"{file_root}/set", random_rollouts(groups=300), parents={}, attributes={})
    command = f"{sys.executable} -m planish show {ref.uri} --rows 1000 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (ref.uri, "")


DEEP = "[" * 900 + "]" * 900
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("config", "schema", "scalars", "attributes", "minibatches", "stage", "iteration")
            )
            | st.text(max_size=6),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
PLACES = (
    layout.run_file(""),
    layout.stage_log("", "train", 1, 0),
    "/prompts/manifest.json",
    "/evals/00001/report.json",
    "/other.json",
)


def show_all(root):
    for place in (root, *(f"{root}{name}" for name in PLACES)):
        with contextlib.suppress(PlanishError):
            show(place, Console(file=io.StringIO(), width=4000), rows=1)


@pytest.mark.slow
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(VALUES, min_size=len(PLACES), max_size=len(PLACES)))
@example([{"schema": []}] * len(PLACES))
def test_documents_of_any_shape_are_shown_or_refused(file_root, documents):
    for place, document in zip(PLACES, documents, strict=True):
        store.write(f"{file_root}{place}", json.dumps(document).encode())
    show_all(file_root)


@pytest.mark.parametrize("schema", ["update/1", "prompts/1"])
@pytest.mark.parametrize(
    "value", [DEEP, "9" * 4000, "NaN", "1e999", '"\\ud800"', '{"a": ' + DEEP + "}"]
)
def test_documents_of_strange_values_are_shown_or_refused(file_root, schema, value):
    names = ("config", "scalars", "attributes")
    fields = ", ".join(f'"{name}": {value}' for name in names)
    for place in PLACES:
        data = f'{{"schema": "{schema}", {fields}}}'.encode()
        store.write(f"{file_root}{place}", data)
    show_all(file_root)


def test_a_document_has_a_limit(file_root):
    store.write(f"{file_root}/x.json", b" " * (65 << 20))
    with pytest.raises(RecordError, match="at most 67108864 bytes"):
        read_json(f"{file_root}/x.json")


@pytest.mark.parametrize("place", ["file:///dev/zero", "/dev/null"])
def test_a_device_is_no_document(place):
    with pytest.raises(ObjectMissing, match="nothing is there"):
        show(place, Console(file=io.StringIO()), rows=1)
