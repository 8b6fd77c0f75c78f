"""Two gloo processes against one: same losses, same weights, states that move between them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from planish.base.errors import LayoutMismatch, PeerLost
from planish.checkpoint import train_state as api
from planish.checkpoint.convert.export_hf import export
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, save_policy
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.refs import parse_pin
from planish.records.reports import UpdateReport, read_report
from planish.records.values import ValueSet
from planish.stages.train.ranks.job import TrainJob
from planish.stages.train.stage import launch
from tests.integration.test_train_stage import all_tensors
from tests.integration.train_forks import train_job
from tests.rounding import GRADIENTS, MOMENTS, STEPS
from tests.unit.stages.train.runs import add_iteration, start_run, tiny_config
from tests.unit.stages.train.windows import add_window_iteration


def job_of(tiny, iteration, state_pin="", processes=1, **train_changes):
    config = {**tiny.config, "train": {**tiny.config["train"], **train_changes}}
    config["train"]["num_processes"] = processes
    rewards = layout.rewards(tiny.root, iteration)
    return TrainJob(
        root=tiny.root,
        config=config,
        # States of different process counts are compared below: they need their own digests.
        config_sha256=f"{processes:064x}",
        iteration=iteration,
        num_shards=2,
        policy_pin=tiny.policy_pin,
        state_pin=state_pin,
        rewards_pin=read_manifest(rewards).ref(rewards).pin(),
    )


def do(job, train_job=train_job):
    pin = train_job(job)
    report = read_report(UpdateReport, layout.update(job.root, job.iteration))
    return pin, report, all_tensors(pin)


def largest_difference(left, right):
    left, right = (
        {n: t.double() for n, t in side.items() if not n.startswith("random.")}
        for side in (left, right)
    )
    assert left.keys() == right.keys()
    return max((left[n] - right[n]).abs().max().item() for n in left)


def trained_by_one_and_two(tmp_path_factory, name, config):
    """Two iterations, trained by one process and by two: run, last state, steps and tensors."""
    results = {}
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp(f"{name}{processes}")
        tiny = start_run(f"file://{folder}/root", config)
        state_pin, steps = "", []
        for iteration in (1, 2):
            add_iteration(tiny, iteration)
            state_pin, report, tensors = do(job_of(tiny, iteration, state_pin, processes))
            steps += report.minibatches
        results[processes] = (tiny, state_pin, steps, tensors)
    return results


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    config = tiny_config(tokens_per_microbatch=96)
    return trained_by_one_and_two(tmp_path_factory, "processes", config)


@pytest.fixture(scope="module")
def one_and_two_with_critic(tmp_path_factory):
    """Two iterations of windows with a critic, trained by one process and by two."""
    results = {}
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp(f"critics{processes}")
        config = tiny_config("tppo", tokens_per_microbatch=96)
        config["algorithm"] |= {"window_tokens": 6, "ignored_tail_tokens": 1, "lambda_min": 0.5}
        config["critic"] = {**config["critic"], "learning_rate": 5e-4}
        tiny = start_run(f"file://{folder}/root", config)
        state_pin, steps = "", []
        for iteration in (1, 2):
            add_window_iteration(tiny, iteration, 6)
            state_pin, report, tensors = do(job_of(tiny, iteration, state_pin, processes))
            steps += report.minibatches
        path = parse_pin(api.read_state_info(state_pin)["data"]["values"])[0]
        values = read_set(ValueSet, f"{tiny.root}/{path}").to_rows()
        results[processes] = (steps, tensors, values)
    return results


def test_two_processes_have_the_critic_of_one(one_and_two_with_critic):
    (steps, tensors, values), (others, moved, stored) = (
        one_and_two_with_critic[processes] for processes in (1, 2)
    )
    assert len(steps) == 7
    for one, two in zip(steps, others, strict=True):
        assert one.keys() == two.keys()
        for name in ("loss", "grad_norm", "value_loss", "value_grad_norm", "value_clipfrac"):
            wanted = pytest.approx(one.get(name), abs=STEPS, rel=STEPS)
            assert two.get(name) == wanted, name
    assert any(name.startswith("critic.head") for name in tensors)
    difference = largest_difference(tensors, moved)
    print(f"largest difference of weights and moments with a critic {difference:.2e}")
    assert difference < MOMENTS
    assert values.keys() == stored.keys()
    assert values
    # Sums of products of hidden states of order 1: rounding alone is above that of the weights.
    assert max(np.abs(values[key] - stored[key]).max() for key in values) < GRADIENTS


def test_two_processes_have_the_losses_and_gradient_norms_of_one(one_and_two):
    for one, two in zip(one_and_two[1][2], one_and_two[2][2], strict=True):
        assert one.keys() == two.keys()
        for name in ("loss", "grad_norm", "entropy", "approx_kl", "clipfrac_high"):
            assert two[name] == pytest.approx(one[name], abs=STEPS, rel=STEPS), name


def test_two_processes_have_the_weights_of_one(one_and_two):
    difference = largest_difference(one_and_two[1][3], one_and_two[2][3])
    print(f"largest difference of weights and moments {difference:.2e}")
    assert difference < MOMENTS


def test_two_processes_write_a_shard_each(one_and_two):
    pin = one_and_two[2][1]
    metadata = api.open_checkpoint(pin).metadata
    names = {key.partition("/")[2] for key in metadata.files.keys}
    assert {f"policy.model/0000{rank}-0.safetensors" for rank in (0, 1)} <= names
    embedding = metadata.tensor_ids["policy", "model", "model.embed_tokens.weight"]
    assert len(metadata.shards_of(embedding)) == 2
    assert api.read_record(pin)[1].attributes["dp"] == 2


def test_a_state_moves_from_one_process_to_two_and_back_without_a_changed_bit(one_and_two):
    tiny, state_pin, _, tensors = one_and_two[1]
    for iteration, processes in ((3, 2), (4, 1)):
        # An iteration without rollouts loads the state and saves it again.
        add_iteration(tiny, iteration, keep_none=True)
        state_pin, _, moved = do(job_of(tiny, iteration, state_pin, processes))
        weights = {n: t for n, t in tensors.items() if not n.startswith("random.")}
        assert all(torch.equal(moved[n], t) for n, t in weights.items())


def test_the_policy_of_two_processes_is_exported_whole(one_and_two):
    tiny, state_pin, _, tensors = one_and_two[2]
    uri = f"{tiny.root}/exported"
    pin, facts = api.checkpoint_pin(state_pin), {"policy_version": 2}
    ref = export(pin, uri, policy=tiny.policy_pin, parents={}, attributes=facts)
    for name, weight in load_policy(ref.pin()).model.named_parameters():
        assert torch.equal(weight, tensors[f"model.{name}"]), name


def test_the_error_of_a_rank_reaches_the_stage_with_its_type(one_and_two):
    tiny, state_pin, _, _ = one_and_two[2]
    wide = build_policy(ModelConfig(num_layers=2, hidden_size=48, head_dim=16), seed=0)
    ref = save_policy(f"{tiny.root}/wide", wide, version=0, parents={}, attributes={})
    add_iteration(tiny, 3)
    job = replace(job_of(tiny, 3, state_pin, 2), policy_pin=ref.pin())
    with pytest.raises(LayoutMismatch, match="must have the shape"):
        launch(job, 2)


def test_a_process_that_ends_without_a_word_is_a_lost_peer(one_and_two):
    tiny, _, _, _ = one_and_two[2]
    job = job_of(tiny, 1, "", 2)
    config = {name: table for name, table in job.config.items() if name != "run"}
    with pytest.raises(PeerLost, match="got 1 from torchrun"):
        launch(replace(job, config=config), 2)
    assert parse_pin(one_and_two[2][1])[0].endswith("step-00000008")
