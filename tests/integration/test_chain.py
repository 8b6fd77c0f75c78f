"""Chained runs, and what a chain trains on."""

import json
import os
import signal
from pathlib import Path

import pytest

from planish.checkpoint.train_state import read_state_info
from planish.minder.lab.files import write_frame
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.reports import UpdateReport, read_report
from planish.records.rollouts import RolloutSet
from planish.run.avoid import AvoidedNode, avoid
from planish.run.chain import Chain, parse_chain
from planish.run.kubeflow import restart_name, run_name
from tests.integration import programs, runs
from tests.unit.minder.lab.test_replay import small_frame
from tests.unit.submit.kfp_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


SETTINGS = {"overrides": f"{runs.LEARNS} algorithm.kl_coefficient=0.04"}
"""With a penalty, so that a chain has a reference to keep."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("two")
    root = (folder / "run").as_uri()
    runs.run(root, folder / "log.txt", iterations=2, **SETTINGS)
    for number in (1, 2):
        update = read_report(UpdateReport, layout.update(root, number))
        assert update.scalars["num_rollouts"] > 0
    return root


def assert_same(root: str, two: str) -> None:
    """Both learned the same; the chain has evaluated more often."""
    final = runs.digests(two)
    assert {k: v for k, v in runs.digests(root).items() if k in final} == final
    more = runs.digests(root).keys() - final
    assert all(path.startswith("evals/") for path in more)


def assert_reference(root: str, name: str, sha256: str, states: int) -> None:
    """Every state of a root names the policy that the penalty holds to."""
    assert read_state_info(runs.newest_state(root))["reference"] == f"{name}#sha256={sha256}"
    found = runs.manifests(root, "/states/").values()
    assert [m["parents"]["reference"] for m in found] == [sha256] * states


def start(server: Server, run: dict, trace: Path, log: Path) -> programs.Program:
    """Start what Kubeflow was asked to run, as its tasks find themselves in a cluster."""
    parameters = {"trace": trace.as_uri(), **run["runtime_config"]["parameters"]}
    environment = {"RUN_ID": run["run_id"], "KF_PIPELINES_ENDPOINT": server.url}
    return programs.start(
        "tests.integration.one_run",
        json.dumps(parameters),
        log=log,
        environment={**runs.environment(), **environment},
    )


def test_a_chain_and_a_restart_through_the_api_equal_two(two: str, tmp_path: Path) -> None:
    """Two runs of an iteration; the second is killed beside a faulty machine and restarted."""
    root, log, trace = (tmp_path / "run").as_uri(), tmp_path / "log.txt", tmp_path / "trace.npz"
    write_frame(trace, small_frame())
    server = Server()
    first = server.add_run(
        display_name="by hand",
        experiment_id="e1",
        service_account="planish-runner",
        pipeline_spec={"pipelineInfo": {"name": "post-train"}},
        runtime_config={
            "parameters": {
                "root": root,
                "config": str(runs.TINY),
                "chain": '{"runs": 2}',
                **SETTINGS,
            }
        },
    )
    runs.finish(start(server, first, trace, log), log)
    (second,) = (run for run in server.objects["runs"].values() if run is not first)
    process = start(server, second, trace, log)
    task = runs.signal_task(process, root, "train", 2, signal.SIGSTOP)
    avoid(root, AvoidedNode("node-3", "monitor_check", second["run_id"], 2))
    os.kill(task, signal.SIGKILL)
    assert process.wait(timeout=300) == 1
    (third,) = (run for run in server.objects["runs"].values() if run not in (first, second))
    runs.finish(start(server, third, trace, log), log)
    server.close()
    names = [body["display_name"] for body in server.posted("runs")]
    assert names == [run_name(root, 1), restart_name(root, 1)]
    places = [run["runtime_config"]["parameters"]["chain"] for run in (second, third)]
    assert [parse_chain(place) for place in places] == [Chain(index=1, runs=2)] * 2
    assert_same(root, two)


def test_no_prompt_is_lost_or_trained_twice(two: str) -> None:
    consumed: list[int] = []
    for _, manifest in sorted(runs.manifests(two, "/rollouts/").items()):
        if manifest["schema"] == RolloutSet.SCHEMA and "consumed" in manifest["attributes"]:
            consumed += manifest["attributes"]["consumed"]
    assert len(consumed) >= 2 * 8
    assert len(consumed) == len(set(consumed))
    # What lies before the last consumed prompt was consumed too, or the cursor still holds it.
    cursor = read_state_info(runs.newest_state(two))["data"]
    assert sorted([*consumed, *cursor["pending"]]) == list(range(cursor["next"]))


@pytest.mark.full
def test_a_run_starts_from_the_end_of_another_root_and_keeps_its_reference(
    two: str, tmp_path: Path
) -> None:
    root = (tmp_path / "fork").as_uri()
    runs.run(root, tmp_path / "log.txt", resume_from=two, **SETTINGS)
    before = read_state_info(runs.newest_state(two))
    after = read_state_info(runs.newest_state(root))
    assert after["step"] > before["step"]
    assert after["policy_version"] == 1
    # Its prompts are those that the other run has left.
    (manifest,) = (m for p, m in runs.manifests(root, "/rollouts/").items() if "/00/" in p)
    assert manifest["attributes"]["cursor"] == {
        name: before["data"][name] for name in ("next", "pending")
    }
    first = read_manifest(layout.policy(two, 0)).sha256
    assert_reference(root, layout.policy(two, 0), first, states=1)
