"""Iterations of a run, from its place in a chain of runs on one root."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from planish import store
from planish.base.errors import ConfigError, ObjectMissing
from planish.records import layout
from planish.run.chain import FIRST_UNFINISHED
from planish.store.documents import read_json, write_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """One run of a chain.

    Example:
        >>> Link(1, 8, 4).last
        12
    """

    index: int
    offset: int
    """Number of iterations before this run; its first iteration is `offset + 1`."""
    num_iterations: int

    @property
    def last(self) -> int:
        """Number of its last iteration."""
        return self.offset + self.num_iterations


def read_link(root: str, index: int) -> Link | None:
    """Return the record of the `index`-th run; None if there is none."""
    try:
        known = read_json(layout.chain_file(root, index))
        return Link(index, known["offset"], known["num_iterations"])
    except ObjectMissing:
        return None


def is_complete(root: str, link: Link) -> bool:
    """Return whether a run is finished: the policy of its last iteration is exported."""
    return store.exists(f"{layout.policy(root, link.last)}/manifest.json")


def is_evaluated(root: str, version: int, names: Iterable[str]) -> bool:
    """Return whether the policy of a version has an evaluation on each of the named sets."""
    folders = (layout.evaluation(root, version, name) for name in names)
    return all(store.exists(f"{folder}/{layout.REPORT}") for folder in folders)


def count_links(root: str) -> int:
    """Return how many runs the chain has."""
    prefix = layout.chain_file(root, 0).rpartition("/")[0]
    names = [uri.rpartition("/")[2].removesuffix(".json") for uri in store.list_uris(prefix)]
    return max((int(name) + 1 for name in names if name.isdecimal()), default=0)


def find_link(root: str, chain_index: int, num_iterations: int) -> Link:
    """Return the iterations that the run must do; write nothing.

    `chain_index` is 0, 1, ..., or -1 for the last run if it is unfinished, else the next run.

    Raises:
        ConfigError: the run before is not finished, or `num_iterations` changes under a later run.
    """
    if num_iterations < 1:
        raise ConfigError(f"`num_iterations` must be at least 1, got {num_iterations}")
    if chain_index < FIRST_UNFINISHED:
        raise ConfigError(f"`chain_index` must be -1 or more, got {chain_index}")
    known = count_links(root)
    if chain_index == FIRST_UNFINISHED:
        newest = read_link(root, known - 1) if known else None
        chain_index = 0 if newest is None else known - (0 if is_complete(root, newest) else 1)
    if chain_index > known:
        raise ConfigError(
            f"`chain_index` must be at most {known}, the number of runs on this root so far, got "
            f"{chain_index}; start the runs of a chain in order"
        )
    own = read_link(root, chain_index)
    if own is not None:
        if chain_index + 1 < known and num_iterations != own.num_iterations:
            raise ConfigError(
                f"`num_iterations` of run {own.index} must stay {own.num_iterations}, got "
                f"{num_iterations}; a later run of the chain begins after it"
            )
        return Link(own.index, own.offset, num_iterations)
    if chain_index == 0:
        return Link(0, 0, num_iterations)
    before = read_link(root, chain_index - 1)
    if before is None or not is_complete(root, before):
        last = before.last if before else "?"
        raise ConfigError(
            f"run {chain_index - 1} of the chain must be finished before run {chain_index}, but "
            f"`{root}` has no policy of its last iteration {last}; start run {chain_index - 1} "
            "again, it goes on where it ended"
        )
    return Link(chain_index, before.last, num_iterations)


def record_link(root: str, link: Link) -> None:
    """Write the record of a run in its chain, unless it exists unchanged."""
    if read_link(root, link.index) == link:
        return
    table = {"offset": link.offset, "num_iterations": link.num_iterations}
    write_json(layout.chain_file(root, link.index), table)
    first, last = link.offset + 1, link.last
    logger.info("chain index=%d first_iteration=%d last_iteration=%d", link.index, first, last)
