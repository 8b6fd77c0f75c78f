"""Random streams: exact under the saved layout, new and different ones under another."""

import random

import numpy as np
import pytest
import torch

from planish.checkpoint.adapters.base import RandomStreams, collect
from tests.integration import ckpt_memory as memory


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
