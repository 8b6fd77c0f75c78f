"""Ranks that share a vLLM: what the first tells, and what it hears of one that has died."""

import json
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from planish.base.errors import PeerLost
from planish.base.parallel import Ranks
from planish.engines.vllm.team import Team

NAMES = ["a", "b", "c"]


def tell_for_ever(team):
    while True:
        team.tell("step")


def run_rank(number, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=2)
    team = Team(Ranks(number, 2), 2, 300.0)
    found = team.union(NAMES[number:2])
    if number:
        (folder / "heard.json").write_text(json.dumps([team.leads, sorted(found), team.hear()]))
        # The first rank is beyond what was heard.
        team.hear()
        os._exit(9)
    team.tell("drop", ["x", "y"])
    with pytest.raises(PeerLost, match="the ranks that share a vLLM must all live"):
        tell_for_ever(team)
    assert team.leads
    assert found == {"a", "b"}
    # What still waits for the lost rank would abort an ordinary exit now and then.
    os._exit(0)


def test_the_others_hear_the_first_which_hears_that_one_has_died(tmp_path):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(number, tmp_path)) for number in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 9]
    heard = json.loads((tmp_path / "heard.json").read_text())
    assert heard == [False, ["a", "b"], ["drop", ["x", "y"]]]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:547] closed by peer"), True),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"), True),
        (dist.DistNetworkError("the connection was reset"), True),
        (dist.DistBackendError("gloo connectFullMesh failed"), True),
        (RuntimeError("max(): Expected reduction dim to be specified"), False),
        (torch.OutOfMemoryError("no memory"), False),
        (NotImplementedError("no kernel"), False),
        (RecursionError("too deep"), False),
    ],
)
def test_only_what_gloo_raises_is_a_lost_rank(error, is_lost):
    team = Team.__new__(Team)
    with pytest.raises(PeerLost if is_lost else type(error)) as caught, team.together():
        raise error
    assert (caught.value is error) != is_lost
