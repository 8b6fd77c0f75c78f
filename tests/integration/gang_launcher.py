"""Submit a gang as the pod of a stage would, in a process that a test may end.

python -m tests.integration.gang_launcher GANG.json
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from kubernetes import client

from planish.base.errors import EXIT_TRANSIENT, PlanishError, exit_code
from planish.run.gang.cluster import GangCluster
from planish.run.gang.launch import run_gang
from planish.run.gang.manifests import Gang, GangPods
from planish.run.signals import stops_with


def connect(server: str, certificate: str, token: str, pod: str, **options: Any) -> GangCluster:
    """Return the cluster as an account sees it."""
    settings = client.Configuration(host=server)
    settings.ssl_ca_cert, settings.retries = certificate, False
    settings.api_key["authorization"] = f"Bearer {token}"
    return GangCluster(settings, "planish", pod, **options)


def main(path: Path) -> int:
    """Do as `planish.run.stage.execute` does with errors and signals."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    given = json.loads(path.read_text())
    gang = Gang(**{**given["gang"], "pods": GangPods(**given["gang"]["pods"])})
    try:
        with stops_with(EXIT_TRANSIENT):
            run_gang(connect(**given["cluster"]), gang, before=lambda: None)
    except PlanishError as error:
        logging.error("%s", error)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
