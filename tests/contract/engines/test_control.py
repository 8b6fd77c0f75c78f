"""How every engine must be steered: abort, weights, ids, threads; on every engine."""

import random
import threading

import pytest
import torch

from planish.base.errors import ConfigError, EngineBusy, EngineError, NotSupported
from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.weights import DictWeights
from planish.models.experts import on_disk
from planish.records.rollouts import FinishReason
from tests.contract.engines.conftest import has_our_noise
from tests.unit.engines.tiny import differs_by_a_tie, ids_of, request


def weights(policy) -> DictWeights:
    state = {name: t.detach().clone() for name, t in policy.model.state_dict().items()}
    tied = policy.model.config.tie_word_embeddings
    tensors = on_disk(state, policy.model.config.to_dict())
    return DictWeights({n: t for n, t in tensors.items() if not (tied and n == "lm_head.weight")})


def poll_all(engine, count: int) -> dict:
    outputs = {}
    while len(outputs) < count:
        outputs.update((o.request_id, o) for o in engine.poll(1.0))
    return outputs


def test_abort_returns_a_prefix_of_what_would_have_been_produced(new_engine):
    whole = {o.request_id: o for o in new_engine().generate([request(i, 50) for i in range(6)])}
    engine = new_engine()
    engine.submit([request(i, 50) for i in range(6)])
    for _ in range(9):
        assert engine.poll(0.0) == []
    assert engine.state == "running"
    outputs = engine.abort(["r1", "r5", "unknown"])
    assert {o.request_id: o.num_tokens for o in outputs} == {"r1": 9, "r5": 0}
    for output in outputs:
        assert output.finish_reason is FinishReason.ABORT
        assert output.token_ids == whole[output.request_id].token_ids[: output.num_tokens]
        assert len(output.token_ids) == len(output.logprobs) == len(output.versions)
    rest = poll_all(engine, 4)
    assert all(rest[i].token_ids == whole[i].token_ids for i in ("r0", "r2", "r3", "r4"))
    assert engine.state == "ready"
    engine.submit([request(i, 50) for i in range(6)])
    engine.poll(0.0)
    assert len(engine.abort(None)) == 6
    assert (engine.state, engine.abort(None)) == ("ready", [])
    assert engine.generate([request(0, 2)])[0].token_ids == whole["r0"].token_ids[:2]


def test_updated_weights_act_as_in_a_fresh_engine_and_go_back_again(new_engine, make_policy):
    requests = [request(i, 20) for i in range(5)]
    fresh = ids_of(new_engine(make_policy(1)).generate(requests))
    engine = new_engine(make_policy(0))
    first = engine.generate(requests)
    report = engine.update_weights(weights(make_policy(1)), 1)
    assert (report.version, engine.version()) == (1, 1)
    second = engine.generate(requests)
    assert ids_of(second) == fresh
    assert ids_of(second) != ids_of(first)
    assert {v for o in second for v in o.versions} == {1}
    engine.update_weights(weights(make_policy(2)), 2)
    # As in a run that began from the newest policy of another one.
    engine.update_weights(weights(make_policy(0)), 1)
    third = engine.generate(requests)
    assert [o.logprobs for o in third] == [o.logprobs for o in first]
    assert {v for o in third for v in o.versions} == {1}


def test_an_engine_that_slept_samples_as_a_fresh_one_or_says_that_it_cannot(
    new_engine, make_policy
):
    requests = [request(i, 20) for i in range(5)]
    engine = new_engine(make_policy(0))
    engine.generate(requests)
    try:
        engine.renew()
    except NotSupported as error:
        assert "run iterations apart" in str(error)  # noqa: PT017
        return
    assert engine.stats()["steps"] == 0
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.submit(requests)
    engine.update_weights(weights(make_policy(1)), 1)
    seen, steps = engine.generate(requests), engine.stats()["steps"]
    fresh = new_engine(make_policy(1))
    assert ids_of(seen) == ids_of(fresh.generate(requests))
    assert steps == fresh.stats()["steps"]


def test_weights_may_not_change_while_requests_are_in_flight(new_engine, make_policy):
    engine = new_engine()
    engine.submit([request(0, 20)])
    with pytest.raises(EngineBusy, match="nothing in flight, got 1 requests; collect"):
        engine.update_weights(weights(make_policy(1)), 1)
    assert poll_all(engine, 1)["r0"].num_tokens == 20


def test_weights_that_do_not_fit_change_nothing(new_engine, make_policy):
    engine = new_engine()
    before = ids_of(engine.generate([request(0, 20)]))
    good = weights(make_policy(1))
    tensors = {name: good.read(name) for name in good.names()}
    name = next(n for n in reversed(tensors) if n.endswith("up_proj.weight"))
    with pytest.raises(EngineError, match=f"got {name} has shape \\(3, 4\\) in place of"):
        engine.update_weights(DictWeights({**tensors, name: tensors[name][:3, :4]}), 1)
    for other in ("one_more", "model.layers.9.mlp.up_proj.weight", "model.norm.bias"):
        with pytest.raises(EngineError, match=f"got {other} is not of this model"):
            engine.update_weights(DictWeights({**tensors, other: torch.ones(3)}), 1)
    del tensors[name]
    with pytest.raises(EngineError, match=f"{name} is missing \\(1 in all\\)"):
        engine.update_weights(DictWeights(tensors), 1)
    assert (engine.version(), engine.state) == (0, "ready")
    assert ids_of(engine.generate([request(0, 20)])) == before


def test_requests_that_can_not_be_taken_leave_the_queue_as_it_was(new_engine):
    engine = new_engine()
    empty = Request("r1", (), Sampling(max_new_tokens=3))
    with pytest.raises(ConfigError, match="at least one token, got none in 'r1'"):
        engine.submit([request(0, 3), empty])
    assert engine.poll(0.01) == engine.generate([]) == []
    assert engine.state == "ready"
    engine.submit([request(0, 5)])
    with pytest.raises(EngineError, match="got 'r0' again"):
        engine.submit([request(0, 5)])
    with pytest.raises(EngineError, match="got 'r1' again"):
        engine.submit([request(1, 5), request(1, 5)])
    assert list(poll_all(engine, 1)) == ["r0"]
    assert engine.generate([request(0, 5), request(1, 5)])[1].num_tokens == 5


def expect_only_ties(engine, policy, outputs, whole):
    """Compare responses with those of another batch: by rounding one may part, and no more."""
    ours = has_our_noise(engine)
    ties = [
        differs_by_a_tie(policy, request(int(name[1:]), 30), one, whole[name], noise_is_ours=ours)
        for name, one in outputs.items()
    ]
    assert sum(ties) <= 1


def test_arrivals_and_aborts_change_other_responses_by_rounding_only(new_engine, make_policy):
    whole = {o.request_id: o for o in new_engine().generate([request(i, 30) for i in range(40)])}
    engine = new_engine()
    generator = random.Random(0)
    waiting = generator.sample(range(40), 40)
    outputs = {}
    while len(outputs) < 40:
        if waiting and generator.random() < 0.5:
            count = generator.randint(1, 3)
            engine.submit([request(i, 30) for i in waiting[:count]])
            del waiting[:count]
        taken = [f"r{generator.randrange(40)}"] if generator.random() < 0.03 else []
        for output in [*engine.abort(taken), *engine.poll(0.0)]:
            outputs[output.request_id] = output
    expect_only_ties(engine, make_policy(), outputs, whole)
    assert sum(output.num_tokens for output in outputs.values()) > 900


def test_submit_poll_and_abort_from_different_threads(new_engine, make_policy):
    whole = {o.request_id: o for o in new_engine().generate([request(i, 30) for i in range(40)])}
    engine = new_engine()
    done, aborted, submitted = {}, {}, threading.Barrier(3, timeout=600)

    def poll():
        while len(done) + len(aborted) < 40:
            done.update((o.request_id, o) for o in engine.poll(0.05))

    def submit(start):
        for index in range(start, 40, 2):
            engine.submit([request(index, 30)])
        submitted.wait()

    threads = [threading.Thread(target=submit, args=(start,)) for start in (0, 1)]
    threads.append(threading.Thread(target=poll))
    for thread in threads:
        thread.start()
    for index in (3, 11, 38):
        aborted.update((o.request_id, o) for o in engine.abort([f"r{index}"]))
    submitted.wait()
    for thread in threads:
        thread.join(600)
    assert not done.keys() & aborted.keys()
    assert len(done) + len(aborted) == 40
    expect_only_ties(engine, make_policy(), {**done, **aborted}, whole)


def test_states_follow_the_life_of_an_engine(new_engine, make_policy):
    engine = new_engine()
    with pytest.raises(EngineBusy, match="`start` needs a new engine"):
        engine.start(ModelRef(policy=make_policy()))
    engine.close()
    engine.close()
    assert engine.state == "closed"
    for call in (lambda: engine.submit([request(0, 1)]), lambda: engine.poll(0)):
        with pytest.raises(EngineError, match="got closed"):
            call()


def test_stats_count_the_tokens_of_running_requests_too(new_engine):
    engine = new_engine()
    engine.submit([request(i, 40) for i in range(6)])
    counts = [0]
    for _ in range(8):
        assert engine.poll(0.0) == []
        counts.append(engine.stats()["tokens"])
    assert counts == sorted(counts)
    assert counts[-1] > counts[1] > 0
    assert counts[-1] == sum(output.num_tokens for output in engine.abort(None))
    assert engine.stats()["tokens"] == counts[-1]
