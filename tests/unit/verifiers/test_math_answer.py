import pytest

from planish.verifiers import VerifierOptions, answer_fault, verify, verify_many
from planish.verifiers.math_answer import extract_answer, last_boxed, normalise_answer

GOLDEN = [
    ("Answer: 72", "72", 1.0),
    ("so it is\nANSWER : 72\n", "72", 1.0),
    ("Answer: 007", "7", 1.0),
    ("Answer: -0", "0", 1.0),
    ("Answer: +5", "5", 1.0),
    ("Answer: 5.00", "5", 1.0),
    ("Answer: 5.01", "5", 0.0),
    ("Answer: 1,234", "1234", 1.0),
    ("Answer: 1,2,3", "123", 0.0),
    ("Answer: $1,234.", "1234", 1.0),
    ("Answer: **72**", "72", 1.0),
    ("Answer: $\\boxed{72}$", "72", 1.0),
    ("Answer: \\text{72 apples}", "72", 1.0),
    ("Answer: 72 square feet.", "72", 1.0),
    ("Answer: 50\\%", "50", 1.0),
    ("Answer: x = 48 + 24 = 72", "72", 1.0),
    ("Answer: 1\nAnswer: 2", "2", 1.0),
    ("Answer: 2\nAnswer: 1", "2", 0.0),
    ("no such line, but \\boxed{72}", "72", 1.0),
    ("\\boxed{71} then \\boxed{72}", "72", 1.0),
    ("Answer: 5 or 7", "5", 0.0),
    ("Answer: 5 or 7", "7", 0.0),
    ("Answer: 5 7", "57", 0.0),
    ("Answer: 5e1", "50", 0.0),
    ("Answer: 0x10", "16", 0.0),
    ("Answer: 1_000", "1000", 0.0),
    ("Answer: \u0667\u0662", "72", 0.0),
    ("Answer: \uff17\uff12", "72", 0.0),
    ("Answer: --5", "5", 0.0),
    ("Answer: yes", "yes", 1.0),
]


@pytest.mark.parametrize(("response", "answer", "accuracy"), GOLDEN)
def test_integer_rule(response, answer, accuracy):
    verdict = verify("integer", response, answer)
    assert verdict.accuracy == accuracy
    assert not verdict.error


@pytest.mark.parametrize(
    "response", ["", "I do not know", "\\boxed{72", "Answer:", "Answer:\n\n", "x" * 10**6]
)
def test_a_response_without_an_answer_is_invalid_and_not_an_error(response):
    verdict = verify("integer", response, "72")
    assert (verdict.accuracy, verdict.invalid, verdict.error) == (0.0, True, False)


def test_only_the_last_300_characters_are_searched_for_the_answer_line():
    assert verify("integer", "Answer: 72\n" + "y" * 289, "72").accuracy == 1.0
    assert verify("integer", "Answer: 72\n" + "y" * 300, "72").invalid


def test_integral_decimals_are_refused_when_the_option_is_off():
    strict = VerifierOptions(accept_integral_decimals=False)
    assert verify("integer", "Answer: 5.0", "5").accuracy == 1.0
    assert verify("integer", "Answer: 5.0", "5", strict).accuracy == 0.0


def test_more_than_64_digits_never_become_a_number():
    assert verify("integer", "Answer: " + "0" * 63 + "7", "7").accuracy == 1.0
    assert verify("integer", "Answer: " + "0" * 64 + "7", "7").accuracy == 0.0
    assert verify("integer", "Answer: " + "9" * 290, "9" * 64).accuracy == 0.0


def test_extraction_takes_the_last_line_and_the_last_balanced_box():
    assert extract_answer("Answer: 1\nanswer:  2 \n") == "2"
    assert last_boxed("\\boxed{3} and \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{\\frac{1}{2}} and \\boxed{3") == ""
    assert last_boxed("\\boxed{\\left\\{1\\right.}") == "\\left\\{1\\right."
    assert last_boxed("\\boxed{a{b}c}") == "a{b}c"
    assert last_boxed("\\boxed{") == ""
    assert last_boxed("{}}}{{{") is None


def test_normalisation_keeps_a_space_between_two_values():
    assert normalise_answer("5 7") == "5 7"
    assert normalise_answer("( 1 , 2 )") == "(1,2)"
    assert normalise_answer("1,234.50") == "1234.50"
    assert normalise_answer("$$") == ""


def test_an_empty_ground_truth_is_an_error_of_the_verifier():
    assert verify("integer", "Answer: 5", " $ ").error
    assert verify("math", "Answer: 5", "").error


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("integer", "72", None),
        ("integer", "1,234", None),
        ("integer", "1" * 64, None),
        ("integer", "1" * 65, "answer_too_long"),
        ("integer", "-" + "1" * 100, "answer_too_long"),
        ("integer", "1" * 2000, "answer_too_long"),
        ("integer", "1/2", "answer_not_an_integer"),
        ("integer", "\u0667", "answer_not_an_integer"),
        ("trace", "72", None),
        ("trace", "1,234", "answer_not_an_integer"),
        ("exact", "  ", "answer_empty"),
        ("exact", "yes", None),
        ("countdown", '{"numbers": [1, 2], "target": 3}', None),
        ("countdown", "3", "answer_not_a_task"),
        ("mystery", "3", "unknown_verifier"),
    ],
)
def test_ground_truth_that_cannot_be_verified_is_named(name, answer, fault):
    assert answer_fault(name, answer) == fault


def test_many_rows_keep_their_order_and_one_bad_row_spoils_no_other():
    rows = [
        ("integer", "Answer: 1", "1"),
        ("trace", "=1", "mystery"),
        ("trace", "1=2", "3"),
        ("exact", "yes", "yes"),
    ]
    verdicts = verify_many(rows)
    assert [v.accuracy for v in verdicts] == [1.0, 0.0, 0.0, 1.0]
    assert [v.error for v in verdicts] == [False, True, False, False]


def test_a_verifier_that_raises_gives_an_error_verdict():
    verdict = verify("integer", None, "5")  # type: ignore[arg-type]
    assert (verdict.accuracy, verdict.error) == (0.0, True)
