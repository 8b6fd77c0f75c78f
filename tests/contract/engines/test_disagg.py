"""What the engine `disagg` refuses, by name and before a token is sampled."""

import socket

import pytest

from planish.base.errors import EngineError
from planish.engines.config import EngineConfig
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.disagg.rank import open_transport
from planish.engines.requests import ModelRef
from tests.contract.engines.conftest import FAMILIES
from tests.unit.engines.disagg.instances import MortalRank, ThreadRank, disagg
from tests.unit.engines.tiny import qwen3_policy, request

CONFIG = EngineConfig(name="disagg", expert_ranks=3)


def test_a_dense_policy_is_refused():
    engine = DisaggEngine(config=CONFIG)
    with pytest.raises(EngineError, match="a model with experts is needed, got a dense one"):
        engine.start(ModelRef(policy=qwen3_policy()))
    assert engine.state == "failed"
    assert engine.pids == {}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nobody", "somebody else"])
def test_an_expert_address_where_no_expert_answers_fails_the_start(what):
    """The address of the last rank is that of a closed port, or of a server of another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        if what == "nobody":
            other.close()

        def new_transport(settings):
            transport = open_transport(settings)
            if settings.role == "expert":
                transport.address = address
            return transport

        config = EngineConfig(name="disagg")
        engine = DisaggEngine(
            max_rows=4,
            config=config,
            timeout_s=2.0,
            launcher=lambda number: ThreadRank(number, new_transport=new_transport),
        )
        # Both ranks miss the other one; who says so first is blamed for nothing.
        with pytest.raises(EngineError, match=r"all ranks must start, got .*rank [01]"):
            engine.start(ModelRef(policy=qwen3_policy(**FAMILIES["experts"])))
    assert engine.pids == {}


@pytest.mark.slow
def test_a_loss_that_statistics_find_is_named_by_the_next_call():
    """A shard asks for them while it samples, between two steps."""
    ranks = []

    def launcher(number):
        ranks.append(MortalRank(number))
        return ranks[-1]

    policy = qwen3_policy(**FAMILIES["experts"])
    with disagg(policy, 1, 2, launcher=launcher) as engine:
        engine.submit([request(0, 20)])
        engine.poll(0.0)
        before = engine.stats()["ranks"]
        assert (before[0]["queue"], before[0]["rows"]) == (1, 1)
        assert sum(rank["rows"] for rank in before[1:]) == 2 * 2 * len(request(0).prompt_ids)
        assert all(rank["busy_s"] > 0 and rank["wait_s"] >= 0 for rank in before)
        traffic = before[0]["m2n"]
        # The prompt and a step, two layers each, to two expert ranks and back.
        assert traffic["num_frames"] == {"dispatch": 8, "reply": 8}
        assert traffic["num_bytes"]["dispatch"] > traffic["num_bytes"]["reply"] > 0
        assert (sum(traffic["reply_counts"]), traffic["reply_seconds"] > 0) == (4, True)
        ranks[2].die()
        assert engine.stats()["state"] == "failed"
        with pytest.raises(EngineError, match="got failed: the engine failed: rank 2 is lost"):
            engine.poll(0.0)
