"""Real gangs of gloo ranks: the one that is slow is named, and the one that hangs."""

import contextlib
import json
import os
import signal
import threading

import pytest

from planish import store
from planish.base.errors import PeerLost
from planish.records import layout
from planish.stages.train.stage import launch
from tests import pages
from tests.integration.slow_rank import gang_job, is_right, one_gang, rank_process
from tests.integration.waiting import wait_for
from tests.servers.program import free_port

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [2, 4])
def test_a_slowed_rank_is_named_within_three_minutes(size):
    result = one_gang(size, slow=size - 1, healthy_seconds=30.0, seconds=180.0)
    assert is_right(result), result
    (line,) = result["lines"]
    assert "metric=planish_train_rank_compute_seconds_total run=file://" in line


@pytest.mark.parametrize("size", [2, 4])
def test_a_quiet_gang_names_nobody(size):
    result = one_gang(size, slow=None, healthy_seconds=0.0, seconds=120.0)
    assert is_right(result), result


def test_a_rank_that_hangs_is_named_in_the_error_with_the_record_of_the_others(
    tmp_path, monkeypatch
):
    job, port = gang_job(tmp_path / "run", 2, timeout_seconds=20.0), free_port()
    monkeypatch.setenv("PLANISH_METRICS_PORT", str(port))
    monkeypatch.setenv("PLANISH_METRICS_LAST_SCRAPE_SECONDS", "0")
    shown = {}

    def has_begun():
        with contextlib.suppress(OSError):
            shown.update(pages.samples(pages.get(f"http://127.0.0.1:{port + 1}/metrics")[1]))
        return shown.get('planish_train_rank_last_step{rank="1"}', 0) > 0

    def hang():
        pid = rank_process(os.getpid(), 1)
        wait_for(has_begun, 240.0)
        os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    with pytest.raises(PeerLost, match=r"wait for rank 1 on \S+, which tells") as caught:
        launch(job, 2)
    record = layout.flight_record(job.root, 1, 0)
    assert record in str(caught.value)
    entries = json.loads(store.read(record))["entries"]
    assert entries[-1]["profiling_name"].startswith("gloo:")
    thread.join(5)
    assert shown['planish_rank_phase{phase="training",rank="0"}'] == 1
    for name in ("compute_seconds", "passes", "tokens"):
        assert all(
            shown[f'planish_train_rank_{name}_total{{rank="{rank}"}}'] > 0 for rank in (0, 1)
        )
