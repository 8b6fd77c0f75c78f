"""What tests of several processes and a real server share."""

from __future__ import annotations

import pytest

from tests.integration.scheduling import running_scheduler
from tests.servers.http_proxy import HttpProxy


@pytest.fixture(scope="session")
def forks():
    """A process that forks ranks; one per pytest-xdist worker."""
    from tests.integration.ckpt_forks import Forks

    with Forks() as found:
        yield found


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
