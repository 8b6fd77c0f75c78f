"""Sharded tensors, objects and factories of megatron-core, without starting any ranks."""

import io

import pytest
import torch

from planish.base.errors import LayoutMismatch
from planish.checkpoint.adapters.base import collect
from tests.integration import ckpt_memory as memory

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def mapping():
    from megatron.core.dist_checkpointing import mapping

    return mapping


def whole(mapping, key, data, **options):
    return mapping.ShardedTensor.from_rank_offsets(key, data, **options)


def interleaved(mapping, data):
    """A factory whose parts are copies: even and odd rows."""

    def build(key, tensor, replica_id, flattened_range):
        return {
            "even": whole(mapping, f"{key}.even", tensor[0::2].clone(), replica_id=replica_id),
            "odd": whole(mapping, f"{key}.odd", tensor[1::2].clone(), replica_id=replica_id),
        }

    def merge(parts):
        return torch.stack([parts["even"], parts["odd"]], 1).flatten(0, 1)

    return mapping.ShardedTensorFactory("w", data, build, merge)


def test_a_factory_that_copies_is_merged_into_its_parameter_after_a_load(mapping):
    source, target = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.zeros(4, 3))
    optimizers = [torch.optim.AdamW([p], lr=0.5) for p in (source, target)]
    source.grad = torch.randn(4, 3)
    optimizers[0].step()
    states = [
        {"model": {"w": interleaved(mapping, p)}, "optimizer": o}
        for p, o in zip((source, target), optimizers, strict=True)
    ]
    saved = memory.save(states[0], "megatron")
    assert sorted(key[2] for key in saved.tensors) == [
        *("w.even", "w.even.exp_avg", "w.even.exp_avg_sq", "w.even.param_group", "w.even.step"),
        *("w.odd", "w.odd.exp_avg", "w.odd.exp_avg_sq", "w.odd.param_group", "w.odd.step"),
    ]
    memory.load(saved, states[1], "megatron")
    assert torch.equal(source, target)
    ours, theirs = optimizers[0].state[source], optimizers[1].state[target]
    assert all(torch.equal(ours[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_objects_come_back_and_empty_ones_are_not_stored(mapping):
    def state(first, second):
        return {
            "a": mapping.ShardedObject("extra", first, (2,), (0,)),
            "b": mapping.ShardedObject("extra", second, (2,), (1,)),
            "none": mapping.ShardedObject("nothing", None, (1,), (0,)),
            "note": 7,
        }

    source = state({"amax": torch.ones(2), "n": 3}, io.BytesIO(b"raw"))
    target = state(None, None) | {"note": 0}
    saved = memory.save({"model": source}, "megatron")
    assert sorted(key[1:] for key in saved.tensors) == [
        *(("extra", "extra/shard_0_2"), ("extra", "extra/shard_1_2"))
    ]
    memory.load(saved, {"model": target}, "megatron")
    assert target["a"].data["amax"].tolist() == [1.0, 1.0]
    assert target["a"].data["n"] == 3
    assert target["b"].data.getvalue() == b"raw"
    assert target["note"] == 7
    other = {"a": mapping.ShardedObject("extra", None, (3,), (0,))}
    with pytest.raises(LayoutMismatch, match="objects cannot be resharded"):
        memory.load(saved, {"model": other}, "megatron")


def test_what_is_no_megatron_module_or_optimizer_is_refused():
    with pytest.raises(TypeError, match="must have `sharded_state_dict`"):
        collect("main", {"model": torch.nn.Linear(1, 1)}, "megatron", for_load=False)

    class MixedPrecision:
        float16_groups = ()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)

    with pytest.raises(TypeError, match="must be a torch optimizer over the model's"):
        collect("main", {"optimizer": MixedPrecision()}, "megatron", for_load=False)
