"""The report stage: artifacts, copies under the root, the webhook, and roots of other runs."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from planish import store
from planish.base.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_TRANSIENT
from planish.records import layout
from planish.run.lock import Holder, acquire, hand_over
from planish.run.stage import PathArtifact, stage_main
from planish.stages.report.stage import add_control, run
from planish.stages.report.webhook import post
from planish.store.documents import read_json
from tests.servers.scripted_http import Reply, ScriptedServer
from tests.unit.stages.prepare.test_prepare_stage import run_stage

FIRST, SECOND = Holder("cluster", run_id="first"), Holder("cluster", run_id="second")


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


def test_artifacts_and_the_copy_in_the_root_are_the_same(short_root, artifacts, tmp_path):
    written = report(short_root, artifacts)
    folder = layout.report(short_root)
    assert store.read(f"{folder}/report.html").decode() == written["report"]
    assert store.read(f"{folder}/report.md").decode() == written["summary"]
    assert artifacts["report"].metadata["accuracy_after"] == 0.4831
    wanted = {
        "accuracy_before": 0.2784, "accuracy_after": 0.4831, "greedy_before": 0.336,
        "greedy_after": 0.5025, "iterations": 2, "state": "SUCCEEDED",
    }  # fmt: skip
    summary = read_json(f"{folder}/summary.json")
    assert {name: summary[name] for name in wanted} == wanted
    assert summary["seconds_by_stage"]["sft"] == 31.0
    target = tmp_path / "again.html"
    code = stage_main(
        run,
        ["--root", short_root, "--state", "SUCCEEDED", "--failed-task", "", "--error-message", "",
         "--max-restarts", "0", "--report", str(target), "--summary", str(tmp_path / "s.md")],
    )  # fmt: skip
    assert code == 0
    assert target.read_text() == written["report"]


def test_what_supervised_training_gave_instead_is_drawn_into_the_report(short_root, artifacts):
    assert "supervised instead" not in report(short_root, artifacts)["report"]
    add_control(short_root, "SUCCEEDED", {"accuracy": 0.357, "greedy": 0.738, "seconds": 60.0})
    folder = layout.report(short_root)
    page = store.read(f"{folder}/report.html").decode()
    assert "supervised instead" in page
    assert "35.7 %" in page
    assert read_json(f"{folder}/summary.json")["control"]["greedy"] == 0.738


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


def test_a_page_that_can_not_be_stored_fails_the_stage(short_root, artifacts):
    store.write(layout.report(short_root), b"a file where the folder goes")
    code, page = failed(short_root, artifacts)
    assert code == EXIT_FAILED
    assert "<svg" in page


def files(root):
    folder = Path(root.removeprefix("file://"))
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("run_id", "overrides"), [("second", ""), ("second", "rollout.no_such_key=1"), (None, "")]
)
def test_a_run_that_is_refused_writes_nothing_under_a_root_in_use(
    short_root, artifacts, tmp_path, monkeypatch, run_id, overrides
):
    acquire(short_root, FIRST)
    monkeypatch.setenv("RUN_ID", "first")
    report(short_root, artifacts)
    before = files(short_root)
    monkeypatch.delenv("RUN_ID")
    if run_id:
        monkeypatch.setenv("RUN_ID", run_id)
    with pytest.raises(SystemExit) as prepared:
        run_stage(tmp_path / "prepare", short_root, overrides=overrides)
    with pytest.raises(SystemExit) as reported:
        report(short_root, artifacts, state="FAILED")
    assert (prepared.value.code, reported.value.code) == (2, 2)
    assert files(short_root) == before


def test_a_run_that_has_handed_its_root_over_still_reports(short_root, artifacts, monkeypatch):
    acquire(short_root, FIRST)
    hand_over(short_root, FIRST)
    acquire(short_root, SECOND)
    monkeypatch.setenv("RUN_ID", "first")
    report(short_root, artifacts)
    assert store.exists(f"{layout.report(short_root)}/report.html")


def test_by_hand_a_run_that_has_ended_is_reported_on(short_root, artifacts):
    acquire(short_root, FIRST, now=1000.0)
    report(short_root, artifacts)
    assert store.exists(f"{layout.report(short_root)}/report.html")


@contextmanager
def server(status, **headers):
    found = ScriptedServer(lambda request: Reply(status, headers=headers))
    try:
        yield f"{found.url}/hook", found.requests
    finally:
        found.close()


def test_the_webhook_of_the_secret_gets_the_summary_and_its_address_shows_nowhere(
    short_root, artifacts, monkeypatch, caplog
):
    caplog.set_level("INFO")
    with server(200) as (url, seen):
        monkeypatch.setenv("PLANISH_WEBHOOK", f"{url}?token=s3cret")
        written = report(short_root, artifacts)
    (sent,) = seen
    assert (sent.path, sent.headers["Content-Type"]) == ("/hook?token=s3cret", "application/json")
    assert sent.json["accuracy_after"] == 0.4831
    assert "webhook sent" in caplog.text
    logs = Path(layout.logs(short_root).removeprefix("file://"))
    stored = [path.read_text() for path in (*logs.iterdir(), *logs.with_name("report").iterdir())]
    assert "s3cret" not in "".join([caplog.text, *written.values(), *stored])


def test_a_webhook_that_fails_does_not_fail_the_stage(short_root, artifacts, monkeypatch):
    monkeypatch.setenv("PLANISH_WEBHOOK", "http://127.0.0.1:1/x")
    assert "<svg" in report(short_root, artifacts)["report"]


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusal_is_a_warning(status, caplog):
    with server(status) as (url, seen):
        assert not post(url, {})
    assert len(seen) == 1
    assert "webhook not sent error=HTTPError" in caplog.text


def test_a_redirect_is_not_followed():
    with server(200) as (goal, reached), server(307, Location=goal) as (url, seen):
        assert not post(url, {})
    assert (len(seen), len(reached)) == (1, 0)


@pytest.mark.parametrize(
    "url",
    [
        *("file:///s3cret", "ftp://s3cret/x", "http://", "http://[s3cret", "no url", "https:///x"),
        *("s3cret:token", "http://127.0.0.1:1/s3cret"),
    ],
)
def test_other_addresses_are_refused_and_no_part_of_them_is_logged(url, caplog):
    assert not post(url, {})
    assert "webhook not sent" in caplog.text
    assert "s3cret" not in caplog.text
