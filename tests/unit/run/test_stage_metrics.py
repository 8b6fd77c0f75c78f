import contextlib
import math
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest

from planish.base import telemetry
from planish.base.errors import ConfigError
from planish.run import stage_metrics
from planish.run.stage import execute
from planish.run.stage_metrics import StageMetrics
from tests import pages
from tests.servers.program import free_port


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(telemetry, "_series", {})
    monkeypatch.delenv("PLANISH_METRICS_PORT", raising=False)
    monkeypatch.setenv("PLANISH_METRICS_LAST_SCRAPE_SECONDS", "0")


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        return pages.samples(answer.read().decode())


def test_nothing_listens_unless_a_port_is_set():
    before = threading.active_count()
    with StageMetrics("reward", 3) as shown:
        shown.open()
        assert threading.active_count() == before


def test_a_task_shows_what_it_is_and_when_it_got_ahead(monkeypatch):
    monkeypatch.setenv("PLANISH_METRICS_PORT", str(free_port()))
    monkeypatch.setenv("PLANISH_ITERATION_LIMIT_SECONDS", "158400")
    begun = time.time()
    with StageMetrics("rollout", 7) as shown:
        shown.open()
        found = scrape(shown._server.port)
        clock = time.time() + 60.0
        monkeypatch.setattr(telemetry.time, "time", lambda: clock)
        telemetry.mark_progress()
        later = scrape(shown._server.port)
        listening = shown._server._server.socket
    assert found['planish_stage_info{rank="0",stage="rollout"}'] == 1
    assert found["planish_stage_iteration"] == 7
    assert found["planish_stage_iteration_limit_seconds"] == 158400
    assert begun <= found["planish_stage_start_timestamp_seconds"] <= clock
    name = "planish_stage_progress_timestamp_seconds"
    assert found[name] < later[name] == pytest.approx(clock)
    assert listening.fileno() == -1


def test_scalars_of_the_outcome_become_gauges_and_what_is_not_finite_is_counted():
    with StageMetrics("reward", 1) as shown:
        shown.open()
        shown.publish(
            {
                "reward_mean": -0.25,
                "accuracy_mean": math.nan,
                "num_rollouts": 64.0,
                "num_kept_rollouts": 16.0,
                "reward_std": math.inf,
            }
        )
    found = pages.samples(telemetry.metrics_text())
    assert found["planish_reward_mean"] == -0.25
    assert found["planish_reward_kept_ratio"] == 0.25
    assert found["planish_stage_nonfinite_total"] == 2
    assert "planish_reward_accuracy_ratio" not in found


def test_a_rank_has_a_port_of_its_own_after_that_of_its_launcher(monkeypatch):
    port = free_port()
    monkeypatch.setenv("PLANISH_METRICS_PORT", str(port))
    with StageMetrics("train", 2, rank=3) as shown:
        shown.open()
        assert port + 4 <= shown._server.port < port + 4 + 16
        found = scrape(shown._server.port)
        assert found['planish_stage_info{rank="3",stage="train"}'] == 1


def test_a_finished_task_waits_until_its_last_numbers_are_scraped(monkeypatch):
    monkeypatch.setenv("PLANISH_METRICS_PORT", str(free_port()))
    monkeypatch.setenv("PLANISH_METRICS_LAST_SCRAPE_SECONDS", "1000")
    seen, over = {}, threading.Event()

    def read(port):
        with contextlib.suppress(OSError):
            while not over.wait(0.05):
                seen.update(scrape(port))

    with StageMetrics("reward", 1) as shown:
        shown.open()
        scrape(shown._server.port)
        shown.publish({"reward_mean": 0.5})
        reader = threading.Thread(target=read, args=(shown._server.port,))
        reader.start()
    over.set()
    reader.join()
    assert seen["planish_reward_mean"] == 0.5


def test_tasks_inside_a_task_are_served_by_it_and_wait_for_nobody(monkeypatch):
    monkeypatch.setenv("PLANISH_METRICS_PORT", str(free_port()))
    monkeypatch.setenv("RANK", "2")
    with StageMetrics("iterate", 5, rank=2) as around:
        around.serve()
        monkeypatch.setenv("PLANISH_METRICS_LAST_SCRAPE_SECONDS", "1000")
        for number in (5, 6):
            with StageMetrics("train", number) as shown:
                shown.open()
                shown.publish({"entropy": float(number)})
        monkeypatch.setenv("PLANISH_METRICS_LAST_SCRAPE_SECONDS", "0")
        found = scrape(around._server.port)
    assert found['planish_stage_info{rank="2",stage="train"}'] == 1
    assert (found["planish_stage_iteration"], found["planish_train_entropy"]) == (6, 6)
    with StageMetrics("train", 7) as shown:
        shown.open()
        assert scrape(shown._server.port)["planish_stage_iteration"] == 7


@pytest.mark.parametrize(
    ("lasted", "is_scraped", "waited"),
    [(600.0, True, [20.0]), (600.0, False, []), (5.0, True, [20.0]), (5.0, False, [15.0])],
)
def test_a_task_waits_only_where_something_scrapes(monkeypatch, lasted, is_scraped, waited):
    """A short one may have ended before a scraper came by."""
    port, clock, waits = free_port(), [100.0], []
    monkeypatch.setenv("PLANISH_METRICS_PORT", str(port))
    monkeypatch.setenv("PLANISH_METRICS_LAST_SCRAPE_SECONDS", "20")
    clock_of = SimpleNamespace(monotonic=lambda: clock[0], time=time.time)
    monkeypatch.setattr(stage_metrics, "time", clock_of)
    monkeypatch.setattr(
        telemetry.MetricsServer, "wait_for_scrape", lambda _, limit: waits.append(limit) or True
    )
    with StageMetrics("reward", 1) as shown:
        shown.open()
        if is_scraped:
            scrape(port)
        shown.publish({"reward_mean": 0.5})
        clock[0] += lasted
    assert waits == waited


@pytest.mark.parametrize("text", ["http", "-1", "70000", "nan"])
def test_a_port_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("PLANISH_METRICS_PORT", text)
    with pytest.raises(ConfigError, match="`PLANISH_METRICS_PORT` must be a number"):
        StageMetrics("train", 1).open()


def test_a_stage_that_fails_is_counted_by_its_exit_code(tmp_path, file_root):
    def work(context):
        raise ConfigError("`x` must be y, got z; set it")

    with pytest.raises(SystemExit):
        execute("reward", work, root=file_root, config_sha256=None, outputs={})
    assert pages.samples(telemetry.metrics_text())['planish_stage_failures_total{code="2"}'] == 1
