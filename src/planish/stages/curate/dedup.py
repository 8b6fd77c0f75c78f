"""Remove equal and nearly equal problems, and training problems that leak held-out ones.

Near duplicates are found by MinHash with fixed seeds and then checked exactly, so that the result
depends on nothing but the problems and their order.

Source: near duplicates by MinHash as in arXiv 2107.06499, section 4.2.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from planish.stages.curate.problem import Drop, Problem, drop, sift, words
from planish.verifiers import split_name

_T = TypeVar("_T", bound=Hashable)

NUM_PERMUTATIONS = 128
SHINGLE_WORDS = 3
SEED = 1
"""Seed of the hash functions; a constant, since the run's seed must not change the data."""
SCHEME = "affine32"
"""Family of hash functions; named, so that another default of the library changes nothing."""
CANDIDATES = 0.6
"""The index asks for this part of the threshold: at the threshold itself it misses every second
pair, and surplus pairs are sorted out exactly."""
FRAME_WORDS = 5
"""Words in a row by which instructions are known."""
FRAME_FRACTION = 0.2
"""Word sequences in more than this share of the problems are instructions and are ignored."""
FRAME_MIN = 5
"""They must stand in more problems than this as well."""


def remove_duplicates(problems: Sequence[Problem]) -> tuple[list[Problem], list[Drop]]:
    """Keep the first of equal questions; questions with different answers are all dropped."""
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
    """Return all runs of `size` words."""
    return frozenset(" ".join(text[i : i + size]) for i in range(len(text) - size + 1))


def sketch_of(shingles: frozenset[str]) -> Any:
    """Return the MinHash of a set of shingles."""
    sketch = _empty_sketch().copy()
    sketch.update_batch([shingle.encode("utf-8") for shingle in sorted(shingles)])
    return sketch


@lru_cache(maxsize=1)
def _empty_sketch() -> Any:
    """Return the sketch that all others are copies of: drawing hash functions is the slow part."""
    from datasketch import MinHash

    return MinHash(num_perm=NUM_PERMUTATIONS, seed=SEED, scheme=SCHEME)


def _sketches(sets: Sequence[frozenset[str]], workers: int) -> list[Any]:
    if workers == 1 or len(sets) < 2 * workers:
        return [sketch_of(item) for item in sets]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(sketch_of, sets, chunksize=-(-len(sets) // (4 * workers))))


def remove_near_duplicates(
    problems: Sequence[Problem], *, threshold: float, min_words: int, workers: int = 1
) -> tuple[list[Problem], list[Drop]]:
    """Drop problems that are like an earlier kept one; frames do not count.

    `threshold` is the Jaccard similarity from which two problems count as one; problems of fewer
    than `min_words` are kept as they are.
    """
    tokens = without_frames([words(problem.question) for problem in problems])
    long = {i: ngrams(t, SHINGLE_WORDS) for i, t in enumerate(tokens) if len(t) >= min_words}
    if threshold >= 1.0 or not long:
        return list(problems), []
    from datasketch import MinHashLSH

    # Problems made from one pattern share a part that says nothing.
    boilerplate = _frequent(long.values(), len(long))
    sets = {i: rest for i, own in long.items() if (rest := own - boilerplate)}
    index = MinHashLSH(threshold=CANDIDATES * threshold, num_perm=NUM_PERMUTATIONS)
    twins: dict[int, int] = {}
    for i, sketch in zip(sets, _sketches(list(sets.values()), workers), strict=True):
        similar = [j for j in sorted(index.query(sketch)) if jaccard(sets[i], sets[j]) >= threshold]
        if similar:
            twins[i] = similar[0]
        else:
            index.insert(i, sketch)
    kept = [problem for i, problem in enumerate(problems) if i not in twins]
    drops = [
        Drop("near_duplicate", f"{problems[i].origin} is like {problems[j].origin}: "
             f"{problems[i].question}")
        for i, j in twins.items()
    ]  # fmt: skip
    return kept, drops


def without_frames(texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """Take out the instructions that stand before, behind or around the problems of a data set.

    A word is part of such a frame when five words in a row that cover it stand in more than a
    fifth of all `texts`, which are lists of words.

    Example:
        >>> without_frames([["please", "solve", "this", "for", "me", name] for name in "abcdef"])
        [['a'], ['b'], ['c'], ['d'], ['e'], ['f']]
    """
    # Words in a row are frequent only if each of them is: few are counted.
    usual = _frequent(map(frozenset, texts), len(texts))
    runs = (frozenset(filter(usual.issuperset, _runs(text))) for text in texts)
    frames = _frequent(runs, len(texts))
    rests = []
    for text in texts:
        starts = [i for i, run in enumerate(_runs(text)) if run in frames]
        covered = {i + offset for i in starts for offset in range(FRAME_WORDS)}
        rests.append([word for i, word in enumerate(text) if i not in covered])
    return rests


def _runs(text: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(text[i:] for i in range(FRAME_WORDS)), strict=False)


def _frequent(sets: Iterable[Iterable[_T]], count: int) -> set[_T]:
    """Return what stands in so many of `count` sets that it is a part of a frame."""
    counts = Counter(item for own in sets for item in own)
    limit = max(FRAME_MIN, FRAME_FRACTION * count)
    return {item for item, number in counts.items() if number > limit}


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Return the size of the intersection over the size of the union."""
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def remove_contaminated(
    train: Sequence[Problem], evaluation: Sequence[Problem], *, ngram: int
) -> tuple[list[Problem], list[Drop]]:
    """Drop training problems that equal a held-out one or share `ngram` words in a row with it.

    With `ngram` 0 only equal problems count. Frames of the problems do not count: 13 words of
    which 12 are instructions are no leak.
    """
    held_out = {problem.key for problem in evaluation}
    leaks: set[str] = set()
    own: dict[int, list[str]] = {}
    if ngram:
        problems = [*train, *evaluation]
        rests = without_frames([words(problem.question) for problem in problems])
        leaks = set().union(*(ngrams(text, ngram) for text in rests[len(train) :]))
        own = {id(problem): text for problem, text in zip(train, rests, strict=False)}

    def judge(problem: Problem) -> Drop | None:
        if problem.key in held_out:
            return drop(problem, "equals_held_out")
        if leaks and not leaks.isdisjoint(ngrams(own[id(problem)], ngram)):
            return drop(problem, f"shares_{ngram}_words_with_held_out")
        return None

    return sift(train, judge)
