"""Run the command of a pod, and run it once more in the same pod if it failed or was killed.

`python3 -m planish.run.again COMMAND ...` has the exit code of the last attempt. By
default the controller of Kubeflow Pipelines 2.17 never retries a container whose program failed,
even if the task sets retries; this module retries without the controller. It cannot retry if the
whole container dies, as at its memory limit, or if the node fails.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from planish.base.errors import EXIT_CONFIG
from planish.run.signals import POLL_SECONDS, end_descendants, on_signal

ATTEMPTS = 2
PAUSE_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def main(command: Sequence[str]) -> int:
    """Run a command up to twice; after a signal or a fault of the settings do not run it again."""
    # Orphans of an attempt become children of this process, so that it can end them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pod = int(os.environ.get("KFP_RETRY_INDEX", "0"))
    child: subprocess.Popen[bytes] | None = None
    signalled = 0

    def stop(number: int) -> None:
        nonlocal signalled
        signalled = number
        if child:
            child.send_signal(number)

    with on_signal(stop):
        for attempt in range(ATTEMPTS):
            index = str(pod * ATTEMPTS + attempt)
            child = subprocess.Popen(command, env={**os.environ, "KFP_RETRY_INDEX": index})
            if signalled:
                child.send_signal(signalled)
            code = child.wait()
            code = code if code >= 0 else 128 - code
            end_descendants(0.0)
            if signalled or code in (0, EXIT_CONFIG) or attempt == ATTEMPTS - 1:
                break
            later = int(index) + 1
            sys.stderr.write(f"exit code {code}: once more in this pod, as attempt {later}\n")
            sys.stderr.flush()
            end = time.monotonic() + PAUSE_SECONDS
            while not signalled and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
            if signalled:
                break
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
