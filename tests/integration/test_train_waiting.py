"""Finished responses that wait for the critic, on real files: pins, resume, forks, retention."""

import pytest

from planish import store
from planish.checkpoint import train_state as api
from planish.checkpoint.commit.catalog import retain
from planish.records import layout
from planish.records.io import read_set
from planish.records.refs import parse_pin
from planish.records.values import ValueSet
from planish.records.waiting import WaitingSet
from planish.store import open_store
from tests.integration.test_train_critic import critic_config, scalars_of, train_windows
from tests.integration.test_train_processes import job_of
from tests.integration.test_train_stage import all_tensors, run_stage
from tests.integration.train_forks import train_job
from tests.rounding import STEPS
from tests.unit.records.samples import rows_of
from tests.unit.stages.train.runs import start_run, train_once
from tests.unit.stages.train.windows import add_window_iteration, whole_responses

WINDOW, ENOUGH = 6, 16


def waiting_config(**train):
    config = critic_config("tppo", min_finished=ENOUGH)
    return {**config, "train": {**config["train"], **train}}


def data_of(pin):
    return api.read_state_info(pin)["data"]


def waiting_of(tiny, pin):
    path, digest = parse_pin(data_of(pin)["waiting"])
    return read_set(WaitingSet, f"{tiny.root}/{path}", sha256=digest)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four iterations: those of odd numbers leave their finished responses to the next."""
    folder = tmp_path_factory.mktemp("four")
    tiny = start_run(f"file://{folder}/root", waiting_config())
    return tiny, train_windows(tiny, folder, (1, 2, 3, 4)), folder


def test_what_waits_is_named_by_the_state_until_the_critic_has_trained_on_it(four):
    tiny, pins, _ = four
    scalars = [scalars_of(tiny, number) for number in (1, 2, 3, 4)]
    finished = [int(s["num_finished"]) for s in scalars]
    waiting = [int(s["num_waiting_responses"]) for s in scalars]
    lengths = [n for shard in (0, 1) for n in whole_responses(tiny, shard).response_tokens.lengths]
    assert sum(finished) == len(lengths)
    assert waiting[:3] == [finished[0], 0, finished[2]]
    assert 0 < waiting[0] < ENOUGH <= finished[0] + finished[1]
    assert [("waiting" in data_of(pin)) for pin in pins] == [n > 0 for n in waiting]
    infos = [api.read_state_info(pin) for pin in pins]
    assert [info["critic_iterations"] for info in infos[:3]] == [0, 1, 1]
    kept = waiting_of(tiny, pins[0])
    assert kept.num_rows == waiting[0]
    assert sorted(kept.response_tokens.lengths) == sorted(n for n in lengths if n <= WINDOW)
    assert parse_pin(data_of(pins[0])["waiting"])[0] == "iterations/00001/waiting"
    assert store.list_uris(layout.waiting(tiny.root, 2)) == []


def test_a_response_waits_with_the_values_of_the_iterations_that_sampled_its_tokens(four):
    tiny, pins, _ = four
    path, digest = parse_pin(data_of(pins[1])["values"])
    earlier = read_set(ValueSet, f"{tiny.root}/{path}", sha256=digest).to_rows()
    starts = {tuple(values.tolist()) for values in earlier.values()}
    kept = waiting_of(tiny, pins[2])
    assert {len(values) for values in starts} == {2 * WINDOW}
    for values, returns in zip(rows_of(kept.values), rows_of(kept.returns), strict=True):
        assert tuple(values[: 2 * WINDOW]) in starts
        assert len(set(returns)) == 1


def test_running_again_resuming_and_retention_give_the_digests_of_an_undisturbed_run(
    four, tmp_path
):
    tiny, wanted, _ = four
    again = start_run(f"file://{tmp_path}/root", waiting_config())
    pins = train_windows(again, tmp_path, (1, 2, 3))
    assert [parse_pin(p)[1] for p in pins] == [parse_pin(p)[1] for p in wanted[:3]]
    # A new process takes up a state that names what waits, and one that leaves some waiting.
    for number in (2, 3):
        step = api.read_state_info(pins[number - 1])["step"]
        gone = (layout.state(again.root, step), layout.waiting(again.root, number))
        for uri in (uri for folder in gone for uri in store.list_uris(folder)):
            store.delete(uri)
        found = run_stage(again, number, pins[number - 2], tmp_path / f"out{number}")
        assert parse_pin(found)[1] == parse_pin(wanted[number - 1])[1]
    assert tiny.digest == again.digest
    # What waits is there when all states but the newest have gone.
    states = layout.state(again.root, 0).rpartition("/")[0]
    verdicts = retain(*open_store(states), keep_last=1)
    assert [v.action for v in verdicts] == ["keep", "delete", "delete"]
    (pin,) = train_windows(again, tmp_path, (4,), found)
    assert scalars_of(again, 4) == scalars_of(tiny, 4)
    assert parse_pin(pin)[1] == parse_pin(wanted[3])[1]


def test_a_forked_run_trains_on_what_waits_in_the_run_before(four, tmp_path):
    tiny, pins, _ = four
    fork = start_run(f"file://{tmp_path}/fork", waiting_config())
    assert (fork.digest, fork.root == tiny.root) == (tiny.digest, False)
    rewards = add_window_iteration(fork, 2, WINDOW)
    pin = train_once(fork, 2, pins[0], rewards, tmp_path / "out")
    for name, tensor in all_tensors(pins[1]).items():
        assert (all_tensors(pin)[name] == tensor).all(), name
    assert "waiting" not in data_of(pin)


def test_two_processes_select_and_wait_as_one_does(tmp_path):
    config = waiting_config(selection="mixed_first", max_groups=3, tokens_per_microbatch=96)
    found = []
    for processes in (1, 2):
        tiny = start_run(f"file://{tmp_path}/{processes}", config)
        pin, counts, losses = "", [], []
        for number in (1, 2):
            add_window_iteration(tiny, number, WINDOW)
            pin = train_job(job_of(tiny, number, pin, processes))
            scalars = scalars_of(tiny, number)
            names = ("num_selected_groups", "num_unselected_tokens", "num_waiting_responses")
            counts.append([scalars[name] for name in names])
            losses += [scalars.get(name, 0.0) for name in ("loss", "value_loss")]
        found.append((counts, losses))
    (one, losses), (two, others) = found
    assert one == two
    assert one[0][0] == 3.0
    assert one[0][1] > 0
    assert others == pytest.approx(losses, abs=STEPS)
