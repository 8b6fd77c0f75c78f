"""Several iterations in one task: the records of tasks apart, under kills as well."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from planish.base.errors import EXIT_TRANSIENT
from planish.records import layout
from tests.integration.resident_ahead import AHEAD, prompt_faults, staleness
from tests.integration.resident_equal import QUICK, WAYS, compare, records, run
from tests.integration.resident_kill import (
    command,
    copy_start,
    count_requests,
    kill_all,
    killed_round,
    site_of,
)
from tests.processes import below, marks
from tests.servers.run_minio import require_minio

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("preset", "way"),
    [
        ("tppo-tiny", "one rank"),
        ("dapo-moe-tiny", "two ranks"),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in [("dapo-tiny", "megatron"), ("dapo-tiny", "adapters")]
        ),
    ],
)
def test_iterations_in_one_task_write_what_tasks_apart_write(preset, way, tmp_path):
    assert compare(tmp_path, preset, 3, WAYS[way], sizes=[2]) == []


@pytest.fixture
def minio_cleared(monkeypatch):
    """Keep what the server's client takes from the environment from outlasting the test."""
    require_minio()
    for name in ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY", "SECURE", "RETRY_SECONDS"):
        monkeypatch.setenv(f"MINIO_{name}", "")


@pytest.mark.server
def test_a_killed_task_goes_on_to_the_same_records(tmp_path, minio_cleared):
    draw = random.Random(random.SystemRandom().randrange(1 << 32))
    with site_of(tmp_path, "dapo-tiny", WAYS["two ranks"], 2) as site:
        count_requests(site, tmp_path)
        folder = tmp_path / "round"
        folder.mkdir()
        assert killed_round(site, folder, ("process", "task"), draw)[1] == []


def test_rollouts_ahead_are_the_same_wherever_tasks_are_cut(tmp_path):
    found = []
    for size in (4, 3):
        root = tmp_path / f"blocks-of-{size}"
        run(root, "dapo-tiny", 4, (*QUICK, *AHEAD), "--resident", str(size))
        assert prompt_faults(root.as_uri(), 4) == []
        assert staleness(root.as_uri(), 4) == [0, 1, 1, 1]
        found.append(records(root))
    assert found[0] == found[1]


@pytest.mark.server
def test_a_killed_rank_that_samples_or_trains_ahead_loses_no_prompt(tmp_path, minio_cleared):
    draw = random.Random(random.SystemRandom().randrange(1 << 32))
    with site_of(tmp_path, "dapo-tiny", AHEAD, 3, size=3) as site:
        count_requests(site, tmp_path)
        folder = tmp_path / "round"
        folder.mkdir()
        assert killed_round(site, folder, ("process", "task"), draw)[1] == []
        assert prompt_faults("s3://kill/round", 3) == []


def rank_below(pid, rank):
    """Return the process of a rank, which has its number in its environment."""
    wanted = f"RANK={rank}".encode()
    (found,) = (
        child
        for child in below(pid)
        if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        and b"planish.stages.iterate.loop" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return found


def test_a_rank_that_hangs_in_training_ends_the_task_within_the_limit_of_training(tmp_path):
    apart, place = tmp_path / "apart", tmp_path / "run"
    settings = (*QUICK, "train.num_processes=2", "train.timeout_seconds=20")
    run(apart, "dapo-tiny", 1, settings, "--resident", "1")
    copy_start(apart, place.as_uri())
    with (tmp_path / "log").open("wb") as out:
        environment = marks(tmp_path)
        line = command(place.as_uri(), 2)
        task = subprocess.Popen(line, env=environment, stdout=out, stderr=out)
    try:
        training = Path(layout.stage_log(place.as_uri(), "train", 1, 0).removeprefix("file://"))
        while not training.exists():
            assert task.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        os.kill(rank_below(task.pid, 1), signal.SIGSTOP)
        # The limit of the waits between iterations is twelve hours.
        assert task.wait(timeout=600) == EXIT_TRANSIENT, (tmp_path / "log").read_text()
    finally:
        kill_all(tmp_path)
