"""The setting `engine.peers`, and what a rank tells its host of its weights."""

from __future__ import annotations

import io
import json

import pytest
from pydantic import ValidationError

from planish.base.errors import PlanishError
from planish.engines.config import EngineConfig
from planish.engines.deploy.held import HeldWeights
from planish.models.policy import save_policy
from tests.unit.engines.tiny import qwen3_policy

PEERS = ["a0:9610", "a1:9610", "e0:9610"]


def config(**settings):
    return EngineConfig(**{"name": "disagg", "attention_ranks": 2, **settings})


def test_peers_name_every_rank_once():
    assert config(peers=PEERS).peers == tuple(PEERS)
    for peers in (PEERS[:2], [*PEERS, "e1:9610"], [*PEERS[:2], "a0:9610"]):
        with pytest.raises(ValidationError, match="must name each of the 3 ranks once, got "):
            config(peers=peers)


def test_peers_need_sockets_and_an_engine_of_ranks():
    with pytest.raises(ValidationError, match="`transport` must be 'sockets' with `peers`"):
        config(peers=PEERS, transport="gloo")
    with pytest.raises(ValidationError, match="`peers` must be left out with the engine 'vllm'"):
        EngineConfig(name="vllm", peers=PEERS)


def test_runs_without_peers_keep_their_digest():
    assert {"peers", "rank_timeout_seconds"}.isdisjoint(config().model_dump())
    assert config(peers=PEERS).model_dump()["peers"] == tuple(PEERS)


def test_a_rank_tells_what_it_wants_before_it_holds_it(tmp_path):
    saved = save_policy(tmp_path.as_uri(), qwen3_policy(), version=3, parents={}, attributes={})
    told = io.StringIO()
    held, pin = HeldWeights(told), saved.pin()
    local = held.want({"folder": "/elsewhere", "pin": pin, "version": 3})
    assert local == {"folder": str(tmp_path), "pin": pin, "version": 3}
    held.hold()
    with pytest.raises(PlanishError):
        held.want({"folder": "", "pin": pin.replace("#sha256=", "#sha256=0")[:-1], "version": 4})
    assert held.want({"weights": pin, "version": 5}) == {"weights": pin, "version": 5}
    assert [json.loads(line) for line in told.getvalue().splitlines()] == [
        {"wanted": pin, "held": "", "version": None},
        {"wanted": pin, "held": pin, "version": 3},
        {"wanted": pin.replace("#sha256=", "#sha256=0")[:-1], "held": pin, "version": 3},
        {"wanted": pin, "held": pin, "version": 3},
    ]
