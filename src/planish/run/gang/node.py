"""One machine of a gang: torchrun, with the exit code of the rank that failed first.

The program torchrun always ends with 1, so a scheduler could not tell whether a retry
may help.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from planish.base.errors import EXIT_TRANSIENT
from planish.base.startup import spare_collections
from planish.run.gang.manifests import GRACE_SECONDS
from planish.run.signals import STOP_VARIABLE

logger = logging.getLogger(__name__)

SIGNALLED = 128
"""Offset in exit codes: a process ended by signal n has 128 + n, as in a shell."""


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this machine and return the exit code for its pod."""
    parser = argparse.ArgumentParser(prog="python -m planish.run.gang.node", description=__doc__)
    parser.add_argument("--name", required=True, help="of the rendezvous")
    parser.add_argument("--nodes", required=True, help="machines of the gang")
    parser.add_argument("--processes", required=True, help="ranks of this machine")
    parser.add_argument("--rendezvous", required=True, help="HOST:PORT of the first machine")
    parser.add_argument("--index", required=True, help="of this machine; 0 holds the rendezvous")
    parser.add_argument("--address", required=True, help="at which other machines reach this one")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="module and its arguments")
    given = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    line = [f"--nnodes={given.nodes}", f"--nproc-per-node={given.processes}"]
    line += ["--rdzv-backend=c10d", f"--rdzv-endpoint={given.rendezvous}"]
    line += [f"--rdzv-id={given.name}", f"--rdzv-conf=is_host={given.index == '0'}"]
    # After SIGTERM ranks have the grace of the pod, less the time that torchrun needs.
    patience = GRACE_SECONDS - 10
    os.environ[STOP_VARIABLE] = str(patience - 5)
    line += [f"--shutdown-timeout={patience}", f"--local-addr={given.address}"]
    try:
        # torch does not annotate this function.
        run.run(run.parse_args([*line, "-m", *given.words]))  # type: ignore[no-untyped-call]
    except SignalException as error:
        logger.warning("stopped index=%s signal=%s", given.index, error.sigval.name)
        return EXIT_TRANSIENT
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        logger.error("rank failed rank=%d index=%s exit_code=%d", rank, given.index, code)
        return SIGNALLED - code if code < 0 else code
    except RendezvousError as error:
        # The first machine ended while ranks of this one still worked, or it never started.
        logger.warning("left alone by other machines index=%s error=%s", given.index, error)
        return EXIT_TRANSIENT
    return 0


if __name__ == "__main__":
    spare_collections()
    raise SystemExit(main(sys.argv[1:]))
