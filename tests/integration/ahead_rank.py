"""A rank of a task of several iterations whose rollouts and training last SLOW_SECONDS each."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from planish.stages.iterate import iteration, loop


def padded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sleeps for what is left of the time."""

    def call(*arguments: Any, **options: Any) -> Any:
        end = time.monotonic() + float(os.environ["SLOW_SECONDS"])
        result = function(*arguments, **options)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    return call


if __name__ == "__main__":
    iteration.sample = padded(iteration.sample)  # type: ignore[assignment]
    iteration.begin_iteration = padded(iteration.begin_iteration)  # type: ignore[assignment]
    raise SystemExit(loop.main(sys.argv[1:]))
