"""Published forms of data sets, a dozen rows of each in words of ours: rows in, rows kept.

The table of docs/bring-your-own.md says the same.
"""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.base.inspection import Inspection
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.inspect import inspect_data
from planish.stages.curate.problem import CurationLedger
from planish.stages.curate.select import curate
from planish.stages.curate.stage import read_tables

PAGE = Path(__file__).resolve().parents[4] / "docs/bring-your-own.md"

PROBLEMS = [
    ("A baker sells 40 rolls in the morning and twice as many after lunch; count all rolls.", 120),
    ("How far does a train get in 6 hours when it does forty kilometres in each of them?", 240),
    ("A square garden has sides of 17 metres. What does the fence measure that closes it?", 68),
    ("Each of seven shelves holds 23 books, and none is lent out. Say how many there are.", 161),
    ("Find the sum of all whole numbers from 1 to 30, both of these counted as well.", 465),
    ("In a class of 28 pupils a quarter walks to school. Tell how many take the bus.", 21),
    ("Two dice are thrown at once. In how many ways do their eyes add up to seven?", 6),
    ("What remains when the fifth power of three is divided by the number eleven?", 1),
    ("A tank loses 15 litres a day and held 400 at first. What is left after nine days?", 265),
    ("The angles of a triangle are in the ratio 2 : 3 : 4. Give the largest in degrees.", 80),
    ("Anna is thrice as old as Ben was five years ago; Ben is now 13. How old is she?", 24),
    ("Count the diagonals of a convex polygon that has exactly ten corners.", 35),
]
"""A dozen of questions and their answers, which are whole numbers."""

FRAME = (
    "Work through this problem of mathematics line by line, and close with a line of the form "
    "Answer: $Answer, where $Answer is what was asked for.\n\n{}\n\nKeep the answer on a line of "
    'its own behind "Answer:".'
)
SUFFIX = '{} Take it one step at a time and put the final number behind "####".'


def verl(source, frame):
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": frame.format(text)}],
            "ability": "math",
            "reward_model": {"ground_truth": str(answer), "style": "rule"},
            "extra_info": {"index": str(place), "split": "train"},
        }
        for place, (text, answer) in enumerate(PROBLEMS)
    ]


def conversation(text, solution):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": solution}]


def open_r1():
    rows = []
    for place, (text, answer) in enumerate(PROBLEMS):
        solution = f"<think>It is {answer}.</think> So it is \\boxed{{{answer}}}."
        rows.append(
            {
                "problem": text,
                "solution": f"One finds ${answer}$.",
                "answer": f"\\frac{{{answer}}}{{97}}",
                "problem_type": "Algebra",
                "source": "olympiads",
                "uuid": f"{place:032x}",
                "generations": [solution],
                "messages": conversation(text, solution),
            }
        )
    # proofs have no answer to compare
    return [*rows[:-1], {**rows[-1], "answer": None}]


def numina():
    rows = []
    for text, answer in PROBLEMS:
        solution = f"First comes \\boxed{{0}}, which is wrong; it is $\\boxed{{{answer}}}$."
        messages = conversation(text, solution)
        rows.append(
            {"source": "cn_k12", "problem": text, "solution": solution, "messages": messages}
        )
    return [*rows[:-1], {**rows[-1], "solution": "Which was to be shown."}]


def olympiad():
    rows = [
        {
            "id": place,
            "question": text,
            "solution": [f"It is ${answer}$."],
            "final_answer": [f"${answer}$"],
            "is_multiple_answer": False,
            "unit": None,
        }
        for place, (text, answer) in enumerate(PROBLEMS)
    ]
    return [*rows[:-1], {**rows[-1], "final_answer": ["$1$", "$2$"], "is_multiple_answer": True}]


FORMS = {
    "DAPO-Math-17k": (lambda: verl("math_dapo", FRAME), {}, 12, "integer"),
    "verl's GSM8K": (lambda: verl("openai/gsm8k", SUFFIX), {}, 12, "integer/hash"),
    "OpenR1-Math": (open_r1, {"no_answer": 1}, 11, "math"),
    "NuminaMath": (numina, {"no_answer": 1}, 11, "integer"),
    "OlympiadBench": (olympiad, {"several_answers": 1}, 11, "integer"),
}
"""Name to rows, rows left out by reason, rows kept, and their verifier."""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FORMS)
def test_a_published_form_is_read_as_it_is(tmp_path, name, kind):
    make, dropped, kept, verifier = FORMS[name]
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(make()), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in make()))
    found = Inspection()
    inspect_data({"curate": {"dataset": str(path)}}, found)
    assert (found.faults, found.warnings) == ([], [])
    config, ledger = CurateConfig(dataset=str(path)), CurationLedger()
    curated = curate(config, 0, read_tables(config, ledger), ledger)
    problems = [*curated.train, *curated.evaluation]
    reasons = {r: n for f in ledger.filters if not f.is_choice for r, n in f.reasons.items()}
    assert (len(problems), reasons) == (kept, dropped), ledger.counts()
    assert len(curated.evaluation) >= 1
    assert {p.verifier for p in problems} == {verifier}
    for problem in problems:
        (text, answer) = next(item for item in PROBLEMS if item[0] in problem.question)
        assert str(answer) in problem.answer
        assert [message["role"] for message in problem.messages] == ["user"]
        assert text in problem.messages[0]["content"]


def test_the_page_tells_what_is_kept():
    rows = re.findall(r"^\| (.+?) \|.*\| (\d+) \| (\d+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert rows == [(name, "12", str(kept)) for name, (_, _, kept, _) in FORMS.items()]
