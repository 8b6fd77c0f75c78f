"""The reshard pipeline through kfp's local runner: any layout to any other, verified, resumed."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from planish import store
from planish.checkpoint.convert.export_hf import encode_header
from planish.checkpoint.convert.hf_names import Form
from planish.checkpoint.convert.layouts import Layout
from planish.checkpoint.format.items import ITEM_BYTES
from planish.checkpoint.loading.fill import RAW
from planish.checkpoint.loading.reader import open_state
from planish.checkpoint.loading.slices import SliceReader
from planish.records import fetch_files, layout, write_files
from planish.store import open_store
from planish.store.documents import read_json
from tests.integration import programs, runs
from tests.unit.checkpoint.written import OBJECTS, tiny_model, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(root, source, target_layout, *options):
    """Run the pipeline; return (exit code, its output)."""
    line = ["--root", root, "--source", source, "--layout", target_layout, *options]
    environment = runs.environment()
    return programs.run("pipelines.reshard", *line, environment=environment, timeout=300.0)


def logs(root):
    """Return stage -> the entry that its newest attempt wrote."""
    names = [uri for uri in store.list_uris(layout.logs(root)) if uri.endswith(".json")]
    return {entry["stage"]: entry for entry in map(read_json, names)}


def assert_holds(place, tensors):
    opened = open_state(place)
    assert len(opened.metadata.tensors) == len(tensors)
    reader = SliceReader(opened)
    for spec, array in tensors.items():
        assert np.array_equal(reader.read(spec), array.view(RAW[ITEM_BYTES[spec.dtype]])), spec


@pytest.mark.server
def test_any_layout_becomes_another_on_a_real_server(s3_root):
    """Save as FSDP ranks, reshard for tensor-parallel ranks, and back to one."""
    root = s3_root
    tensors = tiny_model(layers=1)
    saved = Layout.parse("fsdp=3")
    pin = write_checkpoint(f"{root}/saved", tensors, saved.boxes, num_ranks=3)
    code, output = run(f"{root}/first", pin, "tp=2")
    assert code == 0, output[-3000:]
    made = f"{root}/first/tp-2"
    assert_holds(made, tensors)
    assert open_state(made).metadata.objects == OBJECTS
    entries = logs(f"{root}/first")
    assert {stage: entry["state"] for stage, entry in entries.items()} == {"reshard": "done"}
    assert entries["reshard"]["metrics"]["ranks"] == 2
    assert entries["reshard"]["metrics"]["compared_tensors"] == len(tensors)

    target = f"{root}/flat/step-7"
    code, output = run(f"{root}/second", made, "flat=2", "--target", target, "--parts", "model")
    assert code == 0, output[-3000:]
    assert_holds(target, {s: a for s, a in tensors.items() if s.kind == "model"})
    parent = open_state(target).metadata.header["parents"]["state"]
    assert parent == open_state(made).commit.meta_sha256

    policy = earlier_policy(f"{root}/policies/1", tensors)
    code, output = run(f"{root}/third", made, "merged", "--policy", policy)
    assert code == 0, output[-3000:]
    compared = logs(f"{root}/third")["reshard"]["metrics"]["compared_tensors"]
    assert compared == sum(spec.kind == "model" for spec in tensors)
    weights = load_file(fetch_files(f"{root}/third/merged") / "model.safetensors")
    for spec, array in tensors.items():
        if spec.kind == "model":
            assert np.array_equal(weights[spec.fqn].view(np.uint32), array)


def earlier_policy(uri, tensors):
    """Write a policy whose weights have the names, shapes and types of `tensors`."""
    forms = {s.fqn: Form(s.dtype, s.shape) for s in tensors if s.kind == "model"}
    data = encode_header(forms) + b"".join(bytes(form.nbytes) for form in forms.values())
    files = {"config.json": b"{}", "model.safetensors": data}
    return write_files(uri, "policy/1", files, parents={}, attributes={"policy_version": 1}).pin()


def test_the_same_run_again_computes_nothing(file_root):
    pin = write_checkpoint(f"{file_root}/saved", tiny_model(layers=1))
    assert run(f"{file_root}/run", pin, "fsdp=2")[0] == 0
    first = open_state(f"{file_root}/run/fsdp-2").commit
    code, output = run(f"{file_root}/run", pin, "fsdp=2")
    assert code == 0, output[-3000:]
    assert open_state(f"{file_root}/run/fsdp-2").commit == first
    assert logs(f"{file_root}/run")["reshard"]["already_done"] is True
    code, output = run(f"{file_root}/run", pin, "fsdp=4")
    assert code == 2
    assert "must hold this same wish" in output


def test_a_damaged_source_fails_the_run_and_leaves_no_result(file_root, tmp_path):
    pin = write_checkpoint(f"{file_root}/saved", tiny_model(layers=1))
    (file,) = (tmp_path / "root/saved").glob("a-*/data/main.model/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, output = run(f"{file_root}/run", pin, "tp=2", "--retain-folder", file_root,
                       "--keep-last", "1")  # fmt: skip
    assert code == 1
    assert "main.model/00000-0.safetensors" in output
    assert open_state(pin).commit.step == 7, "retention removes nothing after a failure"
    storage, key = open_store(f"{file_root}/run")
    assert [s.key for s in storage.list(key) if s.key.endswith("COMMIT")] == []
    assert logs(f"{file_root}/run")["reshard"]["state"] == "failed"
