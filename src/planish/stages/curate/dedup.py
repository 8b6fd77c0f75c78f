"""Remove equal and nearly equal problems, and training problems that leak held-out ones.

Near duplicates are found by MinHash with fixed seeds and then checked exactly, so that the result
depends on nothing but the problems and their order.

Source: near duplicates by MinHash as in arXiv 2107.06499, section 4.2.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import Any

from planish.stages.curate.problem import Drop, Problem, drop, sift, words
from planish.verifiers import split_name

NUM_PERMUTATIONS = 128
"""Hash functions of one signature."""
SHINGLE_WORDS = 3
"""Words of one shingle."""
SEED = 1
"""Seed of the hash functions; a constant, since the run's seed must not change the data."""
SCHEME = "affine32"
"""Family of hash functions; named, so that another default of the library changes nothing."""
CANDIDATES = 0.6
"""The index asks for this part of the threshold: at the threshold itself it misses every second
pair, and what it finds too much is sorted out exactly."""
BOILERPLATE_FRACTION = 0.2
"""Word sequences in more of the problems than this are instructions: no likeness, no leak."""
BOILERPLATE_MIN = 5
"""And in at least so many."""


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


def shingles(text: Sequence[str]) -> frozenset[str]:
    """Return all runs of three words."""
    return frozenset(
        " ".join(text[i : i + SHINGLE_WORDS]) for i in range(len(text) - SHINGLE_WORDS + 1)
    )


def sketch_of(shingle_set: frozenset[str]) -> Any:
    """Return the MinHash of a set of shingles."""
    sketch = _empty_sketch().copy()
    sketch.update_batch([shingle.encode("utf-8") for shingle in sorted(shingle_set)])
    return sketch


@lru_cache(maxsize=1)
def _empty_sketch() -> Any:
    """Return the sketch that all others are copies of: drawing hash functions is the slow part."""
    from datasketch import MinHash

    return MinHash(num_perm=NUM_PERMUTATIONS, seed=SEED, scheme=SCHEME)


def sketches(sets: Sequence[frozenset[str]], workers: int) -> list[Any]:
    """Return MinHashes in order, computed by `workers` processes."""
    if workers == 1 or len(sets) < 2 * workers:
        return [sketch_of(item) for item in sets]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(sketch_of, sets, chunksize=-(-len(sets) // (4 * workers))))


def remove_near_duplicates(
    problems: Sequence[Problem], *, threshold: float, min_words: int, workers: int = 1
) -> tuple[list[Problem], list[Drop]]:
    """Drop problems whose shingles overlap with an earlier kept problem.

    Args:
        problems: in order of precedence.
        threshold: Jaccard similarity from which two problems count as one.
        min_words: shorter problems are kept as they are.
        workers: processes for the signatures.

    Returns:
        Kept problems in the same order, and the dropped ones.
    """
    tokens = [words(problem.question) for problem in problems]
    long_enough = [i for i, text in enumerate(tokens) if len(text) >= min_words]
    if threshold >= 1.0 or not long_enough:
        return list(problems), []
    from datasketch import MinHashLSH

    shingle_sets = without_boilerplate([shingles(tokens[i]) for i in long_enough])
    sets = {i: own for i, own in zip(long_enough, shingle_sets, strict=True) if own}
    hashed = sketches(list(sets.values()), workers)
    index = MinHashLSH(threshold=CANDIDATES * threshold, num_perm=NUM_PERMUTATIONS)
    twins: dict[int, int] = {}
    for i, sketch in zip(sets, hashed, strict=True):
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


def without_boilerplate(sets: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Take out what a good part of all sets share: instructions around every problem."""
    counts = Counter(item for own in sets for item in own)
    limit = max(BOILERPLATE_MIN, BOILERPLATE_FRACTION * len(sets))
    shared = {item for item, count in counts.items() if count > limit}
    return [own - shared for own in sets]


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Return the size of the intersection over the size of the union."""
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def remove_contaminated(
    train: Sequence[Problem], evaluation: Sequence[Problem], *, ngram: int
) -> tuple[list[Problem], list[Drop]]:
    """Drop training problems that equal a held-out one or share `ngram` words in a row with it.

    With `ngram` 0 only equal problems count.

    Word sequences that many held-out problems share are instructions and do not count.
    """
    held_out = {problem.key for problem in evaluation}
    counts: Counter[str] = Counter()
    for problem in evaluation if ngram else ():
        counts.update(ngrams(words(problem.question), ngram))
    limit = max(BOILERPLATE_MIN, BOILERPLATE_FRACTION * len(evaluation))
    leaks = {sequence for sequence, count in counts.items() if count <= limit}

    def judge(problem: Problem) -> Drop | None:
        if problem.key in held_out:
            return drop(problem, "equals_held_out")
        if leaks and not leaks.isdisjoint(ngrams(words(problem.question), ngram)):
            return drop(problem, f"shares_{ngram}_words_with_held_out")
        return None

    return sift(train, judge)


def ngrams(text: Sequence[str], size: int) -> set[str]:
    """Return all runs of `size` words."""
    return {" ".join(text[i : i + size]) for i in range(len(text) - size + 1)}
