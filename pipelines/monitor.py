"""Whether tasks that look for faulty machines stand beside training, and what follows from it."""

from dataclasses import dataclass

MAX_RESTARTS = 10
"""More machines than that are no accident of single machines."""


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
    """Return the options; None where nobody looks.

    Raises:
        ValueError: restarts without anybody who names machines, or too many.
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
