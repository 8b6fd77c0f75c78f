"""Boxes of DTensors from meshes and placements, against torch's own and against a tiling."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from planish.base.errors import LayoutMismatch
from planish.checkpoint.adapters.base import RandomStreams, collect
from planish.checkpoint.adapters.placement import shard_box
from tests.integration import ckpt_memory as memory
from tests.thin import examples


@st.composite
def sharded(draw):
    """Return a shape, a mesh, and placements on it."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    placements = tuple(
        draw(st.one_of(st.just(Replicate()), dims.map(Shard))) for _ in range(len(mesh))
    )
    return shape, mesh, placements


def covered(shape, mesh, placements):
    """Return how often the boxes of all coordinates cover each element."""
    count = np.zeros(shape, int)
    for coordinate in itertools.product(*map(range, mesh)):
        box, fault = shard_box(shape, mesh, coordinate, placements, ())
        assert fault == ""
        count[tuple(map(slice, box.offsets, box.ends))] += 1
    return count


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(sharded())
def test_boxes_of_plain_shards_are_those_of_torch_and_tile_the_tensor(case):
    shape, mesh, placements = case
    for coordinate in itertools.product(*map(range, mesh)):
        box, _ = shard_box(shape, mesh, coordinate, placements, ())
        local, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        assert box.lengths == tuple(local)
        if box.volume:
            assert box.offsets == tuple(offset)
    copies = math.prod(n for n, p in zip(mesh, placements, strict=True) if p == Replicate())
    assert (covered(shape, mesh, placements) == copies).all()


@settings(max_examples=examples(200))
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.integers(1, 3))
def test_tensor_parallelism_cuts_before_fsdp_whatever_divides(data, tensor, rows, columns):
    shape, mesh = (rows, columns), (data, tensor)
    placements = (_StridedShard(0, split_factor=tensor), Shard(0))
    values = torch.arange(rows * columns).view(shape)
    for d, t in itertools.product(range(data), range(tensor)):
        box, fault = shard_box(shape, mesh, (d, t), placements, ())
        assert fault == ""
        outer = values.chunk(tensor)
        mine = outer[t] if t < len(outer) else values[:0]
        inner = mine.chunk(data)
        mine = inner[d] if d < len(inner) else values[:0]
        assert torch.equal(values[tuple(map(slice, box.offsets, box.ends))], mine)
    assert (covered(shape, mesh, placements) == 1).all()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_cuts_is_read_from_strides_and_from_an_explicit_order(order):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

    class Mesh:
        def size(self, dim):
            return (2, 3, 2)[dim]

    mesh, shape = (2, 3, 2), (24, 5)
    entry = (ShardOrderEntry(0, order),)
    placements = DTensorSpec._convert_shard_order_to_StridedShard(entry, (Shard(0),) * 3, Mesh())
    for coordinate in itertools.product(*map(range, mesh)):
        values = torch.arange(24)
        for axis in order:
            values = values.chunk(mesh[axis])[coordinate[axis]]
        wanted = (int(values[0]), 0), (len(values), 5)
        assert tuple(shard_box(shape, mesh, coordinate, placements, ())[0]) == wanted
        explicit = shard_box(shape, mesh, coordinate, (Shard(0),) * 3, tuple(map(tuple, entry)))[0]
        assert tuple(explicit) == wanted


def test_stripes_and_pending_sums_are_no_box():
    assert (
        "stripes"
        in shard_box((8,), (2, 2), (0, 0), (_StridedShard(0, split_factor=3), Shard(0)), ())[1]
    )
    assert "Partial" in shard_box((8,), (2,), (0,), (Partial(),), ())[1]


@pytest.fixture
def mesh():
    """A mesh of eight ranks of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_a_dtensor_with_pending_sums_is_refused_by_name(mesh):
    value = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False)
    with pytest.raises(LayoutMismatch, match=r"`layer\.w` must be one box .*Partial"):
        collect("main", {"model": {"layer.w": value}}, "fsdp2", for_load=False)


def test_a_local_tensor_of_another_size_than_its_placements_say_is_refused(mesh):
    value = DTensor.from_local(
        torch.ones(3, 2), mesh, [Shard(0), Replicate()],
        shape=torch.Size((4, 2)), stride=(2, 1), run_check=False,
    )  # fmt: skip
    with pytest.raises(LayoutMismatch, match=r"local shape of \(3, 2\) where .* \(2, 2\)"):
        collect("main", {"model": {"w": value}}, "fsdp2", for_load=False)


def test_a_rank_outside_the_mesh_holds_nothing(mesh):
    part = dist.device_mesh.DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=5)
    value = DTensor.from_local(
        torch.ones(0), part, [Shard(0)], shape=torch.Size((4,)), stride=(1,), run_check=False
    )
    (item,) = collect("main", {"model": {"w": value}}, "fsdp2", for_load=False).items
    assert item.boxes == ()


def test_moments_of_a_dtensor_must_be_dtensors(mesh):
    value = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()], run_check=False)
    parameter = torch.nn.Parameter(value)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {"exp_avg": torch.zeros(2)}
    state = {"model": {"w": parameter}, "optimizer": optimizer}
    with pytest.raises(TypeError, match=r"`w\.exp_avg` must be a DTensor"):
        collect("main", state, "fsdp2", for_load=False)


@pytest.mark.parametrize("for_load", [False, True])
def test_shards_are_taken_where_a_forward_has_left_gathered_and_rounded_copies(mesh, for_load):
    model = torch.nn.Linear(2, 16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    # As the outermost module is by default.
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    shards = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert model.weight.dtype is torch.bfloat16
    for item in collect("main", {"model": model}, "fsdp2", for_load=for_load).items:
        assert item.tensor.dtype == "F32"
        assert item.data.data_ptr() == shards[item.tensor.fqn].data_ptr()


@pytest.fixture(autouse=True)
def _keep_streams():
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(own)


def streams(dp=0, size=2, seed=1, step=3):
    return RandomStreams(seed, step, {"dp": dp, "tp": 0}, {"dp": size, "tp": 1})


def draw():
    return [random.random(), random.gauss(0, 1), np.random.rand(), float(torch.rand(()))]


def saved_here():
    saved = memory.save({"random": streams()}, "plain")
    return saved, draw()


def test_the_same_layout_goes_on_with_the_same_numbers():
    np.random.standard_normal()  # Leaves a second number behind in the state.
    saved, expected = saved_here()
    draw()
    target = streams()
    assert memory.load(saved, {"random": target}, "plain") == {"rng": "exact"}
    assert (draw(), target.outcome) == (expected, "exact")


@pytest.mark.parametrize("target", [streams(size=4), streams(dp=1)], ids=["layout", "place"])
def test_another_layout_or_place_gets_new_streams(target):
    saved, expected = saved_here()
    assert memory.load(saved, {"random": target}, "plain") == {"rng": "reseeded"}
    assert not set(draw()) & set(expected)


def test_derived_streams_differ_by_seed_step_and_place_and_repeat():
    def first(**changes):
        streams(**changes).derive()
        return tuple(draw())

    cases = [{}, {"dp": 1}, {"seed": 2}, {"step": 4}, {"dp": 3, "size": 8}]
    found = [first(**case) for case in cases]
    assert len(set(found)) == len(cases)
    assert found == [first(**case) for case in cases]
    assert len({number for numbers in found for number in numbers}) == 4 * len(cases)


def test_streams_given_as_tensors_by_name_are_filled_in_place():
    source = {"random": {"torch.00000": torch.get_rng_state()}}
    expected = float(torch.rand(()))
    target = {"random": {"torch.00000": torch.zeros_like(source["random"]["torch.00000"])}}
    memory.load(memory.save(source, "plain"), target, "plain")
    torch.set_rng_state(target["random"]["torch.00000"])
    assert float(torch.rand(())) == expected
    with pytest.raises(TypeError, match=r"`random\.numpy` must be a tensor"):
        collect("main", {"random": {"numpy": 3}}, "plain", for_load=False)
