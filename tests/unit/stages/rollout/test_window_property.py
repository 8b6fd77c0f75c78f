"""Successive batching over simulated runs: every token once, no response lost."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.progress import SamplingProgress
from tests import thin
from tests.unit.stages.rollout import simulation
from tests.unit.stages.rollout.scripted_engine import EOS, ScriptedEngine, fails
from tests.unit.stages.rollout.simulation import Simulation

counter = itertools.count()


@pytest.fixture(scope="module")
def place(template, tmp_path_factory):
    """A folder for the roots of simulations, prompts, and policies of several versions."""
    folder = tmp_path_factory.mktemp("simulated")
    prompts, policies = simulation.write_policies_and_prompts(template.as_uri(), folder.as_uri())
    return folder, prompts, policies


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    simulation.register(monkeypatch)


def begin(place, **changes) -> Simulation:
    folder, prompts, policies = place
    config = RolloutConfig(
        **{
            "dynamic_sampling": False,
            "prompts_per_iteration": 4,
            "group_size": 3,
            "max_response_tokens": 16,
            "window_tokens": 4,
            "sample_retries": 0,
            **changes,
        }
    )
    root = folder / f"run-{next(counter)}"
    return Simulation(root.as_uri(), prompts, policies, config)


RUNS = st.fixed_dictionaries(
    {
        "prompts_per_iteration": st.integers(3, 5),
        "group_size": st.integers(1, 4),
        "max_response_tokens": st.integers(1, 18),
        "window_tokens": st.integers(1, 20),
        "max_rows": st.sampled_from([2, 64]),
        "sample_retries": st.integers(0, 1),
    }
)
SHARDS = st.lists(st.integers(1, 3), min_size=1, max_size=5)


def check_slots(run: Simulation, metrics: list[dict[str, float]]) -> None:
    """Slots are all in use, and what is open is in the carry."""
    config = run.config
    num_slots = config.prompts_per_iteration * config.group_size
    assert sum(m["num_live_slots"] for m in metrics) == num_slots
    assert sum(m["num_carried"] for m in metrics) <= len(run.carried)
    finished = sum(m["num_finished"] for m in metrics)
    waiting = sum(m["num_waiting"] for m in metrics)
    assert sum(m["num_carried"] for m in metrics) == num_slots - finished + waiting
    seeds = [(key, run.seed_of(key)) for key in run.carried]
    stuck = [key for key, seed in seeds if fails(seed, run.number - 1)]
    assert sum(m["num_failed_rows"] for m in metrics) <= len(stuck)


def check_nothing_is_lost(run: Simulation) -> None:
    """Every sample of every drawn prompt is finished once, or goes on."""
    everything = {(k, s) for k in run.drawn for s in range(run.config.group_size)}
    assert set(run.finished) | set(run.carried) == everything
    assert not set(run.finished) & set(run.carried)
    assert set(run.finished.values()) <= {1}
    below = range(run.data.cursor["next"])
    assert sorted([*run.drawn, *run.data.cursor["pending"]]) == list(below)


@pytest.mark.slow
@settings(
    max_examples=25 if thin.full else 8, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(options=RUNS, shards=SHARDS)
def test_every_token_is_in_one_window_and_no_response_is_lost(place, options, shards):
    run = begin(place, **options)
    total = 0
    for num_shards in shards:
        metrics = run.iterate(num_shards)
        check_slots(run, metrics)
        check_nothing_is_lost(run)
        total += sum(m["num_generated_tokens"] for m in metrics)
        # each new token of the engine is in exactly one window
        assert run.num_generated == total
        handed_out = sum(len(window) for parts in run.windows.values() for _, window in parts)
        assert handed_out == total
    for key, parts in run.windows.items():
        tokens = [token for _, window in parts for token in window]
        assert all(len(window) <= run.config.window_tokens for _, window in parts)
        script = run.script(key)
        if key in run.finished:
            assert tokens == script
        else:
            assert tokens == run.carried[key] == script[: len(tokens)]
            assert len(tokens) < len(script)


@pytest.mark.slow
@settings(
    max_examples=15 if thin.full else 5, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(options=RUNS, shards=SHARDS, whole_groups=st.booleans())
def test_held_responses_enter_once_with_all_their_tokens(place, options, shards, whole_groups):
    held = "hold_group" if whole_groups else "hold"
    run = begin(place, unfinished=held, **options)
    for num_shards in shards:
        before = set(run.finished)
        metrics = run.iterate(num_shards)
        check_slots(run, metrics)
        check_nothing_is_lost(run)
        fresh = set(run.finished) - before
        assert sum(m["num_rollouts"] for m in metrics) == len(fresh)
        if whole_groups:
            size = run.config.group_size
            assert fresh == {(k, s) for k, _ in fresh for s in range(size)}
    assert set(run.windows) == set(run.finished)
    for key, parts in run.windows.items():
        assert parts == [(0, run.script(key))]


def test_a_window_that_ends_with_the_end_token_finishes_the_response(place):
    run = begin(place, window_tokens=3, max_response_tokens=9)
    for _ in range(4):
        run.iterate(1)
    exact = [k for k in run.finished if len(run.script(k)) % 3 == 0 and run.script(k)[-1] == EOS]
    cut = [k for k in run.finished if len(run.script(k)) == 9 and run.script(k)[-1] != EOS]
    assert exact
    assert cut
    for key in exact + cut:
        # the last window is full, and there is no empty one after it
        windows = [window for _, window in run.windows[key] if window]
        assert [len(window) for window in windows] == [3] * (len(run.script(key)) // 3)
        assert len(run.windows[key][-1][1]) == 3


def test_versions_and_ages_of_tokens_are_those_of_the_policies_that_sampled_them(place):
    run = begin(place, unfinished="hold", window_tokens=2, max_response_tokens=16)
    oldest = 0.0
    for number in range(1, 6):
        metrics = run.iterate(1)[0]
        oldest = max(oldest, metrics.get("staleness_max", 0.0))
        assert 0 <= metrics.get("staleness_mean", 0.0) <= oldest <= number - 1
    assert oldest == max(len(run.script(k)) - 1 for k in run.finished) // 2
    train = begin(place, window_tokens=2)
    assert train.iterate(1)[0]["staleness_max"] == 0.0
    assert train.iterate(1)[0]["staleness_max"] == 1.0


def test_the_pace_counts_the_tokens_that_steps_of_any_size_give(place, monkeypatch):
    runs, looks = [], []

    def look(self, *, num_rows, stats, **_):
        looks.append((num_rows, stats()["tokens"]))

    monkeypatch.setattr(SamplingProgress, "look", look)
    for step_sizes in ((1,), (0, 3)):
        looks.clear()
        monkeypatch.setattr(ScriptedEngine, "step_sizes", step_sizes)
        runs.append(begin(place, window_tokens=8, max_rows=5))
        runs[-1].iterate(1)
    plain, uneven = runs
    assert (uneven.windows, uneven.carried) == (plain.windows, plain.carried)
    counts = [num_tokens for _, num_tokens in looks]
    grown = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert counts[-1] == uneven.num_generated
    # All rows are taken, and of responses that end inside of a step the rest is not counted.
    assert grown.count(0) >= len(grown) // 2
    assert 5 < max(grown) <= 3 * 5
    assert sum(num_rows for num_rows, _ in looks) != counts[-1]
