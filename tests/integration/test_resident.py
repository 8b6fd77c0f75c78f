"""Several iterations in one task: the records of tasks apart, under kills as well."""

import random

import pytest

from tests.integration.resident_ahead import AHEAD, prompt_faults, staleness
from tests.integration.resident_equal import QUICK, WAYS, compare, records, run
from tests.integration.resident_kill import count_requests, killed_round, site_of
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
