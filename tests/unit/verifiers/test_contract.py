"""`planish verifier check` and the contract behind it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.__main__ import main
from planish.base.errors import ConfigError
from planish.verifiers import VERIFIERS
from planish.verifiers.contract import HOSTILE_TEXTS, VerifierCase, check_contract, read_cases


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes `tried_<name>.py` and returns the reference of its reward."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name, body, *columns):
        parameters = ", ".join(("response", "answer", *columns))
        text = f"import os\n\ndef reward({parameters}):\n    {body}\n"
        (tmp_path / f"tried_{name}.py").write_text(text)
        return f"tried_{name}:reward"

    return write


def test_a_verifier_that_keeps_the_contract_has_no_fault(module):
    cases = [VerifierCase("ab", "ab", 1.0), VerifierCase("ab", "a"), VerifierCase("ab")]
    report = check_contract(module("good", "return float(response == answer)"), cases)
    assert (report.faults, report.warnings) == ((), ())
    assert report.scores == (1.0, 0.0, 1.0)
    assert report.num_calls == len(HOSTILE_TEXTS) + 2 * len(cases)
    assert report.slowest_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("return float(response.split()[0] == answer)", "IndexError"),
        ("return len(response)", "a number from 0 to 1, got 4 of type int"),
        ("return hash(answer) % 1000 / 1000", "the same score in every process"),
        ("globals()['n'] = globals().get('n', 0) + 1; return n / 64", "the same score"),
        ("return 0.5", "the score must be 1 as the row says, got 0.5"),
        ("while len(response) > 9999: pass\n    return 1.0", "did not answer within 0.2 s"),
        ("response.encode(); return 1.0", "UnicodeEncodeError"),
    ],
)
def test_each_break_of_the_contract_is_a_fault_with_its_text(module, body, fault):
    cases = [VerifierCase("ab", "ab", 1.0), VerifierCase("abc"), VerifierCase("d")]
    seconds = 0.2 if "while" in body else 120.0
    report = check_contract(module("bad", body), cases, timeout_seconds=seconds)
    assert fault in report.faults[0]


@pytest.mark.slow
def test_prints_and_forks_are_warnings(module):
    body = "print('x'); os.fork(); return float(response == answer)"
    report = check_contract(module("loud", body))
    assert report.faults == ()
    assert [warning.split()[0].rstrip(";") for warning in report.warnings] == ["printed", "forked"]


def test_rows_of_a_training_set_need_only_an_answer(tmp_path):
    rows = [{"question": "2+2=", "answer": 4}, {"answer": "x", "response": "y", "score": 0}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    texts = [json.dumps(row) for row in rows]
    assert read_cases(file) == [
        VerifierCase("4", extra=texts[0]), VerifierCase("x", "y", 0.0, texts[1])
    ]  # fmt: skip


def test_rows_may_be_those_of_verl_in_parquet(tmp_path, module):
    rows = [{"reward_model": {"ground_truth": "7"}, "extra_info": {"level": 2}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (case,) = read_cases(tmp_path / "rows.parquet")
    assert (case.answer, json.loads(case.extra)) == ("7", rows[0])
    name = module("level", "return extra_info['level'] / 4", "extra_info")
    assert check_contract(name, [case]).scores == (0.5,)
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(ConfigError, match="must be a Parquet file"):
        read_cases(tmp_path / "rows.parquet")


def test_built_in_verifiers_are_listed_and_count_rows_right_wrong_and_not_judgeable(
    tmp_path, capsys
):
    assert main(["verifier", "list"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert listed.keys() >= VERIFIERS.keys()
    assert listed["exact"].endswith("apart from white space at both ends.")
    file = tmp_path / "rows.jsonl"
    rows = [("4", "Answer: 4", 1), ("4", "Answer: 5", None), ("4", "no", 0), ("x", "x", None)]
    rows += [("7", None, None)]
    keys = ("answer", "response", "score")
    file.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    assert main(["verifier", "check", "integer", "--data", str(file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "integer: 5 rows: 2 right, 2 wrong, 1 not judgeable"
    assert shown[1:] == [
        "right: answer '4', response 'Answer: 4': saw '4'",
        "right: answer '7', response '7': saw '7'",
        "wrong: answer '4', response 'Answer: 5': saw '5'",
        "wrong: answer '4', response 'no': saw no answer",
        "not judgeable: answer 'x', response 'x': answer_not_an_integer",
    ]
    file.write_text('{"answer": "4", "response": "Answer: 5", "score": 1}')
    assert main(["verifier", "check", "integer", "--data", str(file)]) == 1
    assert "fault: the score must be 1, got 0: answer '4'" in capsys.readouterr().out
    assert main(["verifier", "check", "integer"]) == 2
    assert "`--data` must name rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "it is empty"),
        ("{}", "line 1: `answer` must be text"),
        ('{"answer": "1"}\n[]', "line 2"),
        ('{"answer": "1", "score": 2}', "a number from 0 to 1"),
        ('{"answer": "1", "score": true}', "a number from 0 to 1"),
        ('{"answer": "1", "response": 3}', "line 1"),
        ('{"answer": ', "line 1: Expecting value"),
        ('{"answer": \n{}', "line 1: Expecting value.*; line 2: `answer`"),
    ],
)
def test_rows_that_are_none_are_named(tmp_path, text, fault):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        read_cases(file)


@pytest.mark.slow
def test_the_command_ends_with_0_1_or_2(module, tmp_path, capsys):
    good = module("command", "return float(response == answer)")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"answer": "1", "response": "1", "score": 1}\n')
    assert main(["verifier", "check", good, "--data", str(file)]) == 0
    assert "keeps the contract; 22 calls" in capsys.readouterr().out
    file.write_text('{"answer": "1", "response": "2", "score": 1}\n')
    assert main(["verifier", "check", good, "--data", str(file)]) == 1
    assert "fault: the score must be 1 as the row says, got 0" in capsys.readouterr().out
    for wrong in (["nowhere:reward"], ["nothing"], [good, "--data", str(tmp_path / "none")],
                  [good, "--timeout-seconds", "0"]):  # fmt: skip
        assert main(["verifier", "check", *wrong]) == 2
        assert capsys.readouterr().err.startswith("planish: ")
