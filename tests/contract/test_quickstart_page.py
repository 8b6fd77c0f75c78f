"""The page for clusters: its manifests exist, its pipeline compiles, its names are true."""

import re
from pathlib import Path

import pytest

from pipelines.connect import KFP_NAMESPACE, Kubeflow
from pipelines.lint import lint
from pipelines.submit import (
    _parser,
    check_root,
    default_experiment,
    default_name,
    parse_parameters,
    write_package,
)
from tests.contract.test_manifests import FOLDER, names, resolve

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "quickstart-cluster.md"


def blocks():
    """Return each command of the page with what stands below it; empty where nothing does."""
    fence = re.compile(r"```(text)?\n(.*?)\n```", re.DOTALL)
    found = []
    for kind, text in fence.findall(PAGE.read_text("utf-8")):
        if kind:
            found[-1] = (found[-1][0], text)
        else:
            found += [(line, "") for line in text.splitlines()]
    return found


def submits():
    for command, expected in blocks():
        if "pipelines.submit" in command:
            yield _parser().parse_args(command.split()[3:]), expected


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


@pytest.mark.slow
def test_the_run_of_the_page_compiles_and_has_the_names_that_the_page_says(tmp_path):
    (run, printed), (wait, state) = submits()
    assert (run.command, wait.command, state) == ("run", "wait", "SUCCEEDED")
    root = check_root(run.root)
    parameters = {**parse_parameters(run.parameter), "root": root}
    from pipelines.post_train import profile_named

    profile = profile_named(run.profile, num_iterations=run.iterations, num_shards=run.shards)
    assert lint(write_package(tmp_path, profile).read_text()) == []
    line = Kubeflow(None, run.host, False, KFP_NAMESPACE).describe(KFP_NAMESPACE)
    assert printed.splitlines()[0] == line
    text = PAGE.read_text("utf-8")
    assert f"The run `{default_name(parameters)}`" in text
    assert f"the experiment `{default_experiment(root)}`" in text


def test_pictures_are_there_and_small():
    text = PAGE.read_text("utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", text)
    assert len(pictures) == 3
    for picture in pictures:
        assert 10_000 < (PAGE.parent / picture).stat().st_size < 60_000
