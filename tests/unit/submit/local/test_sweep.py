"""`planish sweep`: each run once, whatever becomes of the others, here and on a cluster."""

import pytest

from planish.__main__ import main
from planish.base.errors import PlanishError
from planish.submit.local.pipeline import Result
from tests.unit.submit.kfp_server import Server

FILE = """
preset = "dapo-qwen2.5-0.5b"
seed = 3
overrides = { "train.grad_clip" = 1.0, "train.learning_rate" = 1e-3 }
[[runs]]
name = "a"
[[runs]]
name = "b"
seed = 4
[runs.overrides.train]
learning_rate = 1e-4
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rates.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def started(monkeypatch):
    """Return the options of the runs that were started; those of a root in `broken` fail."""
    seen, broken = [], []

    def run_command(words):
        seen.append(words)
        if words[1].rpartition("/")[2] in broken:
            raise PlanishError("out of memory")
        return Result(words[1], "pin", 0.25, 0.5, None, "report", {})

    monkeypatch.setattr("planish.submit.local.sweep.run_command", run_command)
    return seen, broken


def test_a_run_that_fails_stops_no_other_and_only_it_is_done_again(file, started, capsys):
    seen, broken = started
    broken.append("a")
    assert main(["sweep", str(file)]) == 1
    root = f"{file.parent.as_uri()}/runs/rates"

    def options(name, seed, rate):
        shared = ["--preset=dapo-qwen2.5-0.5b", f"--seed={seed}", "-o", "train.grad_clip=1.0"]
        return ["--root", f"{root}/{name}", *shared, "-o", f"train.learning_rate={rate}"]

    assert seen == [options("a", 3, 0.001), options("b", 4, 0.0001)]
    told = capsys.readouterr().out
    assert "a: out of memory" in told
    assert "seed=4 train.learning_rate=0.0001" in told
    broken.clear()
    assert main(["sweep", str(file)]) == 0
    assert [words[1] for words in seen[2:]] == [f"{root}/a"]
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"planish compare {root}/a {root}/b"
    # Another setting is another run.
    file.write_text(FILE.replace("1e-4", "1e-5"))
    assert main(["sweep", str(file)]) == 0
    assert [words[1] for words in seen[3:]] == [f"{root}/b"]


def test_a_cluster_gets_each_run_in_one_experiment(file, capsys):
    server = Server()
    words = ["sweep", str(file), "--root", "s3://bucket/rates", "--kubeflow"]
    assert main([*words, "--host", server.url, "--profile", "gpu-1x8"]) == 0
    server.close()
    sent = [body["runtime_config"]["parameters"] for body in server.posted("runs")]
    assert [run["root"] for run in sent] == ["s3://bucket/rates/a", "s3://bucket/rates/b"]
    assert [run["seed"] for run in sent] == [3, 4]
    assert sent[1]["overrides"] == "train.grad_clip=1.0 train.learning_rate=0.0001"
    (experiment,) = server.objects["experiments"].values()
    assert experiment["display_name"] == "rates"
    assert set(server.objects["runs"]) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "`sweep.runs`"),
        ("[[runs]]\nname='a'\nseeds=1", "did you mean `seed`?"),
        ("[[runs]]\nname='a/b'", "`sweep.runs.0.name`"),
        ("[[runs]]\nname='a'\n[[runs]]\nname='a'", "a name of its own"),
    ],
)
def test_a_file_that_is_no_list_of_runs_is_one_line_and_code_two(file, text, words, capsys):
    file.write_text(text)
    assert main(["sweep", str(file)]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert words in errors
