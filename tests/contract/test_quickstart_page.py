"""The pages for clusters, GPUs and gangs: their commands work, their names are true."""

import json
import re
import shlex
from pathlib import Path

from components.pod_settings import GANG_ENV
from planish.__main__ import main
from planish.submit.parameters import pipeline_root
from planish.submit.pipeline import profiles, shipped
from tests.contract.test_manifests import FOLDER, find, launcher_settings, names, resolve
from tests.unit.submit.kfp_server import Server

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "quickstart-cluster.md"
GPU_PAGE = REPOSITORY / "docs" / "quickstart-gpu.md"
GANG_PAGE = REPOSITORY / "docs" / "multi-node.md"

ON_A_RUN = ("planish show", "planish logs", "planish track", "planish export")
"""Commands of the page for GPUs that tests/images/rehearsal.py follows, on the run it submits."""
ELSEWHERE = {
    "make images": "builds gigabytes, as root: `make images-test`",
    "pip install": "wants an index: tests/contract/test_wheel_contents.py installs the wheel",
    "kubectl": "wants an API server: tests/integration/test_quickstart_page.py",
    **dict.fromkeys(ON_A_RUN, "wants a run"),
}
"""Start of a command of the page for GPUs -> why the test here does not follow it."""


def blocks(page=PAGE):
    """Return each command of a page with what stands below it; empty where nothing does."""
    fence = re.compile(r"```(text)?\n(.*?)\n```", re.DOTALL)
    found = []
    for kind, text in fence.findall(page.read_text("utf-8")):
        if kind:
            found[-1] = (found[-1][0], text)
        else:
            found += [(line, "") for line in text.splitlines()]
    return found


def is_shown(expected, printed):
    """Return whether a page shows what was printed; `...` stands for anything."""
    pattern = ".*".join(map(re.escape, expected.split("...")))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def test_every_command_but_the_last_two_shows_what_it_prints():
    assert [command.split()[1] for command, expected in blocks() if not expected] == ["delete"] * 2


def test_manifests_of_the_page_are_there_and_make_what_it_shows():
    for command, expected in blocks():
        words = command.split()
        for word in words:
            place = word.rpartition("=")[2]
            assert not place.startswith("manifests/") or (REPOSITORY / place).exists(), command
        if words[:2] != ["kubectl", "apply"]:
            continue
        made = resolve((REPOSITORY / words[-1]).resolve())
        shown = [line.split()[0].split("/") for line in expected.splitlines()]
        # Behind a dot stands the namespace, which kustomize fills in.
        wanted = sorted(o["metadata"]["name"].partition(".")[0] for o in made)
        assert sorted(name.partition(".")[0] for _, name in shown) == wanted
    assert "minio-setup" in names(resolve((FOLDER / "overlays/local").resolve()), "Job")


def test_the_form_runs_as_many_iterations_as_the_command_of_the_page():
    asked = re.findall(
        r"planish (submit|upload) [^`\n]*--iterations (\d+)", PAGE.read_text("utf-8")
    )
    assert asked == [("submit", "2"), ("upload", "2")]


def test_the_commands_of_planish_print_what_the_page_shows(capsys):
    """Against an API that records: only its address and the id of the run are other ones."""
    server, run_id = Server(), ""
    for command, expected in blocks():
        if not command.startswith("planish"):
            continue
        words = command.replace("RUN_ID", run_id).replace("http://localhost:8080", server.url)
        assert main(words.split()[1:]) == 0
        told = capsys.readouterr()
        run_id = run_id or next(iter(server.objects["runs"]))
        expected = expected.replace("RUN_ID", run_id).replace("http://localhost:8080", server.url)
        assert f"{told.err}{told.out}".strip() == expected, command
    server.close()
    (run,), (experiment,) = server.posted("runs"), server.posted("experiments")
    text = PAGE.read_text("utf-8")
    assert (
        f"The run `{run['display_name']}` lies in the experiment `{experiment['display_name']}`"
        in (" ".join(text.split()))
    )
    graphs = run["pipeline_spec"]["pipeline_spec"]["components"]
    tasks = graphs["comp-condition-2"]["dag"]["tasks"]
    assert [name for name in tasks if name.startswith("iteration")] == [
        "iteration-1",
        "iteration-2",
    ]


def test_the_form_is_filled_with_what_the_manifests_make():
    """With the defaults of Kubeflow a run has neither our rights nor the secret of its root."""
    text = " ".join(PAGE.read_text("utf-8").split())
    account = re.search(r"Service Account `([^`]+)`", text)[1]
    place = re.search(r"Custom Pipeline Root `([^`]+)`", text)[1]
    assert "and an Experiment" in text
    objects = resolve((FOLDER / "overlays/kfp-single-user").resolve())
    assert account in names(objects, "ServiceAccount")
    (bucket,) = launcher_settings()["s3"]["overrides"]
    assert place == pipeline_root(f"s3://{bucket['bucketName']}/first")
    secret = bucket["credentials"]["secretRef"]["secretName"]
    rules = find(objects, "Role", account)["rules"]
    opened = [n for r in rules if "secrets" in r["resources"] for n in r["resourceNames"]]
    assert opened == [secret]
    assert secret in names(objects, "Secret")
    for profile in profiles():
        description = shipped("post-train", profile).spec["pipelineInfo"]["description"]
        for word in (account, place.rpartition("/")[2], "experiment"):
            assert word in description


def test_the_page_for_gpus_is_followed_as_far_as_it_needs_none(capsys, monkeypatch):
    server, run_id, followed = Server(), "", []
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    for command, expected in blocks(GPU_PAGE):
        if command.startswith(tuple(ELSEWHERE)):
            continue
        assert main(command.replace("RUN_ID", run_id).split()[1:]) == 0, command
        told = capsys.readouterr()
        run_id = run_id or next(iter(server.objects["runs"]), "")
        expected = expected.replace("http://localhost:8080", server.url).replace("RUN_ID", run_id)
        printed = [
            " ".join(line.replace("│", " ").split())
            for line in f"{told.err}{told.out}".splitlines()
        ]
        shown = [" ".join(line.split()) for line in expected.splitlines()]
        assert shown, command
        assert set(shown) <= {*printed}, command
        followed.append(command.split()[1])
    server.close()
    assert (followed, printed) == (["plan", "submit", "status"], ["SUCCEEDED"])
    (run,) = server.posted("runs")
    executors = run["pipeline_spec"]["pipeline_spec"]["deploymentSpec"]["executors"].values()
    images = {executor["container"]["image"].rpartition("/")[0] for executor in executors}
    assert images == {"registry.example/team"}
    starts = [command for command, _ in blocks(GPU_PAGE)]
    assert all(any(command.startswith(each) for command in starts) for each in ELSEWHERE)


def test_the_page_for_several_machines_submits_gangs_of_as_many_pods_as_it_says(monkeypatch):
    """One of its commands, on processors alone, is followed to its end by the rehearsal."""
    server, seen = Server(), []
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    for command, _ in blocks(GANG_PAGE):
        assert main(shlex.split(command)[1:]) == 0, command
        run = server.posted("runs")[-1]
        executors = run["pipeline_spec"]["pipeline_spec"]["deploymentSpec"]["executors"]
        trains = executors.get("exec-iterate") or executors["exec-train"]
        variables = trains["container"].get("env", ())
        gangs = [json.loads(each["value"]) for each in variables if each["name"] == GANG_ENV]
        overrides = run["runtime_config"]["parameters"].get("overrides", "")
        seen.append(([gang["num_nodes"] for gang in gangs], overrides))
    server.close()
    assert seen == [
        ([4], ""),
        ([16], "train.num_nodes=8"),
        ([], "train.num_nodes=2"),
        ([4], "train.num_nodes=3"),
    ]


def test_pictures_are_there_and_small():
    text = PAGE.read_text("utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", text)
    assert len(pictures) == 3
    for picture in pictures:
        assert 10_000 < (PAGE.parent / picture).stat().st_size < 60_000
