"""What a rank keeps between iterations: the trainer at its state, the engine with its weights."""

from __future__ import annotations

import pytest
import torch

from planish.base.errors import EngineError
from planish.base.parallel import SINGLE
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef, Request, Sampling
from planish.engines.weights import fetch_weights
from planish.models.policy import load_policy, save_policy
from planish.records.files import WEIGHTS
from planish.records.io import read_manifest
from planish.records.refs import parse_pin
from planish.run.stage import PathArtifact
from planish.stages.export.stage import run as export
from planish.stages.iterate import residents as module
from planish.stages.iterate.residents import Residents, TrainerWeights
from planish.stages.train.ranks.job import TrainJob
from planish.stages.train.ranks.worker import HeldTrainer, train_iteration
from tests.unit.stages.train.runs import add_iteration, start_run

OPTIONS = {"max_rows": 8, "max_model_len": 64, "device": "cpu"}
MODELS = {
    "dense": {},
    "bfloat16": {"dtype": "bfloat16"},
    "moe": {"num_experts": 4, "expert_intermediate_size": 32},
}
REQUESTS = [
    Request(str(n), str(n), (4 + n, 5, 6), Sampling(max_new_tokens=20, seed=n)) for n in range(12)
]


def job_of(tiny, state_pin=""):
    ref = add_iteration(tiny, 1)
    return TrainJob(
        tiny.root, tiny.config, tiny.digest, 1, tiny.num_shards, tiny.policy_pin, state_pin,
        ref.pin(),
    )  # fmt: skip


def exported(tiny, state, folder):
    paths = {name: PathArtifact(str(folder / name)) for name in ("state", "policy")}
    (folder / "state").write_text(state.to_json())
    return export(tiny.root, tiny.digest, 1, 0, tiny.policy_pin, **paths).policy_pin


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_gets_the_very_numbers_that_are_exported(name, tmp_path):
    tiny = start_run(f"file://{tmp_path}/run", **MODELS[name])
    residents = Residents(SINGLE, torch.device("cpu"), {})
    first = ModelRef(pin=tiny.policy_pin)
    with residents.serve(EngineConfig(), first, **OPTIONS) as engine:
        engine.generate(REQUESTS)
    residents.rest()
    trained = train_iteration(job_of(tiny), held=residents.trainer)
    policy_pin = exported(tiny, trained.state, tmp_path)
    wanted = fetch_weights(policy_pin)
    given = TrainerWeights(residents.trainer.trainer, fetch_weights(tiny.policy_pin))
    names = given.names()
    assert names == {name: wanted.names()[name] for name in names}
    assert set(wanted.names()) - set(names) <= {"lm_head.weight"}
    assert all(torch.equal(given.read(name), wanted.read(name)) for name in names)
    residents.exported(policy_pin, trained.state.pin())
    residents.refresh(policy_pin)
    uri, digest = parse_pin(policy_pin)
    assert given.checksum() == read_manifest(uri, sha256=digest).attributes[WEIGHTS]
    with residents.serve(EngineConfig(), ModelRef(pin=policy_pin), **OPTIONS) as engine:
        assert engine.version() == 1
        seen = [(o.token_ids, o.logprobs) for o in engine.generate(REQUESTS)]
    with module.open_engine(EngineConfig(), ModelRef(pin=policy_pin), **OPTIONS) as fresh:
        assert seen == [(o.token_ids, o.logprobs) for o in fresh.generate(REQUESTS)]
    residents.close()


def test_an_engine_whose_weights_differ_from_the_exported_samples_nothing(tmp_path):
    tiny = start_run(f"file://{tmp_path}/run")
    residents = Residents(SINGLE, torch.device("cpu"), {})
    with residents.serve(EngineConfig(), ModelRef(pin=tiny.policy_pin), **OPTIONS):
        pass
    trained = train_iteration(job_of(tiny), held=residents.trainer)
    policy_pin = exported(tiny, trained.state, tmp_path)
    residents.exported(policy_pin, trained.state.pin())
    weight = next(iter(residents.trainer.trainer.policy.weights().values()))
    weight.data.view(-1)[0] += 1.0
    with pytest.raises(EngineError, match=r"with the checksum \w{8}, got \w{8}; run the task"):
        residents.refresh(policy_pin)
    residents.close()


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
    pin = train_iteration(job_of(tiny), held=held).state.pin()
    trainer = held.trainer
    torch.manual_seed(99)  # somebody draws in between
    before = trainer.state().parts["random"]["torch.00000"]
    assert held.take(pin) is trainer
    assert not torch.equal(trainer.state().parts["random"]["torch.00000"], before)
    held.keep(trainer, pin, {})
    assert held.take(f"{tiny.root}/other#sha256={'0' * 64}") is None
    assert held.trainer is None
