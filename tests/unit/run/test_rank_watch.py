"""What ranks tell each other through a real store, and what the first one makes of it."""

import json
import threading
import time

import pytest
import torch
from torch import nn

from planish import store
from planish.base import telemetry
from planish.base.parallel import Ranks
from planish.records import layout
from planish.run import layer_clock, rank_watch, slow_ranks, stage_metrics
from planish.run.layer_clock import time_layers
from planish.run.rank_watch import WatchedTask, behind, watched_ranks
from planish.run.slow_ranks import Work
from planish.run.stage_metrics import StageMetrics, show_phase
from planish.submit.root import open_alerts
from tests import pages


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(telemetry, "_series", {})
    monkeypatch.setattr(layer_clock, "own", Work())
    monkeypatch.setattr(layer_clock, "last_step", 0)
    monkeypatch.setattr(layer_clock, "_shown", {})
    monkeypatch.setattr(stage_metrics, "phase", "")
    monkeypatch.setattr(stage_metrics, "own_rank", "")
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def shown():
    return pages.samples(telemetry.metrics_text())


class Gang:
    """The launcher's store, and ranks beside the one that watches, which is `rank`."""

    def __init__(self, monkeypatch, root, size, rank=0, *, timeout_seconds=1800.0, num_stages=1):
        self.store = torch.distributed.HashStore()
        self.root, self.size, self.rank = root, size, rank
        self.task = WatchedTask(
            root, 3, f"{root}/behind.json", timeout_seconds, lambda size: size, num_stages
        )
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("NODE_NAME", f"node-{rank}")
        monkeypatch.setattr(rank_watch, "TICK_SECONDS", 0.002)
        opened = lambda seconds: (self.store, Ranks(rank, size))  # noqa: E731
        monkeypatch.setattr(rank_watch, "launcher_store", opened)

    def tell(self, rank, work, *, beat=1, step=0, sampling=(0.0, 0, 0), stage=0):
        words = {"beat": beat, "stage": stage, "node": f"node-{rank}", "step": step}
        words |= {"training": work, "sampling": sampling}
        self.store.set(f"rank-watch/{rank}", json.dumps(words))


def wait_for(holds):
    deadline = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.004)
    return found


@pytest.mark.parametrize("kind", ["training", "sampling"])
def test_the_first_rank_names_the_slow_one_in_metrics_log_and_alert(
    monkeypatch, tmp_path, caplog, kind
):
    monkeypatch.setattr(slow_ranks, "HELD", 3)
    gang = Gang(monkeypatch, tmp_path.as_uri(), 3)
    works = {1: Work(), 2: Work()}
    metric = rank_watch.METRICS[kind]

    def compute(times):
        """Let each rank do as much, of which the last needs so many times the seconds."""
        for rank in works:
            seconds, passes, tokens = works[rank]
            seconds += times if rank == 2 else 1.0
            works[rank] = Work(seconds, passes + 10, tokens + 100)
            facts = {"sampling": works[rank]} if kind == "sampling" else {}
            gang.tell(rank, Work() if facts else works[rank], step=7, **facts)
        if kind == "training":
            for _ in range(10):
                layer_clock.count_pass(0.1, 10)
            layer_clock.finish_step(7)
        else:
            telemetry.observe_counts(metric, [10] + [0] * 13, 1.0)
            telemetry.count("planish_rollout_tokens_total", 100)
        return False

    with watched_ranks(gang.task):
        wait_for(lambda: compute(2.0) or open_alerts(gang.root))
        ((uri, line),) = open_alerts(gang.root).items()
        name = f'planish_rank_slowness_ratio{{metric="{metric}",node="node-2",rank="2"}}'
        # The thread may look between two sums of the first rank.
        assert wait_for(lambda: shown().get(name)) == pytest.approx(2.0, rel=0.3)
        wait_for(lambda: compute(1.0) or not open_alerts(gang.root))
    assert line == f"node-2 unlike its peers in {metric} of rank 2"
    (told,) = [each for each in caplog.messages if each.startswith("slow rank=2 node=node-2")]
    assert f"metric={metric} run={gang.root} times_of_others=" in told
    alert = json.loads(store.read(uri))
    assert (alert["state"], alert["machine"], alert["iteration"]) == ("resolved", "node-2", 3)
    assert name not in shown()
    if kind == "training":
        found = shown()
        for rank in (0, 1, 2):
            assert found[f'planish_train_rank_passes_total{{rank="{rank}"}}'] > 0
        assert found['planish_train_rank_last_step{rank="2"}'] == 7


def test_ranks_of_other_stages_are_no_peers(monkeypatch, tmp_path):
    gang = Gang(monkeypatch, tmp_path.as_uri(), 4, rank=3, num_stages=2)
    with watched_ranks(gang.task):
        wait_for(lambda: gang.store.check(["rank-watch/3"]))
    assert json.loads(gang.store.get("rank-watch/3"))["stage"] == 1


def test_a_rank_that_gets_no_further_says_who_is_behind(monkeypatch, tmp_path):
    gang = Gang(monkeypatch, tmp_path.as_uri(), 2, rank=1, timeout_seconds=0.08)
    gang.tell(0, Work(1.0, 12, 120), step=4)
    show_phase("training")
    with watched_ranks(gang.task):
        wait_for(lambda: store.exists(gang.task.behind_file))
    message = json.loads(store.read(gang.task.behind_file))["message"]
    assert "the others wait for rank 0 on node-0, which tells nothing any more" in message
    record = layout.flight_record(gang.root, 3, 1)
    assert record in message
    assert "entries" in json.loads(store.read(record)) or store.exists(record)


def test_a_rank_that_only_waits_for_samplers_is_not_late(monkeypatch, tmp_path):
    gang = Gang(monkeypatch, tmp_path.as_uri(), 2, rank=1, timeout_seconds=0.04)
    gang.tell(0, Work())
    show_phase("waiting")
    with watched_ranks(gang.task):
        wait_for(lambda: json.loads(gang.store.get("rank-watch/1"))["beat"] > 60)
    assert not store.exists(gang.task.behind_file)


def test_a_store_that_is_gone_does_not_fail_the_task(monkeypatch, tmp_path):
    gang = Gang(monkeypatch, tmp_path.as_uri(), 2)

    def gone(*_):
        asked.set()
        raise RuntimeError("connection reset")

    asked = threading.Event()
    monkeypatch.setattr(rank_watch._Board, "tell", gone)
    with watched_ranks(gang.task):
        assert asked.wait(60)


def test_a_process_without_a_launcher_is_not_watched():
    before = threading.active_count()
    with watched_ranks(WatchedTask("file:///nowhere", 1, "", 1.0, lambda size: size, 1)):
        assert threading.active_count() == before


def words(beat, passes, step=3):
    return {"beat": beat, "node": "n", "step": step, "training": [0.0, passes, 0]}


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (
            {0: words(1, 5), 1: words(1, 5)},
            {0: words(2, 5), 1: words(1, 5)},
            "rank 1 on n, which t",
        ),
        (
            {0: words(1, 5), 1: words(1, 4)},
            {0: words(2, 5), 1: words(2, 4)},
            "rank 1 on n, which h",
        ),
        ({0: words(1, 5, 2), 1: words(1, 9)}, {0: words(2, 5, 2), 1: words(2, 9)}, "rank 0 on n"),
        ({0: words(1, 5), 1: words(1, 5)}, {0: words(2, 5), 1: words(2, 5)}, "no rank is behind"),
        ({0: words(1, 5)}, {0: words(2, 5), 1: words(1, 0)}, "rank 1 on n, which has computed"),
    ],
)
def test_who_is_behind(before, now, expected):
    assert expected in behind(before, now)


class Layer(nn.Module):
    def forward(self, hidden_states, fails=False):
        assert not fails
        return hidden_states * 2


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.layers_of_another_kind = Layer()

    def forward(self, x):
        x = self.layers_of_another_kind(self.layers[0](x))
        return self.layers[1](hidden_states=x)


def test_layers_count_their_passes_and_tokens_and_no_other_module():
    decoder = Decoder()
    time_layers(decoder)
    decoder(torch.zeros(2, 5, 8))
    with pytest.raises(AssertionError):
        decoder.layers[0](torch.zeros(2, 5, 8), fails=True)
    decoder(torch.zeros(7, 1, 8))
    assert layer_clock.own[1:] == (4, 34)
    assert layer_clock.own.compute_seconds > 0
    layer_clock.finish_step(1)
    layer_clock.finish_step(2)
    found = shown()
    assert found['planish_train_rank_passes_total{rank="0"}'] == 4
    assert found['planish_train_rank_tokens_total{rank="0"}'] == 34


@pytest.mark.parametrize(
    ("stage", "phase"),
    [
        ("rollout", "sampling"),
        ("reward", "judging"),
        ("train", "training"),
        ("checkpoint", "saving"),
    ],
)
def test_a_task_shows_the_phase_of_its_rank_and_waits_after_it(stage, phase):
    with StageMetrics(stage, 1) as metrics:
        metrics.open()
        during = shown()
    names = [name for name in (*during, *shown()) if name.startswith("planish_rank_phase")]
    wanted = [phase, "waiting"]
    assert names == [f'planish_rank_phase{{phase="{each}",rank="0"}}' for each in wanted]


def test_a_task_beside_the_main_thread_changes_no_phase():
    show_phase("sampling")

    def export():
        with StageMetrics("checkpoint", 1) as metrics:
            metrics.open()

    thread = threading.Thread(target=export)
    thread.start()
    thread.join()
    assert shown()['planish_rank_phase{phase="sampling",rank="0"}'] == 1
