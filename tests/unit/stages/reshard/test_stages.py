"""The stage of the reshard pipeline, called as its component calls it."""

import math
from contextlib import nullcontext

import pytest

from planish import store
from planish.base.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError
from planish.checkpoint.convert.export_hf import encode_header, policy_role
from planish.checkpoint.convert.hf_names import Form
from planish.checkpoint.convert.layouts import Layout
from planish.checkpoint.loading.reader import open_state
from planish.checkpoint.reshard.verify import verify
from planish.records import fetch_files, layout, read_manifest, write_files
from planish.records.manifest import manifest_uri, seal
from planish.records.refs import Ref
from planish.run.stage import PathArtifact
from planish.stages.reshard.stage import run as reshard
from planish.store.documents import read_json
from tests.unit.checkpoint.written import tiny_model, write_checkpoint


class Bench:
    """A root, a source and the artifacts of one run."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.source = write_checkpoint(f"{root}/saved", tiny_model(layers=1))

    def reshard(self, target_layout, **options):
        """Run the stage; returns the scalars of its result."""
        result = PathArtifact(str(self.folder / "result"))
        wish = {
            "target": "", "parts": "all", "role": "", "policy": "", "source": self.source,
            "retain_folder": "", "keep_last": 0, "keep_every": 0,
        }  # fmt: skip
        reshard(
            root=f"{self.root}/run", target_layout=target_layout, **{**wish, **options},
            result=result, summary=PathArtifact(str(self.folder / "summary.md")),
        )  # fmt: skip
        return self.entry()["metrics"]

    def read(self, name):
        return (self.folder / name).read_text()

    def ref(self):
        return Ref.from_json(self.read("result"))

    def entry(self):
        """Return what the stage wrote to its log."""
        return read_json(layout.stage_log(f"{self.root}/run", "reshard", 0, 0))


@pytest.fixture
def bench(file_root, tmp_path):
    (tmp_path / "out").mkdir()
    return Bench(file_root, tmp_path / "out")


def test_a_state_is_written_anew_read_back_and_described(bench):
    found = bench.reshard("tp=2")
    page = bench.read("summary.md")
    for words in ("| becomes | `tp=2`, 2 rank(s) |", "bit by bit", "Nothing was removed"):
        assert words in page
    ref = bench.ref()
    assert (ref.schema, ref.uri) == ("checkpoint/1", f"{bench.root}/run/tp-2")
    assert ref.attributes["step"] == 7
    assert found["compared_tensors"] == len(tiny_model(layers=1))
    assert found["checked_bytes"] < open_state(ref.pin()).commit.total_bytes


@pytest.mark.parametrize(
    ("target_layout", "options", "words"),
    [
        ("tp=x", {}, "'tp=x' is none of"),
        ("merged", {}, "`policy` must name a policy"),
        ("tp=2", {"parts": "weights"}, "`parts` must be `all` or `model`"),
        ("tp=2", {"role": "judge"}, r"`role` must be one of ['main'] of the source"),
        ("tp=2", {"source": "mem://nowhere/at/all"}, "`source` must be a committed checkpoint"),
    ],
)
def test_a_wish_that_can_not_be_is_told_before_anything_is_written(
    bench, target_layout, options, words
):
    with pytest.raises(SystemExit) as caught:
        bench.reshard(target_layout, **options)
    assert caught.value.code == 2
    assert words in bench.entry()["error"]
    with pytest.raises(OSError, match=r"run\.json"):
        read_json(layout.run_file(f"{bench.root}/run"))


def test_a_source_that_lacks_an_object_is_refused_at_once(bench, tmp_path):
    (file,) = (tmp_path / "root/saved").glob("a-*/data/main.model/*.safetensors")
    file.unlink()
    with pytest.raises(SystemExit) as caught:
        bench.reshard("tp=2")
    assert caught.value.code == 1
    assert "`data/main.model/00000-0.safetensors` is missing" in bench.entry()["error"]


def test_the_pin_of_a_record_around_a_checkpoint_means_the_checkpoint(bench):
    uri, _, digest = bench.source.partition("#sha256=")
    manifest, data = seal("train-state/2", 0, (), {}, {"checkpoint_sha256": digest})
    store.write(manifest_uri(uri), data)
    bench.reshard("tp=2", source=manifest.ref(uri).pin())
    config = read_json(layout.run_file(f"{bench.root}/run"))["config"]
    assert config["reshard"]["source_pin"] == bench.source
    first = bench.read("result")
    bench.reshard("tp=2", source=bench.source)
    assert bench.read("result") == first


def test_a_result_that_was_damaged_is_found_by_the_next_attempt(bench, tmp_path):
    bench.reshard("fsdp=2")
    files = (tmp_path / "root/run/fsdp-2").glob("a-*/data/main.optim/00001-0.safetensors")
    (file,) = files
    content = bytearray(file.read_bytes())
    content[-2] ^= 4
    file.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        bench.reshard("fsdp=2")
    assert caught.value.code == 1
    assert "data/main.optim/00001-0.safetensors" in bench.entry()["error"]


def test_a_result_of_another_source_is_found(bench):
    bench.reshard("fsdp=2")
    other = write_checkpoint(f"{bench.root}/other", tiny_model(layers=1, seed=3))
    with pytest.raises(CheckpointCorrupt, match=r"`model.lm_head.weight`: values, 104 elements"):
        verify(bench.ref(), other)


def test_parts_and_roles_that_were_left_out_are_not_missed(bench):
    both = {**tiny_model(layers=1, role="policy"), **tiny_model(layers=1, role="critic", seed=1)}
    source = write_checkpoint(f"{bench.root}/both", both, extra=False)
    found = bench.reshard("tp=2", source=source, parts="model", role="critic")
    expected = sum(s.role == "critic" and s.kind == "model" for s in both)
    assert found["compared_tensors"] == expected


@pytest.mark.parametrize(
    ("role", "roles", "expected"),
    [("", ["main"], "main"), ("critic", ["critic", "x"], "critic"), ("", ["judge"], "judge")],
)
def test_a_merged_policy_is_made_of_the_usual_role(role, roles, expected):
    assert policy_role(roles, role) == expected
    with pytest.raises(ConfigError, match="`role` must be one of"):
        policy_role(["a", "b"], role)


@pytest.mark.parametrize(
    ("target_layout", "keep_last", "left"),
    [("tp=2", 2, [2, 3]), ("merged", 2, [1, 2, 3]), ("tp=2", 0, [1, 2, 3])],
)
def test_retention_removes_after_success_only(bench, file_root, target_layout, keep_last, left):
    boxes = Layout.parse("dp=1").boxes
    for step in (1, 2, 3):
        write_checkpoint(f"{file_root}/c/{step}", tiny_model(layers=1), boxes, step=step)
    # A merged result needs a policy, and none is given.
    with pytest.raises(SystemExit) if target_layout == "merged" else nullcontext():
        found = bench.reshard(target_layout, retain_folder=f"{file_root}/c/", keep_last=keep_last)
        assert found["deleted"] == 3 - len(left)
    steps = []
    for step in (1, 2, 3):
        try:
            steps.append(open_state(f"{file_root}/c/{step}").commit.step)
        except CheckpointNotFound:
            continue
    assert steps == left


def earlier_policy(uri, tensors, dtype="BF16"):
    """Write a policy that has the weights' names and shapes, another type and a tokenizer."""
    weights = [spec for spec in tensors if spec.kind == "model"]
    forms = {spec.fqn: Form(dtype, spec.shape) for spec in weights}
    data = b"".join(bytes(forms[name].nbytes) for name in forms)
    files = {
        "config.json": b'{"model_type": "qwen3"}',
        "tokenizer.json": b'{"version": "1.0"}',
        "model.safetensors": encode_header(forms) + data,
    }
    return write_files(uri, "policy/1", files, parents={}, attributes={"policy_version": 4}).pin()


def test_a_state_is_merged_to_a_policy_and_compared_with_it(bench):
    policy = earlier_policy(f"{bench.root}/policies/4", tiny_model(layers=1))
    found = bench.reshard("merged", policy=policy)
    ref = bench.ref()
    assert (ref.schema, ref.uri) == ("policy/1", f"{bench.root}/run/merged")
    assert ref.attributes["role"] == "main"
    assert ref.attributes["step"] == 7
    folder = fetch_files(ref.uri, sha256=ref.manifest_sha256)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "manifest.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    weights = [s for s in tiny_model(layers=1) if s.kind == "model"]
    assert found["compared_tensors"] == len(weights)
    assert found["compared_bytes"] == 2 * sum(math.prod(s.shape) for s in weights)
    bench.reshard("merged", policy=policy)
    assert bench.ref() == ref


def test_a_merged_policy_with_one_wrong_weight_is_found(bench):
    policy = earlier_policy(f"{bench.root}/policies/4", tiny_model(layers=1))
    bench.reshard("merged", policy=policy)
    ref = bench.ref()
    folder = fetch_files(ref.uri, sha256=ref.manifest_sha256)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    del files["manifest.json"]
    weights = bytearray(files["model.safetensors"])
    weights[-1] ^= 1
    files["model.safetensors"] = bytes(weights)
    other = write_files(f"{bench.root}/other", "policy/1", files, parents={},
                        attributes=ref.attributes)  # fmt: skip
    with pytest.raises(CheckpointCorrupt, match="differs in 1 elements"):
        verify(other, bench.source)


def test_a_merged_target_that_is_taken_is_refused(bench):
    policy = earlier_policy(f"{bench.root}/policies/4", tiny_model(layers=1))
    target = f"{bench.root}/policies/4"
    with pytest.raises(SystemExit) as caught:
        bench.reshard("merged", policy=policy, target=target)
    assert caught.value.code == 1
    assert "must be free" in bench.entry()["error"]
    assert read_manifest(target).attributes["policy_version"] == 4
