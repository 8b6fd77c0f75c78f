"""The report of a run that may not use its root: what lies there is another run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from planish.records import layout
from planish.run.lock import Holder, acquire, hand_over
from planish.run.stage import PathArtifact
from planish.stages.report.stage import run
from tests.unit.stages.prepare.test_prepare_stage import run_stage


def files(root: str) -> dict[Path, bytes]:
    folder = Path(root.removeprefix("file://"))
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def report(root: str, folder: Path, *, state: str) -> None:
    outputs = {name: PathArtifact(str(folder / name)) for name in ("report", "summary")}
    run(root=root, state=state, failed_task="", error_message="", max_restarts=0, **outputs)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ["", "rollout.no_such_key=1"])
def test_a_run_that_is_refused_writes_nothing_under_a_root_in_use(
    short_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: str
) -> None:
    acquire(short_root, Holder("cluster", run_id="first"))
    monkeypatch.setenv("RUN_ID", "first")
    report(short_root, tmp_path, state="SUCCEEDED")
    before = files(short_root)
    monkeypatch.setenv("RUN_ID", "second")
    with pytest.raises(SystemExit) as prepared:
        run_stage(tmp_path / "prepare", short_root, overrides=overrides)
    with pytest.raises(SystemExit) as reported:
        report(short_root, tmp_path, state="FAILED")
    assert (prepared.value.code, reported.value.code) == (2, 2)
    assert files(short_root) == before


def test_a_refused_local_run_writes_nothing_either(short_root: str, tmp_path: Path) -> None:
    acquire(short_root, Holder("cluster", run_id="first"))
    before = files(short_root)
    with pytest.raises(SystemExit):
        run_stage(tmp_path / "prepare", short_root)
    with pytest.raises(SystemExit):
        report(short_root, tmp_path, state="FAILED")
    assert files(short_root) == before


@pytest.mark.slow
def test_a_run_that_has_handed_its_root_over_still_reports(
    short_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Holder("cluster", run_id="first"), Holder("cluster", run_id="second")
    acquire(short_root, first)
    hand_over(short_root, first)
    acquire(short_root, second)
    monkeypatch.setenv("RUN_ID", "first")
    report(short_root, tmp_path, state="SUCCEEDED")
    assert Path(layout.report(short_root).removeprefix("file://"), "report.html").is_file()


@pytest.mark.slow
def test_by_hand_a_run_that_has_ended_is_reported_on(short_root: str, tmp_path: Path) -> None:
    acquire(short_root, Holder("cluster", run_id="first"), now=1000.0)
    report(short_root, tmp_path, state="SUCCEEDED")
    assert Path(layout.report(short_root).removeprefix("file://"), "report.html").is_file()
