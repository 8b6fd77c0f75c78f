"""`planish.run_pipeline`: what it gives to the command, and what it makes of its lines."""

import json
import sys

import pytest

import planish
from planish.__main__ import parser
from planish.base.config import parse_override
from planish.base.errors import ConfigError, PlanishError
from planish.stages.prepare.settings import split_overrides

SUMMARY = {"root": "file:///r", "policy": "p#sha256=0", "accuracy_before": 0.25}
SUMMARY |= {"accuracy_after": 0.5, "report": "file:///r/report/report.html", "iterations": 2}

PROGRAM = """#!{python}
import json, sys
sys.stderr.write("a warning\\n")
print(json.dumps(sys.argv[1:]))
print({told!r})
sys.stderr.write({error!r})
raise SystemExit({code})
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Stand in for Python with a program that prints its arguments and what it is told to."""

    def stand_in(told="", error="", code=0):
        path = tmp_path / "python"
        path.write_text(PROGRAM.format(python=sys.executable, told=told, error=error, code=code))
        path.chmod(0o700)
        monkeypatch.setattr("sys.executable", str(path))

    return stand_in


def test_options_and_settings_reach_the_command_and_its_last_line_is_the_result(command, capsys):
    command(told=json.dumps(SUMMARY), error="a warning of the end\n")
    table = {"train": {"betas": [0.9, 0.95]}, "curate.verifier": "it's x", "model": {"path": None}}
    table["reward"] = {"functions": [{"name": "mine:f", "weight": 0.5}]}
    result = planish.run_pipeline(table, root="r", iterations=2, no_control=True, no_track=False)
    given = json.loads(capsys.readouterr().out.splitlines()[1])
    assert given[:5] == ["-m", "planish", "run", "--preset", "dapo-tiny"]
    assert given[-3:] == ["--root=r", "--iterations=2", "--no-control"]
    asked = parser().parse_args(given[2:])
    assert [parse_override(word) for word in split_overrides(" ".join(asked.overrides))] == [
        ("train", "betas", [0.9, 0.95]),
        ("curate", "verifier", "it's x"),
        ("model", "path", "none"),
        ("reward", "functions", [{"name": "mine:f", "weight": 0.5}]),
    ]
    assert (result.root, result.policy) == ("file:///r", "p#sha256=0")
    assert (result.accuracy_before, result.accuracy_after, result.control) == (0.25, 0.5, None)
    assert result.summary == SUMMARY


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (1, PlanishError)])
def test_a_command_that_fails_raises_its_last_line(command, code, kind):
    command(error="planish: no such preset\n", code=code)
    with pytest.raises(PlanishError, match=r"^no such preset$") as raised:
        planish.run_pipeline("mine.toml")
    assert type(raised.value) is kind


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="run_pipelines"):
        planish.run_pipelines  # noqa: B018
