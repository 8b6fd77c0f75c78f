"""Data sets as files and on the hub: rows in, rows out, and what is no data set."""

import gzip
import hashlib
import json
import re
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.base.errors import ConfigError
from planish.base.inspection import Inspection
from planish.stages.curate import records
from planish.stages.curate.columns import read_problems
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.inspect import form_warnings, inspect_data
from planish.stages.curate.problem import CurationLedger
from planish.stages.curate.records import DataRow, as_answer, read_data
from planish.stages.curate.select import curate
from planish.stages.curate.stage import read_tables
from planish.verifiers import asked_form, verify
from tests.unit.records.bombs import bomb, peak_megabytes

GOOD = b'{"prompt": "1+1", "answer": "2"}'


def read(path, *, skip_bad=False):
    ledger = CurationLedger()
    table = read_data(CurateConfig(dataset=str(path), skip_bad=skip_bad), ledger)
    return table, ledger.filters[0]


def refused(path, **options):
    with pytest.raises(ConfigError) as caught:
        read(path, **options)
    return str(caught.value)


def jsonl(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_rows_of_a_jsonl_file_know_their_lines_and_the_file_its_digest(tmp_path):
    path = jsonl(tmp_path, GOOD + b"\r", b'{"prompt": "2+2", "answer": 4}')
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    table, counts = read(path)
    assert [row.origin for row in table.rows] == ["line 1", "line 2"]
    assert table.rows[1].fields == {"prompt": "2+2", "answer": 4}
    assert table.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (counts.num_in, counts.num_out) == (2, 2)


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b'{"prompt": ', "not_json", "not JSON"),
        (b"[1, 2]", "not_an_object", "must be an object"),
        (b'"text"', "not_an_object", "must be an object"),
        (b'{"prompt": "\xff\xfe"}', "not_utf8", "not UTF-8 at byte 12 (0xff)"),
        (b'{"prompt": "\\ud800"}', "not_utf8", "no valid Unicode"),
        (b"[" * 100_000, "not_json", "not JSON"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "not_json", "not JSON"),
    ],
)
def test_a_bad_line_stops_with_its_number_and_is_left_out_on_demand(tmp_path, line, reason, words):
    path = jsonl(tmp_path, GOOD, line, GOOD.replace(b"1+1", b"3+3"))
    told = refused(path)
    assert "line 2 of `data.jsonl`" in told
    assert words in told
    assert "skip_bad" in told
    table, counts = read(path, skip_bad=True)
    assert [row.fields["prompt"] for row in table.rows] == ["1+1", "3+3"]
    assert counts.reasons == {reason: 1}


KINDS = "JSONL (one object a line, gzip may pack it), Parquet"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["`data.jsonl` must hold at least one readable row, got 0 bad rows", "it is empty"]),
        (b"x\ny\n", ["line 1", KINDS]),
        (b"[" + GOOD + b"]", ["line 1", "a row must be an object, got [{'prompt'", KINDS]),
        (json.dumps([{"a": 1}], indent=1).encode(), ["line 1", "not JSON", KINDS]),
        (b"prompt,answer\n1+1,2\n2+2,4\n", ["line 1", "not JSON", KINDS]),
        (GOOD.decode().encode("utf-16"), ["line 1", "not UTF-8 at byte 0", KINDS]),
        (b"PAR1 and nothing else", ["`data.jsonl` must be a Parquet file"]),
    ],
)
def test_a_file_of_another_kind_is_told_why_and_which_kinds_there_are(tmp_path, content, words):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    for skip_bad in (False, True):
        told = refused(path, skip_bad=skip_bad)
        assert [word for word in words if word not in told] == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_blank_lines_and_ids_that_repeat_are_no_fault(tmp_path, packed):
    row = b'{"id": 7, "prompt": "%d+1"}'
    lines = [b"\xef\xbb\xbf" + row % 1, b"", row % 2, b" \t", row % 3, b"\r", b"", b""]
    content = b"\n".join(lines)
    path = tmp_path / "data.jsonl"
    path.write_bytes(gzip.compress(content) if packed else content)
    table, counts = read(path)
    assert [row.origin for row in table.rows] == ["line 1", "line 3", "line 5"]
    assert (counts.num_in, counts.num_out) == (3, 3)


def test_parquet_is_known_by_its_content_and_read_in_order(tmp_path):
    path = tmp_path / "data.jsonl"
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [Decimal("7.00"), None]}), path)
    rows = read(path)[0].rows
    assert [row.fields["prompt"] for row in rows] == ["a", "b"]
    assert rows[1].origin == "row 2"
    assert as_answer(rows[0].fields["answer"]) == "7"


@pytest.mark.parametrize("kind", ["text", "nested", "broken"])
def test_a_parquet_file_that_decodes_to_much_or_to_nothing_is_refused(tmp_path, kind):
    path = tmp_path / "data.parquet"
    if kind == "broken":
        broken = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
        pq.write_table(pa.table({"prompt": broken}), path)
        assert "must be a Parquet file" in refused(path)
    else:
        path.write_bytes(bomb(kind))
        assert "must decode to at most 536870912" in refused(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "/nowhere/data", "a/b/c", "owner/na me", "/tmp"])
def test_what_is_neither_a_file_nor_a_hub_id_is_refused(name):
    assert "curate.dataset" in refused(name)


def test_rows_of_a_hub_data_set_have_a_digest_of_their_content(monkeypatch):
    rows = [{"prompt": "a", "answer": "1"}, {"answer": "2", "prompt": "b"}]
    monkeypatch.setattr(records, "read_hub", lambda *_, **options: iter(rows))
    table, _ = read("owner/name")
    canonical = "\n".join(json.dumps(row, sort_keys=True) for row in rows)
    assert table.sha256 == hashlib.sha256(canonical.encode()).hexdigest()
    assert len(table.rows) == 2


def test_a_long_line_is_bad_by_its_size_and_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
    fits = b'{"prompt": "%s", "answer": 1}' % (b"x" * 973)
    assert len(fits) == 1000
    path = jsonl(tmp_path, GOOD, fits, fits + b" ", b"x" * 1000, b"y" * 100_000, GOOD)
    table, counts = read(path, skip_bad=True)
    assert [row.origin for row in table.rows] == ["line 1", "line 2", "line 6"]
    assert counts.reasons == {"line_too_long": 2, "not_json": 1}
    assert "line 3 of `data.jsonl` must be readable, got: more than 1000 bytes" in refused(path)


@pytest.mark.slow
def test_a_line_of_half_a_gigabyte_takes_no_memory(tmp_path):
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b"\n")
        file.seek(1 << 29)
        file.write(b"\n" + GOOD)
    peak, printed = peak_megabytes(
        "from pathlib import Path\nfrom planish.stages.curate.records import bounded_lines\n"
        f"print([type(line).__name__ for line in bounded_lines(Path({str(path)!r}))])"
    )
    assert printed.strip() == "['bytes', 'BadRow', 'bytes']"
    assert peak < 300


@pytest.mark.slow
def test_packed_lines_are_read_and_a_bomb_is_refused(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD + b"\n" + GOOD.replace(b"1+1", b"2+2")))
    assert [row.origin for row in read(path)[0].rows] == ["line 1", "line 2"]
    path.write_bytes(path.read_bytes()[:-9])
    assert "must be a whole gzip file" in refused(path)
    # many lines, and one long one
    for block in (b'{"prompt": "%s"}\n' % (b"x" * (1 << 20)), b"x" * (1 << 20)):
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(80):
                file.write(block)
        assert "must unpack to at most 67108864 bytes, 100 times" in refused(path, skip_bad=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(" 7 ", "7"), (7, "7"), (-7, "-7"), (7.0, "7"), (7.5, "7.5"), (True, None), (None, None),
     (1e-7, "0.0000001"), (1 / 3, None), (Decimal(7), "7"), (Decimal("2.50"), "2.50"),
     (Decimal("NaN"), None), (Decimal("-1E+9"), "-1000000000"), (float("-inf"), None),
     (float("nan"), None), ([7], None), (10**4000, None), (10**99, "1" + "0" * 99)],
)  # fmt: skip
def test_answers_become_text_without_loss_or_not_at_all(value, text):
    assert as_answer(value) == text


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


TRAIN = 'Solve the problem step by step. The last line should be "Answer: $Answer".\n\n1+17?\n\n'
BOX = "Please reason step by step, and put your final answer within \\boxed{}."
TAGS = "Think in <think> </think>, then give the answer in <answer> </answer>."
HASH = 'Two and sixteen eggs? Think step by step and output the final answer after "####".'
GRADED_FORMS = {
    "DAPO": (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": TRAIN}],
            "reward_model": {"ground_truth": "18", "style": "rule"},
        },
        "integer",
        ["so\n\nAnswer: 18", "Answer: $18$", "Answer: \\boxed{18}", "**Answer:** 18."],
        ["Answer: 19", "\\boxed{18}\nAnswer: 19", "Answer: 18 or 19", "I do not know"],
    ),
    "GSM8K of verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": HASH}],
            "reward_model": {"ground_truth": "1250", "style": "rule"},
        },
        "integer/hash",
        ["2+16\n#### 1250", "#### 1,250", "#### $1250.", "The answer is 1250."],
        ["#### 1251", "#### 1250\n#### 1251", "Answer: 1250\n#### 5", "it is 1251."],
    ),
    "GSM8K": (
        {"question": "Two and sixteen eggs?", "answer": "It is 2+16=<<2+16=18>>18.\n#### 18"},
        "integer",
        ["Answer: 18", "2+16=18\n#### 18", "so it is 18."],
        ["Answer: 19", "2+16=18, twice 36\n#### 36", "so it is 19."],
    ),
    "OpenR1": (
        {"prompt": [{"role": "user", "content": f"Find x. {BOX}"}], "answer": "\\frac{3}{4}"},
        "math/box",
        ["<think>\\boxed{1}</think> It is $\\boxed{\\frac{3}{4}}$.", "$$\\boxed{x = 0.75}$$"],
        ["\\boxed{\\frac{3}{5}}", "\\boxed{\\frac{3}{4}} or \\boxed{", "Answer: \\frac{4}{3}"],
    ),
    "NuminaMath": (
        {
            "prompt": [{"role": "system", "content": BOX}, {"role": "user", "content": "Solve."}],
            "answer": "x=1, y=2",
        },
        "math/box",
        ["\\boxed{x = 1, y = 2}", "So $\\boxed{x=1,\\ y=2}$."],
        ["\\boxed{x=9, y=2}", "\\boxed{2}", "\\boxed{x=1}"],
    ),
    "OlympiadBench": (
        {"prompt": [{"role": "user", "content": f"How long? {BOX}"}], "final_answer": "$12$"},
        "integer/box",
        ["\\boxed{12 \\text{ cm}}", "so $l = \\boxed{12}\\ \\text{cm}$", "\\boxed{12~cm}"],
        ["\\boxed{-12}", "\\boxed{l^2 = 12}", "\\boxed{13 \\text{ cm}}"],
    ),
    "tags of R1": (
        {"prompt": [{"role": "user", "content": f"1+17? {TAGS}"}], "answer": 18},
        "integer/tags",
        ["<think>1</think><answer>18</answer>", "<answer> $\\boxed{18}$ </answer>"],
        ["<answer>19</answer>", "<answer>18</answer> <answer>19", "<answer>18 or 19</answer>"],
    ),
}


def problem_of(fields, **settings):
    return read_problems(CurateConfig(**settings), [DataRow(fields, "line 1")])[0][0]


@pytest.mark.parametrize("name", GRADED_FORMS)
def test_answers_to_a_published_data_form_are_graded_as_published(name):
    fields, verifier, right, wrong = GRADED_FORMS[name]
    problem = problem_of(fields)
    assert problem.verifier == verifier
    assert form_warnings("data", [problem]) == []
    graded = {text: verify(verifier, text, problem.answer).accuracy for text in (*right, *wrong)}
    assert graded == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


def test_the_last_form_that_a_prompt_names_counts_and_verls_source_before_it():
    assert asked_form("Work. Write `Answer: <answer>`.") == "line"
    assert asked_form("#### Problem\n1+1?") is None
    assert asked_form(f"{TAGS} {BOX}") == "box"
    assert asked_form(BOX, "openai/gsm8k") == "hash"
    assert asked_form(BOX, "mine") == "box"


def test_another_form_than_the_verifier_reads_is_warned_of():
    fields = {"prompt": [{"role": "user", "content": BOX}], "answer": "18"}
    assert form_warnings("data", [problem_of(fields)]) == []
    told = form_warnings("data", [problem_of(fields, verifier="exact")] * 2)
    assert told == [
        "2 of 2 prompts of the data ask for the answer as `\\boxed{}`, but the verifier `exact` "
        "compares the whole response; change the prompts or `curate.verifier`"
    ]
    (told,) = form_warnings("data", [problem_of(fields | {"data_source": "openai/gsm8k"})])
    assert "but the verifier `integer/hash` looks for `####` first" in told
    (told,) = form_warnings("data", [problem_of(fields, verifier="integer/tags")])
    assert "looks for `<answer>` first" in told


@pytest.mark.parametrize(
    ("model", "read_as", "is_told"),
    [("m", "steps", True), ("m", "problems", False), ("", "steps", False)],
)
def test_people_hear_that_word_problems_become_steps(tmp_path, model, read_as, is_told):
    lines = [
        json.dumps(
            {
                "question": f"The farm sends {n} boxes and 3 more. How many is that?",
                "answer": f"It is {n} + 3 = <<{n}+3={n + 3}>>{n + 3}.\n#### {n + 3}",
            }
        )
        for n in range(10, 40)
    ]
    path = jsonl(tmp_path, *map(str.encode, lines))
    settings = {"dataset": str(path), "gsm8k_as": read_as}
    found = Inspection()
    inspect_data({"curate": settings, "model": {"path": model}}, found)
    told = "data: word problems are replaced by their 30 steps (`curate.gsm8k_as`)"
    assert (found.faults, told in found.warnings) == ([], is_told)


FOUR = ["red", "blue", "4", "0"]
LABELLED = [{"label": "p", "text": "x"}, {"text": "y", "label": "q"}]
LINES = "\n(A) red\n(B) blue\n(C) 4\n(D) 0"


@pytest.mark.parametrize(
    ("fields", "lines", "answer"),
    [
        ({"choices": FOUR, "answer": "B"}, LINES, "B"),
        ({"options": FOUR, "answer": "c"}, LINES, "C"),
        ({"choices": FOUR, "answer": "(D)"}, LINES, "D"),
        ({"choices": FOUR, "answer": 0}, LINES, "A"),
        ({"choices": FOUR, "answer": 3}, LINES, "D"),
        ({"choices": FOUR, "answer": "1"}, LINES, "B"),
        ({"choices": FOUR, "answer": ["B"]}, LINES, "B"),
        ({"choices": [7, 8.5], "answer": 1}, "\n(A) 7\n(B) 8.5", "B"),
        ({"choices": ["red"], "answer": "A"}, "\n(A) red", "A"),
        ({"choices": ["A) red", "B) blue"], "answer": "B"}, "\n(A) red\n(B) blue", "B"),
        (
            {"choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"},
            "\n(A) x\n(B) y",
            "B",
        ),
        (
            {"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
            "\n(1) x\n(2) y",
            "2",
        ),
        ({"options": {"A": "x", "B": "y"}, "answer": "b"}, "\n(A) x\n(B) y", "B"),
        ({"choices": FOUR, "answer": "blue"}, LINES, "B"),
        ({"choices": FOUR, "answer": "0"}, LINES, "D"),
        ({"choices": ["B", "A"], "answer": "A"}, "\n(A) B\n(B) A", "A"),
        ({"choices": ["two words", "1"], "answer": "two words"}, "\n(A) two words\n(B) 1", "A"),
        ({"choices": LABELLED, "answer": "q"}, "\n(p) x\n(q) y", "q"),
        ({"choices": LABELLED, "answer": "x"}, "\n(p) x\n(q) y", "p"),
        ({"options": [{"label": 1, "text": 7}], "answer": 1}, "\n(1) 7", "1"),
        ({"choices": [], "answer": "12"}, "", "12"),
        ({"choices": [], "options": FOUR, "answer": "B"}, LINES, "B"),
        ({"choices": None, "answer": 1}, "", "1"),
    ],
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_choices_stand_in_the_problem_and_the_answer_is_a_letter(fields, lines, answer, is_chat):
    asked = [{"role": "user", "content": "Which one?"}] if is_chat else "Which one?"
    problem = problem_of({"prompt": asked, **fields})
    assert (problem.question, problem.answer, problem.unread) == (
        f"Which one?{lines}",
        answer,
        "",
    )
    assert problem.question in problem.messages[-1]["content"]
    assert verify(problem.verifier, f"So it is.\nAnswer: {answer}", problem.answer).accuracy == 1


@pytest.mark.parametrize(
    ("text", "given", "answer"),
    [
        ("Which?\n(A) red\n(B) blue", "B", "B"),
        ("Which?\nA. red\nB. blue", 1, "B"),
        ("Which? (a) red (b) blue", "B", "b"),
        ("Which?\n**A.** red\n**B.** blue", "b", "B"),
        ("Which?\n1) red\n2) blue", "1", "1"),
    ],
)
def test_choices_in_the_text_are_not_appended_twice(text, given, answer):
    problem = problem_of({"prompt": text, "choices": ["red", "blue"], "answer": given})
    assert (problem.question, problem.answer) == (text, answer)


@pytest.mark.parametrize(
    "fields",
    [
        {"choices": FOUR, "answer": "E"},
        {"choices": FOUR, "answer": "green"},
        {"choices": FOUR, "answer": 5},
        {"choices": FOUR, "answer": -1},
        {"choices": [{"label": "p"}], "answer": "p"},
        {"options": "red, blue", "answer": "B"},
        {"choices": {"text": ["x", "y"], "label": ["A"]}, "answer": "A"},
        {"choices": [["x"], ["y"]], "answer": "A"},
        {"choices": ["x", ""], "answer": "A"},
        {"choices": [{"x": 1}], "answer": "A"},
    ],
)
def test_choices_that_are_not_understood_are_told(tmp_path, fields):
    rows = [{"prompt": f"Which one has the number {n}?", **fields} for n in range(40)]
    path = jsonl(tmp_path, *(json.dumps(row).encode() for row in rows))
    found = Inspection()
    inspect_data({"curate": {"dataset": str(path)}}, found)
    (column,) = fields.keys() & {"choices", "options"}
    start = f"the column '{column}' of 40 of 40 rows of the data is not shown"
    assert any(line.startswith(start) for line in found.warnings), found
    problem = problem_of(rows[0])
    assert (problem.question, problem.answer) == (rows[0]["prompt"], str(fields["answer"]))


@pytest.mark.parametrize(
    ("indices", "letters"),
    [
        ([1, 2, 3, 4], "ABCD"),
        ([4, 4], "DD"),
        (["1", "4"], "AD"),
        ([1, 2, 3], "BCD"),
        ([0, 1, 3], "ABD"),
        ([0, 4], "A4"),
        ([1, 5], "B5"),
        ([4, "B"], "DB"),
    ],
)
def test_indices_of_choices_count_from_1_where_only_so_all_rows_have_one(indices, letters):
    texts = ["red", "blue", "green", "black"]
    rows = [
        DataRow({"prompt": f"Which one of {n}?", "choices": texts, "answer": index}, f"row {n}")
        for n, index in enumerate(indices)
    ]
    problems, drops = read_problems(CurateConfig(), rows)
    assert ["".join(problem.answer for problem in problems), drops] == [letters, []]
