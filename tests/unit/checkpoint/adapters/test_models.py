"""States of one process: exact round trips, names, ties, refusals."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from planish.base.errors import LayoutMismatch
from planish.checkpoint import api
from planish.checkpoint.adapters.base import collect, split_roles
from planish.checkpoint.adapters.models import clean, named_tensors
from planish.checkpoint.adapters.placement import NAMES, FlatShard
from tests.integration import ckpt_memory as memory


def random_bytes(dtype, shape):
    count = int(np.prod(shape)) * dtype.itemsize
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).to(torch.bool)
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def assert_same_bits(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.equal(memory.raw(a), memory.raw(b))


def round_trip(state, target, framework="plain", **options):
    saved = memory.save(state, framework)
    return memory.load(saved, target, framework, **options)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_every_type_comes_back_bit_by_bit(dtype):
    torch.manual_seed(0)
    source = random_bytes(dtype, (3, 5))
    target = torch.empty((3, 5), dtype=dtype)
    round_trip({"model": {"w": source}}, {"model": {"w": target}})
    assert_same_bits(source, target)


ODD = {
    "transposed": lambda: torch.randn(4, 6).t(),
    "sliced": lambda: torch.randn(8, 9)[1:7:2, 2:8:3],
    "storage offset": lambda: torch.randn(100)[37:49].view(3, 4),
    "scalar": lambda: torch.tensor(3.25, dtype=torch.bfloat16),
    "zero size": lambda: torch.zeros(0, 7),
    "zero size inside": lambda: torch.zeros(3, 0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one dim of many": lambda: torch.randn(1, 1, 1, 5, 1),
    "conjugate": lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.randn(3, 3) > 0,
    "not finite": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_come_back_into_plain_and_into_equally_odd_ones(name):
    torch.manual_seed(0)
    source = ODD[name]()
    expected = source.resolve_conj().resolve_neg().contiguous()
    plain = torch.zeros(source.shape, dtype=source.dtype)
    odd = ODD[name]()
    strides, pointer = odd.stride(), odd.data_ptr()
    saved = memory.save({"model": {"w": source}}, "plain")
    memory.load(saved, {"model": {"w": plain}}, "plain")
    memory.load(saved, {"model": {"w": odd}}, "plain")
    assert_same_bits(expected, plain)
    assert_same_bits(expected, odd.resolve_conj().resolve_neg().contiguous())
    assert (odd.stride(), odd.data_ptr()) == (strides, pointer)


def test_names_of_all_kinds_come_back():
    names = ["a/b", "a b", "gr\u00f6\u00dfe", "x|y", "..", "n" * 1000, "0", 0, (1, 2)]
    source = {name: torch.tensor([float(k)]) for k, name in enumerate(names)}
    target = {name: torch.zeros(1) for name in names}
    round_trip({"model": source}, {"model": target})
    assert [float(target[name]) for name in names] == list(map(float, range(len(names))))


def test_nested_states_and_values_that_are_no_tensors_come_back():
    source = {"a": {"b": [torch.ones(2), torch.zeros(1)], "n": 3}, "epoch": (1, {"x": b"y"})}
    target = {"a": {"b": [torch.zeros(2), torch.ones(1)], "n": 0}, "epoch": None}
    round_trip({"model": source}, {"model": target})
    assert target["a"]["b"][0].tolist() == [1.0, 1.0]
    assert target["a"]["b"][1].tolist() == [0.0]
    assert (target["a"]["n"], target["epoch"]) == (3, (1, {"x": b"y"}))


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "complex half": lambda: torch.ones(2).to(torch.complex32),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("part", ["model", "optimizer", "extra", "random"])
def test_tensors_that_are_not_dense_are_refused_by_name(kind, part):
    with pytest.raises(TypeError, match=r"layer\.x"):
        memory.save({part: {"layer.x": REFUSED[kind]()}}, "plain")


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("scratch", torch.rand(2), persistent=False)


def test_tied_weights_are_stored_once_with_an_alias():
    torch.manual_seed(0)
    source = Tied()
    found = collect("main", {"model": source}, "plain", for_load=False)
    assert [item.tensor.fqn for item in found.items] == [
        *("scale", "embed.weight", "body.weight", "body.bias")
    ]
    assert found.facts == {"aliases": {"head.weight": "embed.weight"}}
    untied = Tied(tied=False)
    round_trip({"model": source}, {"model": untied})
    assert torch.equal(untied.head.weight, source.embed.weight)
    assert torch.equal(untied.embed.weight, source.embed.weight)
    assert not torch.equal(untied.scratch, source.scratch)
    assert torch.equal(untied.scale, source.scale)


def test_weights_stored_apart_load_into_tied_ones_only_when_they_are_equal():
    torch.manual_seed(0)
    source, target = Tied(tied=False), Tied()
    with pytest.raises(LayoutMismatch, match=r"`head\.weight` and `embed\.weight` must be stored"):
        round_trip({"model": source}, {"model": target})
    with torch.no_grad():
        source.head.weight.copy_(source.embed.weight)
    round_trip({"model": source}, {"model": target})
    assert torch.equal(target.head.weight, source.embed.weight)


def test_wrappers_leave_no_trace_in_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)  # A module's own name, not a wrapper's.
            self.block = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2)))

    plain = ["module.weight", "module.bias", "block.0.weight", "block.0.bias"]
    assert list(named_tensors(Holder()).tensors) == plain
    assert list(named_tensors(torch.compile(Holder())).tensors) == plain
    assert list(named_tensors(nn.DataParallel(Holder())).tensors) == plain
    assert clean("_fsdp_wrapped_module.a._orig_mod._checkpoint_wrapped_module.b") == "a.b"
    source, target = Holder(), torch.compile(Holder())
    round_trip({"model": source.state_dict()}, {"model": target})
    assert torch.equal(source.block[0].weight, target.block[0].weight)


def test_extra_state_of_modules_comes_back():
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    source, target = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    source[0].count = 7
    round_trip({"model": source}, {"model": target})
    assert target[0].count == 7


class Saving(nn.Linear):
    """Saves a table and a number that are neither parameters nor buffers."""

    def __init__(self, calls=0):
        super().__init__(2, 2)
        self.table, self.calls = torch.zeros(3), calls

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "table"] = self.table
        destination[prefix + "calls"] = self.calls

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.table = state_dict.pop(prefix + "table").clone()
        self.calls = state_dict.pop(prefix + "calls")
        super()._load_from_state_dict(state_dict, prefix, *args)


def hooked(public):
    """A model whose hooks count before the state is taken, and add a tensor to it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("seen", torch.zeros(()))
    model.held, model.calls = torch.zeros(3), 0

    def add(module, state, prefix, metadata):
        state[prefix + "held"] = module.held

    def take(module, state, prefix, *_):
        module.held = state.pop(prefix + "held").clone()

    model.register_state_dict_pre_hook(lambda m, *_: m.seen.fill_(m.calls))
    if public:
        model.register_state_dict_post_hook(add)
    else:
        model._register_state_dict_hook(add)
    model.register_load_state_dict_pre_hook(take)
    return model


def test_values_that_a_module_saves_by_itself_come_back():
    source, target = (nn.Sequential(Saving(), nn.Linear(2, 1)) for _ in range(2))
    source[0].table, source[0].calls = torch.arange(3.0), 7
    states = [
        {"model": one, "optimizer": torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)}
        for one in (source, target)
    ]
    source(torch.ones(1, 2)).sum().backward()
    states[0]["optimizer"].step()
    round_trip(*states)
    assert target[0].table.tolist() == [0.0, 1.0, 2.0]
    assert target[0].calls == 7
    assert torch.equal(target[1].weight, source[1].weight)
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        moment = states[1]["optimizer"].state[mine]["momentum_buffer"]
        assert torch.equal(moment, states[0]["optimizer"].state[theirs]["momentum_buffer"])


@pytest.mark.parametrize("public", [True, False])
def test_values_that_hooks_on_a_state_dict_add_come_back(public):
    source, target = hooked(public), hooked(public)
    source.held, source.calls = torch.arange(3.0), 4
    round_trip({"model": source}, {"model": target})
    assert target.held.tolist() == [0.0, 1.0, 2.0]
    assert target.seen == 4
    assert torch.equal(target[0].weight, source[0].weight)


def test_flat_shards_become_boxes_without_a_copy():
    data = torch.arange(5.0)
    shard = FlatShard("w", (6, 4), (0, 2), (6, 2), 3, 8, data)
    found = collect("main", {"model": [shard]}, "flat", for_load=False)
    (item,) = found.items
    assert [tuple(box) for box in item.boxes] == [*(((1, 3), (1, 1)), ((2, 2), (2, 2)))]
    assert item.data.data_ptr() == data.data_ptr()


@pytest.mark.parametrize(
    ("value", "error", "told"),
    [
        ([FlatShard("w", (6, 4), (0, 3), (6, 2), 0, 5, torch.ones(5))], ValueError, "of a shard"),
        ([FlatShard("w", (6, 4), (0, 0), (6, 4), -1, 4, torch.ones(5))], ValueError, "of a shard"),
        ([FlatShard("w", (6, 4), (0, 0), (6, 4), 0, 6, torch.ones(5))], ValueError, "6 contiguous"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ValueError, r"got `a\.b` twice"),
        ({"w": torch.ones(2, 1).expand(2, 3)}, TypeError, "`w` must have a place in memory"),
        ({"a": {"deep": lambda: 1}}, TypeError, r"a\.deep"),
        (nn.Sequential(Saving(lambda: 0)), TypeError, r"0\.calls"),
    ],
)
def test_what_has_no_place_in_a_checkpoint_is_refused_by_name(value, error, told):
    with pytest.raises(error, match=told):
        collect("main", {"model": value}, "plain", for_load=False)


def test_roles_are_told_apart_from_parts():
    model = {"model": {}}
    assert split_roles(model, "plain") == {"main": (model, "plain")}
    assert split_roles(model, {"actor": "ddp"}, "actor") == {"actor": (model, "ddp")}
    both = {"actor": model, "critic": {"extra": 1}}
    assert split_roles(both, {"actor": "megatron", "critic": "fsdp2"}) == {
        "actor": (model, "megatron"),
        "critic": ({"extra": 1}, "fsdp2"),
    }
    with pytest.raises(ValueError, match="critic"):
        split_roles(both, {"actor": "plain"})
    with pytest.raises(ValueError, match=r"only the parts .* got \['weights'\]"):
        split_roles({"model": {}, "weights": {}}, "plain")
    with pytest.raises(ValueError, match="framework of role `main`"):
        split_roles(model, "deepspeed")


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def groups(net, order=1):
    decay = [p for p in net.parameters() if p.dim() > 1][::order]
    plain = [p for p in net.parameters() if p.dim() == 1][::order]
    return [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def adam(net, order=1, **options):
    return torch.optim.AdamW(groups(net, order)[::order], lr=0.01, **options)


def two_trainings():
    net, other = model(0), model(1)
    return net, other, adam(net), adam(other)


def carry(net, optimizer, other, second):
    """Save one training and load it into another."""
    round_trip({"model": net, "optimizer": optimizer}, {"model": other, "optimizer": second})


def step(net, optimizer, times=1):
    for k in range(times):
        torch.manual_seed(100 + k)
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(net, optimizer):
    return {
        f"{name}.{key}": value
        for name, parameter in net.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def assert_equal_states(net, optimizer, other, second):
    ours, theirs = states(net, optimizer), states(other, second)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_fresh_optimizer_gets_moments_and_goes_on_bit_by_bit():
    net, other = model(0), model(1)
    optimizer, second = adam(net, amsgrad=True), adam(other, amsgrad=True)
    step(net, optimizer, 3)
    saved = memory.save({"model": net, "optimizer": optimizer}, "plain")
    assert sorted(k[2] for k in saved.tensors if k[1] == "optim" and k[2].startswith("0.bias")) == [
        *("0.bias.exp_avg", "0.bias.exp_avg_sq", "0.bias.max_exp_avg_sq", "0.bias.step")
    ]
    state = {"model": other, "optimizer": second}
    found = collect("main", state, "plain", for_load=True, metadata=saved.metadata)
    assert len([item for item in found.items if item.tensor.kind == "optim"]) == 6 * 4
    assert len(second.state) == 0, "a load that fails must leave the optimizer as it was"
    memory.load(saved, state, "plain")
    assert_equal_states(net, optimizer, other, second)
    step(net, optimizer, 2)
    step(other, second, 2)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_an_optimizer_that_never_stepped_clears_one_that_did():
    net, other, optimizer, second = two_trainings()
    step(other, second)
    carry(net, optimizer, other, second)
    assert len(second.state) == 0
    step(net, optimizer)
    step(other, second)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_groups_follow_their_members_into_another_order():
    net, other = model(0), model(1)
    optimizer, second = adam(net), adam(other, order=-1)
    optimizer.param_groups[0].update(lr=0.5, initial_lr=0.7, betas=(0.8, 0.9))
    step(net, optimizer)
    carry(net, optimizer, other, second)
    decay = second.param_groups[1]
    assert (decay["lr"], decay["initial_lr"], decay["betas"]) == (0.5, 0.7, (0.8, 0.9))
    assert (second.param_groups[0]["lr"], decay["weight_decay"]) == (0.01, 0.1)
    assert_equal_states(net, optimizer, other, second)


def test_a_group_of_members_with_different_options_is_refused():
    net, other = model(0), model(1)
    optimizer, second = adam(net), torch.optim.AdamW(other.parameters(), lr=0.01)
    with pytest.raises(LayoutMismatch, match="saved with equal options"):
        carry(net, optimizer, other, second)


def test_options_that_choose_a_kernel_stay_those_of_the_loading_optimizer():
    net, other = model(0), model(1)
    optimizer, second = adam(net, foreach=False), adam(other, fused=True)
    step(net, optimizer)
    carry(net, optimizer, other, second)
    assert [group["fused"] for group in second.param_groups] == [True, True]
    assert [group["foreach"] for group in second.param_groups] == [None, None]


def test_several_optimizers_and_schedulers_come_back():
    net, other = model(0), model(1)

    def build(net):
        first = torch.optim.AdamW(net[0].parameters(), lr=torch.tensor(0.1))
        second = torch.optim.SGD([*net[1].parameters(), *net[2].parameters()], 0.1, momentum=0.9)
        schedules = [
            torch.optim.lr_scheduler.MultiStepLR(second, [1, 3], gamma=0.5),
            torch.optim.lr_scheduler.OneCycleLR(first, 0.3, total_steps=10),
        ]
        return {"a": first, "b": second}, schedules

    def run(net, optimizers, schedules, times):
        for k in range(times):
            torch.manual_seed(k)
            net(torch.randn(5, 3)).square().sum().backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()

    ours, theirs = build(net), build(other)
    run(net, *ours, 2)
    state = {"model": net, "optimizer": ours[0], "scheduler": ours[1]}
    rate = theirs[0]["a"].param_groups[0]["lr"]
    round_trip(state, {"model": other, "optimizer": theirs[0], "scheduler": theirs[1]})
    assert theirs[0]["a"].param_groups[0]["lr"] is rate, "a tensor is filled in place"
    assert_equal_states(net, ours[0]["b"], other, theirs[0]["b"])
    run(net, *ours, 3)
    run(other, *theirs, 3)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    assert ours[1][0].last_epoch == theirs[1][0].last_epoch == 5


def test_two_optimizers_of_one_parameter_are_refused():
    net = model()
    both = [torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(net.parameters(), 0.1)]
    with pytest.raises(ValueError, match=r"in one group of one optimizer, got \['0.bias'"):
        collect("main", {"model": net, "optimizer": both}, "plain", for_load=False)


def test_names_come_from_the_optimizer_where_the_state_has_no_model():
    net, other = model(0), model(1)
    optimizer = torch.optim.Adam(net.named_parameters())
    second = torch.optim.Adam(other.named_parameters())
    step(net, optimizer)
    round_trip({"optimizer": optimizer}, {"optimizer": second})
    assert_equal_states(net, optimizer, other, second)
    with pytest.raises(ValueError, match="every parameter of an optimizer must have a name"):
        collect("main", {"optimizer": adam(net)}, "plain", for_load=False)


def test_an_optimizer_with_numbers_and_odd_shapes_in_its_state_comes_back():
    net, other = model(0), model(1)
    optimizer = torch.optim.Adafactor(net.parameters(), lr=0.01)
    second = torch.optim.Adafactor(other.parameters(), lr=0.01)
    step(net, optimizer)
    for state in optimizer.state.values():
        state["calls"] = 3
    carry(net, optimizer, other, second)
    weight, copied = net[0].weight, other[0].weight
    assert optimizer.state[weight]["row_var"].shape == (4, 1)
    assert torch.equal(optimizer.state[weight]["row_var"], second.state[copied]["row_var"])
    assert second.state[copied]["calls"] == 3
    assert second.state[copied]["step"].device.type == "cpu"


def test_what_a_module_saved_a_state_dict_loads_and_the_other_way_round():
    net, other, optimizer, second = two_trainings()
    step(net, optimizer)
    step(other, second)
    carry(net, optimizer, other.state_dict(), states(other, second))
    assert_equal_states(net, optimizer, other, second)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_an_optimizer_state_dict_by_names_comes_back():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net, other, optimizer, second = two_trainings()
    step(net, optimizer)
    step(other, second)
    source = get_optimizer_state_dict(net, optimizer)
    target = copy.deepcopy(get_optimizer_state_dict(other, second))
    round_trip({"optimizer": source}, {"optimizer": target})
    assert torch.equal(
        target["state"]["0.bias"]["exp_avg"], optimizer.state[net[0].bias]["exp_avg"]
    )
    assert target["param_groups"] == source["param_groups"]


def test_a_fresh_optimizer_gets_moments_under_other_names_too(tmp_path):
    net, other = model(0), nn.ModuleDict({"body": model(1)})
    optimizer, second = adam(net), adam(other)
    optimizer.param_groups[0]["lr"] = 0.5
    step(net, optimizer)
    place = f"file://{tmp_path}/a"
    api.save(place, {"model": net, "optimizer": optimizer}, async_=False).result(60)
    state = {"model": other, "optimizer": second}
    api.load(place, state, map_fqn=lambda name: name.removeprefix("body."))
    assert_equal_states(net, optimizer, other["body"], second)
    assert second.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("part", ["model", "optim", "extra"])
def test_a_load_of_one_part_leaves_the_others_as_they_are(tmp_path, part):
    net, other, optimizer, second = two_trainings()
    step(net, optimizer)
    second.param_groups[0]["lr"] = 0.25
    before = copy.deepcopy(other.state_dict())
    place = f"file://{tmp_path}/a"
    state = {"model": net, "optimizer": optimizer, "extra": {"step": 3}}
    api.save(place, state, async_=False).result(60)
    target = {"model": other, "optimizer": second, "extra": {}}
    api.load(place, target, parts=(part,))
    source = net.state_dict() if part == "model" else before
    assert all(torch.equal(source[name], value) for name, value in other.state_dict().items())
    assert len(second.state) == (6 if part == "optim" else 0)
    assert second.param_groups[0]["lr"] == (0.01 if part == "optim" else 0.25)
    assert target["extra"] == ({"step": 3} if part == "extra" else {})
