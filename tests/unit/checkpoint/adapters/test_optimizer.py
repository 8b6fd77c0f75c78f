"""Optimizers: moments by name, fresh and stepped ones, groups that survive another order."""

import copy

import pytest
import torch
from torch import nn

from planish.base.errors import LayoutMismatch
from planish.checkpoint import api
from planish.checkpoint.adapters.base import collect
from tests.integration import ckpt_memory as memory


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def groups(net, order=1):
    decay = [p for p in net.parameters() if p.dim() > 1][::order]
    plain = [p for p in net.parameters() if p.dim() == 1][::order]
    return [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def adam(net, order=1, **options):
    return torch.optim.AdamW(groups(net, order)[::order], lr=0.01, **options)


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
        *("0.bias.exp_avg", "0.bias.exp_avg_sq", "0.bias.max_exp_avg_sq", "0.bias.step"),
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
    net, other = model(0), model(1)
    optimizer, second = adam(net), adam(other)
    step(other, second)
    saved = memory.save({"model": net, "optimizer": optimizer}, "plain")
    memory.load(saved, {"model": other, "optimizer": second}, "plain")
    assert len(second.state) == 0
    step(net, optimizer)
    step(other, second)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_groups_follow_their_members_into_another_order():
    net, other = model(0), model(1)
    optimizer, second = adam(net), adam(other, order=-1)
    optimizer.param_groups[0].update(lr=0.5, initial_lr=0.7, betas=(0.8, 0.9))
    step(net, optimizer)
    saved = memory.save({"model": net, "optimizer": optimizer}, "plain")
    memory.load(saved, {"model": other, "optimizer": second}, "plain")
    decay = second.param_groups[1]
    assert (decay["lr"], decay["initial_lr"], decay["betas"]) == (0.5, 0.7, (0.8, 0.9))
    assert (second.param_groups[0]["lr"], decay["weight_decay"]) == (0.01, 0.1)
    assert_equal_states(net, optimizer, other, second)


def test_a_group_of_members_with_different_options_is_refused():
    net, other = model(0), model(1)
    optimizer, second = adam(net), torch.optim.AdamW(other.parameters(), lr=0.01)
    saved = memory.save({"model": net, "optimizer": optimizer}, "plain")
    with pytest.raises(LayoutMismatch, match="saved with equal options"):
        memory.load(saved, {"model": other, "optimizer": second}, "plain")


def test_options_that_choose_a_kernel_stay_those_of_the_loading_optimizer():
    net, other = model(0), model(1)
    optimizer, second = adam(net, foreach=False), adam(other, fused=True)
    step(net, optimizer)
    saved = memory.save({"model": net, "optimizer": optimizer}, "plain")
    memory.load(saved, {"model": other, "optimizer": second}, "plain")
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
    saved = memory.save(state, "plain")
    rate = theirs[0]["a"].param_groups[0]["lr"]
    memory.load(saved, {"model": other, "optimizer": theirs[0], "scheduler": theirs[1]}, "plain")
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
    saved = memory.save({"optimizer": optimizer}, "plain")
    memory.load(saved, {"optimizer": second}, "plain")
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
    saved = memory.save({"model": net, "optimizer": optimizer}, "plain")
    memory.load(saved, {"model": other, "optimizer": second}, "plain")
    weight, copied = net[0].weight, other[0].weight
    assert optimizer.state[weight]["row_var"].shape == (4, 1)
    assert torch.equal(optimizer.state[weight]["row_var"], second.state[copied]["row_var"])
    assert second.state[copied]["calls"] == 3
    assert second.state[copied]["step"].device.type == "cpu"


def test_what_a_module_saved_a_state_dict_loads_and_the_other_way_round():
    net, other = model(0), model(1)
    optimizer, second = adam(net), adam(other)
    step(net, optimizer)
    step(other, second)
    saved = memory.save({"model": net, "optimizer": optimizer}, "plain")
    target = {"model": other.state_dict(), "optimizer": states(other, second)}
    memory.load(saved, target, "plain")
    assert_equal_states(net, optimizer, other, second)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_an_optimizer_state_dict_by_names_comes_back():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net, other = model(0), model(1)
    optimizer, second = adam(net), adam(other)
    step(net, optimizer)
    step(other, second)
    source = get_optimizer_state_dict(net, optimizer)
    target = copy.deepcopy(get_optimizer_state_dict(other, second))
    memory.load(memory.save({"optimizer": source}, "plain"), {"optimizer": target}, "plain")
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
    net, other = model(0), model(1)
    optimizer, second = adam(net), adam(other)
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
