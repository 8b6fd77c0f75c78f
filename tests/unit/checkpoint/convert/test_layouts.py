import itertools

import numpy as np
import pytest

from planish.base.errors import ConfigError
from planish.checkpoint.convert.layouts import Layout, tensor_parallel_dim
from planish.checkpoint.format.items import TensorSpec


def spec(fqn, *shape):
    return TensorSpec("main", "model", fqn, "F32", shape)


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


SHAPES = [(), (1,), (7,), (5, 3), (3, 5), (2, 3, 4), (0, 3), (64, 1)]


@pytest.mark.parametrize("text", ["dp=3", "fsdp=4", "flat=3", "tp=2", "fsdp=3,tp=2", "flat=2,tp=3"])
def test_each_element_belongs_to_exactly_one_rank_of_each_copy(text):
    layout = Layout.parse(text)
    names = ("q_proj.weight", "down_proj.weight", "norm.weight")
    for shape, name in itertools.product(SHAPES, names):
        tensor = spec(name, *shape)
        seen = np.zeros(shape, np.int64)
        for rank in range(layout.num_ranks):
            for box in layout.boxes(tensor, rank):
                place = zip(box.offsets, box.lengths, strict=True)
                seen[tuple(slice(o, o + n) for o, n in place)] += 1
        whole_copies = (
            layout.num_ranks
            if tensor_parallel_dim(name, len(shape)) is None
            else (layout.num_ranks // layout.tp * layout.tp // layout.tp)
        )
        expected = whole_copies // (layout.fsdp * layout.flat)
        assert (seen == expected).all(), (shape, name)
