import importlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.__main__ import main
from planish.base.errors import ConfigError, VerifierFailure
from planish.verifiers import (
    VERIFIERS,
    VerifierOptions,
    answer_fault,
    find_verifier,
    own,
    verify,
    verify_many,
)
from planish.verifiers.contract import HOSTILE_TEXTS, VerifierCase, check_contract, read_cases
from planish.verifiers.own import MAX_TIMEOUTS, OwnVerifier
from tests.integration.waiting import wait_for
from tests.processes import is_running

OPTIONS = VerifierOptions(timeout_seconds=120.0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes a module `own_<name>` and returns its verifier."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    made = []

    def make(name, body):
        (tmp_path / f"own_{name}.py").write_text(body)
        made.append(OwnVerifier(f"own_{name}:reward"))
        return made[-1]

    yield make
    for verifier in made:
        verifier.close()


def returning(value):
    return f"import math\n\ndef reward(response, answer):\n    return {value}\n"


SCORES = {
    "True": 1.0, "False": 0.0, "1": 1.0, "0.25": 0.25, "len(response) / 28": 0.5, "0.0": 0.0,
}  # fmt: skip
FAILURES = {
    "math.nan": "got nan of type float", "math.inf": "got inf", "-0.01": "got -0.01",
    "1.5": "got 1.5", "None": "got None of type NoneType", "'1'": "got '1' of type str",
    "[1.0]": "of type list", "1 / 0": "raised ZeroDivisionError: division by zero",
    "exec('raise SystemExit(0)')": "raised SystemExit: 0",
}  # fmt: skip


def test_a_number_from_0_to_1_is_the_score_and_anything_else_a_failure_with_a_reason(
    package, caplog
):
    verifier = package("value", returning("eval(answer)"))
    for value, score in SCORES.items():
        verdict = verifier("fourteen signs", value, OPTIONS)
        found = (verdict.accuracy, verdict.score, verdict.error)
        assert found == (float(score == 1.0), score, False), value
    assert caplog.records == []
    for value, reason in FAILURES.items():
        verdict = verifier("ab", value, OPTIONS)
        assert (verdict.accuracy, verdict.score, verdict.error) == (0.0, None, True)
        assert reason in verdict.reason
    assert len(caplog.records) == 3, "each kind of fault is logged once"
    assert "own_value:reward" in caplog.text


def test_any_text_reaches_the_function_unchanged(package):
    texts = ["", "\x00", "\ud800", "a\nb\r", "\u202e", "x" * 3_000_000]
    body = "def reward(response, answer):\n    return float(response == answer)\n"
    verifier = package("same", body)
    assert [verifier(t, t, OPTIONS).accuracy for t in texts] == [1.0] * len(texts)
    assert verifier("a", "b", OPTIONS).accuracy == 0.0


@pytest.mark.slow
def test_a_function_that_hangs_is_killed_and_given_up_after_some_calls(package):
    body = (
        "import time\n\ndef reward(response, answer):\n"
        "    time.sleep(0 if answer == 'now' else 600)\n    return 1.0\n"
    )
    verifier = package("hang", body)
    options = VerifierOptions(timeout_seconds=0.2)
    verdict = verifier("x", "never", options)
    assert (verdict.accuracy, verdict.timeout, verdict.error) == (0.0, True, False)
    assert "did not answer within 0.2 s" in verdict.reason
    assert not verifier.pid
    assert verifier("x", "now", OPTIONS).accuracy == 1.0
    for _ in range(MAX_TIMEOUTS - 1):
        verifier("x", "never", options)
    with pytest.raises(VerifierFailure, match="no answer to 5 calls in a row"):
        verifier("x", "never", options)


def test_what_a_function_prints_does_not_reach_the_replies(package, caplog, capfd):
    body = (
        "import os, sys\n\ndef reward(response, answer):\n"
        "    print('{\"score\": 1.0}')\n    print('loud', file=sys.stderr)\n"
        "    os.write(1, b'{\"score\": 1.0}\\n')\n    os.write(2, b'loud')\n"
        "    return float(sys.stdin.read() == 'x')\n"
    )
    verifier = package("loud", body)
    assert [verifier("x", "y", OPTIONS).score for _ in range(3)] == [0.0] * 3
    assert 'printed \'{"score": 1.0}' in caplog.text
    assert len(caplog.records) == 1
    assert capfd.readouterr() == ("", "")


def test_a_function_that_forks_answers_once_and_leaves_nothing(package, caplog, tmp_path):
    body = (
        "import os, time\n\ndef reward(response, answer):\n"
        "    pid = os.fork()\n"
        "    if pid == 0 and answer == 'stay':\n        time.sleep(600)\n"
        f"    if pid:\n        open({str(tmp_path / 'pid')!r}, 'w').write(str(pid))\n"
        "    return float(response)\n"
    )
    verifier = package("fork", body)
    assert [verifier(text, "", OPTIONS).score for text in ("0.5", "0.25", "1")] == [0.5, 0.25, 1.0]
    verifier("1", "stay", OPTIONS)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(pid), 120.0, "the copy still runs")
    assert caplog.text.count("forked") == 1


def test_a_function_that_ends_its_process_costs_the_row(package):
    body = "import os\n\ndef reward(response, answer):\n    os._exit(int(answer))\n"
    verifier = package("exit", body)
    verdict = verifier("x", "3", OPTIONS)
    assert verdict.error
    assert "exit code 3" in verdict.reason
    assert "exit code 4" in verifier("x", "4", OPTIONS).reason


def test_the_function_gets_no_credentials(package, monkeypatch):
    monkeypatch.setenv("MINIO_SECRET_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    body = (
        "import os\n\ndef reward(response, answer):\n"
        "    return float('hidden' in os.environ.values())\n"
    )
    assert package("keys", body)("", "", OPTIONS).score == 0.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "must be importable by .*No module named 'own_bad'; install its package"),
        ("import nowhere_at_all\n", "No module named 'nowhere_at_all'"),
        ("1 / 0\n", "must be importable, got ZeroDivisionError: division by zero"),
        ("def reward(:\n", "must be importable, got SyntaxError"),
        ("raise SystemExit(3)\n", r"must not end the program .* SystemExit\(3\)"),
        ("import os\nos._exit(3)\n", "its process ended, exit code 3"),
        ("import time\ntime.sleep(600)\n", "not ready within 2 s"),
        ("def rewards(r, a): ...\n", "no such name; did you mean 'rewards'"),
        ("reward = 7\n", "a function `reward`, got a int"),
        (
            "def reward(response): ...\n",
            r"arguments \(response, answer\), .* got reward\(response\)",
        ),
        ("def reward(r, a, prompt, /): ...\n", r"got reward\(r, a, prompt, /\)"),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_line(
    package, tmp_path, monkeypatch, body, message
):
    monkeypatch.setattr(own, "START_SECONDS", 2.0 if body and "sleep" in body else 120.0)
    verifier = package("bad", body or "")
    if body is None:
        (tmp_path / "own_bad.py").unlink()
    with pytest.raises(ConfigError, match=message) as refused:
        verifier.start()
    assert "'own_bad:reward'" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not verifier.pid


@pytest.mark.parametrize(
    ("parameters", "named", "seen"),
    [
        ("prompt, response, answer", ["prompt"], "prompt=p response=r answer=a"),
        ("answer, response", [], "answer=a response=r"),
        ("*, response, answer, level", ["level"], "response=r answer=a level=2"),
        ("text, truth, level=1, other=3", ["level", "other"], "text=r truth=a level=2 other=3"),
        ("level, solution_str, ground_truth", ["level"], "level=2 solution_str=r ground_truth=a"),
        ("response, answer, **columns", [], "response=r answer=a columns=level,prompt,text"),
        ("text, truth, *, level, **rest", ["level"], "text=r truth=a level=2 rest=prompt"),
    ],
)  # fmt: skip
def test_columns_reach_the_parameters_that_name_them(package, tmp_path, parameters, named, seen):
    body = (
        f"def reward({parameters}):\n    found = locals().items()\n"
        "    text = lambda v: ','.join(sorted(v)) if isinstance(v, dict) else v\n"
        f"    with open({str(tmp_path / 'seen')!r}, 'w') as file:\n"
        "        file.write(' '.join(f'{k}={text(v)}' for k, v in list(found)))\n"
        "    return 1.0\n"
    )
    verifier = package("columns", body)
    assert verifier.columns() == tuple(named)
    extra = '{"level": 2, "prompt": "p", "answer": "other", "text": "t"}'
    assert verifier("r", "a", OPTIONS, extra).score == 1.0
    assert (tmp_path / "seen").read_text() == seen


def test_a_needed_column_that_a_row_lacks_is_a_failure_of_the_row(package):
    verifier = package("lack", "def reward(response, answer, level):\n    return level\n")
    verdict = verifier("r", "a", OPTIONS, '{"prompt": "p"}')
    assert verdict.error
    assert "takes the column `level`, which this row does not have" in verdict.reason
    assert verifier("r", "a", OPTIONS, '{"level": 0.5}').score == 0.5


def test_a_reference_and_an_entry_point_are_found_by_every_name(package, tmp_path, monkeypatch):
    package("found", returning("0.5"))
    info = tmp_path / "own_found-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own_found\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[planish.verifiers]\nhalf = own_found:reward\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    own.installed_verifiers.cache_clear()
    try:
        rows = [("half", "a", "b"), ("own_found:reward", "a", "b"), ("exact", "a", "a")]
        assert [v.score for v in verify_many(rows)] == [0.5, 0.5, None]
        assert answer_fault("half", "") is None
        assert find_verifier("half") is find_verifier("own_found:reward")
        with pytest.raises(ConfigError, match="did you mean 'half'"):
            find_verifier("hafl")
    finally:
        find_verifier("own_found:reward").close()
        own.installed_verifiers.cache_clear()


@pytest.mark.parametrize("name", ["integr", "", "a:b:c", "os.system('x'):f", "../x:y"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError, match="verifier must be one of"):
        verify(name, "x", "y")
    assert answer_fault(name, "y") == "unknown_verifier"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes `tried_<name>.py` and returns the reference of its reward."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

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
