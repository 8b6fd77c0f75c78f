"""Copies that may go on until the optimizer steps, and the hook that makes the step wait.

Between two steps forward and backward read parameters and optimizer state but do not write them;
so with `snapshot="lazy"` they are copied by a thread meanwhile. What is written outside of
`optimizer.step()` would make a mixture: PyTorch counts writes to a tensor, and the counts are
compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from planish.base.errors import SaveFailed

if TYPE_CHECKING:
    from planish.checkpoint.format.records import LocalItem


def is_written_in_step(item: LocalItem) -> bool:
    """Return whether an item surely changes in `optimizer.step()` only.

    Parameters and the optimizer's tensors do; buffers (BatchNorm's) change in forward.
    """
    if item.tensor.kind == "optim":
        return True
    return item.tensor.kind == "model" and item.data is not None and item.data.requires_grad


class LazyCopies:
    """Copies under way, and the hook before every optimizer step of this process.

    Example:
        >>> copies = LazyCopies()
        >>> copies.wait()
        >>> copies.close()
    """

    def __init__(self) -> None:
        """Register nothing until a copy begins."""
        self._hook: Any = None
        self._threads: list[threading.Thread] = []

    def begin(
        self,
        items: Sequence[LocalItem],
        copy: Callable[[], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Run `copy` in a thread; the next optimizer step waits for it.

        Args:
            items: What is copied, to notice writes meanwhile.
            copy: The work.
            done: Told how it went.
        """
        if self._hook is None:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            self._hook = register_optimizer_step_pre_hook(lambda *_: self.wait())
        versions = [_version(item) for item in items]

        def run() -> None:
            try:
                copy()
                _refuse_writes(items, versions)
            except BaseException as error:
                done(error)
            else:
                done(None)

        thread = threading.Thread(target=run, name="lazy-copy", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def wait(self) -> None:
        """Return when no copy is under way."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def close(self) -> None:
        """Wait, and let steps go on without the hook."""
        self.wait()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _version(item: LocalItem) -> int:
    data = item.data
    # Tensors made under inference mode have no count and can not be written in place.
    return -1 if data is None or data.is_inference() else int(data._version)


def _refuse_writes(items: Sequence[LocalItem], versions: Sequence[int]) -> None:
    wrong = [
        item.tensor.fqn
        for item, version in zip(items, versions, strict=True)
        if _version(item) != version
    ]
    if wrong:
        raise SaveFailed(
            "with `snapshot='lazy'` tensors must not be written outside of `optimizer.step()`, "
            f"but {wrong[:5]} ({len(wrong)} in all) were; use `snapshot='copy'`, or wait for "
            "`staged()`"
        )
