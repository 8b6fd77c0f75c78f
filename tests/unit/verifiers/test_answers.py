"""Answers as models write them, with a truth that is known by hand, and text that would be slow."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest

from planish.show.verifier import compare
from planish.verifiers import VerifierOptions, verify
from planish.verifiers.math_answer import normalise_answer, number_in
from planish.verifiers.thoughts import after_thought

RIGHT = {
    "integer": {
        "293": [
            "Answer: $m+n = 256+37 = 293$",
            "Answer: m+n = 293 cm",
            "Answer: \\boxed{m+n = 256+37 = 293}",
            "Answer: \\begin{align*} m+n &= 256+37 \\\\ &= 293 \\end{align*}",
        ],
        "304": ["Answer: $100m+n = 304$"],
        "25": ["Answer: $a^2+b^2 = 25$", "Answer: $AB^2 = 25$"],
        "24": [
            "Answer: $N \\bmod 1000 = 24$",
            "Answer: N mod 1000 = 24",
            "Answer: $N \\equiv 24 \\pmod{1000}$",
        ],
        "120": ["Answer: $n! = 120$"],
        "7": ["Answer: $a_1+a_2+a_3=7$", "Answer: $2x = 14 \\implies x = 7$", "Answer: 007"],
        "14": ["Answer: $\\lfloor 100x \\rfloor = 14$"],
        "10": ["Answer: $\\binom{5}{2} = 10$"],
        "6": ["Answer: $\\gcd(12, 18) = 6$"],
        "55": ["Answer: $\\sum_{k=1}^{10} k = 55$"],
        "9": ["Answer: $f(3) = 9$"],
        "12": [
            "Answer: $|S| = 12$",
            "\u7b54\u6848\uff1a12",
            "\u7b54\u6848\uff1a12\u4e2a",
            "Answer\uff1a12",
            "**Answer**\uff1a12",
        ],
        "1234": ["Answer: $p+q+r = 1,234$", "Answer: 1,234", "Answer: $1,234."],
        "18": [
            "Answer: \u20ac18",
            "Answer: 18 USD",
            "Answer: USD 18",
            "Answer: US$18",
            "Answer: R$ 18",
            "Answer: \u20bf18",
            "Answer: 18 z\u0142",
            "Answer: CHF18",
            "Answer: Rs. 18",
            "Answer: \\pounds 18",
            "Answer: \\$18",
            "Answer: $18/day",
            "Answer: 18 km per hour",
            "Answer: 18 m^2",
            "Answer: 18 m/s^2",
            "Answer: 18 m\xb2",
            '{"answer": "18"}',
            '{"answer": 18}',
            '{"answer": "18", "confidence": 0.9}',
            '{"reasoning": "6*3", "answer": 18, "x": 3}',
            "Answer: `18`",
            'Answer: "18"',
            "Answer: '18'",
            "Answer: \u201c18\u201d",
            "Answer: {18}",
            "Answer: ```18```",
            "Answer:\n```\n18\n```",
            "Answer: The total is 18 apples.",
            "Answer: Tom and Jerry have 18 apples",
            "Answer: 18th",
            "Answer: Option B: 18",
            "Answer: 18-year-old",
            "Answer: 18 percent",
            "Answer: 18.",
            "Answer: (18)",
            "Answer: [18]",
            "Answer: 18\xb0",
            "so it costs \u20ac18.",
            "so it costs 18 dollars per day.",
            "Answer: A$18",
            "Answer: C\\$ 18",
        ],
        "1800": ["Answer: \xa51,800"],
        "-18": ["Answer: -\u20ac18", "Answer: -$18", "Answer: negative 18"],
        "12500": [
            "Answer: 12\u2009500",
            "Answer: 12\u202f500",
            "Answer: 12\xa0500",
            "Answer: $12\\,500$",
            "Answer: $12\\ 500$",
            "Answer: 12~500",
            "Answer: 12'500",
            "Answer: 12 500 dollars",
            "in total 12 500.",
        ],
        "1234567": ["Answer: 1 234 567"],
        "125000": ["Answer: 1,25,000"],
        "72": [
            "Answer: 72",
            "so it is\nANSWER : 72\n",
            "Answer: **72**",
            "Answer: $\\boxed{72}$",
            "Answer: \\text{72 apples}",
            "Answer: 72 square feet.",
            "Answer: x = 48 + 24 = 72",
            "no such line, but \\boxed{72}",
            "\\boxed{71} then \\boxed{72}",
        ],
        "0": ["Answer: -0"],
        "5": ["Answer: +5", "Answer: 5.00", "Answer: $\\boxed{\n5\n}$", "Answer: \\(\n5\n\\)"],
        "50": ["Answer: 50\\%"],
        "2": ["Answer: 1\nAnswer: 2"],
        "yes": ["Answer: yes"],
        "A": ["Answer: $A$"],
        "C": ["Answer: $C$"],
        "S": ["Answer: $S$."],
        "R": ["Answer: \\boxed{R}"],
        "B": ["**Answer: (B) 18**", "Answer: Choice B"],
        "3": ["Answer: 3 p.m."],
    },
    "math": {
        "120": ["Answer: $n! = 120$"],
        "f(x)=x+1": ["Answer: $f(x)=x+1$", "Answer: $y=x+1$"],
        "1011_2": ["Answer: $1011_2$", "Answer: $1011_{2}$", "Answer: 1011 (base 2)"],
        "2-1": ["Answer: 2-1"],
        "3-2\\sqrt{2}": ["Answer: $3-2\\sqrt{2}$"],
        "x-1": ["Answer: x-1"],
        "12.5": ["Answer: \u20ac12.50", "Answer: 12.50 EUR", "Answer: 12.5 dollars per day"],
        "3/4": ["Answer: $\\frac{3}{4}$ cups", "Answer: $\\frac{3}{4}\\text{ cups}$"],
        "0.5": ["Answer: 1/2"],
        "\\frac12": ["Answer: 0.5"],
        "1/2": ["Answer: $\\frac{1}{2}$"],
        "(1,2)": ["Answer: (1, 2)"],
        "2\\sqrt{2}": ["Answer: \\sqrt{8}"],
        "x+1": ["Answer: 1+x"],
    },
}
"""Verifier to truth to what is right, and below to what looks like it."""
WRONG = {
    "integer": {
        "14": ["Answer: $2x=14$"],
        "2": ["Answer: $x=9, y=2$", "Answer: x = 1; y = 2", "Answer: 2\nAnswer: 1"],
        "7": [
            "Answer: $\\frac{x}{2} = 7$",
            "Answer: $\\sqrt{x} = 7$",
            "Answer: $x = 5$ and $y = 7$",
            "Answer: x=5 or x=7",
            "Answer: 5 or 7",
        ],
        "5": ["Answer: $-x = 5$", "Answer: 5.01", "Answer: 5 or 7", "Answer: --5"],
        "25": ["Answer: $x^2 = 25$"],
        "18": [
            "Answer: -\u20ac18",
            "Answer: 18\xb2",
            "Answer: 18 and a half",
            "Answer: 18 million",
            "Answer: not 18",
            "Answer: 18!",
            "Answer: 18\u03c0",
            "Answer: 18x",
            "Answer: 18 x",
            "Answer: 18k",
            "Answer: x 18",
            "Answer: negative 18",
            "Answer: more than 18",
            "Answer: 1/18",
            "Answer: .18",
            "Answer: 18 of 20",
            "Answer: \u224818",
            "Answer: $x \\ge 18$",
        ],
        "1850": ["Answer: 18\u20ac50"],
        "1250": ["Answer: 12 50"],
        "12": ["\u7b54\u6848\uff1a12\u4e07"],
        "42": ["Answer: 42\nAnswer:", "Answer: 42\nAnswer: \n\n", "Answer: 42\n**Answer:**"],
        "101": ["Answer: $101_2$"],
        "-2588": ["call 1-800-555-1234"],
        "123": ["Answer: 1,2,3"],
        "57": ["Answer: 5 7"],
        "50": ["Answer: 5e1"],
        "16": ["Answer: 0x10"],
        "1000": ["Answer: 1_000"],
        "72": ["Answer: \u0667\u0662", "Answer: \uff17\uff12"],
        "A": ["Answer: $C$"],
        "B": ["Answer: ABC"],
        "1 2": ["Answer: $\\begin{pmatrix}\n1\n\\end{pmatrix}$"],
    },
    "integer/hash": {
        "42": ["#### 42\n####"],
    },
    "integer/tags": {
        "42": ["<answer>42</answer><answer></answer>"],
    },
    "math": {
        "f(x)=x+1": ["Answer: $g(x)=x+1$"],
        "f(x)=2x": ["Answer: $f'(x)=2x$"],
        "f(x)=3": ["Answer: $g(x)=3$"],
        "f(2)=3": ["Answer: $f(1)=3$"],
        "f(x)=x, g(x)=2x": ["Answer: $g(x)=x, f(x)=2x$"],
        "$P(A)=\\frac12$": ["Answer: $P(B)=\\frac12$"],
        "1011_2": ["Answer: $1011_3$", "Answer: 1011", "Answer: 11"],
        "101": ["Answer: $101_2$"],
        "101_2": ["Answer: $101_{\\text{two}}$"],
        "-2": ["Answer: 5-7"],
        "-2588": ["Answer: 1-800-555-1234", "call 1-800-555-1234"],
        "2008": ["Answer: 2024-01-15"],
        "1/2": ["Answer: 2/3", "Answer: \\frac{1}{0}"],
        "(1,2)": ["Answer: (2, 1)"],
        "\\frac{10}{2}": ["Answer: 5} or {5", "Answer: 5 or 7", "Answer: \u0665"],
        "13": ["Answer: 12"],
    },
}


@pytest.mark.parametrize(
    ("name", "response", "answer", "accuracy"),
    [
        (name, response, answer, accuracy)
        for accuracy, verifiers in ((1.0, RIGHT), (0.0, WRONG))
        for name, answers in verifiers.items()
        for answer, responses in answers.items()
        for response in responses
    ],
)
def test_chains_currencies_units_groups_and_quotes(name, response, answer, accuracy):
    verdict = verify(name, response, answer)
    assert (verdict.accuracy, verdict.error, verdict.timeout) == (accuracy, False, False)


FORMS = {
    "integer": ("Answer: {}", "so it is\n**Answer:** {}", "Answer\uff1a{}", "Answer:\n\n{}\n"),
    "integer/box": ("So \\boxed{{{}}}.", "$$\\boxed{{{}}}$$", "\\fbox{{{}}}"),
    "integer/hash": ("6*7\n#### {}", "#### {}\nas wanted"),
    "integer/tags": ("<answer>{}</answer>", "<think>13</think><answer>\\boxed{{{}}}</answer>"),
}
VALUES = (
    *("{}", "{}.", "{}.0", "+{}", "({})", "`{}`", '"{}"', "x = {}", "m+n = 2+3 = {}", "n! = {}"),
    *("100m+n = {}", "a^2+b^2 = {}", "\\gcd(a, b) = {}", "\u20ac{}", "{} USD", "US$ {}", "{} cm^2"),
    *(
        "{} dollars per day",
        "{} km/h",
        "{}^\\circ",
        "\\text{{{}}}",
        "the total is {} apples",
        "{}%",
    ),
)
OTHERS = (
    *("2x = {}", "x = 5, y = {}", "{} or 5", "{}!", "{}k", "{} million", "{}x", "{} and a half"),
    *(
        "{}/7",
        "7-{}",
        "0x{}",
        "{} is not it",
        "{}e1",
        "{}_7",
        "\\sqrt{{{}}}",
        "{}^2",
        "{} or more",
        "1{}",
    ),
)


def test_answers_of_templates_are_graded_as_their_truth_is():
    draw = random.Random(0)
    count = 0
    for name, forms in FORMS.items():
        for form, (value, is_right) in itertools.product(
            forms, [(v, 1.0) for v in VALUES] + [(v, 0.0) for v in OTHERS]
        ):
            for number in (draw.randint(2, 999), draw.randint(1000, 99_999)):
                response = form.format(value.format(number))
                assert verify(name, response, str(number)).accuracy == is_right, (name, response)
                assert verify(name, response, str(number + 1)).accuracy == 0.0, (name, response)
                count += 2
    assert count >= 1500


WRITTEN = {
    "12": (["12\\\\", "= 12", "\\approx 12"], ["12 or 13", "12 and 13"]),
    "12, 13": (["12 or 13", "12 and 13"], ["12 or 14"]),
    "x = 2 or x = 3": (["x = 3 or x = 2"], []),
    "2, 3": (["x = 2, x = 3", "x = 2 \\text{ or } x = 3"], ["x = 2, y = 3"]),
    "3": (["\\{3\\}"], ["x = 2 or x = 3", "3i", "3 i", "n = 1, 2, 3"]),
    "-2, 3": (["x=-2 \\quad \\text{or} \\quad x=3"], []),
    "x = 2": ([], ["x = 2, y = 3"]),
    "\\frac{1}{3}": (["0.\\overline{3}"], ["0.333"]),
    "0.5": ([], ["0.\\overline{5}"]),
    "1": (["0.\\overline{9}", "1^{st}"], []),
    "0.1\\overline{23}": (["\\frac{61}{495}"], []),
    "3.\\overline{142857}": (["\\frac{22}{7}"], []),
    "2\\frac{1}{2}": (["2.5"], ["\\frac{21}{2}"]),
    "\\frac{21}{2}": ([], ["2 1/2"]),
    "2 1/2": (["5/2"], []),
    "12 500/7": (["12500/7"], []),
    "\\frac{5}{2}": ([], ["-2 1/2"]),
    "-\\frac{5}{2}": (["-2 1/2"], []),
    "1/2": (["0.5"], ["3 1/2"]),
    "1.5": (["1,5", "1,50"], ["(1,5)", "1, 5", "\\{1,5\\}"]),
    "15": ([], ["1,5"]),
    "1,500": ([], ["1.500"]),
    "1500": ([], ["1.500"]),
    "1,234.5": ([], ["1.234,5"]),
    "0.75": (["0,75"], []),
    "1, 5": (["1,5"], []),
    "(1,5)": ([], ["1.5"]),
    "-1.5": (["-1,5"], []),
    "1.25": (["1,25 m"], []),
    "10:30 a.m.": (["10:30 am", "10:30 AM.", "\\text{10:30 a.m.}"], ["10:30", "10:30 p.m."]),
    "10 am": ([], ["10 pm"]),
    "10 \\text{ pm}": ([], ["10 \\text{ am}"]),
    "10": (["10 am"], []),
    "5 pm": (["5 p.m."], ["5"]),
    "\\infty": (["+\u221e"], ["-\u221e"]),
    "-\\infty": (["-\u221e"], []),
    "\\pi/2": (["\u03c0/2"], ["2\u03c0"]),
    "2\\sqrt{3}": (["2\u221a3"], ["2\u221a5"]),
    "\\sqrt{12}": (["2\u221a(3)"], []),
    "x^2": (["x\xb2"], ["2x"]),
    "x^3": ([], ["x\xb2"]),
    "3 \\times 10^5": (["3 \xd7 10^5"], ["3 \xd7 10^6"]),
    "6": (["2\xd73"], []),
    "25": (["5\xb2"], []),
    "\\emptyset": (["\\varnothing", "\\{\\}"], ["\\{0\\}"]),
    "0": ([], ["\\varnothing"]),
    "101_2": (["101_{(2)}"], ["101_{two}"]),
    "21_{3}": (["21_3"], []),
    "4": (["4^{\\text{th}}", "4^\\text{th}"], ["4^{h}", "4^{4}"]),
    "16": (["4^{2}"], []),
    "22": (["22^{\\text{nd}}"], []),
    "8": ([], ["x > 8"]),
    "(8,\\infty)": (["x>8", "8<x"], ["x<8"]),
    "(-\\infty,8]": (["x \\le 8"], []),
    "(-\\infty,8)": ([], ["x \\le 8"]),
    "[1,3]": (["1 \\le x \\le 3"], ["1 \\le x < 3"]),
    "x>8": (["(8,\\infty)"], ["[8,\\infty)"]),
    "\\{3\\}": (["x = 3"], []),
    "(1,3)": (["1<x<3"], ["x=1,y=3"]),
    "A": (
        [
            "A. red",
            "(A) red",
            "\\textbf{(A)}",
            "\\textbf{(A)}\\ 5",
            "a",
            "Option A: red",
            "\\boxed{A}",
            "(a)",
        ],
        [
            "(B)",
            "A and B",
            "A or B",
            "AB",
            "not A",
            "A, B",
            "A; B",
            "(A), (B)",
            "A. red or B. blue",
            "A = 5",
            "\\text{D. 48}",
        ],
    ),
    "AB": ([], ["A"]),
    "A, B": (["A, B"], []),
    "5": (["A = 5"], []),
    "7:4": (["7\\colon 4", "7/4"], ["4\\colon 7"]),
    "218": (
        [
            "\\underline{\\underline{218}}",
            "\\textcolor{red}{218}",
            "\\color{blue}{218}",
            "\\displaystyle 218",
        ],
        ["\\color{blue}{219}", "\\overline{218}"],
    ),
    "\\frac12": (["\\displaystyle\\frac{1}{2}"], []),
    "3\\pi": (["3\\pi\\text{ cm}^2", "3 \\pi \\text{ cm}^2"], ["3\\text{ cm}^2"]),
    "3i": (["3 i"], ["3"]),
    "3 + 2\\sqrt{2}": (["(3+2\\sqrt{2})\\text{ m}"], []),
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}": (
        ["v = \\begin{pmatrix}1\\\\2\\end{pmatrix}"],
        [
            "\\begin{pmatrix}2\\\\1\\end{pmatrix}",
            "u = \\begin{pmatrix}1\\\\3\\end{pmatrix}",
            "\\begin{pmatrix}1&2\\end{pmatrix}",
        ],
    ),
    "2": ([], ["\\begin{pmatrix}1\\\\2\\end{pmatrix}", "v=\\begin{cases}x=1\\\\y=2\\end{cases}"]),
    "1, 2, 3": (["x = 1, 2, 3", "n \\in \\{1,2,3\\}"], []),
    "(1,2)": (["(x,y) = (1,2)"], []),
    "(1,2),(3,4)": (["(x,y) = (1,2), (3,4)"], ["(x,y) = (1,2)"]),
    "(3,4)": ([], ["(x,y) = (1,2), (3,4)"]),
    "$12.50": (["12.50"], []),
    "12.50": (["\\$12.5"], []),
    "1/3": ([], ["33.3\\%"]),
    "50\\%": (["50"], ["0.5", "\\frac{1}{2}"]),
    "6 \\text{ and } 7": (["6, 7"], []),
    "\\text{Saturday}": (["saturday"], ["Sunday"]),
    "1:2:3": (["1 : 2 : 3"], ["3:2:1"]),
    "90^\\circ": ([], ["\\frac{\\pi}{2}"]),
    "2^{10}": (["1024"], []),
    "10!": (["3628800"], []),
    "\\frac{a}{b}": (["a/b"], []),
    "ab": (["ba"], []),
    "x+y": (["y+x"], []),
    "x-y": ([], ["y-x"]),
    "(x+1)^2": (["x^2+2x+1"], []),
    "x^2+2x+1": (["(x+1)(x+1)"], []),
    "e^2": ([], ["e^3"]),
    "10^{-3}": (["0.001"], []),
    "1.2 \\times 10^{-3}": (["0.0012"], []),
    "\\frac{\\sqrt{3}}{2}": (["\\frac{\\sqrt3}2", "\\sqrt{3}/2"], ["0.866"]),
    "8.7 \\times 10^{8}": (["870000000"], ["870000001"]),
    "4.1 \\times 10^{9}": (["41 \\times 10^{8}"], []),
    "1.25 \\times 10^{-3}": (["0.00125"], []),
    "6.02 \\cdot 10^{23}": ([], ["6.03 \\times 10^{23}"]),
}
"""Truth to what models write for it, and to what looks like it and is another value."""


@pytest.mark.parametrize("form", ["So $\\boxed{{{}}}$.", "Answer: ${}$", "Answer: {}"])
def test_values_are_read_as_models_write_them(form):
    name = "math/box" if "boxed" in form else "math"
    for truth, values in WRITTEN.items():
        for accuracy, written in zip((1.0, 0.0), values, strict=True):
            for value in written:
                seen = verify(name, form.format(value), truth)
                assert (seen.accuracy, seen.error) == (accuracy, False), (truth, value)


def test_answers_on_which_graders_differ_are_judged_as_by_hand():
    rows = (Path(__file__).parent / "judged.jsonl").read_text("utf-8").splitlines()
    assert len(rows) == 50
    for row in map(json.loads, rows):
        assert row["verl"] != row["right"] or row["math_verify"] != row["right"]
        seen = verify(row["verifier"], row["response"], row["answer"])
        assert seen.accuracy == row["right"], row


@pytest.mark.parametrize("groups", ["12,500", "12 500", "12\u2009500", "12\u202f500", "12\\,500"])
def test_groups_of_three_are_one_number_and_others_are_not(groups):
    assert normalise_answer(groups) == number_in(groups) == "12500"
    # A comma before other than three digits is that of a decimal.
    assert number_in(groups.replace("500", "50")) in (None, "12.50") or "\\," in groups


THOUGHTS = [
    ("Answer: 42", "Answer: 42"),
    ("<think>Answer: 41</think>\nAnswer: 42", "\nAnswer: 42"),
    ("41</think>Answer: 42", "Answer: 42"),
    ("<think>a<think>b</think>c</think>d", "d"),
    ("<THINK>a</Think>d", "d"),
    ("[THINK]a[/THINK]d", "d"),
    ("<think></think>d<|im_end|>", "d"),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>d", "d"),
    ("<think>Answer: 42", None),
    ("Answer: 41 <think>or rather", None),
    ("<think>a</think>d<think>b", None),
    ("<reasoning>42", None),
]


@pytest.mark.parametrize(("response", "judged"), THOUGHTS)
def test_what_follows_the_last_thought_is_judged(response, judged):
    assert after_thought(response, "42") == judged
    assert after_thought("", "42") == ""
    assert after_thought(response, "<think>") == response.removesuffix("<|im_end|>")


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("integer", "42", "42"),
        ("math", "1/2", "\\boxed{1/2}"),
        ("exact", "yes", "yes"),
        ("trace", "7", "3+4=7"),
        ("regex", "o+k", "ook"),
        ("countdown", '{"numbers": [1, 2], "target": 3}', "1+2"),
        ("json_schema", '{"type": "object"}', "{}"),
    ],
)
def test_no_verifier_of_ours_takes_an_answer_out_of_a_thought(name, answer, said):
    assert verify(name, f"<think>hm</think>{said}", answer).accuracy == 1.0
    for response in (f"<think>{said}", f"<think>{said}</think>", f"hm</think>{said}<think>"):
        assert verify(name, response, answer).accuracy == 0.0, response
    marked = VerifierOptions(timeout_seconds=120.0, answer_after="@@")
    assert verify(name, f"hm@@{said}", answer, marked).accuracy == 1.0
    assert verify(name, said, answer, marked).invalid


HOSTILE = [
    *("\\boxed{", "Answer:", "=", " ", "1", "####", "<answer>", "<think>", "</think>", "$", "\n"),
    *(
        "answer ",
        "(",
        "}{",
        "1 ",
        "1 000 ",
        "1-",
        "1,",
        "-",
        "<|a|>",
        "a=",
        "\\[",
        '"answer":"',
        "\\",
    ),
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("name", ["integer", "math/box"])
def test_a_megabyte_of_one_piece_takes_linear_work(name, piece):
    def lines_run(length):
        count = 0

        def look(*_):
            nonlocal count
            count += 1
            return look

        sys.settrace(look)
        try:
            verdict = verify(name, (piece * length)[:length], "72")
        finally:
            sys.settrace(None)
        assert verdict.accuracy == 0.0
        return count

    assert lines_run(1_000_000) < 20_000


def test_rows_that_another_grader_judges_differently_are_shown(tmp_path):
    rows = [
        {"response": "Answer: $2x = 14$", "answer": "14"},
        {"response": "Answer: 18", "answer": "18"},
        {"response": "<think>Answer: 18", "answer": "18"},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    told = list(compare("integer", "math-verify", str(data), 120.0))
    assert [line.partition(": answer")[0] for line in told] == [
        "row 1: integer 0, math-verify 1",
        "row 3: integer 0, math-verify 1",
        "integer and math-verify differ on 2 of 3 rows",
    ]
    own = list(compare("integer", "planish.show.verifier:math_verify", str(data), 120.0))
    assert own[-1].endswith("differ on 2 of 3 rows")
    assert list(compare("integer", "integer/box", str(data), 120.0))[:-1] == []


def test_all_stages_judge_with_the_settings_of_the_reward():
    table = {"verifier_timeout_seconds": 60.0, "answer_after": "@", "reward_wrong": 0.0}
    assert VerifierOptions.of(table) == VerifierOptions(True, 60.0, "@")
    assert VerifierOptions.of({}) == VerifierOptions(timeout_seconds=10.0)
