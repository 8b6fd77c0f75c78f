"""The train stage with a critic on real files: pretraining, windows, resume, wrong states."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from planish import store
from planish.checkpoint import train_state as api
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy
from planish.records import layout
from planish.records.io import read_set
from planish.records.refs import parse_pin
from planish.records.reports import UpdateReport, read_report
from planish.records.values import ValueSet
from planish.stages.export.stage import run as run_export
from tests.integration import programs
from tests.integration.test_train_stage import (
    all_tensors,
    run_stage,
    stage_words,
    train_all,
)
from tests.unit.stages.train.runs import (
    TINY_CRITIC,
    add_iteration,
    artifact,
    start_run,
    tiny_config,
    train_once,
)
from tests.unit.stages.train.windows import add_window_iteration, whole_responses, window_of

WINDOW = 6


def critic_config(algorithm="vapo", **critic):
    config = tiny_config(algorithm)
    more = {"window_tokens": WINDOW, "ignored_tail_tokens": 1} if algorithm == "tppo" else {}
    config["algorithm"] |= {"lambda_alpha": 0.5, "lambda_min": 0.5, **more}
    return {**config, "critic": {**TINY_CRITIC, **critic}}


def train_windows(tiny, folder, iterations, state_pin=""):
    pins = []
    for iteration in iterations:
        rewards = add_window_iteration(tiny, iteration, WINDOW)
        state_pin = train_once(tiny, iteration, state_pin, rewards, folder / str(iteration))
        pins.append(state_pin)
    return pins


def scalars_of(tiny, iteration):
    return read_report(UpdateReport, layout.update(tiny.root, iteration)).scalars


def test_pretraining_exports_the_policy_unchanged_and_then_trains_it(file_root, tmp_path):
    tiny = start_run(file_root, critic_config(pretrain_iterations=1))
    pins = train_all(tiny, tmp_path, (1, 2))
    infos = [api.read_state_info(pin) for pin in pins]
    counters = ("step", "updates", "iterations", "critic_iterations", "pretrain_iterations")
    assert [[info[name] for name in counters] for info in infos] == [
        [4, 0, 0, 1, 1],
        [8, 4, 1, 2, 1],
    ]
    assert [info["critic_updates"] for info in infos] == [4, 8]
    assert [scalars_of(tiny, k)["pretraining"] for k in (1, 2)] == [1.0, 0.0]
    exported = []
    for iteration in (1, 2):
        out = tmp_path / f"export{iteration}"
        result = run_export(
            tiny.root, tiny.digest, iteration, 0, tiny.policy_pin,
            artifact(tmp_path / str(iteration), "state"), artifact(out, "policy"),
        )  # fmt: skip
        exported.append(load_policy(result.policy_pin))
    before = load_policy(tiny.policy_pin).model.state_dict()
    frozen, trained = (policy.model.state_dict() for policy in exported)
    assert [policy.version for policy in exported] == [1, 2]
    assert all(torch.equal(frozen[name], before[name]) for name in before)
    assert not torch.equal(trained["model.norm.weight"], before["model.norm.weight"])
    assert not any(
        "critic" in name or "head" in name.split(".")[0]
        for name in set(trained) - {"lm_head.weight"}
    )
    first, second = (all_tensors(pin) for pin in pins)
    assert not torch.equal(first["critic.head.weight"], second["critic.head.weight"])


@pytest.mark.parametrize("algorithm", ["vapo", "tppo"])
def test_a_new_process_that_resumes_arrives_at_the_bytes_of_going_on(
    algorithm, file_root, tmp_path
):
    tiny = start_run(file_root, critic_config(algorithm, pretrain_iterations=1))
    first, second = train_windows(tiny, tmp_path / "out", (1, 2))
    step = api.read_state_info(second)["step"]
    for folder in (layout.state(tiny.root, step), layout.values(tiny.root, 2)):
        for uri in store.list_uris(folder):
            store.delete(uri)
    assert parse_pin(run_stage(tiny, 2, first, tmp_path / "again"))[1] == parse_pin(second)[1]


@pytest.mark.slow
def test_kill_at_any_moment_with_slots_in_flight_gives_the_digest_of_an_undisturbed_run(tmp_path):
    config = critic_config("tppo")
    wanted = train_windows(start_run(f"file://{tmp_path}/a", config), tmp_path / "x", (1, 2))[1]
    tiny = start_run(f"file://{tmp_path}/b", config)
    first = train_windows(tiny, tmp_path / "y", (1,))[0]
    add_window_iteration(tiny, 2, WINDOW)
    words = stage_words(tiny, 2, first, tmp_path / "out")
    state = Path(layout.state(tiny.root, api.read_state_info(wanted)["step"])[7:])
    values = Path(layout.values(tiny.root, 2)[7:])
    for there, name in ((values, "manifest.json"), (state, "critic.model/00000-0.safetensors")):
        process = programs.start("planish.run", *words, log=tmp_path / "log.txt")
        while process.poll() is None and not any(there.glob(f"**/{name}")):
            os.sched_yield()
        process.kill()
        process.wait()
    found = run_stage(tiny, 2, first, tmp_path / "out")
    assert parse_pin(found)[1] == parse_pin(wanted)[1]


def test_windows_train_every_token_once_and_every_response_once(file_root, tmp_path):
    tiny = start_run(file_root, critic_config("tppo"))
    iterations = (1, 2, 3, 4)
    pins = train_windows(tiny, tmp_path, iterations)
    scalars = [scalars_of(tiny, k) for k in iterations]
    wholes = [whole_responses(tiny, shard) for shard in range(2)]
    lengths = np.concatenate([whole.response_tokens.lengths for whole in wholes])
    # The policy: every token but the last one before each cut.
    cuts = sum(int((lengths > WINDOW * k).sum()) for k in iterations)
    assert sum(s["num_ignored_tokens"] for s in scalars) == cuts
    assert sum(s["num_tokens"] for s in scalars) == lengths.sum()
    # The critic: every response once, with all its tokens, when it is finished.
    assert sum(s["num_finished"] for s in scalars) == len(lengths)
    assert sum(s["num_value_tokens"] for s in scalars) == lengths.sum()
    assert all(s["num_missing_values"] == 0.0 for s in scalars)
    assert scalars[0]["num_finished"] == (lengths <= WINDOW).sum()
    assert api.read_state_info(pins[-1])["data"]["next"] == 8


def test_tokens_keep_the_values_of_the_iteration_that_sampled_them(file_root, tmp_path):
    tiny = start_run(file_root, critic_config("tppo"))
    pins = train_windows(tiny, tmp_path, (1, 2))
    found = []
    for iteration, pin in zip((1, 2), pins, strict=True):
        data = api.read_state_info(pin)["data"]
        path, digest = parse_pin(data["values"])
        assert path == f"iterations/{iteration:05d}/values"
        assert [parse_pin(p)[0] for p in data["carry"]] == [
            f"iterations/{iteration:05d}/carry/{shard:02d}" for shard in (0, 1)
        ]
        found.append(read_set(ValueSet, f"{tiny.root}/{path}", sha256=digest).to_rows())
        for shard in (0, 1):
            made, groups = window_of(whole_responses(tiny, shard), iteration, WINDOW)
            for row in np.flatnonzero(made.finish == 2):
                key = shard + 2 * int(groups[made.group_index[row]]), int(made.sample_index[row])
                assert len(found[-1][key]) == WINDOW * iteration
    assert 0 < len(found[1]) < len(found[0])
    for key, values in found[1].items():
        assert np.array_equal(values[:WINDOW], found[0][key])
        assert np.isfinite(values).all()


@pytest.mark.parametrize("init", ["model", "state"])
def test_where_a_critic_came_from_is_read_once(init, tmp_path):
    source = tmp_path / "source"
    if init == "model":
        # another size than the policy's: the train state alone knows it later
        build_policy(
            ModelConfig(num_layers=1, hidden_size=24, head_dim=8), seed=8
        ).model.save_pretrained(source)
        path = str(source)
    else:
        donor = start_run(source.as_uri(), critic_config())
        (path,) = train_all(donor, tmp_path / "donor", (1,))
    pins = []
    for name in ("kept", "removed"):
        config = critic_config(init=init, path=path, pretrain_iterations=1)
        tiny = start_run(f"file://{tmp_path}/{name}", config)
        (first,) = train_all(tiny, tmp_path / f"{name}-out", (1,))
        if name == "removed":
            shutil.rmtree(source)
        rewards = add_iteration(tiny, 2)
        pins.append((first, train_once(tiny, 2, first, rewards, tmp_path / f"{name}-out" / "2")))
    kept, removed = ([parse_pin(pin)[1] for pin in row] for row in pins)
    assert kept == removed
