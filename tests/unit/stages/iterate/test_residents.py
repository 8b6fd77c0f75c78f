"""What a rank keeps between iterations: the trainer at its state, the engine with its weights."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from planish import store
from planish.base.errors import EngineError
from planish.base.parallel import SINGLE, Ranks, open_group
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.weights import DictWeights, fetch_weights
from planish.models.policy import checksum, load_policy, save_policy
from planish.records import layout
from planish.records.files import weights_checksum, weights_name
from planish.records.io import write_set
from planish.records.manifest import manifest_uri, read_manifest
from planish.records.prompts import PromptSet
from planish.run.stage import Context
from planish.stages.iterate import broadcast
from planish.stages.iterate import residents as module
from planish.stages.iterate.broadcast import SentWeights, names_from_json, names_to_json, send
from planish.stages.iterate.commit import begin_commit
from planish.stages.iterate.job import Block
from planish.stages.iterate.residents import Residents, TrainerWeights, check_weights
from planish.stages.iterate.stage import _earlier_pin
from planish.stages.rollout.job import read_data, start_of
from planish.stages.rollout.stage import sample
from planish.stages.train.ranks.job import TrainJob
from planish.stages.train.ranks.worker import HeldTrainer, begin_iteration
from planish.store.documents import read_json
from tests.unit.stages.train.runs import add_iteration, start_run, tiny_config

OPTIONS = {"max_rows": 8, "max_model_len": 64, "device": "cpu"}
MODELS = {
    "dense": {},
    "bfloat16": {"dtype": "bfloat16"},
    "moe": {"num_experts": 4, "expert_intermediate_size": 32},
}
REQUESTS = [Request(str(n), (4 + n, 5, 6), Sampling(max_new_tokens=20, seed=n)) for n in range(12)]


SAMPLING = {
    "temperature": 1.0,
    "prompts_per_iteration": 2,
    "group_size": 2,
    "dynamic_sampling": False,
    "max_response_tokens": 16,
    "commit_steps": 0,
    "max_rows": 4,
}


def job_of(tiny, state_pin=""):
    ref = add_iteration(tiny, 1)
    return TrainJob(
        tiny.root, tiny.config, tiny.digest, 1, tiny.num_shards, tiny.policy_pin, state_pin,
        ref.pin(),
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_gets_the_very_numbers_that_are_exported(name, tmp_path):
    tiny = start_run(f"file://{tmp_path}/run", **MODELS[name])
    residents = Residents(SINGLE, torch.device("cpu"), {})
    first = ModelRef(pin=tiny.policy_pin)
    with residents.serve(EngineConfig(), first, **OPTIONS) as engine:
        engine.generate(REQUESTS)
    residents.rest()
    job = job_of(tiny)
    made = begin_commit(job, begin_iteration(job, held=residents.trainer))
    start = residents.refresh(made)
    policy_pin = made.pins.result().policy_pin
    check_weights(start, policy_pin)
    wanted = fetch_weights(policy_pin)
    given = TrainerWeights(residents.trainer.trainer, fetch_weights(tiny.policy_pin))
    names = given.names()
    assert names == {name: wanted.names()[name] for name in names}
    assert set(wanted.names()) - set(names) <= {"lm_head.weight"}
    assert all(torch.equal(given.read(name), wanted.read(name)) for name in names)
    assert (1, given.checksum()) == weights_name(policy_pin) == (start.version, start.weights)
    with residents.serve(EngineConfig(), ModelRef(pin=policy_pin), **OPTIONS) as engine:
        assert engine.version() == 1
        seen = [(o.token_ids, o.logprobs) for o in engine.generate(REQUESTS)]
    with module.open_engine(EngineConfig(), ModelRef(pin=policy_pin), **OPTIONS) as fresh:
        assert seen == [(o.token_ids, o.logprobs) for o in fresh.generate(REQUESTS)]
    residents.close()


def test_an_engine_whose_weights_differ_from_the_exported_ends_the_task(tmp_path):
    tiny = start_run(f"file://{tmp_path}/run")
    residents = Residents(SINGLE, torch.device("cpu"), {})
    with residents.serve(EngineConfig(), ModelRef(pin=tiny.policy_pin), **OPTIONS):
        pass
    job = job_of(tiny)
    made = begin_commit(job, begin_iteration(job, held=residents.trainer))
    weight = next(iter(residents.trainer.trainer.policy.weights().values()))
    weight.data.view(-1)[0] += 1.0
    start = residents.refresh(made)
    with pytest.raises(EngineError, match=r"with the checksum \w{8}, got \w{8}; run the task"):
        check_weights(start, made.pins.result().policy_pin)
    residents.close()


def test_rollouts_from_memory_are_written_before_their_policy_is_exported(tmp_path):
    tiny = start_run(f"file://{tmp_path}/run", tiny_config() | {"rollout": SAMPLING})
    texts = ["1+1=", "1+2="]
    prompts = PromptSet(
        prompt_id=["a" * 16, "b" * 16],
        messages=[[{"role": "user", "content": text}] for text in texts],
        answer=["2", "3"],
        verifier=["exact"] * 2,
        source=["sums"] * 2,
        pass_rate=np.full(2, np.nan, np.float32),
    )
    write_set(layout.prompts(tiny.root), prompts, parents={}, attributes={})
    residents = Residents(SINGLE, torch.device("cpu"), tiny.config)
    context = Context(tiny.root, "rollout", 2, 0, tiny.config, tiny.digest, {})
    job, has_sampled = job_of(tiny), Event()
    trained = begin_iteration(job, held=residents.trainer)

    def late():
        assert has_sampled.wait(60.0)
        return trained.commit()

    made = begin_commit(job, replace(trained, commit=late))
    start = residents.refresh(made)
    seen = sample(context, 1, start, residents.serve).refs["rollouts"]
    assert not store.exists(layout.policy(tiny.root, 1) + "/manifest.json")
    has_sampled.set()
    pins = made.pins.result()
    check_weights(start, pins.policy_pin)
    store.delete(manifest_uri(seen.uri))
    residents.close()
    again = start_of(pins.policy_pin, read_data(pins.state_pin))
    assert sample(context, 1, again).refs["rollouts"] == seen
    (entry,) = (e for e in store.list_uris(layout.logs(tiny.root)) if e.endswith(".json"))
    assert read_json(entry)["state"] == "done"


def test_an_engine_is_opened_once_for_equal_options_and_anew_after_a_failure(tmp_path, monkeypatch):
    tiny = start_run(f"file://{tmp_path}/run")
    other = load_policy(tiny.policy_pin)
    for parameter in other.model.parameters():
        parameter.data.mul_(1.5)
    pins = [
        tiny.policy_pin,
        save_policy(f"file://{tmp_path}/b", other, version=1, parents={}, attributes={}).pin(),
    ]
    opened = []

    def count(config, model, **options):
        opened.append(options)
        return module_open(config, model, **options)

    module_open = module.open_engine
    monkeypatch.setattr(module, "open_engine", count)
    residents, config = Residents(SINGLE, torch.device("cpu"), {}), EngineConfig()
    texts = []
    for pin in (*pins, pins[1]):
        with residents.serve(config, ModelRef(pin=pin), **OPTIONS) as engine:
            texts.append([output.token_ids for output in engine.generate(REQUESTS)])
            assert engine.stats()["most_rows"] == OPTIONS["max_rows"]
    assert len(opened) == 1
    assert texts[0] != texts[1] == texts[2]
    with residents.serve(config, ModelRef(pin=pins[1]), **{**OPTIONS, "max_rows": 4}):
        assert len(opened) == 2
    with (
        pytest.raises(KeyError),
        residents.serve(config, ModelRef(pin=pins[1]), **{**OPTIONS, "max_rows": 4}),
    ):
        raise KeyError
    assert len(opened) == 2
    with residents.serve(config, ModelRef(pin=pins[1]), **{**OPTIONS, "max_rows": 4}):
        assert len(opened) == 3
    residents.close()


def test_requests_that_nobody_waits_for_end_with_the_block_that_asked(tmp_path):
    tiny = start_run(f"file://{tmp_path}/run")
    residents, model = Residents(SINGLE, torch.device("cpu"), {}), ModelRef(pin=tiny.policy_pin)
    seen = []
    for _ in range(2):
        with residents.serve(EngineConfig(), model, **OPTIONS) as engine:
            seen.append([output.token_ids for output in engine.generate(REQUESTS)])
            # Some run, some wait, and some have ended without being fetched.
            engine.submit(REQUESTS)
            engine.poll(0.0)
    assert seen[0] == seen[1]
    residents.rest()
    residents.close()


def test_a_trainer_is_held_for_the_state_that_it_stands_at(tmp_path):
    tiny = start_run(f"file://{tmp_path}/run")
    held = HeldTrainer()
    pin = begin_iteration(job_of(tiny), held=held).commit().pin()
    trainer, held.state_pin = held.trainer, pin
    torch.manual_seed(99)  # somebody draws in between
    before = trainer.state().parts["random"]["torch.00000"]
    assert held.take(pin) is trainer
    assert not torch.equal(trainer.state().parts["random"]["torch.00000"], before)
    held.keep(trainer, {})
    assert held.take(f"{tiny.root}/other#sha256={'0' * 64}") is None
    assert held.trainer is None


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
