"""How full the slots of a rollout are, whole responses against windows: a model to choose W by.

Decoding is taken to cost the same for one living row or for all of them, as where memory bandwidth
bounds it. The cost of computing prefixes anew, staler prefixes and delayed value updates are left
out. Only numpy, no engine: `python -m tests.benchmarks.studies.slot_model --help`.

The method is T-PPO's (arXiv 2506.15050, successive batching); this model of its gain is ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planish.base.errors import ConfigError

Lengths = Callable[[np.random.Generator, int], npt.NDArray[np.int64]]
"""Draws so many response lengths in tokens, each at least 1."""


@dataclass(frozen=True)
class Utilisation:
    """What a simulated rollout used.

    Example:
        >>> Utilisation(num_tokens=60, decode_iterations=30, num_slots=4).share
        0.5
    """

    num_tokens: int
    """Response tokens generated."""
    decode_iterations: int
    """Forward passes; each could have given one token per slot."""
    num_slots: int
    """Responses that are generated at once."""

    @property
    def share(self) -> float:
        """Tokens per slot and decode iteration, 0 to 1."""
        return self.num_tokens / (self.decode_iterations * self.num_slots)


def synchronous(
    lengths: Lengths, *, num_slots: int, num_batches: int = 200, seed: int = 0
) -> Utilisation:
    """Simulate batches of whole responses: each takes as long as its longest one."""
    generator = np.random.default_rng(seed)
    num_tokens = iterations = 0
    for _ in range(num_batches):
        drawn = lengths(generator, num_slots)
        num_tokens += int(drawn.sum())
        iterations += int(drawn.max())
    return Utilisation(num_tokens, iterations, num_slots)


def successive(
    lengths: Lengths, *, num_slots: int, window_tokens: int, num_batches: int = 200, seed: int = 0
) -> Utilisation:
    """Simulate successive batching: a slot grows by a window, then its next response begins."""
    if window_tokens < 1:
        raise ConfigError(f"`window_tokens` must be at least 1, got {window_tokens}; give a window")
    generator = np.random.default_rng(seed)
    left = lengths(generator, num_slots)
    num_tokens = iterations = 0
    for _ in range(num_batches):
        grown = np.minimum(left, window_tokens)
        num_tokens += int(grown.sum())
        iterations += int(grown.max())
        left = left - grown
        free = left == 0
        left[free] = lengths(generator, int(free.sum()))
    return Utilisation(num_tokens, iterations, num_slots)


def log_normal(mu: float, sigma: float) -> Lengths:
    """Lengths whose natural log has mean `mu` and standard deviation `sigma`."""
    return lambda generator, num: _whole(generator.lognormal(mu, sigma, num))


def uniform(low: float, high: float) -> Lengths:
    """Every length from `low` to `high` is equally likely."""
    return lambda generator, num: generator.integers(int(low), int(high), num, endpoint=True)


def mixture(*parts: float) -> Lengths:
    """Lengths `parts[0], parts[2], ...` with the weights `parts[1], parts[3], ...`."""
    values, weights = np.array(parts[::2]), np.array(parts[1::2], dtype=np.float64)
    share = weights / weights.sum()
    return lambda generator, num: _whole(generator.choice(values, num, p=share))


def constant(length: float) -> Lengths:
    """All lengths are equal."""
    return mixture(length, 1.0)


def observed(lengths: Sequence[int] | npt.NDArray[np.int64]) -> Lengths:
    """Lengths of a run, drawn with replacement."""
    seen = np.asarray(lengths, dtype=np.int64)
    return lambda generator, num: generator.choice(seen, num)


def capped(lengths: Lengths, longest: int) -> Lengths:
    """Cut every length at `longest`."""
    return lambda generator, num: np.minimum(lengths(generator, num), longest)


def _whole(lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.maximum(np.ceil(lengths), 1).astype(np.int64)


_KINDS: dict[str, tuple[Callable[..., Lengths], int]] = {
    "lognormal": (log_normal, 2),
    "uniform": (uniform, 2),
    "mixture": (mixture, 4),
    "constant": (constant, 1),
}
"""Name to distribution and the least count of its numbers."""


def parse_lengths(text: str) -> Lengths:
    """Read a distribution such as `lognormal:7.6,1.0` or `mixture:2000,0.9,24576,0.1`.

    Raises:
        ConfigError: no such distribution, or other numbers than it needs.
    """
    name, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    make, least = _KINDS.get(name, (None, 0))
    fits = len(numbers) == least or (make is mixture and len(numbers) % 2 == 0)
    finite = all(np.isfinite(number) and number > 0 for number in numbers)
    if make is None or not numbers or not fits or not finite:
        raise ConfigError(
            f"lengths must be one of {sorted(_KINDS)} with positive numbers, such as "
            f"`lognormal:7.6,1.0` or `mixture:2000,0.9,24576,0.1`, got {text!r:.80}"
        )
    return make(*numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """Print utilisation and speed-up for some windows."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.studies.slot_model",
        description="Share of slots in use: whole responses against windows.",
    )
    parser.add_argument("--lengths", default="lognormal:7.6,1.0", help="kind:numbers, in tokens")
    parser.add_argument("--slots", type=int, default=512, help="responses at once")
    parser.add_argument("--cap", type=int, default=24576, help="longest response in tokens")
    parser.add_argument("--windows", default="8192,4096", help="window tokens, with commas")
    parser.add_argument("--batches", type=int, default=200, help="iterations to simulate")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    try:
        lengths = capped(parse_lengths(asked.lengths), asked.cap)
        windows = [int(part) for part in asked.windows.split(",")]
    except ValueError as error:
        parser.error(str(error))
    options = {"num_slots": asked.slots, "num_batches": asked.batches, "seed": asked.seed}
    whole = synchronous(lengths, **options)
    sys.stdout.write(f"{'window':>10} {'utilisation':>12} {'speed-up':>9}\n")
    sys.stdout.write(f"{'whole':>10} {whole.share:>12.3f} {1.0:>8.2f}x\n")
    for window in windows:
        cut = successive(lengths, window_tokens=window, **options)
        sys.stdout.write(f"{window:>10} {cut.share:>12.3f} {cut.share / whole.share:>8.2f}x\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
