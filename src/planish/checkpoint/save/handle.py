"""What the caller of a save holds while it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from planish.base.errors import SaveFailed
from planish.checkpoint.watch.timings import CheckpointInfo


class SaveHandle:
    """A save under way; one on every rank, all ending alike.

    Example:
        >>> handle = SaveHandle("mem://doc/step-1")
        >>> handle.done()
        False
    """

    def __init__(self, uri: str, *, skipped: str = "") -> None:
        """Follow a save; `skipped` says why it will not happen."""
        self.uri = uri
        self.skipped = skipped
        """Why the save was left out (`inflight="skip"`), empty otherwise."""
        self.stall_seconds = 0.0
        """How long the call held up its caller."""
        self._staged, self._done = threading.Event(), threading.Event()
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        self._cancel: Callable[[], None] = lambda: None
        if skipped:
            self._staged.set()
            self._fail(
                SaveFailed(
                    f"`{uri}` was not saved, as asked by `inflight='skip'`: {skipped}; save less "
                    "often, or use `inflight='wait'`"
                )
            )

    def staged(self) -> bool:
        """Return whether the state may be changed."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the state may be changed; returns whether it may."""
        return self._staged.wait(timeout)

    def done(self) -> bool:
        """Return whether the save has been committed or has failed."""
        return self._done.is_set()

    def wait_done(self, timeout: float | None = None) -> bool:
        """Wait for the end, whatever it is; returns whether it has come."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Return what was committed, waiting for it.

        Args:
            timeout: Limit on the wait in seconds; the save goes on.

        Raises:
            TimeoutError: neither committed nor failed within `timeout`.
            SaveFailed: a rank failed, or the save was cancelled or skipped; nothing is visible.
            CheckpointExists: something else is committed there.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save of `{self.uri}` must end within {timeout} s, but goes on")
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self._info

    def cancel(self) -> None:
        """Ask all ranks to give the save up; too late, it is committed all the same."""
        self._cancel()

    def _finish(self, info: CheckpointInfo) -> None:
        self._info = info
        self._staged.set()
        self._done.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._staged.set()
        self._done.set()
