"""What tests of several processes and a real server share."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.integration.scheduling import running_scheduler
from tests.servers.http_proxy import HttpProxy
from tests.stacks import packages_of_an_image, stacks_without_sources

__all__ = ["packages_of_an_image", "stacks_without_sources"]

FOLDER = Path(__file__).parent
QUICK = {
    "test_whole_run.py": ("*killed_once*",),
    "test_s3_faults.py": ("*clock*",),
    "test_ckpt_failures.py": ("*an_uploader_killed*", "*killed_in_a_load*"),
    "test_train_processes.py": ("*losses*", "*weights*", "*shard_each*", "*moves*"),
    "test_megatron_training.py": ("*[[]wide-dp2-*", "*[[]wide-tp2-sequence-*"),
    "test_minder_prometheus.py": ("*of_the_past*", "*names_the_machine*", "*can_be_replayed*"),
    "test_minder_rules.py": ("*",),
    "test_minder_alertmanager.py": ("*",),
    "test_disagg_equality.py": ("*[[]Qwen3Moe-2-2-3*", "*others_run*", "*is_noticed*"),
}
"""The tests of this folder that `make test` runs; all others are `long`.

They are chosen by `tests/durations.json`, so that each system meets a real server or real ranks.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as `long` what `QUICK` does not name."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            names = QUICK.get(item.path.name, ())
            if not any(fnmatchcase(item.name, name) for name in names):
                item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def forks():
    """A process that forks ranks; one per pytest-xdist worker."""
    from tests.integration.ckpt_forks import shared_forks

    return shared_forks()


@pytest.fixture
def site(minio, s3_root, forks, tmp_path):
    """An empty bucket that ranks reach through a proxy; see `ckpt_failures.Site`."""
    from tests.integration.ckpt_failures import Site

    with HttpProxy(minio.endpoint) as proxy:
        yield Site(minio, s3_root, proxy, forks, tmp_path)


@pytest.fixture
def scheduler(control_plane):
    """The control plane with a scheduler, for as long as the test lasts."""
    with running_scheduler(control_plane) as plane:
        yield plane
