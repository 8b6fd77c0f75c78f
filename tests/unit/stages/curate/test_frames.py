"""Mixtures of sources, each with an instruction of its own: nothing but leaks is lost."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from planish.stages.curate.dedup import (
    remove_contaminated,
    remove_duplicates,
    remove_near_duplicates,
)
from planish.stages.curate.problem import CurationLedger, Drop, Problem, drop
from planish.stages.curate.report import drop_warnings

GSM8K = Path(__file__).parents[5] / "shared/data/gsm8k/train.jsonl"
LONG = """reason about this exam with care then write one number in a box after four hash signs as
last line and give no other text since a program reads what you return"""
STYLES = {"long": LONG, "short": "think step by step and put final answer last within tags please"}
PLACES = """boat train farm shop school garden bakery museum factory library river market"""
WORDS = PLACES.split()
PEOPLE = "Ann Bob Carl Dora Eve Finn Gus Hana Ivo Jill"
NAMES = PEOPLE.split()
LEAKS = 100


def story(rng):
    a, b, c, d = rng.sample(WORDS, 4)
    return (
        f"A {a} near the {b} keeps {rng.randint(3, 900)} crates and the {c} sends "
        f"{rng.randint(3, 900)} more for the {d}. How many are there?"
    )


def short(rng):
    return (
        f"What is {rng.randint(10, 9999)} minus {rng.randint(10, 9999)} and {rng.randint(2, 99)}?"
    )


def people(rng):
    a, b = rng.sample(NAMES, 2)
    n, m, k = (rng.randint(3, 99) for _ in range(3))
    return (
        f"{a} has {n} coins. {b} gives {a} {m} more coins and takes {k} stamps away. How many "
        f"coins does {a} have now?"
    )


def prose(rng):
    return " ".join(
        "".join(rng.choices("abcdefghijklmnop", k=5)) for _ in range(rng.randint(14, 40))
    )


def gsm8k(rng):
    if not hasattr(gsm8k, "rows"):
        if not GSM8K.exists():
            pytest.skip("the file of GSM8K is not there")
        gsm8k.rows = [json.loads(line)["question"] for line in GSM8K.read_text().splitlines()]
    return rng.choice(gsm8k.rows)


def frame(rng, style):
    words = STYLES[style].split()
    before, behind = (
        " ".join(rng.choices(words, k=rng.randint(8, 2 * len(words)))) for _ in range(2)
    )
    return rng.choice([(before, ""), ("", behind), (before, behind)])


def put(text, frame):
    return f"{frame[0]} {text} {frame[1]}".strip()


def problems(texts, tag):
    return [
        Problem(text, [], "0", "integer", "dataset", origin=f"{tag}{n}")
        for n, text in enumerate(texts)
    ]


def different(kind, rng, count):
    texts = {}
    while len(texts) < count:
        texts[kind(rng)] = None
    return list(texts)


HELD_IN = ["the same frames", "no frame", "one frame", "another frame"]
MIXTURES = [
    pytest.param(number, held_in, marks=[] if n == m else [pytest.mark.long])
    for n, number in enumerate((2, 4, 6, 9))
    for m, held_in in enumerate(HELD_IN)
]


@pytest.mark.parametrize(("num_sources", "held_in"), MIXTURES)
@pytest.mark.parametrize("kind", [story, short, people, prose, gsm8k])
def test_a_mixture_loses_its_leaks_and_nothing_else(num_sources, kind, held_in):
    rng = random.Random(f"{num_sources} {kind.__name__} {held_in}")
    weights = [rng.uniform(0.05, 1) for _ in range(num_sources - 1)]
    shares = [0.02, *(0.98 * weight / sum(weights) for weight in weights)]
    style = rng.choice(list(STYLES))
    frames = [frame(rng, style) for _ in shares]

    def some():
        return rng.choices(frames, shares)[0]

    texts = different(kind, rng, 750)
    held, train = texts[:200], [(put(text, some()), False) for text in texts[200:]]
    train += [(put(text, some()), True) for text in rng.sample(held, LEAKS)]
    rng.shuffle(train)
    other = frame(rng, style)
    chosen = {
        "the same frames": some,
        "no frame": lambda: ("", ""),
        "one frame": lambda: frames[-1],
        "another frame": lambda: other,
    }[held_in]
    left = problems([text for text, _ in train], "")
    left, near = remove_near_duplicates(left, threshold=0.8, min_words=12)
    kept, _ = remove_contaminated(left, problems([put(t, chosen()) for t in held], "h"), ngram=13)
    lost = set(range(len(train))) - {int(problem.origin) for problem in kept}
    planted = {n for n, (_, is_leak) in enumerate(train) if is_leak}
    assert planted <= lost
    # The real problems hold a few that share thirteen words.
    assert len(lost - planted) <= (3 if kind is gsm8k else 0), near


def test_one_problem_in_many_frames_is_one_problem():
    rng = random.Random(5)
    frames = [frame(rng, "long") for _ in range(9)]
    texts = different(people, rng, 300)
    rows = [put(text, frames[n % 9]) for n, text in enumerate(texts)]
    copies = [put(texts[0], own) for own in frames[1:]]
    kept, drops = remove_near_duplicates(problems(rows + copies, ""), threshold=0.8, min_words=12)
    assert len(kept) == len(rows)
    assert [each.example.split()[:4] for each in drops] == [
        [str(n), "is", "like", "0:"] for n in range(300, 308)
    ]
    # Where they were not taken out before, they are leaks.
    kept, drops = remove_contaminated(
        problems(rows[1:] + copies, ""), problems(rows[:1], "h"), ngram=13
    )
    assert (len(kept), len(drops)) == (299, 8)


def test_problems_of_another_source_are_near_duplicates_in_other_frames():
    rng = random.Random(6)
    frames = [frame(rng, "long") for _ in range(4)]
    texts = different(prose, rng, 200)
    texts += [text.rpartition(" ")[0] + " end" for text in texts[:10]]
    rows = problems([put(t, frames[(n + n // 200) % 4]) for n, t in enumerate(texts)], "")
    kept, drops = remove_near_duplicates(rows, threshold=0.8, min_words=12)
    assert kept == rows[:200]
    assert {each.reason for each in drops} == {"near_duplicate"}


GRIDS = {
    "a grid of two digits": lambda rng: " ".join(rng.choices("01", k=100)),
    "a grid of marks": lambda rng: " ".join(rng.choices("_#", k=36)),
    "a grid of pictures": lambda rng: " ".join(rng.choices("❌✅", k=36)),
    "a drawing": lambda rng: "".join(rng.choices("|/_\\ ", k=60)),
    "a list of few animals": lambda rng: ", ".join(
        f"{rng.randint(1, 15)} {rng.choice(WORDS)}s" for _ in range(8)
    ),
    "a rule of few words": lambda rng: " ".join(
        f"{n}. {rng.choice(['All', 'No', 'Some'])} {rng.choice(WORDS)}s are {rng.choice(WORDS)}s."
        for n in (1, 2, 3)
    ),
}


def test_tasks_made_of_one_text_and_few_words_keep_all_that_differ():
    rng = random.Random(7)
    rows = []
    for name, made in GRIDS.items():
        task = " ".join(rng.choices(LONG.split(), k=40))
        rows += [f"{name}: {task}\n{text}" for text in different(made, rng, 60)]
    rng.shuffle(rows)
    every = problems(rows, "")
    kept, drops = remove_duplicates(every)
    kept, near = remove_near_duplicates(kept, threshold=0.8, min_words=12)
    kept, leaks = remove_contaminated(kept[:-50], kept[-50:], ngram=13)
    assert Counter(each.reason for each in (*drops, *near, *leaks)) == {}


@pytest.mark.parametrize(
    ("lost", "of", "told"), [(13, 60, True), (12, 60, False), (3, 9, False), (4, 10, True)]
)
def test_a_source_that_loses_a_fifth_is_told(lost, of, told):
    rows = [Problem("q", [], "1", "integer", "small", origin=f"s{n}") for n in range(of)]
    large = [Problem("q", [], "1", "integer", "large", origin=f"l{n}") for n in range(540)]
    ledger = CurationLedger()
    ledger.record(
        "contamination", "prompts", large + rows[lost:], [drop(row, "leak") for row in rows[:lost]]
    )
    ledger.record("lines", "rows", [1, 2, 3], [Drop("bad", "line 4")] * 0)
    lines = drop_warnings(ledger)
    assert len(lines) == told
    if told:
        assert f"drops {lost} of {of} prompts of the source `small`" in lines[0]
