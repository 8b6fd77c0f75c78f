from __future__ import annotations

from pathlib import Path

import pytest

from planish import store
from planish.base.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_TRANSIENT
from planish.records import layout
from planish.run.stage import PathArtifact, stage_main
from planish.stages.report.facts import ReportFacts
from planish.stages.report.stage import add_control, as_metrics, as_summary, run
from planish.store.documents import read_json
from tests.unit.stages.report.test_report_webhook import server


@pytest.fixture
def artifacts(tmp_path):
    names = ("report", "summary")
    return {name: PathArtifact(str(tmp_path / "out" / name)) for name in names}


def report(root, artifacts, *, state="SUCCEEDED", failed_task="", error_message=""):
    run(
        root=root, state=state, failed_task=failed_task, error_message=error_message,
        max_restarts=0, **artifacts,
    )  # fmt: skip
    return {name: Path(artifact.path).read_text() for name, artifact in artifacts.items()}


@pytest.mark.slow
def test_artifacts_and_the_copy_in_the_root_are_the_same(short_root, artifacts):
    written = report(short_root, artifacts)
    folder = layout.report(short_root)
    assert store.read(f"{folder}/report.html").decode() == written["report"]
    assert store.read(f"{folder}/report.md").decode() == written["summary"]
    assert artifacts["report"].metadata["accuracy_after"] == 0.4831


@pytest.mark.slow
def test_the_summary_has_what_the_demo_prints(short_root, artifacts):
    report(short_root, artifacts)
    summary = read_json(f"{layout.report(short_root)}/summary.json")
    assert summary["accuracy_before"] == 0.2784
    assert summary["accuracy_after"] == 0.4831
    assert summary["greedy_before"] == 0.336
    assert summary["greedy_after"] == 0.5025
    assert summary["iterations"] == 2
    assert summary["seconds_by_stage"]["sft"] == 31.0
    assert summary["state"] == "SUCCEEDED"


@pytest.mark.slow
def test_what_supervised_training_gave_instead_is_drawn_into_the_report(short_root, artifacts):
    page = report(short_root, artifacts)["report"]
    assert "supervised instead" not in page
    add_control(short_root, "SUCCEEDED", {"accuracy": 0.357, "greedy": 0.738, "seconds": 60.0})
    folder = layout.report(short_root)
    page = store.read(f"{folder}/report.html").decode()
    assert "supervised instead" in page
    assert "35.7 %" in page
    assert read_json(f"{folder}/summary.json")["control"]["greedy"] == 0.738


def test_the_summary_has_the_largest_divergence_of_all_iterations():
    updates = {1: {"mismatch_k3": 2e-9}, 2: {"mismatch_k3": -5e-8}, 3: {"mismatch_k3": 1e-9}, 4: {}}
    facts = ReportFacts("file:///r", updates=updates)
    assert as_summary(facts)["mismatch_k3_max"] == 5e-8
    assert as_metrics(as_summary(facts))["mismatch_k3_max"] == 5e-8
    facts = ReportFacts("file:///r", updates={1: {"loss": 0.5}})
    assert as_summary(facts)["mismatch_k3_max"] is None


def test_a_root_without_anything_still_gives_a_report(tmp_path, artifacts):
    written = report(
        f"file://{tmp_path}/none", artifacts, state="FAILED", failed_task="post-train",
        error_message="prepare said no",
    )  # fmt: skip
    assert "prepare said no" in written["report"]
    assert "the configuration (run.json): not written" in written["summary"]
    assert artifacts["report"].metadata["iterations"] == 0.0


def failed(root, artifacts):
    """Report on a root that can not be written; returns the exit code and the page."""
    with pytest.raises(SystemExit) as ended:
        report(root, artifacts, state="FAILED")
    return ended.value.code, Path(artifacts["report"].path).read_text()


def test_a_root_that_can_not_be_still_gives_a_report(artifacts):
    code, page = failed("file:///a/../b", artifacts)
    assert code == EXIT_CONFIG
    assert "What this report could not read" in page


def test_a_store_that_is_down_at_the_end_fails_the_stage_as_transient(artifacts, monkeypatch):
    settings = {"ENDPOINT": "127.0.0.1:1", "ACCESS_KEY": "key", "SECRET_KEY": "secret"}
    for name, value in {**settings, "RETRY_SECONDS": "0"}.items():
        monkeypatch.setenv(f"MINIO_{name}", value)
    code, page = failed("s3://bucket/run", artifacts)
    assert code == EXIT_TRANSIENT
    assert "everything under the run root" in page


@pytest.mark.slow
def test_a_page_that_can_not_be_stored_fails_the_stage(short_root, artifacts):
    store.write(layout.report(short_root), b"a file where the folder goes")
    code, page = failed(short_root, artifacts)
    assert code == EXIT_FAILED
    assert "<svg" in page


@pytest.mark.slow
def test_a_webhook_that_fails_does_not_fail_the_stage(short_root, artifacts, monkeypatch):
    monkeypatch.setenv("PLANISH_WEBHOOK", "http://127.0.0.1:1/x")
    assert "<svg" in report(short_root, artifacts)["report"]


@pytest.mark.slow
def test_the_webhook_of_the_secret_gets_the_summary_and_its_address_shows_nowhere(
    short_root, artifacts, monkeypatch, caplog
):
    caplog.set_level("INFO")
    with server(200) as (url, seen):
        monkeypatch.setenv("PLANISH_WEBHOOK", f"{url}?token=s3cret")
        written = report(short_root, artifacts)
    ((path, _, message),) = seen
    assert (path, message["accuracy_after"]) == ("/hook?token=s3cret", 0.4831)
    assert "webhook sent" in caplog.text
    logs = Path(layout.logs(short_root).removeprefix("file://"))
    stored = [path.read_text() for path in (*logs.iterdir(), *logs.with_name("report").iterdir())]
    assert "s3cret" not in "".join([caplog.text, *written.values(), *stored])


@pytest.mark.slow
def test_the_command_line_writes_the_same_page(short_root, artifacts, tmp_path):
    expected = report(short_root, artifacts)["report"]
    target = tmp_path / "again.html"
    code = stage_main(
        run,
        ["--root", short_root, "--state", "SUCCEEDED", "--failed-task", "", "--error-message", "",
         "--max-restarts", "0", "--report", str(target),
         "--summary", str(tmp_path / "s.md")],
    )  # fmt: skip
    assert code == 0
    assert target.read_text() == expected
