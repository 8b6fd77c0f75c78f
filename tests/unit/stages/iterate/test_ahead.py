"""Rollouts one iteration ahead: weights on their way, and the policy that a task begins with."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from planish.base.parallel import Ranks, open_group
from planish.engines.weights import DictWeights
from planish.models.policy import checksum
from planish.records.files import weights_checksum
from planish.records.manifest import read_manifest
from planish.stages.iterate import broadcast
from planish.stages.iterate.broadcast import SentWeights, names_from_json, names_to_json, send
from planish.stages.iterate.job import Block
from planish.stages.iterate.stage import _earlier_pin
from tests.unit.stages.train.runs import start_run

CPU = torch.device("cpu")


def test_what_is_sent_is_read_in_any_order_and_summed_by_all_that_read(monkeypatch):
    monkeypatch.setattr(broadcast, "MESSAGE_BYTES", 100)
    torch.manual_seed(0)
    tensors = {f"t{n}": torch.randn(n + 1, 5) for n in range(6)}
    tensors["model.embed_tokens.weight"] = torch.randn(9, 4).bfloat16()
    tensors["bias"] = torch.randn(3, dtype=torch.float16)
    source, store = DictWeights(tensors), HashStore()
    # The files have a head that is the embedding.
    files = DictWeights({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert max(map(len, broadcast.messages(source.names()))) > 1
    assert sum(map(len, broadcast.messages(source.names()))) == len(tensors)

    def rank(number):
        group = open_group(store, Ranks(number, 2), CPU, timeout_seconds=60.0)
        if number == 0:
            return send(source, group, CPU)
        names = names_from_json(names_to_json(source.names()))
        assert names == source.names()
        roles = SimpleNamespace(mine=Ranks(0, 1), group=group, device=CPU)
        sent = SentWeights(names, files, roles)
        with torch.inference_mode():
            late, early = sent.read("bias"), sent.read("t1")
            assert torch.equal(late, tensors["bias"])
            assert torch.equal(early, tensors["t1"])
        return sent.checksum()

    with ThreadPoolExecutor(2) as pool:
        _, told = pool.map(rank, range(2))
    assert told == weights_checksum({n: checksum(files.read(n)) for n in files.names()})


@pytest.mark.parametrize(
    ("iteration", "origin", "place"),
    [
        (1, "", "first"),
        (1, "other", "other"),
        (2, "", "first"),
        (2, "other", "other"),
        (3, "other", "own"),
    ],
)
def test_a_task_begins_with_the_policy_before_its_own(iteration, origin, place, tmp_path):
    tiny = start_run(f"file://{tmp_path}/run")
    uri = f"{tiny.root}/policies/00000"
    pins = {"own": "own", "other": "other", "first": read_manifest(uri).ref(uri).pin()}
    block = Block(tiny.root, tiny.config, tiny.digest, iteration, 2, "own", "", "")
    assert _earlier_pin(block, origin) == pins[place]
