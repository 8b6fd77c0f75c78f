"""Several iterations in one task: the records of tasks apart, under kills as well."""

import random

import pytest

from tests.integration.resident_equal import WAYS, compare
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


@pytest.mark.server
def test_a_killed_task_goes_on_to_the_same_records(tmp_path, monkeypatch):
    require_minio()
    # What the server's client takes from the environment must not outlast the test.
    for name in ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY", "SECURE", "RETRY_SECONDS"):
        monkeypatch.setenv(f"MINIO_{name}", "")
    draw = random.Random(random.SystemRandom().randrange(1 << 32))
    with site_of(tmp_path, "dapo-tiny", "two ranks", 2) as site:
        count_requests(site, tmp_path)
        folder = tmp_path / "round"
        folder.mkdir()
        assert killed_round(site, folder, ("process", "task"), draw)[1] == []
