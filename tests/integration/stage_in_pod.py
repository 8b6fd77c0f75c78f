"""Run a stage as its pod does; the node agent of the tests mounts no service account.

python -m tests.integration.stage_in_pod STAGE OPTIONS
"""

import json
import os
import sys
from unittest import mock

from planish.run.__main__ import main
from planish.run.gang.cluster import GangCluster
from tests.integration.gang_launcher import connect

if __name__ == "__main__":
    access = json.loads(os.environ["GANG_ACCESS"])

    def from_pod(launcher: str) -> GangCluster:
        """Connect with the token that a variable holds."""
        return connect(**access, pod=os.environ["POD_NAME"], launcher=launcher)

    with mock.patch.object(GangCluster, "from_pod", from_pod):
        raise SystemExit(main(sys.argv[1:]))
