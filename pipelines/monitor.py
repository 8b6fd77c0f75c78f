"""Whether tasks that look for faulty machines run beside training, and what follows from it."""

import argparse
from dataclasses import dataclass

MAX_RESTARTS = 10
"""More faulty machines than that in one run have a common cause, which no restart mends."""


@dataclass(frozen=True)
class Monitor:
    """Options of the tasks `monitor_check`, fixed when a pipeline is compiled.

    Example:
        >>> Monitor("s3://runs/minder.toml", max_restarts=2).watches
        True
    """

    settings: str = ""
    """URI of the TOML of the monitor; empty for what is built in, which a trace needs only."""
    trace: str = ""
    """URI of a recorded trace to look at; empty for Prometheus."""
    watches: bool = True
    """Look for as long as the iteration trains; False for one look."""
    max_restarts: int = 0
    """How often the exit task starts a failed run again without the machine that was named in it,
    and from how many machines a run keeps away; 0 for neither."""


def monitor_of(
    settings: str, trace: str = "", *, watches: bool = True, max_restarts: int = 0
) -> Monitor | None:
    """Return the options; None where neither settings nor a trace is given.

    Raises:
        ValueError: restarts without settings or a trace, or too many.
    """
    if not 0 <= max_restarts <= MAX_RESTARTS:
        raise ValueError(f"`max_restarts` must be 0 to {MAX_RESTARTS}, got {max_restarts}")
    if not settings and not trace:
        if max_restarts:
            raise ValueError(
                f"`max_restarts` must be 0 without --monitor, got {max_restarts}; nobody would "
                "name the machine to keep away from"
            )
        return None
    return Monitor(settings, trace, watches=watches, max_restarts=max_restarts)


def monitor_options(parser: argparse.ArgumentParser, *, on_cluster: bool) -> None:
    """Add the options that `monitor_of` takes; without `--monitor` or a trace nothing looks.

    Args:
        parser: of a command that runs or compiles `post-train`.
        on_cluster: restarts are an option of a cluster, a recorded trace of one machine.
    """
    parser.add_argument("--monitor", default="", metavar="URI", help="TOML of monitor_check")
    if on_cluster:
        help_text = "restarts without a machine that monitor_check named; 0 for none"
        parser.add_argument("--max-restarts", type=int, default=0, help=help_text)
    else:
        help_text = "recorded trace that it looks at"
        parser.add_argument("--monitor-trace", default="", metavar="URI", help=help_text)
