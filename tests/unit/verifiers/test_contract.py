"""`planish verifier check` and the contract behind it."""

import json

import pytest

from planish.__main__ import main
from planish.base.errors import ConfigError
from planish.verifiers.contract import HOSTILE_TEXTS, VerifierCase, check_contract, read_cases


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes `tried_<name>.py` and returns the reference of its reward."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name, body):
        text = f"import os\n\ndef reward(response, answer):\n    {body}\n"
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
    assert read_cases(file) == [VerifierCase("4"), VerifierCase("x", "y", 0.0)]


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
