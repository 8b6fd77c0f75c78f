"""Every error that this program raises on purpose, as one tree.

::

    PlanishError
      ConfigError(ValueError)          unknown key, wrong type, impossible combination
      RecordError(ValueError)          schema, shape or digest does not match
      StoreError(OSError)
        ObjectMissing                  no object at this URI
        ObjectExists                   a conditional create found an object in its place
        AccessRefused                  the store refused the credentials
        StoreUnavailable               gave up after the retry policy
      CheckpointError
        CheckpointIncomplete           no manifest: the save never finished
        LayoutMismatch                 tensors do not cover what the new layout needs
      EngineError                      a rollout engine failed
        EngineBusy                     the call needs an engine with nothing in flight
        NotSupported                   this engine lacks an optional ability
      VerifierFailure                  too many verifier errors in one batch
      PeerLost                         a rank did not answer in time

A message reads: what must be what, the value seen, who must change what.
"""

from __future__ import annotations


class PlanishError(Exception):
    """Root of the tree; catch it to catch everything that is ours."""


class ConfigError(PlanishError, ValueError):
    """The user asked for something that cannot be: never retried."""


class RecordError(PlanishError, ValueError):
    """A record set is damaged, of an unknown version, or does not fit its parents."""


class StoreError(PlanishError, OSError):
    """A store could not do what was asked."""


class ObjectMissing(StoreError):
    """No object at this URI."""


class ObjectExists(StoreError):
    """A conditional create found an object in its place."""


class AccessRefused(StoreError):
    """The store refused the credentials; never retried."""


class StoreUnavailable(StoreError):
    """The store did not answer within the retry policy."""


class CheckpointError(PlanishError):
    """A checkpoint could not be written or read."""


class CheckpointIncomplete(CheckpointError):
    """The save never finished: its manifest is missing."""


class LayoutMismatch(CheckpointError):
    """The tensors of a checkpoint do not cover what the new layout needs."""


class EngineError(PlanishError):
    """A rollout engine failed."""


class EngineBusy(EngineError):
    """The call needs an engine with nothing in flight."""


class NotSupported(EngineError):
    """This engine lacks an optional ability."""


class VerifierFailure(PlanishError):
    """Too many verifier errors in one batch to trust its rewards."""


class PeerLost(PlanishError):
    """A rank did not answer in time."""


EXIT_DONE = 0
"""Done, or already done."""
EXIT_FAILED = 1
"""Anything that no other code names; may be retried."""
EXIT_CONFIG = 2
"""Wrong arguments or configuration; must not be retried."""
EXIT_TRANSIENT = 75
"""Store, peer or device failed for now; a retry may help."""


def exit_code(error: BaseException) -> int:
    """Return the process exit code that tells a scheduler what to do about `error`."""
    if isinstance(error, (ConfigError, AccessRefused)):
        return EXIT_CONFIG
    if isinstance(error, (StoreUnavailable, PeerLost)):
        return EXIT_TRANSIENT
    return EXIT_FAILED
