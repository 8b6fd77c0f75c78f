"""Grading faults that were published of verifiers: for each, answers that are right and wrong.

Rows are (verifier, response, ground truth, accuracy).
"""

import pytest

from planish.verifiers import verify

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


def test_each_fault_has_right_and_wrong_answers():
    some = {fault for fault, *_, accuracy in ROWS if accuracy == 1.0}
    assert set(FAULTS) - some == {
        "several answers, one of them right",
        "the box before one that is cut off",
    }
    assert {fault for fault, *_, accuracy in ROWS if accuracy == 0.0} == set(FAULTS)
