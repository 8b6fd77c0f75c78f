"""Remove equal and nearly equal problems, and training problems that leak held-out ones.

MinHash with fixed seeds proposes near duplicates, and the exact Jaccard similarity decides. The
result depends only on the problems and their order.

Source: near duplicates by MinHash as in arXiv 2107.06499, section 4.2.
"""

from __future__ import annotations

import multiprocessing
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from planish.stages.curate.problem import Drop, Problem, drop, sift, words
from planish.verifiers import split_name

_T = TypeVar("_T", bound=Hashable)

NUM_PERMUTATIONS = 128
SHINGLE_WORDS = 3
SEED = 1
"""Seed of the hash functions; it is constant because the run's seed must not change the data."""
SCHEME = "affine32"
"""Family of hash functions, fixed here against a change of the library's default."""
CANDIDATES = 0.6
"""Ratio of the index's threshold to the configured one. An index at the configured threshold would
miss half of the pairs there; `jaccard` removes surplus pairs."""
FRAME_WORDS = 5
"""Length, in words, of the sequences that identify instructions."""
FRAME_FRACTION = 0.005
"""A word sequence in more than this share of the problems is an instruction and is ignored. It is
small because a file may have a hundred sources, each with its own instruction."""
FRAME_MIN = 4
"""Instructions must occur in more problems than this as well."""
ANCHORS = 4
"""Number of word sequences under which a problem is indexed. A lookup needs only one of them; in
the other problem the rest may belong to a pattern."""


def remove_duplicates(problems: Sequence[Problem]) -> tuple[list[Problem], list[Drop]]:
    """Keep the first of equal questions; drop all of them if their answers differ."""
    answers: dict[str, set[str]] = {}
    for problem in problems:
        answers.setdefault(problem.key, set()).add(
            f"{split_name(problem.verifier)[0]}/{problem.answer}"
        )
    kept_keys: set[str] = set()

    def judge(problem: Problem) -> Drop | None:
        if len(answers[problem.key]) > 1:
            return drop(problem, "conflicting_answers")
        if problem.key in kept_keys:
            return drop(problem, "duplicate")
        kept_keys.add(problem.key)
        return None

    return sift(problems, judge)


def ngrams(text: Sequence[str], size: int) -> frozenset[str]:
    """Return all sequences of `size` consecutive words."""
    return frozenset(" ".join(text[i : i + size]) for i in range(len(text) - size + 1))


def sketch_of(shingles: frozenset[str]) -> Any:
    """Return the MinHash of a set of shingles."""
    sketch = _empty_sketch().copy()
    sketch.update_batch([shingle.encode("utf-8") for shingle in sorted(shingles)])
    return sketch


@lru_cache(maxsize=1)
def _empty_sketch() -> Any:
    """Return an empty sketch to copy: a new one would draw its hash functions, which is slow."""
    from datasketch import MinHash

    return MinHash(num_perm=NUM_PERMUTATIONS, seed=SEED, scheme=SCHEME)


def _sketches(sets: Sequence[frozenset[str]], workers: int) -> list[Any]:
    if workers == 1 or len(sets) < 2 * workers:
        return [sketch_of(item) for item in sets]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(sketch_of, sets, chunksize=-(-len(sets) // (4 * workers))))


def remove_near_duplicates(
    problems: Sequence[Problem], *, threshold: float, min_words: int = 12, workers: int = 1
) -> tuple[list[Problem], list[Drop]]:
    """Drop problems that are similar to an earlier kept one, or differ from it only in the frame.

    Two problems count as one from a Jaccard similarity of `threshold`. Similarity is not computed
    for problems of fewer than `min_words` words: `1+2=` and `1+3=` differ.
    """
    found = contents([words(problem.question) for problem in problems])
    if threshold >= 1.0:
        return list(problems), []
    from datasketch import MinHashLSH

    long = {
        i: ngrams(content.rest, SHINGLE_WORDS)
        for i, content in enumerate(found)
        if len(content.rest) >= min_words
    }
    # Problems made from one pattern share words that do not distinguish them.
    boilerplate = _frequent(long.values(), _limit(len(problems)))
    enough = min_words - SHINGLE_WORDS + 1
    sets = {i: rest for i, own in long.items() if len(rest := own - boilerplate) >= enough}
    sketches = dict(zip(sets, _sketches(list(sets.values()), workers), strict=True))
    index = MinHashLSH(threshold=CANDIDATES * threshold, num_perm=NUM_PERMUTATIONS)
    known, twins = Twins(), dict[int, Problem]()
    for i, (content, problem) in enumerate(zip(found, problems, strict=True)):
        twin = known.find(content, problem, one_sided=False)
        if twin is None and i in sets:
            near = sorted(index.query(sketches[i]))
            like = (problems[j] for j in near if jaccard(sets[i], sets[j]) >= threshold)
            twin = next(like, None)
        if twin is not None:
            twins[i] = twin
            continue
        known.add(content, problem)
        if i in sets:
            index.insert(i, sketches[i])
    kept = [problem for i, problem in enumerate(problems) if i not in twins]
    drops = [
        Drop("near_duplicate", f"{problems[i].origin} is like {twin.origin}: "
             f"{problems[i].question}", problems[i].source)
        for i, twin in twins.items()
    ]  # fmt: skip
    return kept, drops


@dataclass(frozen=True)
class Content:
    """Words of a problem, with and without the instructions it shares with others."""

    text: str
    """All its words, each between spaces."""
    core: str
    """Words between the frames, each between spaces."""
    rest: tuple[str, ...]
    """Words of the core that belong to no pattern."""
    anchors: tuple[int, ...]
    """CRC-32 of each sequence of `FRAME_WORDS` words of the core that is no pattern, ascending."""

    @property
    def family(self) -> str:
        """Text of `rest`, equal in any frame; empty if it has fewer than `FRAME_WORDS` words."""
        return " ".join(self.rest) if len(self.rest) >= FRAME_WORDS else ""


def contents(texts: Sequence[Sequence[str]]) -> list[Content]:
    """Remove the instructions before, after or around the problems of each source.

    `texts` are lists of words. A frame is a common beginning or end of many of them. A word belongs
    to a pattern if a sequence of five words with it occurs in as many different cores.

    Example:
        >>> found = contents([["please", "solve", "this", "for", "me", name] for name in "abcdef"])
        >>> [content.core for content in found]
        [' a ', ' b ', ' c ', ' d ', ' e ', ' f ']
    """
    limit = _limit(len(texts))
    before = _common_starts(texts, limit)
    behind = _common_starts([text[::-1] for text in texts], limit)
    cores = []
    for text, (start, begun), (end, ended) in zip(texts, before, behind, strict=True):
        if start + end > len(text) - FRAME_WORDS:
            # The same problem in many frames is no frame: keep the side that more texts share.
            start, end = (start, 0) if begun > ended else (0, end)
        cores.append(tuple(text[start : len(text) - end]))
    different = set(cores)
    # A sequence is frequent only if each word is: this leaves few sequences to count.
    usual = _frequent(map(frozenset, different), limit)
    runs = (frozenset(filter(usual.issuperset, _runs(core))) for core in different)
    patterns = _frequent(runs, limit)
    return [_content(text, core, patterns) for text, core in zip(texts, cores, strict=True)]


def _content(text: Sequence[str], core: Sequence[str], patterns: set[tuple[str, ...]]) -> Content:
    covered: set[int] = set()
    hashes = set()
    for i, run in enumerate(_runs(core)):
        if run in patterns:
            covered.update(range(i, i + FRAME_WORDS))
        else:
            hashes.add(zlib.crc32(" ".join(run).encode("utf-8")))
    rest = tuple(word for i, word in enumerate(core) if i not in covered)
    anchors = tuple(sorted(hashes))
    return Content(f" {' '.join(text)} ", f" {' '.join(core)} ", rest, anchors)


class Twins:
    """Index of problems that finds the same problem in another frame."""

    def __init__(self) -> None:
        self._by_anchor: dict[tuple[int, str], list[tuple[Content, Problem]]] = {}

    def add(self, content: Content, problem: Problem) -> None:
        """Add a problem to the index."""
        for anchor in content.anchors[:ANCHORS]:
            self._by_anchor.setdefault((anchor, problem.answer), []).append((content, problem))

    def find(self, content: Content, problem: Problem, *, one_sided: bool) -> Problem | None:
        """Return a known problem with the same answer whose core is part of this text, or None.

        Unless `one_sided`, this core must be part of the known text as well.
        """
        for anchor in content.anchors:
            for known, twin in self._by_anchor.get((anchor, problem.answer), ()):
                is_held = known.core in content.text
                if is_held and (one_sided or content.core in known.text):
                    return twin
        return None


def _common_starts(texts: Sequence[Sequence[str]], limit: float) -> list[tuple[int, int]]:
    """Return the length of each text's common beginning, and the number of texts that share it.

    More than `limit` texts share a common beginning, of five words at least. Each of its last four
    words keeps more than half of the texts that share the words before it.
    """
    found = [(0, 0)] * len(texts)
    groups = [(list(range(len(texts))), 0)]
    depth = 0
    while groups:
        depth += 1
        deeper = []
        for group, since in groups:
            by_word: dict[str, list[int]] = {}
            for i in group:
                if len(texts[i]) >= depth:
                    by_word.setdefault(texts[i][depth - 1], []).append(i)
            for own in by_word.values():
                if len(own) > limit:
                    begun = since if 2 * len(own) > len(group) else depth - 1
                    deeper.append((own, begun))
                    if depth - begun >= FRAME_WORDS:
                        for i in own:
                            found[i] = depth, len(own)
        groups = deeper
    return found


def _runs(text: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(text[i:] for i in range(FRAME_WORDS)), strict=False)


def _limit(count: int) -> float:
    """Return the number of problems, out of `count`, that a frame must exceed."""
    return max(FRAME_MIN, FRAME_FRACTION * count)


def _frequent(sets: Iterable[Iterable[_T]], limit: float) -> set[_T]:
    """Return the items of more than `limit` sets."""
    counts = Counter(item for own in sets for item in own)
    return {item for item, number in counts.items() if number > limit}


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Return the size of the intersection over the size of the union."""
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def remove_contaminated(
    train: Sequence[Problem], evaluation: Sequence[Problem], *, ngram: int
) -> tuple[list[Problem], list[Drop]]:
    """Drop training problems that equal a held-out one or share `ngram` words in a row with it.

    A training problem that contains the whole core of a held-out one with the same answer is a leak
    too, even below `ngram` words. With `ngram` 0 only equal problems are leaks. Frames do not
    count: 13 words of which 12 are instructions are no leak.
    """
    held_out = {problem.key for problem in evaluation}
    leaks: set[str] = set()
    own: dict[int, Content] = {}
    known = Twins()
    if ngram:
        problems = [*train, *evaluation]
        found = contents([words(problem.question) for problem in problems])
        own = {id(problem): content for problem, content in zip(train, found, strict=False)}
        for problem, content in zip(evaluation, found[len(train) :], strict=True):
            leaks |= ngrams(content.rest, ngram)
            known.add(content, problem)

    def judge(problem: Problem) -> Drop | None:
        if problem.key in held_out:
            return drop(problem, "equals_held_out")
        if not ngram:
            return None
        content = own[id(problem)]
        if known.find(content, problem, one_sided=True) is not None:
            return drop(problem, "equals_held_out_but_for_frame")
        if not leaks.isdisjoint(ngrams(content.rest, ngram)):
            return drop(problem, f"shares_{ngram}_words_with_held_out")
        return None

    return sift(train, judge)
