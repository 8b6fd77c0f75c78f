"""Which Kubeflow answers, where it puts runs, and what to type where none answers."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import submit
from pipelines.connect import connect
from planish.base.errors import ConfigError
from tests.servers.program import free_port
from tests.unit.pipelines.kfp_server import Server

REPOSITORY = Path(__file__).resolve().parents[3]
ONE = ["--profile", "cpu-tiny", "--iterations", "1"]


@pytest.fixture
def server():
    found = Server()
    yield found
    found.close()


def test_a_server_for_one_user_takes_all_runs_into_its_own_namespace(server, capsys):
    assert connect(server.url, "kfp").namespace_of_runs("") == "kfp"
    assert connect(server.url).namespace_of_runs("kubeflow") == "kubeflow"
    assert submit.main(["run", "s3://b/r", "--host", server.url, *ONE]) == 0
    line = f"Kubeflow at {server.url} serves one user: runs go to namespace kubeflow"
    assert capsys.readouterr().err.splitlines() == [line]
    (experiment,) = server.posted("experiments")
    assert not experiment.get("namespace")
    (run,) = server.posted("runs")
    assert run["runtime_config"]["pipeline_root"] == "s3://b/kfp"


def test_a_server_for_one_user_refuses_another_namespace_before_anything_is_sent(server, capsys):
    with pytest.raises(SystemExit) as caught:
        submit.main(["run", "s3://b/r", "--host", server.url, "--namespace", "team", *ONE])
    assert caught.value.code == 2
    assert "must be left out or `kubeflow`, got 'team'" in capsys.readouterr().err
    assert not server.posted("runs")


def test_a_server_for_several_users_puts_runs_into_the_profile_that_is_named(server, capsys):
    server.is_multi_user = True
    with pytest.raises(ConfigError, match="must name the namespace of your profile, got none"):
        connect(server.url).namespace_of_runs("")
    words = ["run", "s3://b/r", "--host", server.url, "--namespace", "team", *ONE]
    assert submit.main(words) == 0
    assert "serves several users: runs go to namespace team" in capsys.readouterr().err
    (experiment,) = server.posted("experiments")
    assert experiment["namespace"] == "team"


def test_a_token_says_who_asks(server, tmp_path):
    server.is_multi_user = True
    run = server.add_run(display_name="x")
    path = tmp_path / "token"
    path.write_text("abc.def\n")
    words = ["wait", run["run_id"], "--host", server.url, "--token-file", str(path)]
    assert submit.main(words) == 0
    assert server.tokens == {"Bearer abc.def"}


@pytest.mark.parametrize("command", ["run", "wait", "status", "cleanup"])
def test_where_nothing_answers_one_line_says_what_to_type(command, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    words = {"run": ["s3://b/r", *ONE]}.get(command, ["some-run"])
    server = ["--host", url, "--kfp-namespace", "kfp"]
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.submit", command, *words, *server],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""},
    )
    assert done.returncode == 75
    (line,) = done.stderr.splitlines()
    assert f"must answer at {url}, got" in line
    assert "refused" in line
    assert "`kubectl -n kfp port-forward svc/ml-pipeline-ui 8080:80`" in line


def test_a_server_that_is_no_kubeflow_is_said_so_at_once(server, capsys, monkeypatch):
    monkeypatch.setattr(server, "_get", lambda handler: server._answer(handler, 503, {"a": 1}))
    assert submit.main(["wait", "some-run", "--host", server.url]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert f"must answer at {server.url}, got" in line
    assert "port-forward" in line
