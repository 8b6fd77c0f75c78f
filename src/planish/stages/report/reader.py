"""Read files under the root of a run; list missing ones instead of raising."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from planish import store
from planish.base.errors import AccessRefused, ObjectMissing, PlanishError, StoreUnavailable
from planish.stages.report.text import one_line
from planish.store.documents import read_json

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Reader:
    """Reader of one run root, which collects in `missing` what it could not read.

    Example:
        >>> reader = Reader("file:///no/such/run")
        >>> reader.list("file:///no/such/run/logs", "the logs"), reader.missing
        ([], [])
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.missing: list[str] = []
        self.failure: PlanishError | None = None
        """Error after which no request is sent to the store; None while it answers."""

    def attempt(self, what: str, read: Callable[[], ResultT], default: ResultT) -> ResultT:
        """Return the result of `read`; after a fault, add it to `missing` and return `default`.

        Once the store has refused a request or not answered, no further request is sent, since each
        would wait for its whole retry policy.
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
            # A damaged file must not end the exit task: the report lists the fault.
            logger.warning("unreadable what=%s", what, exc_info=True)
            self.missing.append(f"{what}: {one_line(f'{type(error).__name__}: {error}')}")
        return default

    def list(self, uri: str, what: str) -> list[str]:
        """Return the URIs below the folder `uri`; none if the store cannot list it."""
        return self.attempt(what, lambda: store.list_uris(f"{uri.rstrip('/')}/"), [])

    def documents(
        self, folder: str, what: str, make: Callable[[dict[str, Any]], ResultT]
    ) -> Iterator[ResultT]:
        """Yield `make(document)` for each readable JSON object in a folder."""
        for uri in self.list(folder, f"the {what}s"):
            if uri.endswith(".json"):
                name = f"{what} {uri.rpartition('/')[2]}"
                raw = self.attempt(name, partial(read_json, uri), None)
                made = self.attempt(name, partial(make, raw), None) if raw is not None else None
                if made is not None:
                    yield made
