import importlib

import pytest

from planish.base.errors import ConfigError, VerifierFailure
from planish.verifiers import (
    VerifierOptions,
    answer_fault,
    find_verifier,
    own,
    verify,
    verify_many,
)
from planish.verifiers.own import MAX_TIMEOUTS, OwnVerifier
from tests.integration.waiting import wait_for

OPTIONS = VerifierOptions(timeout_seconds=120.0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes a module `own_<name>` and returns its verifier."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = []

    def make(name, body, **options):
        (tmp_path / f"own_{name}.py").write_text(body)
        made.append(OwnVerifier(f"own_{name}:reward", **options))
        return made[-1]

    yield make
    for verifier in made:
        verifier.close()


def returning(value):
    return f"import math\n\ndef reward(response, answer):\n    return {value}\n"


@pytest.mark.parametrize(
    ("value", "accuracy", "score"),
    [("True", 1.0, 1.0), ("False", 0.0, 0.0), ("1", 1.0, 1.0), ("0.25", 0.0, 0.25),
     ("len(response) / len(answer)", 0.0, 0.5), ("0.0", 0.0, 0.0)],
)  # fmt: skip
def test_a_number_from_0_to_1_is_the_score_and_only_1_is_right(package, value, accuracy, score):
    verdict = package("value", returning(value))("ab", "abcd", OPTIONS)
    assert (verdict.accuracy, verdict.score, verdict.error) == (accuracy, score, False)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("math.nan", "got nan of type float"), ("math.inf", "got inf"), ("-0.01", "got -0.01"),
     ("1.5", "got 1.5"), ("None", "got None of type NoneType"), ("'1'", "got '1' of type str"),
     ("[1.0]", "of type list"), ("1 / 0", "raised ZeroDivisionError: division by zero"),
     ("exec('raise SystemExit(0)')", "raised SystemExit: 0")],
)  # fmt: skip
def test_anything_else_is_a_failure_of_the_row_with_a_reason(package, caplog, value, reason):
    verifier = package("value", returning(value))
    for _ in range(3):
        verdict = verifier("ab", "abcd", OPTIONS)
        assert (verdict.accuracy, verdict.score, verdict.error) == (0.0, None, True)
        assert reason in verdict.reason
    assert len(caplog.records) == 1
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
    assert verifier.pid is None
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


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


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
def test_what_cannot_be_called_is_refused_in_one_line(package, tmp_path, body, message):
    verifier = package("bad", body or "", start_seconds=2.0 if body and "sleep" in body else 120.0)
    if body is None:
        (tmp_path / "own_bad.py").unlink()
    with pytest.raises(ConfigError, match=message) as refused:
        verifier.start()
    assert "'own_bad:reward'" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert verifier.pid is None


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
