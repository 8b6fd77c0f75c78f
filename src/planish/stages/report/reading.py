"""Read what lies under a run root, telling what is missing in place of raising."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from planish.base.errors import AccessRefused, ObjectMissing, PlanishError, StoreUnavailable
from planish.stages.report.words import one_line
from planish.store import open_store
from planish.store.documents import read_json

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Reader:
    """Reads from one run root; collects in `missing` what could not be read.

    Example:
        >>> reader = Reader("file:///no/such/run")
        >>> reader.json("file:///no/such/run/run.json", "the configuration"), len(reader.missing)
        (None, 1)
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.missing: list[str] = []
        self.failure: PlanishError | None = None
        """Why the store is not asked any more; None while it answers."""

    def attempt(self, what: str, read: Callable[[], ResultT], default: ResultT) -> ResultT:
        """Return what `read` returns, or note the fault and return `default`.

        After the store has once refused or failed to answer it is not asked again, since each
        call would wait for its whole retry policy.
        """
        if self.failure:
            return default
        try:
            return read()
        except ObjectMissing:
            self.missing.append(f"{what}: not written")
        except (StoreUnavailable, AccessRefused) as error:
            self.failure = error
            self.missing.append(f"everything under the run root: {one_line(str(error))}")
        except (PlanishError, OSError) as error:
            self.missing.append(f"{what}: {one_line(str(error))}")
        except Exception as error:
            # The exit task tells what it can even when a file is hostile; the fault is shown.
            logger.warning("unreadable what=%s", what, exc_info=True)
            self.missing.append(f"{what}: {one_line(f'{type(error).__name__}: {error}')}")
        return default

    def json(self, uri: str, what: str) -> Any:
        """Return the JSON value at `uri`, None when it can not be read."""
        return self.attempt(what, lambda: read_json(uri), None)

    def text(self, uri: str, what: str) -> str:
        """Return the text at `uri`, empty when it can not be read."""
        return self.attempt(what, lambda: open_store(uri).read(uri).decode("utf-8", "replace"), "")

    def list(self, uri: str, what: str) -> list[str]:
        """Return the URIs below the folder `uri`, none when it can not be listed."""
        return self.attempt(what, lambda: open_store(uri).list(f"{uri.rstrip('/')}/"), [])

    def exists(self, uri: str, what: str) -> bool:
        """Return whether there is an object, False when that can not be known."""
        return self.attempt(what, lambda: open_store(uri).exists(uri), False)
