"""/healthz, /readyz and /metrics."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from planish.base.errors import ConfigError
from planish.minder.service.http import status_server
from planish.minder.service.own_metrics import OwnMetrics
from tests import pages


@dataclass
class Health:
    healthy: bool = True
    ready: bool = False

    def is_healthy(self):
        return self.healthy

    def why_not_ready(self):
        return "" if self.ready else "Prometheus is away"


def serve(port, health):
    probes = {"is_healthy": health.is_healthy, "why_not_ready": health.why_not_ready}
    return status_server("127.0.0.1", port, OwnMetrics(), **probes)


def get(server, path):
    return pages.get(f"http://127.0.0.1:{server.port}{path}")


def test_probes_tell_health_and_readiness_and_metrics_are_text():
    health = Health()
    server = serve(0, health)
    try:
        assert get(server, "/healthz") == (200, "ok\n")
        assert get(server, "/readyz") == (503, "not ok: Prometheus is away\n")
        health.healthy, health.ready = False, True
        assert get(server, "/healthz")[0] == 503
        assert get(server, "/readyz?verbose=1") == (200, "ok\n")
        assert "minder_breaker_open 0.0" in get(server, "/metrics")[1]
        assert get(server, "/other")[0] == 404
        with pytest.raises(ConfigError, match=r"server.port"):
            serve(server.port, health)
    finally:
        server.close()
