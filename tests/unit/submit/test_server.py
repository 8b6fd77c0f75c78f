"""Which Kubeflow answers, where it puts runs, and what to type where none answers."""

import pytest

from planish.__main__ import main
from planish.base.errors import ConfigError
from planish.submit.server import connect
from tests.unit.submit.kfp_server import Server

ONE = ["--profile", "cpu-tiny", "--iterations", "1"]


@pytest.fixture
def server():
    found = Server()
    yield found
    found.close()


def test_a_server_for_one_user_takes_all_runs_into_its_own_namespace(server, capsys):
    assert connect(server.url, "kfp").namespace_of_runs("") == "kfp"
    assert connect(server.url).namespace_of_runs("kubeflow") == "kubeflow"
    assert main(["submit", "s3://b/r", "--host", server.url, *ONE]) == 0
    line = f"Kubeflow at {server.url} serves one user: runs go to namespace kubeflow"
    assert capsys.readouterr().err.splitlines() == [line]
    (experiment,) = server.posted("experiments")
    assert not experiment.get("namespace")
    (run,) = server.posted("runs")
    assert run["runtime_config"]["pipeline_root"] == "s3://b/kfp"
    assert main(["submit", "s3://b/r2", "--host", server.url, *ONE]) == 0
    assert len(server.posted("experiments")) == 1


def test_a_server_for_one_user_refuses_another_namespace_before_anything_is_sent(server, capsys):
    assert main(["submit", "s3://b/r", "--host", server.url, "--namespace", "team", *ONE]) == 2
    assert "must be left out or `kubeflow`, got 'team'" in capsys.readouterr().err
    assert not server.posted("runs")


def test_a_server_for_several_users_puts_runs_into_the_profile_that_is_named(server, capsys):
    server.is_multi_user = True
    with pytest.raises(ConfigError, match="must name the namespace of your profile, got none"):
        connect(server.url).namespace_of_runs("")
    words = ["submit", "s3://b/r", "--host", server.url, "--namespace", "team", *ONE]
    assert main(words) == 0
    assert "serves several users: runs go to namespace team" in capsys.readouterr().err
    (experiment,) = server.posted("experiments")
    assert experiment["namespace"] == "team"


def test_a_token_says_who_asks(server, tmp_path, monkeypatch):
    server.is_multi_user = True
    run = server.add_run(display_name="x")
    path = tmp_path / "token"
    path.write_text("abc.def\n")
    words = ["status", run["run_id"], "--wait", "--host", server.url]
    assert main([*words, "--token-file", str(path)]) == 0
    assert server.tokens == {"Bearer abc.def"}
    server.tokens.clear()
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(path))
    assert main(words) == 0
    assert server.tokens == {"Bearer abc.def"}
    assert main([*words, "--token-file", str(tmp_path / "absent")]) == 2


COMMANDS = [["submit", "s3://b/r", *ONE], ["status", "some-run"], ["logs", "some-run"]]
COMMANDS += [["stop", "some-run"], ["cleanup", "some-run"], ["upload", "reshard"]]
COMMANDS += [["schedule", "s3://b/r", "--cron", "0 0 2 * * *", *ONE]]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_where_nothing_answers_one_line_says_what_to_type(words, capsys, closed_port):
    url = f"http://127.0.0.1:{closed_port}"
    assert main([*words, "--host", url, "--kfp-namespace", "kfp"]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert f"must answer at {url}, got" in line
    assert "refused" in line
    assert "`kubectl -n kfp port-forward svc/ml-pipeline-ui 8080:80`" in line


def kubeconfig_at(path, monkeypatch):
    # The client of Kubernetes reads its environment when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))


def test_without_any_way_to_a_server_one_line_says_so(tmp_path, monkeypatch, capsys):
    kubeconfig_at(tmp_path / "absent", monkeypatch)
    assert main(["status", "some-run"]) == 75
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert "Kubeflow Pipelines must answer, got Invalid kube-config file" in line


def test_a_server_is_found_behind_the_api_of_kubernetes(server, tmp_path, monkeypatch):
    """The path is that of the API server's own proxy; the server of the test ends with it."""
    path = tmp_path / "config"
    path.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: "
        "{cluster: k, user: u}}], users: [{name: u, user: {token: of-user}}], clusters: "
        f"[{{name: k, cluster: {{server: '{server.url}'}}}}]}}"
    )
    kubeconfig_at(path, monkeypatch)
    connect(kfp_namespace="kfp")
    ((_, asked, _, _),) = server.requests
    proxy = "/api/v1/namespaces/kfp/services/ml-pipeline:http/proxy"
    assert asked == f"{proxy}/apis/v2beta1/healthz"
    assert server.tokens == {"Bearer of-user"}


def test_a_server_that_is_no_kubeflow_is_said_so_at_once(server, capsys, monkeypatch):
    monkeypatch.setattr(server, "_get", lambda handler: server._answer(handler, 503, {"a": 1}))
    assert main(["status", "some-run", "--host", server.url]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert f"must answer at {server.url}, got" in line
    assert "port-forward" in line


def test_what_the_server_refuses_is_one_line(server, capsys):
    assert main(["status", "no-such-run", "--host", server.url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Kubeflow at {server.url} must do what is asked, got 404: " in line
    assert "not found" in line


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_the_password_of_an_address_is_printed_nowhere(words, server, capsys, closed_port):
    for port in (closed_port, server.url.rpartition(":")[2]):
        main([*words, "--host", f"http://me:geheim@127.0.0.1:{port}", "--namespace", "wrong"])
        told = capsys.readouterr().err
        assert f"http://***@127.0.0.1:{port}" in told
        assert "me:" not in told
        assert "geheim" not in told
