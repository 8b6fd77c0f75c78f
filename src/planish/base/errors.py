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

A store serves records as well as checkpoints, so a `StoreError` is no `CheckpointError`: who calls
`planish.checkpoint` catches both, or `PlanishError`. A store that fails during a save raises
`SaveFailed`.

A message reads: what must be what, the value seen, who must change what.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class PlanishError(Exception):
    """Root of the tree; catch it to catch everything that is ours."""

    per_rank: Mapping[int, str] = MappingProxyType({})
    """What each rank failed with, where an error of some ranks is raised on all of them."""


class RanksError(PlanishError):
    """Some ranks failed, each for a reason of its own.

    Example:
        >>> PeerLost("rank 2 is gone", per_rank={2: "closed its connection"}).per_rank
        {2: 'closed its connection'}
    """

    def __init__(self, message: str, *, per_rank: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.per_rank = dict(per_rank or {})


class ConfigError(PlanishError, ValueError):
    """The user asked for something that cannot be: never retried."""


class RootInUse(ConfigError):
    """Another run holds the lock of the root; a run with this error has written nothing there."""


class RecordError(PlanishError, ValueError):
    """A record set is damaged, of an unknown version, or does not fit its parents."""


class StoreError(PlanishError, OSError):
    """A store could not do what was asked."""


class ObjectMissing(StoreError):
    """No object at this URI."""


class ObjectExists(StoreError):
    """A conditional create found an object in its place."""


class ObjectChanged(StoreError):
    """An object is not, or no longer, the one that the caller named by its entity tag."""


class ObjectTooLarge(StoreError):
    """An object has more bytes than its reader is ready to hold."""


class StoreMisconfigured(StoreError, ConfigError):
    """The bucket, the address or the credentials can not be: never retried."""


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
    """The save never finished, or an object that the commit names is missing or short."""


class CheckpointCorrupt(CheckpointError):
    """Stored bytes are not those that were saved."""

    def __init__(self, message: str, *, file: str = "", block: int = -1) -> None:
        """Keep which object is damaged, and its first damaged block of 1 MiB (-1: unknown)."""
        super().__init__(message)
        self.file, self.block = file, block


class LayoutMismatch(CheckpointError):
    """The tensors of a checkpoint do not cover what the new layout needs."""


class MissingKeys(LayoutMismatch):
    """The checkpoint lacks tensors that the target has."""


class UnexpectedKeys(LayoutMismatch):
    """The checkpoint has tensors that the target has no place for."""


class ShapeMismatch(LayoutMismatch):
    """A tensor has another global shape than the target's."""


class DtypeMismatch(LayoutMismatch):
    """A tensor has another type than the target's."""


class PlanMismatch(CheckpointError):
    """Ranks do not take part in the same save or load."""


class SaveFailed(RanksError, CheckpointError):
    """At least one rank could not do its part; nothing has become visible."""


class EngineError(PlanishError):
    """A rollout engine failed."""


class EngineBusy(EngineError):
    """The call needs an engine with nothing in flight."""


class NotSupported(EngineError):
    """This engine lacks an optional ability."""


class ProtocolError(EngineError):
    """A rank sent, or was asked to send, what no rank of its instance may send."""


class VerifierFailure(PlanishError):
    """Too many verifier errors in one batch to trust its rewards."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        """Keep whether the same batch must fail again; a verifier that was slow may answer."""
        super().__init__(message)
        self.is_final = is_final


class PeerLost(RanksError):
    """A rank did not answer in time."""


class ClusterError(PlanishError):
    """The API server of Kubernetes or Kubeflow refused a request, or did not answer it."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float = 0.0) -> None:
        """Keep the HTTP status (0: no answer) and how many seconds the server asks to wait."""
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class BackendUnavailable(PlanishError):
    """Prometheus or Alertmanager did not answer, or not as it must."""

    def __init__(self, message: str, *, code: str) -> None:
        """Keep the HTTP status, or timeout, connection, tls, invalid, empty, unknown, stopped."""
        super().__init__(message)
        self.code = code


EXIT_DONE = 0
"""Done, or already done."""
EXIT_FAILED = 1
"""Anything that no other code names; may be retried."""
EXIT_CONFIG = 2
"""Wrong arguments or configuration, or rewards that no retry mends; must not be retried."""
EXIT_TRANSIENT = 75
"""Store, peer or device failed for now; a retry may help."""


_EXTRAS = {
    **dict.fromkeys(("mlflow", "tensorboard", "wandb"), "trackers"),
    "pyarrow": "tables",
    **dict.fromkeys(("torch", "transformers"), "train"),
}
"""Packages that commands import and the base does not bring -> the extra that does."""


def named_error(error: PlanishError | ModuleNotFoundError) -> PlanishError:
    """Return an error, or for a missing package of an extra one that names the extra.

    Raises:
        ModuleNotFoundError: of another module.
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
    """Return the process exit code that tells a scheduler what to do about `error`."""
    if isinstance(error, (ConfigError, AccessRefused)) or getattr(error, "is_final", False):
        return EXIT_CONFIG
    if isinstance(error, (StoreUnavailable, PeerLost, ClusterError, BackendUnavailable)):
        return EXIT_TRANSIENT
    return EXIT_FAILED
