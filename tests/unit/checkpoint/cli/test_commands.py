"""`planish checkpoint ...` on small checkpoints in folders: what it prints, does and returns."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from planish.__main__ import main
from planish.checkpoint import train_state
from planish.checkpoint.convert.layouts import Layout
from planish.checkpoint.loading.reader import open_state
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.monitor import Timeline, Timing
from planish.records import fetch_files, parse_pin
from planish.store import open_store
from tests.unit.checkpoint.written import EXTRA, SHARED, tiny_model, write_checkpoint


@pytest.fixture
def run(capsys):
    """Run one command; return (exit code, standard output, standard error)."""

    def call(*words):
        code = main(["checkpoint", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def states(file_root):
    """Three checkpoints of one run, steps 5, 10 and 15; return their pins."""
    return [
        write_checkpoint(f"{file_root}/step-{step:02d}", tiny_model(seed=step), step=step)
        for step in (5, 10, 15)
    ]


def test_ls_and_latest_know_committed_checkpoints_alone(run, states, file_root, monkeypatch):
    storage, key = open_store(file_root)
    storage.put(f"{key}/step-20/a-{'0' * 26}/data/x", b"not committed")
    code, out, _ = run("ls", file_root)
    assert code == 0
    lines = [line for line in out.splitlines() if "/step-" in line]
    assert [line.split()[0] for line in lines] == ["5", "10", "15"]
    assert [entry["pin"] for entry in json.loads(run("ls", file_root, "--json")[1])] == states
    assert run("ls", f"{file_root}/nothing")[:2] == (0, "no committed checkpoint\n")
    folder = file_root.removeprefix("file://")
    monkeypatch.chdir(folder)
    for root in (file_root, folder, ".", f"{folder}/"):
        assert run("latest", root)[:2] == (0, f"{states[-1]}\n")


def test_info_says_what_a_checkpoint_holds(run, states):
    code, out, _ = run("info", states[0])
    assert code == 0
    assert "main.model" in out
    assert "ranks=1" in out
    code, out, _ = run("info", states[0], "--json")
    found = json.loads(out)
    model = sum(spec.kind == "model" for spec in tiny_model())
    elements = sum(a.size for s, a in tiny_model().items() if s.kind == "model")
    assert found["pin"] == states[0]
    assert found["step"] == 5
    assert found["states"]["main.model"] == {
        "tensors": model, "elements": elements, "bytes": 4 * elements,
        "parts": model, "files": 1, "types": ["F32"],
    }  # fmt: skip
    assert found["states"]["main.extra"]["bytes"] == len(EXTRA[SHARED])


def test_inspect_lists_tensors_by_name(run, file_root):
    layout = Layout.parse("fsdp=2")
    write_checkpoint(f"{file_root}/a", tiny_model(), layout.boxes, num_ranks=2)
    code, out, _ = run("inspect", f"{file_root}/a", "--name", "*embed_tokens.weight")
    assert code == 0
    assert "13 x 8" in out
    assert "q_proj" not in out


def test_rm_says_what_it_would_do_until_it_is_told_to(run, states, file_root):
    code, out, _ = run("rm", states[1])
    assert code == 2
    assert "would remove" in out
    assert run("latest", f"{file_root}/step-10")[0] == 0
    assert run("rm", f"{file_root}/step-10", "--yes")[0] == 0
    assert run("latest", f"{file_root}/step-10")[0] == 1


def test_retain_keeps_by_number_step_and_pin(run, states, file_root):
    options = ("--keep-last", 1, "--pin", 5)
    code, out, _ = run("retain", file_root, *options, "--dry-run")
    assert code == 0
    assert "would delete 1, would keep 2" in out
    assert len(run("ls", file_root)[1].splitlines()) >= 5
    assert "deleted 1, kept 2" in run("retain", file_root, *options)[1]
    left = json.loads(run("ls", file_root, "--json")[1])
    assert [entry["step"] for entry in left] == [5, 15]


def test_gc_tells_and_clears(run, states, file_root):
    attempt = open_state(states[0]).commit.attempt
    storage, key = open_store(file_root)
    # An attempt as old as its id says, which nobody has committed.
    old = f"00{attempt[2:]}"
    storage.put(f"{key}/step-05/a-{old}/data/x", b"left by a crash")
    assert "deleted 0, kept 4" in run("gc", file_root)[1], "one day must pass"
    code, out, _ = run("gc", file_root, "--grace-seconds", 0, "--dry-run")
    assert code == 0
    assert old in out
    run("gc", file_root, "--grace-seconds", 0)
    assert [s.key for s in storage.list(f"{key}/step-05/a-{old}")] == []
    assert run("info", states[0])[0] == 0


def test_reshard_prints_the_pin_of_the_result_last(run, states, file_root):
    code, out, _ = run("reshard", states[2], f"{file_root}/tp", "tp=2", "--parts", "model")
    assert code == 0
    first, pin = out.splitlines()
    assert "for 2 ranks" in first
    assert open_state(pin).metadata.header["layout"] == "tp=2"
    code, out, _ = run("reshard", states[2], f"{file_root}/tp", "tp=2", "--parts", "model")
    assert out.splitlines() == ["already there", pin]


@pytest.mark.slow
def test_report_prints_the_timings_of_a_save_or_load(run, states, file_root):
    storage, key = open_store(f"{file_root}/step-05")
    attempt = open_state(states[0]).commit.attempt
    records = [Timing(0, "save", "main.model", "upload", 1.0, 3.0, 1 << 20, host="node-7")]
    monitor.store_timings(storage, key, attempt, Timeline(records))
    code, out, _ = run("report", states[0])
    assert code == 0
    assert "1 rank on 1 machine, 2.00 s" in out
    assert "512.0 KiB/s" in out
    assert "node-7" in out
    records = [Timing(3, "load", "main.model", "read", 1.0, 5.0, 4 << 20, host="node-8")]
    monitor.store_timings(storage, key, attempt, Timeline(records), "load")
    code, out, _ = run("report", states[0], "--load")
    assert code == 0
    assert "1 rank on 1 machine, 4.00 s" in out
    assert "1.0 MiB/s" in out
    assert "node-8" in out


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("info", "{root}/none"), 1, "COMMIT"),
        (("inspect", "{root}/none"), 1, "COMMIT"),
        (("report", "{root}/none"), 1, "COMMIT"),
        (("latest", "{root}/none"), 1, "must hold a committed checkpoint"),
        (("rm", "{root}/none", "--yes"), 1, "must hold a committed checkpoint"),
        (("report", "{root}/step-05", "--load"), 1, "no load was asked to keep them"),
        (("report", "{root}/step-05"), 1, "timing records"),
        (("import-dcp", "{root}/none", "{root}/x"), 1, ".metadata"),
        (("reshard", "{root}/step-05", "{root}/step-10", "tp=4"), 1, "must be free"),
        (("ls", "gopher://x/y"), 2, "gopher"),
        (("retain", "{root}", "--keep-last", "0"), 2, "`keep_last` must be at least 1"),
        (("reshard", "{root}/step-05", "{root}/x", "pp=4"), 2, "pp=4"),
        (
            ("export-hf", "{root}/step-05", "{root}/x", "--source", "no/such/folder"),
            2,
            "`--source`",
        ),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
@pytest.mark.usefixtures("states")
def test_what_can_not_be_done_is_one_line_and_an_exit_code(run, file_root, words, code, told):
    found, out, err = run(*(word.replace("{root}", file_root) for word in words))
    assert (found, out) == (code, "")
    assert err.startswith("planish: ")
    assert told in err
    assert len(err.splitlines()) == 1


def test_verify_names_the_damaged_object_and_block(run, states, file_root, tmp_path):
    code, out, _ = run("verify", states[0])
    assert code == 0
    assert "every block intact, 5 objects, 25 tensors" in out
    (file,) = (tmp_path / "root/step-05").glob("a-*/data/main.optim/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, out, _ = run("verify", states[0])
    assert code == 1
    assert "1 faults" in out
    assert "data/main.optim/00000-0.safetensors" in out
    assert run("verify", states[0], "--level", "size")[0] == 0
    file.unlink()
    code, out, _ = run("verify", states[0], "--level", "size")
    assert (code, "is missing" in out) == (1, True)


def test_diff_lists_what_differs_and_returns_one(run, file_root):
    tensors = tiny_model()
    one = write_checkpoint(f"{file_root}/a", tensors)
    name = "model.layers.1.norm.weight"
    changed = {s: a.copy() for s, a in tensors.items() if s.fqn != "lm_head.weight"}
    for spec, array in changed.items():
        if spec.fqn == name:
            array[3] ^= 1
    other = write_checkpoint(f"{file_root}/b", changed)
    code, out, _ = run("diff", one, other)
    assert code == 1
    assert "2 differences; 23 tensors are equal" in out
    (line,) = [line for line in out.splitlines() if name in line]
    assert line.split("│")[2].strip() == "1"
    assert "only in the first" in out
    assert run("diff", one, other, "--limit", 1)[1].count("│") < out.count("│")


def test_export_hf_writes_weights_beside_the_files_of_a_folder(run, states, file_root, tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"the weights of another model")
    code, out, _ = run("export-hf", states[0], f"{file_root}/hf", "--source", source)
    assert code == 0
    folder = fetch_files(*parse_pin(out.strip())[:1], sha256=parse_pin(out.strip())[1])
    weights = load_file(folder / "model.safetensors")
    model = {s.fqn: a for s, a in tiny_model(seed=5).items() if s.kind == "model"}
    assert weights.keys() == model.keys()
    for name, array in model.items():
        assert np.array_equal(weights[name].view(np.uint32), array)
    code, out, _ = run("reshard", states[0], f"{file_root}/hf2", "merged", "--source", source)
    assert code == 0
    code, _, _ = run("export-hf", states[0], f"{file_root}/hf3", "--source", f"{file_root}/hf")
    assert code == 0
    assert (fetch_files(f"{file_root}/hf3") / "config.json").read_text() == "{}"


def test_torch_folders_are_imported_and_exported(run, states, file_root, tmp_path):
    folder = tmp_path / "dcp"
    code, out, _ = run("export-dcp", states[0], folder)
    assert (code, out.strip()) == (0, f"written {folder}")
    assert (folder / ".metadata").exists()
    code, out, _ = run("import-dcp", folder, f"{file_root}/back", "--step", 5)
    assert code == 0
    assert run("diff", states[0], out.strip())[1].count("only in") == 0
    code, _, err = run("export-dcp", states[0], folder)
    assert code == 2
    assert "must be empty" in err


def test_the_pin_of_a_train_state_means_the_checkpoint_behind_it(run, file_root):
    weights = {"model.norm.weight": torch.arange(4.0)}
    state = {"model": weights, "extra": {"step": 3}}
    ref = train_state.save(f"{file_root}/s", state, parents={}, attributes={"step": 3})
    code, out, _ = run("info", ref.pin(), "--json")
    assert code == 0
    found = json.loads(out)
    assert found["pin"] != ref.pin()
    assert found["step"] == 3
    assert run("verify", ref.pin())[0] == 0
    assert run("diff", ref.pin(), found["pin"])[1].startswith("equal: 1 tensors, 16 B")
