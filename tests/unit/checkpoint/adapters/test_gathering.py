"""What saves of one state take over from each other: whatever changes is described anew."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from planish.checkpoint import api
from planish.checkpoint.adapters import base
from planish.checkpoint.adapters.base import collect
from planish.checkpoint.adapters.gathering import Descriptions
from planish.checkpoint.adapters.placement import FlatShard
from tests.integration.ckpt_memory import raw
from tests.integration.ckpt_states import read_back
from tests.thin import examples


def anew(state, framework="plain"):
    """Describe a state as if there had been no save before."""
    kept, base._descriptions = base._descriptions, Descriptions()
    try:
        return collect("main", state, framework, for_load=False)
    finally:
        base._descriptions = kept


def as_seen(collected):
    """Return all that a save takes from a collection, comparable."""
    return (
        [(i.tensor, i.boxes, i.data is not None and raw(i.data).tolist()) for i in collected.items],
        [i.data is None or i.data.dtype for i in collected.items],
        repr(collected.shared),
        collected.facts,
    )


def assert_described_rightly(state, framework="plain"):
    try:
        anew(state, framework)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            collect("main", state, framework, for_load=False)
        return None
    again = collect("main", state, framework, for_load=False)
    assert as_seen(again) == as_seen(anew(state, framework))
    return again.description


class Net(nn.Module):
    """Square weights, tied ones and twins, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.twin = nn.Parameter(self.blocks[0].weight.detach())
        self.register_buffer("mean", torch.rand(4))
        self.register_buffer("scratch", torch.rand(4), persistent=False)


def stepped(model):
    # Optimizer state is named by its parameter, and a twin has the name of the other one.
    parameters = [one for one in model.parameters() if one is not model.twin]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return optimizer


def state_of(seed=0):
    torch.manual_seed(seed)
    model = Net()
    return {"model": model, "optimizer": stepped(model), "extra": {"step": 1}}


def _untie(state):
    state["model"].second.weight = nn.Parameter(state["model"].first.weight.detach().clone())


def _half(state):
    state["model"].first.bias.data = state["model"].first.bias.data.half()


def _same_bytes_other_type(state):
    state["model"].mean.data = state["model"].mean.data.view(torch.int32)


def _same_bytes_other_shape(state):
    weight = state["model"].blocks[1].weight
    weight.data = weight.data.view(2, 8)


def _swap_first_two(state):
    inner = state["model"].blocks._modules
    inner["0"], inner["1"] = inner["1"], inner["0"]


def _first_optimizer_key_anew(state):
    held = next(iter(state["optimizer"].state.values()))
    held["exp_avg"] = held["exp_avg"].clone()


def _other_module_same_weights(state):
    model = state["model"]
    model.first, model.second = model.second, model.first


def _renamed(held, old, new):
    """Rename a key where it stands."""
    pairs = [(new if key == old else key, value) for key, value in held.items()]
    held.clear()
    held.update(pairs)


def _moments_exchanged(state):
    held = state["optimizer"].state
    (one, first), (other, second), *rest = held.items()
    held.clear()
    held.update([(other, first), (one, second), *rest])


def _counted(state):
    held = next(iter(state["optimizer"].state.values()))
    held["count"] = held.get("count", 0) + 1


CHANGES = {
    "twin apart": lambda s: setattr(s["model"].twin, "data", s["model"].twin.data.clone()),
    "twin transposed": lambda s: setattr(s["model"].twin, "data", s["model"].twin.data.t()),
    "parameter renamed": lambda s: _renamed(s["model"]._parameters, "twin", "other"),
    "module renamed where it stands": lambda s: _renamed(s["model"]._modules, "first", "zeroth"),
    "buffer renamed": lambda s: _renamed(s["model"]._buffers, "mean", "average"),
    "moment renamed": lambda s: _renamed(
        next(iter(s["optimizer"].state.values())), "exp_avg", "momentum"
    ),
    "moments exchanged": _moments_exchanged,
    "counted": _counted,
    "a step": lambda s: s["optimizer"].step(),
    "values": lambda s: [p.data.mul_(2) for p in s["model"].parameters()],
    "plain values": lambda s: s["extra"].update(step=s["extra"]["step"] + 1, note=[1.5, None]),
    "learning rate": lambda s: s["optimizer"].param_groups[0].update(lr=0.5),
    "another group": lambda s: s["optimizer"].add_param_group(
        {"params": [s["model"].register_parameter("late", nn.Parameter(torch.rand(2)))
                    or s["model"].late]}
    ),
    "new parameter": lambda s: s["model"].register_parameter("new", nn.Parameter(torch.rand(3))),
    "parameter is none": lambda s: s["model"].first.register_parameter("bias", None),
    "new module": lambda s: s["model"].add_module("more", nn.Linear(4, 2)),
    "modules swapped": _swap_first_two,
    "equal modules swapped": _other_module_same_weights,
    "module replaced": lambda s: setattr(s["model"], "second", nn.Linear(4, 4)),
    "module renamed": lambda s: s["model"].add_module("x", s["model"]._modules.pop("second")),
    "module gone": lambda s: s["model"].add_module("second", None),
    "data replaced": lambda s: setattr(s["model"].first.weight, "data", torch.rand(4, 4)),
    "transposed in place": lambda s: s["model"].first.weight.data.t_(),
    "parameter transposed": lambda s: s["model"].first.weight.detach_().t_(),
    "tied one transposed": lambda s: setattr(
        s["model"].second, "weight", nn.Parameter(s["model"].first.weight.detach().t())
    ),
    "untied": _untie,
    "half": _half,
    "same bytes, other type": _same_bytes_other_type,
    "same bytes, other shape": _same_bytes_other_shape,
    "buffer not saved any more": lambda s: s["model"]._non_persistent_buffers_set.add("mean"),
    "buffer saved from now on": lambda s: s["model"]._non_persistent_buffers_set.clear(),
    "scratch replaced": lambda s: setattr(s["model"], "scratch", torch.rand(5)),
    "frozen": lambda s: s["model"].requires_grad_(False),
    "moment replaced": _first_optimizer_key_anew,
    "moment gone": lambda s: next(iter(s["optimizer"].state.values())).pop("exp_avg", None),
    "moments lost": lambda s: s["optimizer"].state.clear(),
    "new optimizer": lambda s: s.update(optimizer=torch.optim.Adam(s["model"].parameters())),
    "nothing among the moments": lambda s: s["optimizer"].state[
        next(s["model"].parameters())
    ].update(momentum_buffer=None),
    "a scheduler": lambda s: s.update(scheduler={"last_epoch": 3}),
    "no optimizer": lambda s: s.pop("optimizer", None) and s.pop("extra", None),
    "copied": lambda s: s.update(copy.deepcopy(s)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_is_described_anew_where_it_must_be_after(name):
    state = state_of()
    assert_described_rightly(state)
    for _ in range(2):
        with contextlib.suppress(KeyError, AttributeError, RuntimeError, ValueError):
            CHANGES[name](state)
        assert_described_rightly(state)
        assert_described_rightly(state)


@pytest.mark.slow
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=6), st.integers(0, 3))
@settings(max_examples=examples(50), deadline=None)
def test_changes_in_any_order_are_seen(names, seed):
    state = state_of(seed)
    assert_described_rightly(state)
    for name in names:
        try:
            CHANGES[name](state)
        except (KeyError, AttributeError, RuntimeError, ValueError, StopIteration):
            continue  # An earlier change has taken away what this one is about.
        assert_described_rightly(state)


def test_a_state_that_trains_is_described_once():
    state = state_of()
    first = assert_described_rightly(state)
    assert first is not None
    for _ in range(3):
        state["optimizer"].step()
        state["extra"]["step"] += 1
        assert assert_described_rightly(state) is first


READABLE = set(CHANGES) - {"half", "same bytes, other type"}
"""Those after which `read_back` knows all types."""


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.sampled_from(sorted(READABLE)), min_size=1, max_size=3))
def test_what_is_saved_again_is_what_the_state_holds(names):
    state = state_of()
    for number, name in enumerate(["a step", *names]):
        try:
            CHANGES[name](state)
            expected = anew(state)
        except (KeyError, AttributeError, RuntimeError, ValueError, StopIteration):
            return
        api.save("mem://again/x", state, step=number, overwrite=True).result(30)
        _, _, tensors, _ = read_back("mem://again/x")
        assert len(tensors) == len(expected.items)
        for item in expected.items:
            spec = item.tensor
            found = torch.from_numpy(tensors[spec.role, spec.kind, spec.fqn])
            assert torch.equal(raw(found), raw(item.data.resolve_neg())), spec.fqn


class Extra(nn.Linear):
    """A module with a value of its own that is no tensor."""

    def get_extra_state(self):
        return {"count": self.count}


class Odd(nn.Linear):
    """A module that decides at each save what belongs to its state."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)


def test_modules_with_values_of_their_own_are_asked_each_time():
    model = Extra(2, 2)
    for count in range(3):
        model.count = count
        found = collect("main", {"model": model}, "plain", for_load=False)
        assert found.shared["model"]["extra_state"] == {"_extra_state": {"count": count}}
        assert found.description is None


def test_modules_that_choose_what_they_save_are_described_each_time():
    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_post_hook(lambda *_: None)
    for model in (Odd(2, 2), hooked):
        for _ in range(2):
            found = collect("main", {"model": model}, "plain", for_load=False)
            assert found.description is None


@pytest.mark.parametrize("view", ["conjugate", "negative"])
def test_conjugates_and_negatives_over_the_same_bytes_are_resolved(view):
    numbers = torch.randn(3, 2, dtype=torch.complex64)
    pair = {"conjugate": (numbers, numbers.conj()), "negative": (numbers.imag, numbers.conj().imag)}
    values = torch.empty(0)
    for number, data in enumerate(pair[view]):
        values = data if number == 0 else values
        values.data = data
        api.save("mem://again/y", {"model": {"w": values}}, step=number, overwrite=True).result(30)
        target = torch.zeros(data.shape, dtype=data.dtype)
        api.load("mem://again/y", {"model": {"w": target}})
        assert torch.equal(target, data.resolve_conj().resolve_neg())


def test_state_dicts_and_flat_shards_are_described_by_their_memory():
    data = torch.rand(8)

    def state(start, stop):
        shard = FlatShard("w", (4, 2), (0, 0), (4, 2), start, stop, data[start:stop])
        return {"model": {"a": {"b": data}, "list": [data.view(2, 4)]}, "optimizer": [shard]}

    first = assert_described_rightly(held := state(2, 6), "flat")
    assert first is not None
    assert assert_described_rightly(held, "flat") is first
    held["optimizer"] = state(2, 8)["optimizer"]
    assert assert_described_rightly(held, "flat") is not first
    held["model"]["a"] = {"c": data}
    assert_described_rightly(held, "flat")


@pytest.fixture(name="mesh")
def _mesh():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_other_placements_over_the_same_bytes_are_seen(mesh):
    local = torch.rand(4, 4)
    model = nn.Linear(4, 4, bias=False)
    seen = []
    for placements in ([Shard(0)], [Shard(0)], [Shard(1)], [Replicate()]):
        weight = DTensor.from_local(local, mesh, placements)
        model.weight = nn.Parameter(weight, requires_grad=False)
        seen.append(assert_described_rightly({"model": model}, "fsdp2"))
    assert None not in seen
    assert assert_described_rightly({"model": model}, "fsdp2") is seen[-1]
    assert len(set(seen[1:])) == 3
    model.weight._spec = DTensor.from_local(local, mesh, [Shard(0)])._spec
    assert assert_described_rightly({"model": model}, "fsdp2") is not seen[-1]


@pytest.mark.slow
def test_a_description_keeps_no_tensor_and_no_module_alive():
    state = state_of()
    collect("main", state, "plain", for_load=False)
    collect("main", state, "plain", for_load=False)
    tensors = [*state["model"].parameters(), *state["model"].buffers()]
    tensors += [v for held in state["optimizer"].state.values() for v in held.values()]
    watched = [weakref.ref(one) for one in [*tensors, *state["model"].modules()]]
    del state, tensors
    gc.collect()
    assert [one() for one in watched if one() is not None] == []
