"""Every error that this program raises on purpose, as one tree.

::

    PlanishError
      ConfigError(ValueError)          unknown key, wrong type, impossible combination
        RootInUse                      another run holds the lock of the root
      RecordError(ValueError)          schema, shape or digest does not match
      StoreError(OSError)
        ObjectMissing                  no object at this URI
        ObjectExists                   a conditional create found an object in its place
        ObjectChanged                  the object is not the one that was named any more
        ObjectTooLarge                 an object exceeds what its reader is ready to hold
        StoreMisconfigured(ConfigError)  no such bucket, no credentials, not an S3 server
        AccessRefused                  the store refused the credentials
        StoreUnavailable               gave up after the retry policy
      CheckpointError
        CheckpointNotFound             nothing has been committed there
        CheckpointExists               another save committed to this place first
        CheckpointIncomplete           an object that the commit names is missing or short
        CheckpointCorrupt              a digest or a checksum differs
        LayoutMismatch                 tensors do not cover what the new layout needs
          MissingKeys                  the checkpoint lacks tensors
          UnexpectedKeys               the checkpoint has tensors that nothing asks for
          ShapeMismatch                a tensor has another global shape
          DtypeMismatch                a tensor has another type
        PlanMismatch                   ranks do not take part in the same save or load
        SaveFailed(RanksError)         at least one rank could not do its part
      EngineError                      a rollout engine failed
        EngineBusy                     the call needs an engine with nothing in flight
        NotSupported                   this engine lacks an optional ability
        ProtocolError                  a rank sent what no rank of its instance may send
      VerifierFailure                  too many verifier errors in one batch
      RanksError                       some ranks failed, each for a reason of its own
        PeerLost                       a rank did not answer in time
      ClusterError                     Kubernetes or Kubeflow refused, or did not answer
      BackendUnavailable               a monitoring server did not answer, or not as it must

A store serves records as well as checkpoints, so a `StoreError` is no `CheckpointError`. A caller
of `planish.checkpoint` catches both, or `PlanishError`. If a store fails during a save, the error
is `SaveFailed`.

A message has three parts: the rule, the value seen, and who must change what.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class PlanishError(Exception):
    """Root of the tree; catch it to catch every error of this program."""

    per_rank: Mapping[int, str] = MappingProxyType({})
    """Errors by rank, if some ranks failed and all ranks raise this exception."""


class RanksError(PlanishError):
    """Some ranks failed, each for its own reason.

    Example:
        >>> PeerLost("rank 2 is gone", per_rank={2: "closed its connection"}).per_rank
        {2: 'closed its connection'}
    """

    def __init__(self, message: str, *, per_rank: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.per_rank = dict(per_rank or {})


class ConfigError(PlanishError, ValueError):
    """The settings or arguments are wrong; never retried."""


class RootInUse(ConfigError):
    """Another run holds the lock of the root; the failed run has written nothing there."""


class RecordError(PlanishError, ValueError):
    """A record set is damaged, has an unknown version, or does not fit the sets it was made
    from.
    """


class StoreError(PlanishError, OSError):
    """A store could not carry out a request."""


class ObjectMissing(StoreError):
    """No object at this URI."""


class ObjectExists(StoreError):
    """A conditional create found an object in its place."""


class ObjectChanged(StoreError):
    """An object does not have the entity tag (any more) that the caller gave."""


class ObjectTooLarge(StoreError):
    """An object has more bytes than its reader accepts."""


class StoreMisconfigured(StoreError, ConfigError):
    """The bucket, the address or the credentials are wrong; never retried."""


class AccessRefused(StoreError):
    """The store refused the credentials; never retried."""


class StoreUnavailable(StoreError):
    """The store did not answer within the retry policy."""


class CheckpointError(PlanishError):
    """A checkpoint could not be written or read; see `StoreError` for a store that is down."""


class CheckpointNotFound(CheckpointError):
    """Nothing has been committed at this place."""


class CheckpointExists(CheckpointError):
    """Another save has committed to this place first."""


class CheckpointIncomplete(CheckpointError):
    """The save never finished, or an object that COMMIT lists is missing or short."""


class CheckpointCorrupt(CheckpointError):
    """Stored bytes differ from the saved bytes."""

    def __init__(self, message: str, *, file: str = "", block: int = -1) -> None:
        """Store the damaged object and its first damaged block of 1 MiB (-1: unknown)."""
        super().__init__(message)
        self.file, self.block = file, block


class LayoutMismatch(CheckpointError):
    """The tensors of a checkpoint do not cover the tensors of the new layout."""


class MissingKeys(LayoutMismatch):
    """The checkpoint lacks tensors that the target has."""


class UnexpectedKeys(LayoutMismatch):
    """The checkpoint has tensors that the target lacks."""


class ShapeMismatch(LayoutMismatch):
    """A tensor has another global shape than the target's."""


class DtypeMismatch(LayoutMismatch):
    """A tensor has another type than the target's."""


class PlanMismatch(CheckpointError):
    """Ranks do not take part in the same save or load."""


class SaveFailed(RanksError, CheckpointError):
    """At least one rank could not do its part; the checkpoint does not exist."""


class EngineError(PlanishError):
    """A rollout engine failed."""


class EngineBusy(EngineError):
    """The call needs an engine without requests in progress."""


class NotSupported(EngineError):
    """This engine lacks an optional ability."""


class ProtocolError(EngineError):
    """A rank sent or received a message that is not allowed for its instance."""


class VerifierFailure(PlanishError):
    """Too many verifier errors in one batch to trust its rewards."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        """Store whether a retry of the batch must fail too; a slow verifier may answer next
        time.
        """
        super().__init__(message)
        self.is_final = is_final


class PeerLost(RanksError):
    """A rank did not answer in time."""


class ClusterError(PlanishError):
    """The API server of Kubernetes or Kubeflow refused a request, or did not answer it."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float = 0.0) -> None:
        """Store the HTTP status (0: no answer) and the seconds to wait that the server names."""
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class BackendUnavailable(PlanishError):
    """Prometheus or Alertmanager did not answer, or gave a wrong answer."""

    def __init__(self, message: str, *, code: str) -> None:
        """Store the HTTP status, or timeout, connection, tls, invalid, empty, unknown, stopped."""
        super().__init__(message)
        self.code = code


EXIT_DONE = 0
"""The work is done, now or before."""
EXIT_FAILED = 1
"""All other failures; a retry may help."""
EXIT_CONFIG = 2
"""Arguments or configuration are wrong, or no retry can mend the rewards; do not retry."""
EXIT_TRANSIENT = 75
"""A store, a peer or a device failed for now; retry."""


_EXTRAS = {
    **dict.fromkeys(("mlflow", "tensorboard", "wandb"), "trackers"),
    "pyarrow": "tables",
    **dict.fromkeys(("torch", "transformers"), "train"),
}
"""Map from a package that the base install lacks to the extra that installs it."""


def named_error(error: PlanishError | ModuleNotFoundError) -> PlanishError:
    """Return the error; for a missing package, a `ConfigError` that names its extra.

    Raises:
        ModuleNotFoundError: the missing module belongs to no extra.
    """
    if isinstance(error, PlanishError):
        return error
    if error.name not in _EXTRAS:
        raise error
    extra = _EXTRAS[error.name]
    return ConfigError(
        f"the extra `{extra}` must be installed, got no package `{error.name}`: "
        f"pip install 'planish[{extra}]'"
    )


def exit_code(error: BaseException) -> int:
    """Return the process exit code, which tells a scheduler whether to retry."""
    if isinstance(error, (ConfigError, AccessRefused)) or getattr(error, "is_final", False):
        return EXIT_CONFIG
    if isinstance(error, (StoreUnavailable, PeerLost, ClusterError, BackendUnavailable)):
        return EXIT_TRANSIENT
    return EXIT_FAILED


class Ended(Exception):
    """A command has printed everything and ends with an exit code other than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
