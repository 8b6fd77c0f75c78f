import random

import pytest

from planish.stages.curate.dedup import (
    SHINGLE_WORDS,
    jaccard,
    ngrams,
    remove_contaminated,
    remove_duplicates,
    remove_near_duplicates,
)
from planish.stages.curate.problem import Problem, words

TEXT = (
    "A farmer has twelve cows and sells four of them at the market on a rainy Monday morning "
    "before he buys nine sheep from his neighbour who lives across the river how many animals"
)


def problem(question, answer="1", verifier="integer", origin=""):
    return Problem(question, [{"role": "user", "content": question}], answer, verifier, "s",
                   origin=origin or question[:20])  # fmt: skip


def test_equal_questions_are_kept_once_whatever_their_case_and_spacing_but_operators_differ():
    rows = [problem("1+1 ="), problem("How  many?"), problem("1 + 1="), problem("how many")]
    kept, drops = remove_duplicates(rows)
    assert kept == rows[:2]
    assert [d.reason for d in drops] == ["duplicate", "duplicate"]
    rows = [problem("4+2="), problem("4-2="), problem("4*2="), problem("42=")]
    assert remove_duplicates(rows)[0] == rows


def test_equal_questions_with_different_answers_are_all_dropped():
    rows = [problem("1+1=", "2"), problem("1+1=", "3"), problem("2+2=", "4")]
    kept, drops = remove_duplicates(rows)
    assert kept == rows[2:]
    assert [d.reason for d in drops] == ["conflicting_answers"] * 2


def near(problems, **options):
    return remove_near_duplicates(problems, **{"threshold": 0.7, "min_words": 12, **options})


def test_a_changed_word_makes_a_near_duplicate_and_the_first_one_stays():
    rows = [problem(TEXT), problem(TEXT.replace("Monday", "Friday")), problem(TEXT[::-1])]
    kept, drops = near(rows)
    assert kept == [rows[0], rows[2]]
    assert [d.reason for d in drops] == ["near_duplicate"]
    assert rows[0].origin in drops[0].example


def test_short_problems_are_never_near_duplicates_and_threshold_one_turns_the_filter_off():
    rows = [problem(f"{n}+1=") for n in range(50)]
    assert near(rows) == (rows, [])
    rows = [problem(TEXT), problem(TEXT + " now")]
    assert near(rows, threshold=1.0) == (rows, [])


def test_candidates_are_checked_exactly():
    left, right = (
        ngrams(words(t), SHINGLE_WORDS) for t in (TEXT, TEXT.replace("Monday", "Friday"))
    )
    similarity = jaccard(left, right)
    assert similarity == pytest.approx(29 / 35)
    rows = [problem(TEXT), problem(TEXT.replace("Monday", "Friday"))]
    assert len(near(rows, threshold=similarity)[0]) == 1
    assert len(near(rows, threshold=similarity + 0.01)[0]) == 2


def test_shared_instructions_make_no_near_duplicates():
    instruction = " ".join(f"please{chr(97 + i)}" for i in range(26))
    rows = [problem(f"{instruction} what is {n} plus {n * n} times {n + 7}") for n in range(30)]
    assert near(rows) == (rows, [])
    assert len(near(rows[:4])[0]) < 4, "too few to tell instructions from the problem"
    # A problem of instructions only is kept.
    rows = [problem(instruction), *(problem(f"{instruction} {TEXT[n:]}") for n in range(0, 60, 5))]
    assert rows[0] in near(rows)[0]


def many(count):
    rng = random.Random(5)
    vocabulary = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400)]
    texts = [" ".join(rng.choices(vocabulary, k=30)) for _ in range(count)]
    return [
        problem(t, origin=f"line {i}") for i, t in enumerate([*texts, *(t + " x" for t in texts)])
    ]


@pytest.mark.slow
def test_near_duplicates_do_not_depend_on_the_number_of_workers():
    rows = many(40)
    one, three = near(rows, workers=1), near(rows, workers=3)
    assert one == three
    assert one[0] == rows[:40]


def test_a_training_problem_that_equals_a_held_out_one_is_dropped():
    kept, drops = remove_contaminated(
        [problem("1+1="), problem("1+2=")], [problem("1 + 1 =")], ngram=13
    )
    assert [p.question for p in kept] == ["1+2="]
    assert drops[0].reason == "equals_held_out"


def test_thirteen_words_in_a_row_are_a_leak_and_twelve_are_not():
    row = TEXT.split()
    held = [problem(TEXT)]
    thirteen = problem("unrelated words first then " + " ".join(row[5:18]))
    twelve = problem("unrelated words first then " + " ".join(row[5:17]))
    kept, drops = remove_contaminated([thirteen, twelve], held, ngram=13)
    assert kept == [twelve]
    assert drops[0].reason == "shares_13_words_with_held_out"
    assert remove_contaminated([thirteen], held, ngram=0)[0] == [thirteen]


def test_problems_in_a_frame_are_near_duplicates_by_what_is_in_it():
    frame = "Please read what follows and work on it line by line. {} End with the answer alone."
    rng = random.Random(7)
    names = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400)]
    texts = [" ".join(rng.choices(names, k=20)) for _ in range(30)]
    texts += [text + " x" for text in texts[:3]] + ["short one"]
    kept, drops = near([problem(frame.format(text)) for text in texts])
    assert [d.reason for d in drops] == ["near_duplicate"] * 3
    assert len(kept) == 31
