import os
import sys

import pytest

from planish.verifiers import VerifierOptions, answer_fault, math_answer, verify, verify_many
from planish.verifiers.math_answer import extract_answer, last_boxed, normalise_answer
from planish.verifiers.own import shared_verifier


@pytest.mark.parametrize(
    "response", ["", "I do not know", "\\boxed{72", "Answer:", "Answer:\n\n", "x" * 10**6]
)
def test_a_response_without_an_answer_is_invalid_and_not_an_error(response):
    verdict = verify("integer", response, "72")
    assert (verdict.accuracy, verdict.invalid, verdict.error) == (0.0, True, False)


@pytest.mark.parametrize(
    ("name", "asked", "other"),
    [
        ("integer", "Answer: 72", "\\boxed{72}"),
        ("integer/hash", "#### 72", "Answer: 72"),
        ("math/box", "\\boxed{72}", "Answer: 72"),
        ("integer/tags", "<answer>72</answer>", "#### 72"),
    ],
)
def test_the_form_that_is_asked_for_counts_anywhere_and_others_near_the_end(name, asked, other):
    for behind in ("\n" + "y" * 200, "\n" + "y" * 10_000):
        assert verify(name, asked + behind, "72").accuracy == 1.0
        assert verify(name, asked.replace("72", "71") + "\n" + asked + behind, "72").accuracy == 1.0
    assert verify(name, other + "\n" + "y" * 200, "72").accuracy == 1.0
    assert verify(name, other + "\n" + "y" * 300, "72").invalid


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


FAULTS = {
    "braces inside a box end it": [
        ("math", r"Answer: $\boxed{\frac{3}{4}}$", r"\frac{3}{4}", 1.0),
        ("math", r"Answer: $\boxed{\frac{3}{5}}$", r"\frac{3}{4}", 0.0),
        ("math", r"so \boxed{\frac{\sqrt{3}}{\frac{2}{5}}}", r"\frac{5\sqrt{3}}{2}", 1.0),
        ("math", r"Answer: \boxed{\left\{ 1, 2 \right\}}", r"\{1,2\}", 1.0),
        ("math", r"Answer: \boxed{\left\{ 1, 3 \right\}}", r"\{1,2\}", 0.0),
    ],
    "an equation in a box": [
        ("integer", r"Answer: $\boxed{n = 7}$", "7", 1.0),
        ("integer", r"Answer: $\boxed{n = 8}$", "7", 0.0),
        ("math", r"Answer: $\boxed{x = \frac{3}{4}}$", r"\frac34", 1.0),
        ("integer", r"Answer: $x = \boxed{7}$", "7", 1.0),
        ("integer", r"Answer: The answer is \boxed{7}.", "7", 1.0),
        ("integer", r"Answer: -\boxed{7}", "7", 0.0),
        ("integer", r"Answer: -\boxed{7}", "-7", 1.0),
    ],
    "several answers, one of them right": [
        ("integer", r"Answer: \boxed{5} or \boxed{7}", "7", 0.0),
        ("integer", "Answer: $5$ or $7$", "7", 0.0),
        ("integer", "Answer: $5$ or $7$", "5", 0.0),
        ("integer", "Answer: $18 or $20", "18", 0.0),
    ],
    "the right side alone of an equation": [
        ("math", "Answer: x=9, y=2", "x=1, y=2", 0.0),
        ("math", "Answer: x=1, y=2", "x=1, y=2", 1.0),
        ("math", "Answer: y=2, x=1", "x=1, y=2", 1.0),
        ("math", "Answer: x=9; y=2", "x=1; y=2", 0.0),
        ("math", "Answer: $x=9$ and $y=2$", "$x=1$ and $y=2$", 0.0),
        ("math", r"Answer: x = 9 \quad y = 2", r"x = 1 \quad y = 2", 0.0),
        ("math", r"Answer: x = 9 \\ y = 2", r"x = 1 \\ y = 2", 0.0),
        ("math", "Answer: x = 9 y = 2", "x = 1 y = 2", 0.0),
        ("math", "Answer: $x >= 3$", "3", 0.0),
        ("integer", "Answer: $x != 3$", "3", 0.0),
        ("integer", "Answer: $2x=14$", "14", 0.0),
        ("math", "Answer: $x+1=3$", "3", 0.0),
        ("math", "Answer: $x^2=4$", "4", 0.0),
        ("math", "Answer: $x+y=5$", "x-y=5", 0.0),
        ("math", "Answer: $y=x+5$", "x-y=-5", 1.0),
        ("math", "Answer: $f(x)=x+1$", "x+1", 1.0),
        ("math", "Answer: $f(x)=x+2$", "x+1", 0.0),
        ("math", "Answer: $(a,b)=(3,4)$", "(3,4)", 1.0),
        ("math", "Answer: $(a,b)=(3,5)$", "(3,4)", 0.0),
        ("math", r"Answer: $P(A)=\frac{1}{3}$", r"\frac13", 1.0),
        ("integer", "Answer: $m+n=7$", "7", 1.0),
        ("integer", "Answer: $m+n=8$", "7", 0.0),
        ("integer", "Answer: $x_1 + x_2 = 7$", "7", 1.0),
        ("integer", "Answer: 48 + 24 = 72", "72", 1.0),
    ],
    "degrees, thousands and minus signs of LaTeX": [
        ("integer", r"Answer: $35^\circ$", "35", 1.0),
        ("integer", r"Answer: $35^{\circ}$", "35", 1.0),
        ("integer", r"Answer: $\angle ABC = 35^\circ$", "35", 1.0),
        ("integer", "Answer: 36\u00b0", "35", 0.0),
        ("integer", r"Answer: $25^\circ\text{C}$", "25", 1.0),
        ("integer", "Answer: 1{,}250{,}000", "1250000", 1.0),
        ("integer", "Answer: 1{,}251", "1250", 0.0),
        ("integer", r"Answer: 1,\!250", "1250", 1.0),
        ("integer", "Answer: \u2212250", "-250", 1.0),
        ("integer", "Answer: \u2212250", "250", 0.0),
        ("integer", "Answer: \u2013250", "-250", 1.0),
        ("math", "Answer: 5\u20137", "-2", 0.0),
        ("math", "Answer: \u2212\\frac{1}{2}", "-1/2", 1.0),
    ],
    "units of LaTeX": [
        ("integer", r"Answer: $12\ \text{cm}$", "12", 1.0),
        ("integer", "Answer: $12~cm$", "12", 1.0),
        ("integer", r"Answer: $12\,\text{cm}^2$", "12", 1.0),
        ("integer", r"Answer: $12\ \mathrm{m/s}$", "12", 1.0),
        ("integer", "Answer: 12 km/h", "12", 1.0),
        ("integer", r"Answer: $13\ \text{cm}$", "12", 0.0),
        ("integer", r"Answer: $5 \text{ million}$", "5", 0.0),
        ("integer", "Answer: $5$ million", "5", 0.0),
        ("math", r"Answer: $2\mathrm{i}$", "2", 0.0),
    ],
    "other delimiters of formulas": [
        ("integer", r"Answer: \(17\)", "17", 1.0),
        ("integer", r"Answer: \(18\)", "17", 0.0),
        ("integer", r"Answer: \[17\]", "17", 1.0),
        ("integer", r"Answer: \( x = 17 \).", "17", 1.0),
        ("integer", r"Answer: **\(17\)**", "17", 1.0),
    ],
    "the value on a later line": [
        ("integer", "Answer:\n\n$$\n\\boxed{17}\n$$", "17", 1.0),
        ("integer", "Answer:\n\n$$\n\\boxed{18}\n$$", "17", 0.0),
        ("integer", "Answer:\n\n\\[\nx = 17\n\\]", "17", 1.0),
        ("integer", "**Answer:**\n17", "17", 1.0),
        ("integer", "Answer:\n\\begin{align*}\nx &= 17\n\\end{align*}", "17", 1.0),
    ],
    "boxes of another spelling": [
        ("integer", r"Therefore \fbox{42}", "42", 1.0),
        ("integer", r"Therefore $\boxed {42}$", "42", 1.0),
        ("integer", r"Therefore \fbox {43}", "42", 0.0),
        ("integer", r"Therefore $\boxed 42$", "42", 1.0),
    ],
    "the box before one that is cut off": [
        ("integer", r"Maybe \boxed{5}. Or rather \boxed{7", "5", 0.0),
        ("integer", r"Maybe \boxed{5}. Or rather \fbox{\frac{7}{2}", "5", 0.0),
        ("integer", r"\boxed{5}. Or rather $\boxed{7", "7", 0.0),
        ("integer/tags", "<answer>5</answer><answer>7", "5", 0.0),
    ],
    "small numbers are all equal": [
        ("math", r"Answer: $\frac{1}{2010!}$", r"\frac{1}{2011!}", 0.0),
        ("math", r"Answer: $\frac{1}{2010! \cdot 2011}$", r"\frac{1}{2011!}", 1.0),
        ("math", "Answer: $10^{-9}$", "10^{-8}", 0.0),
        ("math", "Answer: 0.0000001", "0.0000002", 0.0),
        ("math", "Answer: 0.000000", "10^{-9}", 0.0),
        ("math", r"Answer: $1.2 \times 10^{-7}$", "0.00000012", 1.0),
        ("math", "Answer: $e^{-50}$", "e^{-51}", 0.0),
        ("math", r"Answer: $(\frac{1}{30!}, 2)$", r"(\frac{1}{31!}, 2)", 0.0),
        ("math", r"Answer: $\{\frac{1}{30!}, 2\}$", r"\{\frac{1}{31!}, 2\}", 0.0),
        ("math", r"Answer: $\sqrt{2}+10^{-20}$", r"\sqrt{2}", 0.0),
        ("math", "Answer: 0.333333", "1/3", 1.0),
    ],
    "the form that the prompt asks for is not read": [
        ("integer", "#### 18", "18", 1.0),
        ("integer", "#### 19", "18", 0.0),
        ("integer/hash", "He has 3 apples.\n#### $1,250", "1250", 1.0),
        ("integer/hash", "Answer: see below\n#### 18", "18", 1.0),
        ("integer/box", "\\boxed{18}\nAnswer: see above", "18", 1.0),
        ("integer/tags", "<think>5</think> <answer>18</answer>", "18", 1.0),
        ("integer/tags", "<answer>\\boxed{18}</answer>", "18", 1.0),
        ("integer", "so it is 18.", "18", 1.0),
        ("integer", "so it is 19.", "18", 0.0),
        ("integer", "The final answer is $18$", "18", 1.0),
        ("integer", "**Final Answer**: 18", "18", 1.0),
        ("integer", "#### Solution\nso it is 18.", "18", 1.0),
        ("math", r"the answer is \(\frac{3}{4}\).", "3/4", 1.0),
    ],
}
ROWS = [(fault, *row) for fault, rows in FAULTS.items() for row in rows]


@pytest.mark.parametrize(("fault", "name", "response", "answer", "accuracy"), ROWS)
def test_a_published_fault_of_grading(fault, name, response, answer, accuracy):
    verdict = verify(name, response, answer)
    assert (verdict.accuracy, verdict.error, verdict.timeout) == (accuracy, False, False)


def test_the_child_is_reused_and_the_library_stays_out_of_this_process():
    verify("math", "Answer: 1/3", "2/6")
    child = shared_verifier("planish.verifiers.math_library:judge")
    pid = child.pid
    verify("math", "Answer: 1/4", "2/8")
    assert child.pid == pid != os.getpid()
    assert "math_verify" not in sys.modules


@pytest.mark.slow
def test_a_comparison_without_end_is_killed_and_the_next_one_works():
    hostile = verify("math", "Answer: 99999999!", "1/2", VerifierOptions(timeout_seconds=1.0))
    assert (hostile.accuracy, hostile.timeout, hostile.error) == (0.0, True, False)
    assert verify("math", "Answer: 3/6", "1/2").accuracy == 1.0


@pytest.mark.slow
def test_a_ground_truth_that_takes_too_long_itself_is_an_error():
    verdict = verify("math", "Answer: 1/2", "99999999!", VerifierOptions(timeout_seconds=1.0))
    assert (verdict.accuracy, verdict.timeout, verdict.error) == (0.0, True, True)
    assert "takes too long" in verdict.reason


class Broken:
    """Stands for the child of a comparison."""

    def __init__(self, *ends):
        self.ends, self.asked = list(ends), 0

    def ask(self, *_):
        self.asked += 1
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


@pytest.fixture
def broken(monkeypatch):
    def make(*ends):
        fake = Broken(*ends)
        monkeypatch.setattr(math_answer, "shared_verifier", lambda _: fake)
        math_answer._asked.cache_clear()
        return fake

    yield make
    math_answer._asked.cache_clear()


def test_what_was_judged_or_was_late_is_asked_once_and_a_crash_again(broken):
    fake = broken({"score": 1.0}, TimeoutError(), {"score": 0.0}, OSError(), {"score": 1.0})
    for _ in range(2):
        assert verify("math", "Answer: 1/2", "2/4").accuracy == 1.0
    for _ in range(2):
        late = verify("math", "Answer: 1/3", "2/4")
        assert (late.timeout, late.error) == (True, False)
    assert fake.asked == 3
    assert verify("math", "Answer: 1/5", "2/4").error
    assert verify("math", "Answer: 1/5", "2/4").accuracy == 1.0


def test_a_value_without_a_form_is_found_and_its_search_may_be_late_or_crash(broken):
    assert verify("math", "so it is 18.", "18").accuracy == 1.0
    broken(TimeoutError(), OSError())
    late = verify("integer", "so it is 19.", "18")
    assert (late.timeout, late.error) == (True, False)
    assert verify("integer", "so it is 20.", "18").error
