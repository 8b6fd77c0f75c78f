"""The lock of a root: who holds it, when it is taken over, and races."""

import dataclasses
import os
import subprocess
import sys
import threading

import pytest

from planish import store
from planish.base.errors import ConfigError, RecordError
from planish.records import layout
from planish.run import lock, stage_log
from planish.run.lock import Holder, acquire, beat, current_holder, hand_over, is_alive, read_lock
from tests.integration.waiting import wait_for

ROOTS = ("file_root", pytest.param("s3_root", marks=pytest.mark.server))


@pytest.fixture(params=ROOTS)
def root(request):
    return request.getfixturevalue(request.param)


def other(pid, started=1):
    return Holder("local", host="elsewhere", space=lock.process_space(), pid=pid, started=started)


def test_a_live_process_of_this_machine_is_refused_by_name(file_root):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        holder = other(child.pid, lock.process_start(child.pid))
        acquire(file_root, holder, now=1000.0)
        with pytest.raises(ConfigError, match=rf"process {child.pid} on elsewhere .* wait for"):
            acquire(file_root, current_holder(), now=10_000.0)
    finally:
        child.kill()
        child.wait()


def test_a_killed_process_loses_the_lock_at_once(root):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    holder = other(child.pid, lock.process_start(child.pid))
    acquire(root, holder, now=1000.0)
    child.kill()
    child.wait()
    assert acquire(root, current_holder(), now=1000.1).generation == 2
    assert beat(root, holder) is False


def test_a_later_process_with_the_same_id_is_not_the_holder():
    mine = current_holder()
    assert is_alive(mine) is True
    assert is_alive(dataclasses.replace(mine, started=mine.started + 1)) is False


def test_a_zombie_counts_as_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = lock.process_start(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(other(child.pid, started)) is False
    child.wait()


@pytest.mark.parametrize(("silent", "free"), [(599.0, False), (600.0, True)])
def test_where_nothing_tells_the_heartbeat_decides_after_ten_minutes(file_root, silent, free):
    holder = dataclasses.replace(other(7), space="another boot")
    acquire(file_root, holder, now=1000.0)
    if free:
        assert acquire(file_root, current_holder(), now=1000.0 + silent).generation == 2
    else:
        with pytest.raises(ConfigError, match=r"wait 1 s without a heartbeat"):
            acquire(file_root, current_holder(), now=1000.0 + silent)


@pytest.mark.parametrize(("active", "free"), [(True, False), (False, True)])
def test_a_run_of_the_cluster_is_asked_for(file_root, active, free):
    acquire(file_root, Holder("cluster", run_id="7f3a"), now=1000.0)
    me = Holder("cluster", run_id="other")
    if free:
        assert acquire(file_root, me, alive=lambda _: active, now=1001.0).generation == 2
    else:
        with pytest.raises(ConfigError, match=r"run 7f3a of the cluster holds"):
            acquire(file_root, me, alive=lambda _: active, now=9999.0)


def test_of_many_that_take_over_at_the_same_moment_one_wins(root):
    acquire(root, dataclasses.replace(other(1), started=1), now=0.0)
    barrier, won, lost = threading.Barrier(8), [], []

    def race(number):
        me = Holder("cluster", run_id=f"racer-{number}")
        barrier.wait()
        try:
            won.append(acquire(root, me, alive=lambda h: h.kind == "cluster").generation)
        except ConfigError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [2]
    assert len(lost) == 7
    assert all("one run at a time" in text for text in lost)


def test_a_stage_process_holds_for_what_started_it(tmp_path):
    script = "from planish.run.lock import current_holder; print(current_holder().pid)"
    (tmp_path / "planish_probe.py").write_text(script)
    # A stage runs as `sh -ec "... kfp.dsl.executor_main ..."` below the runner.
    inner = f"{sys.executable} {tmp_path}/planish_probe.py kfp.dsl.executor_main; true"
    found = subprocess.run(
        ["sh", "-ec", inner], capture_output=True, text=True, check=True, env=_environment()
    )
    assert int(found.stdout) == os.getpid()


def test_a_program_that_is_no_stage_holds_for_itself():
    script = (
        "import os; from planish.run.lock import current_holder as h; print(h().pid, os.getpid())"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=_environment(),
    )
    pid, own = found.stdout.split()
    assert pid == own


def _environment():
    return {name: value for name, value in os.environ.items() if name != "RUN_ID"}


@pytest.mark.parametrize("text", ["[]", '{"holder": {"kind": "local"}}', '{"holder": {"x": 1}}'])
def test_a_damaged_lock_is_told_and_not_taken(file_root, text):
    uri = layout.lock_file(file_root, 1)
    store.write(uri, text.encode())
    with pytest.raises(RecordError, match="must name a holder"):
        acquire(file_root, current_holder())


def test_a_lock_without_a_word_is_free_since_its_writer_never_began(file_root):
    uri = layout.lock_file(file_root, 1)
    store.write(uri, b"")
    assert acquire(file_root, current_holder()).generation == 2


@pytest.mark.parametrize("heartbeat", [float("nan"), float("inf"), 1e12])
def test_a_heartbeat_that_can_not_be_is_no_sign_of_life(file_root, heartbeat):
    acquire(file_root, dataclasses.replace(other(7), space="another boot"), now=heartbeat)
    assert acquire(file_root, current_holder(), now=1000.0).generation == 2


def test_a_running_stage_beats_for_its_run(file_root, monkeypatch):
    monkeypatch.setattr(stage_log, "FLUSH_SECONDS", 0.02)
    acquire(file_root, current_holder(), now=1000.0)
    with stage_log.StageLog(file_root, "train", 1, 0, log_format="%(message)s"):
        wait_for(lambda: read_lock(file_root).heartbeat_seconds != 1000.0, 60.0)
    assert read_lock(file_root).heartbeat_seconds > 1_000_000


def test_a_holder_that_hands_over_makes_room_once(root):
    first, second, third = (Holder("cluster", run_id=name) for name in "abc")
    assert not hand_over(root, first)
    acquire(root, first)
    assert hand_over(root, first)
    assert read_lock(root).generation == 1
    assert acquire(root, second, alive=lambda _: True).generation == 2
    assert not hand_over(root, first)
    with pytest.raises(ConfigError, match="run b of the cluster holds its lock"):
        acquire(root, third, alive=lambda _: True)
