"""What `planish status` tells of the tasks of a run."""

import json
from pathlib import Path

import pytest

from planish import store
from planish.__main__ import main
from planish.records import layout
from planish.submit import pipeline
from tests.unit.submit.kfp_server import Server


@pytest.fixture
def server():
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="module")
def package():
    found = pipeline.shipped("post-train", "cpu-tiny")
    pipeline.cut(found, 1)
    return found


def test_the_state_of_a_run_comes_with_its_tasks(server, capsys):
    failed = {"display_name": "train", "state": "FAILED", "start_time": "2026-01-01T00:00:01Z"}
    details = {"task_details": [{**failed, "error": {"message": "exit code 75"}}]}
    run = server.add_run(display_name="x", state="RUNNING", run_details=details)
    assert main(["status", run["run_id"], "--host", server.url]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "RUNNING"
    row = next(line for line in rest if "train" in line)
    for words in ("FAILED", "2026-01-01 00:00:01", "exit code 75"):
        assert words in row


def test_tasks_are_told_in_the_order_of_the_graph_without_those_of_kubeflow(
    server, file_root, capsys, package
):
    recorded = json.loads((Path(__file__).parent / "run_of_one_iteration.json").read_text())
    details = {"task_details": recorded}
    given = {"pipeline_spec": package.spec, "platform_spec": package.platform}
    facts = {"state": "RUNNING", "run_details": details}
    parameters = {"parameters": {"root": file_root}}
    log = layout.stage_log(file_root, "train", 1, 0)
    store.write(log, b'{"state": "running", "start_seconds": 5.0}')
    store.write(f"{log.removesuffix('.json')}-0.txt", b"step=1\nstep=2 of=8\n")
    for spec in (given, None):
        run = server.add_run(pipeline_spec=spec, runtime_config=parameters, **facts)
        assert main(["status", run["run_id"], "--host", server.url]) == 0
        told = capsys.readouterr().out
        assert "0001-01-01" not in told
        words = [line.replace("│", " ").split() for line in told.splitlines()]
        names = [row[0] for row in words if row[1:2] in (["SUCCEEDED"], ["RUNNING"])]
        names = [name for name in names if name != "post-train-x7k2p"]
        shards = {"rollout-i1", "rollout-2-i1"}
        assert [name for name in names if name not in shards] == [
            *("exit-handler-1", "prepare", "curate", "sft", "iteration-1"),
            *("reward-i1", "train-i1"),
        ]
        assert {*names[5:7]} == shards
        # Only the pipeline tells tasks from the workflow itself.
        assert ("post-train-x7k2p" in told) == (spec is None)
        assert told.splitlines()[-1] == "== 00001-train-00-0.txt running: step=2 of=8"
