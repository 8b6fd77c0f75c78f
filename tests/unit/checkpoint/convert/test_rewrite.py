import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from planish.base.errors import CheckpointCorrupt, CheckpointExists, CheckpointNotFound, ConfigError
from planish.checkpoint.convert import diff as module
from planish.checkpoint.convert.diff import diff
from planish.checkpoint.convert.layouts import Layout, tensor_parallel_dim
from planish.checkpoint.convert.rewrite import rewrite
from planish.checkpoint.format.items import ITEM_BYTES, TensorSpec
from planish.checkpoint.loading.fill import RAW
from planish.checkpoint.loading.reader import BlockReader, check_objects, open_state
from planish.checkpoint.loading.slices import SliceReader
from planish.store import open_store
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.planned import random_tiling
from tests.unit.checkpoint.written import EXTRA, OBJECTS, tiny_model, write_checkpoint

_numbers = itertools.count()
LAYOUTS = ["dp=1", "dp=3", "fsdp=7", "flat=3", "tp=2", "tp=5", "fsdp=2,tp=2", "dp=2,flat=2,tp=2"]
"""More ranks than rows, so that some hold nothing, too."""


@pytest.fixture
def root():
    """A store in memory: nothing here depends on the kind of store."""
    return f"mem://rewrite-{next(_numbers)}"


def arrays(place):
    opened = open_state(place)
    reader, tensors = SliceReader(opened), opened.metadata.tensors
    return {tensors.spec(row): reader.read(tensors.spec(row)) for row in range(len(tensors))}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for spec, array in expected.items():
        assert np.array_equal(found[spec], array.view(RAW[ITEM_BYTES[spec.dtype]])), spec


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", ["dp=1", "fsdp=3", "flat=2,tp=2"])
def test_every_layout_becomes_every_other_bit_by_bit(source, target, root):
    tensors = tiny_model(dtype="BF16")
    layout = Layout.parse(source)
    pin = write_checkpoint(f"{root}/a", tensors, layout.boxes, num_ranks=layout.num_ranks)
    made = rewrite(pin, f"{root}/b", Layout.parse(target))
    assert not made.already_done
    opened = open_state(made.pin)
    assert check_objects(opened) == []
    assert_equal(arrays(made.pin), tensors)
    assert opened.metadata.header["layout"] == str(Layout.parse(target))
    assert opened.metadata.header["parents"] == {"state": pin.partition("=")[2]}
    assert (opened.commit.step, opened.commit.roles) == (7, ("main",))
    assert opened.metadata.objects == OBJECTS
    for name, content in EXTRA.items():
        assert BlockReader(opened).read_file(name) == content


def test_a_rewrite_leaves_the_hint_to_the_newest_of_a_run_as_it_is(root):
    layout = Layout.parse("dp=1")
    first = write_checkpoint(f"{root}/run/step-7", tiny_model(), layout.boxes, num_ranks=1)
    storage, folder = open_store(f"{root}/run")
    hint = storage.get(f"{folder}/LATEST", 1000)
    rewrite(first, f"{root}/run/step-7-tp2", Layout.parse("tp=2"))
    rewrite(first, f"{root}/elsewhere/b", Layout.parse("tp=2"))
    assert storage.get(f"{folder}/LATEST", 1000) == hint
    assert [
        one.key
        for one in storage.list(folder.replace("run", "elsewhere"))
        if one.key.endswith("LATEST")
    ] == []


def test_ranks_of_the_new_layout_find_their_shard_in_a_file_of_their_own(root):
    pin = write_checkpoint(f"{root}/a", tiny_model())
    made = rewrite(pin, f"{root}/b", Layout.parse("tp=2"))
    metadata = open_state(made.pin).metadata
    row = metadata.tensor_ids["main", "model", "model.layers.0.self_attn.o_proj.weight"]
    rows = metadata.shards_of(row)
    boxes = list(zip(metadata.shards.offsets[rows].tolist(), metadata.shards.lengths[rows].tolist(),
                     strict=True))  # fmt: skip
    assert boxes == [([0, 0], [8, 4]), ([0, 4], [8, 4])]
    files = [metadata.files.keys[file] for file in metadata.shards.file[rows]]
    assert files == [f"data/main.model/0000{rank}-0.safetensors" for rank in (0, 1)]


def test_a_second_call_writes_nothing_and_gives_the_same_pin(root):
    pin = write_checkpoint(f"{root}/a", tiny_model())
    first = rewrite(pin, f"{root}/b", Layout.parse("fsdp=2"))
    storage, path = open_store(f"{root}/b")
    before = [tuple(stat) for stat in storage.list(path)]
    again = rewrite(pin, f"{root}/b", Layout.parse("fsdp=2"))
    assert again.already_done
    assert again.pin == first.pin
    assert [tuple(stat) for stat in storage.list(path)] == before


def test_another_state_in_the_place_is_refused_or_replaced(root):
    first = write_checkpoint(f"{root}/a", tiny_model(seed=1))
    second = write_checkpoint(f"{root}/c", tiny_model(seed=2))
    rewrite(first, f"{root}/b", Layout.parse("tp=2"))
    with pytest.raises(CheckpointExists, match="got step 7, layout 'tp=2'"):
        rewrite(second, f"{root}/b", Layout.parse("tp=2"))
    assert_equal(arrays(f"{root}/b"), tiny_model(seed=1))
    rewrite(second, f"{root}/b", Layout.parse("tp=2"), overwrite=True)
    assert_equal(arrays(f"{root}/b"), tiny_model(seed=2))


def test_a_policy_alone_leaves_out_optimizers_and_small_values(root):
    pin = write_checkpoint(f"{root}/a", tiny_model())
    made = rewrite(pin, f"{root}/b", Layout.parse("tp=2"), parts="model")
    assert {spec.kind for spec in arrays(made.pin)} == {"model"}
    assert open_state(made.pin).metadata.objects == {}


def test_roles_can_be_chosen(root):
    tensors = {**tiny_model(role="actor"), **tiny_model(role="critic", seed=1)}
    pin = write_checkpoint(f"{root}/a", tensors, extra=False)
    made = rewrite(pin, f"{root}/b", Layout.parse("fsdp=2"), roles=["critic"])
    assert_equal(arrays(made.pin), tiny_model(role="critic", seed=1))
    assert made.commit.roles == ("critic",)
    with pytest.raises(CheckpointNotFound, match=r"\['judge'\], got \['actor', 'critic'\]"):
        rewrite(pin, f"{root}/c", Layout.parse("fsdp=2"), roles=["judge"])


@pytest.mark.parametrize("target", ["flat=2", "tp=4"])
def test_large_tensors_stream_through_parts_and_each_byte_is_read_once(root, target):
    tensors = tiny_model(layers=1, hidden=256, vocab=9001)
    pin = write_checkpoint(f"{root}/a", tensors, Layout.parse("fsdp=3").boxes, num_ranks=3)
    made = rewrite(pin, f"{root}/b", Layout.parse(target))
    assert_equal(arrays(made.pin), tensors)
    files = open_state(pin).metadata.files
    assert sum(files.sizes) > 32 << 20
    assert made.bytes_read <= sum(files.sizes)


def test_a_damaged_source_leaves_nothing_behind(file_root, tmp_path):
    pin = write_checkpoint(f"{file_root}/a", tiny_model())
    (damaged,) = (tmp_path / "root" / "a").glob("a-*/data/main.optim/*.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 0x20
    damaged.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"main.optim/00000-0.safetensors"):
        rewrite(pin, f"{file_root}/b", Layout.parse("tp=2"))
    assert list((tmp_path / "root").glob("b/**/*.safetensors")) == []
    with pytest.raises(CheckpointNotFound):
        open_state(f"{file_root}/b")


@pytest.mark.parametrize(
    ("text", "shown", "ranks"),
    [
        ("merged", "merged", 1),
        ("tp=4", "tp=4", 4),
        ("tp=2, dp=3", "dp=3,tp=2", 6),
        ("fsdp=1", "dp=1", 1),
        ("flat=5,tp=2", "flat=5,tp=2", 10),
    ],
)
def test_a_layout_is_read_and_written_as_text(text, shown, ranks):
    layout = Layout.parse(text)
    assert str(layout) == shown
    assert layout.num_ranks == ranks
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is none of dp=N"),
        ("tp", "'tp' is none of"),
        ("pp=2", "'pp=2' is none of"),
        ("tp=0", "`tp` must be at least 1"),
        ("tp=2,tp=2", "'tp=2' is none of"),
        ("fsdp=2,flat=2", "exclude each other"),
        ("dp=99999,tp=9", "at most 65536 ranks"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_reason(text, words):
    with pytest.raises(ConfigError, match=words):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("fqn", "dims", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, 0),
        ("model.layers.0.self_attn.q_proj.bias", 1, 0),
        ("model.layers.0.self_attn.o_proj.weight", 2, 1),
        ("model.layers.0.self_attn.o_proj.bias", 1, None),
        ("model.layers.0.mlp.down_proj.weight.exp_avg_sq", 2, 1),
        ("model.norm.weight", 1, None),
        ("decoder.layers.3.mlp.linear_fc1.weight", 2, 0),
        ("decoder.layers.mlp.linear_fc1.weight", 3, 1),
        ("decoder.layers.mlp.linear_fc2.weight", 3, 2),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", 2, None),
        ("decoder.layers.3.self_attention.linear_proj.bias", 1, None),
        ("lm_head.weight", 2, 0),
        ("step", 0, None),
    ],
)
def test_linear_layers_are_cut_along_their_dimension(fqn, dims, expected):
    assert tensor_parallel_dim(fqn, dims) == expected


def tiled(seed, size):
    def boxes(spec, rank):
        pieces = random_tiling(random.Random(f"{seed} {spec.fqn}"), spec.shape)
        mine = [piece for k, piece in enumerate(pieces) if k % size == rank]
        return [box for piece in mine for box in piece]

    return boxes


@pytest.mark.slow
@pytest.mark.parametrize("window", [64, 1 << 20])
@pytest.mark.parametrize("layout", [tiled(1, 4), tiled(2, 5)])
def test_equal_states_are_equal_whatever_layouts_saved_them(monkeypatch, layout, window):
    monkeypatch.setattr(module, "WINDOW_BYTES", window)
    tensors = tiny_model()
    a = write_checkpoint(damage.fresh(), tensors)
    b = write_checkpoint(damage.fresh(), tensors, layout, num_ranks=5)
    seen = []
    found = diff(a, b, progress=lambda *numbers: seen.append(numbers))
    assert found.is_equal
    total = sum(array.nbytes for array in tensors.values())
    assert (found.num_equal, found.num_bytes) == (len(tensors), total)
    assert seen[-1] == (total, total)


def test_every_kind_of_difference_is_told(monkeypatch):
    monkeypatch.setattr(module, "WINDOW_BYTES", 16)
    w = TensorSpec("main", "model", "w", "F32", (3, 4))
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    other = values.copy()
    other[0, 2], other[2, 1] = 2.5, 12.0
    half = TensorSpec("main", "model", "h", "BF16", (2,))
    lone = TensorSpec("main", "optim", "w.exp_avg", "F32", (1,))
    nan = TensorSpec("main", "model", "n", "F32", ())
    a = write_checkpoint(damage.fresh(), {
        w: values.view(np.uint32), half: np.zeros(2, np.uint16), lone: np.zeros(1, np.uint32),
        nan: np.array(0x7FC00000, np.uint32),
    })  # fmt: skip
    b = write_checkpoint(damage.fresh(), {
        w: other.view(np.uint32), dataclasses.replace(half, dtype="F16"): np.zeros(2, np.uint16),
        nan: np.array(0x7FC00001, np.uint32),
    }, extra=False)  # fmt: skip
    found = diff(a, b)
    assert (found.only_a, found.only_b) == (["`optim.w.exp_avg`"], [])
    assert found.values == ["main"]
    assert found.differing[0][:2] == ("`model.h`", "BF16 [2] against F16 [2]")
    assert found.differing[1][:4] == ("`model.n`", "values", 1, ())
    assert math.isnan(found.differing[1].max_abs)
    assert found.differing[2] == ("`model.w`", "values", 2, (0, 2), 3.0)
    assert found.num_equal == 0
    assert not found.is_equal


def test_a_damaged_side_is_an_error_and_no_difference():
    a, b = (write_checkpoint(damage.fresh(), tiny_model()) for _ in range(2))
    damage.flip(b, "main.optim/00000-0.safetensors")
    with pytest.raises(CheckpointCorrupt) as caught:
        diff(a, b)
    assert caught.value.block == 0
    assert diff(a, b, parts=("model",)).is_equal
