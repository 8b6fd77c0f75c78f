"""What tests of several processes and a real server share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.scheduling import running_scheduler
from tests.servers.http_proxy import HttpProxy
from tests.stacks import stacks_without_sources

__all__ = ["stacks_without_sources"]


@pytest.fixture(scope="module", autouse=True)
def packages_of_an_image():
    """Let what a test starts find the packages of an image; see `stage_path/sitecustomize.py`."""
    with pytest.MonkeyPatch.context() as patch:
        # Before what is there: a work tree beside the installed one is tested with its own code.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "stage_path"), prepend=os.pathsep)
        yield


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
