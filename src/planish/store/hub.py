"""Failures of the hub's client: a message of one line, and whether a retry may help.

`planish.store.sources` reads from the hub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from planish.base.errors import ConfigError, StoreError, StoreUnavailable
from planish.base.telemetry import first_line

HUB_TIMEOUT_SECONDS = 20.0
"""Seconds to wait for the hub's answer to one request."""


def passes(error: BaseException | None) -> bool:
    """Return whether a later retry at the hub, or another web server, may succeed.

    The clients wrap errors; the innermost error decides. The HTTP library is not fixed: httpx and
    its successor both call a lost connection a TransportError.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    told = False
    while error is not None and not isinstance(error, OfflineModeIsEnabled):
        status = getattr(getattr(error, "response", None), "status_code", 0)
        lost = isinstance(error, (ConnectionError, TimeoutError)) or any(
            kind.__name__ == "TransportError" for kind in type(error).__mro__
        )
        told = lost or status in (408, 429) or status >= 500
        error = error.__cause__ or error.__context__
    return told and error is None


def hub_fault(error: Exception, *, key: str, place: str, revision: str) -> StoreError | ConfigError:
    """Return our error, with the remedy in one line, for an error of the hub's client."""
    from huggingface_hub import errors

    what = "a data set" if key.endswith("dataset") else "a model"
    login = "log in with `hf auth login`, in a cluster give the secret with `HF_TOKEN`"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    line = first_line(error)
    unreached = (
        f"the hub can not be reached or failed, and the cache has no copy ({type(error).__name__}: "
        f"{line}): download it where there is a network and give its path as `{key}`"
    )
    # The order matters: some of these are subclasses of later ones.
    remedies: tuple[tuple[type[Exception], str], ...] = (
        (errors.GatedRepoError, f"accept its licence on the hub and {login}"),
        (errors.RevisionNotFoundError, f"the revision {revision!r} does not exist there"),
        (
            errors.RepositoryNotFoundError,
            f"there is no such {what[2:]}, or it is private: check the spelling or {login}",
        ),
        (errors.HFValidationError, f"not a hub id: {line}"),
        (errors.LocalEntryNotFoundError, unreached),
        (errors.OfflineModeIsEnabled, unreached),
        (errors.EntryNotFoundError, f"it has no such file: {line}"),
        (
            errors.HfHubHTTPError,
            f"it answered with HTTP status {status}: {login}, try again later, or give a path as "
            f"`{key}`",
        ),
    )
    remedy = next((text for kind, text in remedies if isinstance(error, kind)), unreached)
    kind = StoreUnavailable if passes(error) else ConfigError
    return kind(f"`{key}` must be {what} that the hub gives, got {place!r}; {remedy}")


@contextlib.contextmanager
def asking_hub(key: str, place: str, revision: str = "") -> Iterator[None]:
    """Turn errors of the hub's client in the block into those of `hub_fault`."""
    try:
        yield
    except (ConfigError, StoreError):
        raise
    except Exception as error:
        # The client raises errors of several packages; each means that nothing was read.
        raise hub_fault(error, key=key, place=place, revision=revision) from None
