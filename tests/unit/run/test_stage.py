import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from planish import store
from planish.base.config import Section, config_sha256
from planish.base.errors import (
    ConfigError,
    PeerLost,
    RecordError,
    StoreUnavailable,
    VerifierFailure,
)
from planish.records import layout
from planish.records.refs import Ref
from planish.run.__main__ import STAGES, main, stage_run
from planish.run.stage import (
    LOCAL_RUN,
    Artifact,
    Context,
    Outcome,
    PathArtifact,
    execute,
    is_stopped,
    load_run,
    mark_stopped,
    read_ref,
    stage_main,
)
from planish.store.documents import read_json, write_json
from tests.integration.waiting import wait_for
from tests.processes import marked, marks, wait_until_none

CONFIG = {"run": {"seed": 7}, "toy": {"size": 3}}


class ToyConfig(Section):
    size: int = 1
    """Size."""


@pytest.fixture
def root(tmp_path: Path) -> str:
    uri = (tmp_path / "run").as_uri()
    digest = config_sha256(CONFIG)
    write_json(layout.run_file(uri), {"config": CONFIG, "config_sha256": digest})
    return uri


def call(root: str, work: Any, tmp_path: Path, **more: Any) -> tuple[Outcome, dict[str, Artifact]]:
    outputs = {n: PathArtifact(str(tmp_path / "out" / n)) for n in ("result", "metrics", "page")}
    options = {"config_sha256": config_sha256(CONFIG), **more}
    return execute("toy", work, root=root, outputs=outputs, **options), outputs


STRANGE = [
    [], "x", {}, {"state": "failed"}, {"state": "running", "start_seconds": "soon", "iteration": 1},
    {"state": "failed", "start_seconds": 1.0, "seconds": None, "iteration": 1},
    {"state": "done", "earlier": {"task": "of a later release"}},
]  # fmt: skip


@pytest.mark.parametrize("left", STRANGE)
def test_what_another_release_has_left_in_the_log_stops_no_task(root, tmp_path, left):
    uri = layout.stage_log(root, "toy", 2, 1)
    store.write(uri, json.dumps(left).encode())
    call(root, lambda _: Outcome(metrics={"good": 2.0}), tmp_path, iteration=2, shard=1)
    assert read_json(uri)["state"] == "done"


def test_a_marker_of_another_release_is_of_no_task(root, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "run-a")
    write_json(layout.failed_file(root, "toy", 2, 1), {"why": "of a later release"})
    call(root, lambda _: Outcome(), tmp_path, iteration=2, shard=1)


@pytest.mark.parametrize("text", [b"[]", b"7", b"null", b'"x"', b"{", b"[" * 100_000])
def test_what_is_no_object_is_no_document(root, text):
    store.write(f"{root}/x.json", text)
    with pytest.raises(RecordError, match=r"x\.json` must be a JSON object, got"):
        read_json(f"{root}/x.json")


def test_outputs_metrics_and_log_are_written(root: str, tmp_path, monkeypatch: Path) -> None:
    monkeypatch.setattr("planish.run.stage_log._has_begun", False)
    ref = Ref("toy/1", f"{root}/toy", "a" * 64, {"num_rows": 5})

    def work(context: Context) -> Outcome:
        assert context.seed == 7
        assert context.section(ToyConfig, "toy").size == 3
        logging.getLogger("planish.toy").info("working hard")
        return Outcome(
            refs={"result": ref},
            metrics={"good": 2.0, "bad": math.nan},
            documents={"page": "<p>hello</p>"},
        )

    _, outputs = call(root, work, tmp_path, iteration=2, shard=1)
    assert read_ref(outputs["result"]) == ref
    assert outputs["result"].metadata == {"num_rows": 5, "manifest_sha256": "a" * 64}
    assert json.loads(Path(outputs["metrics"].path).read_text()) == {
        "bad_nonfinite": 1.0,
        "good": 2.0,
    }
    assert Path(outputs["page"].path).read_text() == "<p>hello</p>"
    entry = read_json(layout.stage_log(root, "toy", 2, 1))
    assert entry["state"] == "done"
    assert entry["metrics"] == {"bad_nonfinite": 1.0, "good": 2.0}
    assert 0 < entry["startup_seconds"] < 3600
    lines = store.read(f"{root}/logs/00002-toy-01-0.txt").decode()
    assert "working hard" in lines
    # A second task of the process waits for no start.
    call(root, work, tmp_path, iteration=3, shard=1)
    assert read_json(layout.stage_log(root, "toy", 3, 1))["startup_seconds"] == 0


def test_the_last_stage_of_an_iteration_draws_the_report_and_survives_its_failure(
    root: str, tmp_path, monkeypatch, caplog
) -> None:
    drawn = []

    def draw(*words: object) -> None:
        drawn.append(words)
        raise ValueError("no page")

    monkeypatch.setattr("planish.stages.report.stage.write_running", draw)
    for stage in ("train", "checkpoint"):
        execute(stage, lambda _: Outcome(), root=root, config_sha256=None, outputs={}, iteration=2)
    assert drawn == [(root, 2)]
    assert "report not drawn iteration=2" in caplog.text
    assert read_json(layout.stage_log(root, "checkpoint", 2, 0))["state"] == "done"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2),
        (RecordError("no"), 1),
        (VerifierFailure("slow"), 1),
        (VerifierFailure("wrong", is_final=True), 2),
        (StoreUnavailable("no"), 75),
        (RuntimeError("bug"), 1),
    ],
)
def test_each_error_has_its_exit_code(
    error: Exception, code: int, root: str, tmp_path: Path
) -> None:
    def work(context: Context) -> Outcome:
        raise error

    with pytest.raises(SystemExit) as caught:
        call(root, work, tmp_path)
    assert caught.value.code == code
    entry = read_json(layout.stage_log(root, "toy", 0, 0))
    # After a failure of the store nothing more is written to it.
    assert entry["state"] == ("running" if code == 75 else "failed")


@pytest.mark.parametrize("name", ["RUN_ID", LOCAL_RUN])
@pytest.mark.parametrize(
    "error", [ConfigError("`toy.size` is 3"), VerifierFailure("no", is_final=True)]
)
def test_a_final_failure_is_not_tried_again_by_the_same_run(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    calls = []

    def work(context: Context) -> Outcome:
        calls.append(1)
        raise error

    monkeypatch.delenv("RUN_ID", raising=False)
    monkeypatch.setenv(name, "run-a")
    for _ in range(2):
        with pytest.raises(SystemExit):
            call(root, work, tmp_path)
    assert len(calls) == 1
    monkeypatch.setenv(name, "run-b")
    with pytest.raises(SystemExit):
        call(root, work, tmp_path)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "must be a JSON object"),
        ("{}", "must hold config"),
        ('{"config": []}', "must hold config"),
        ('{"config": {"run": 5}}', "must hold config"),
        ('{"config": {"run": {"seed": NaN}}}', "must be finite"),
        ('{"config": {"run": {"seed": 1e999}}}', "must be finite"),
        ('{"config": {"run": ' + "[" * 100 + "]" * 100 + "}}", "must hold config"),
        ('{"config": {"run": {"seed": ' + "[" * 100 + "]" * 100 + "}}}", "nested at most"),
        ('{"config": {"run": {"seed": ' + "9" * 3000 + "}}}", "at most 64 bits"),
        ("[" * 5000, "must be a JSON object"),
        ("9" * 5000, "must be a JSON object"),
        ("\xff", "must be a JSON object"),
    ],
)
def test_a_strange_run_file_ends_a_stage_with_exit_code_2(
    root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, words: str
) -> None:
    store.write(layout.run_file(root), text.encode("latin-1"))
    with pytest.raises(SystemExit) as caught:
        call(root, lambda context: Outcome(), tmp_path)
    assert caught.value.code == 2
    assert words in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("data", [b"[]", b"\xff", b"{}", b"[" * 5000, b'{"attributes": [1]}'])
def test_a_strange_reference_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "ref").write_bytes(data)
    with pytest.raises(RecordError, match="Ref"):
        read_ref(PathArtifact(str(tmp_path / "ref")))


def test_what_is_missing_or_of_another_run_is_told(root: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a new root"):
        load_run(root, "0" * 64)
    with pytest.raises(ConfigError, match="prepare stage"):
        load_run((tmp_path / "none").as_uri(), "0" * 64)
    with pytest.raises(RecordError, match="absent"):
        read_ref(PathArtifact(str(tmp_path / "absent")))


def test_stop_is_decided_once_an_iteration(root: str) -> None:
    assert not mark_stopped(root, 1)
    write_json(layout.stop_file(root), {})
    assert not is_stopped(root, 2)
    assert mark_stopped(root, 2)
    assert mark_stopped(root, 2)
    assert is_stopped(root, 2)
    assert not is_stopped(root, 1)


class ToyValues(NamedTuple):
    pin: str
    count: int


def test_the_command_line_mirrors_the_signature(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def run(*, root: str, number: int, fast: bool, result: Artifact, note: str = "n") -> ToyValues:
        """Do it."""
        seen.update(root=root, number=number, fast=fast, result=result.path, note=note)
        return ToyValues("p", 4)

    values = tmp_path / "values.json"
    argv = ["--root", "file:///r", "--number", "3", "--fast", "true", "--result", "/x"]
    assert stage_main(run, [*argv, "--values", str(values)]) == 0
    assert seen == {"root": "file:///r", "number": 3, "fast": True, "result": "/x", "note": "n"}
    assert json.loads(values.read_text()) == {"count": 4, "pin": "p"}


def test_attempts_before_the_last_are_kept_as_events(root: str, tmp_path: Path) -> None:
    def fail(context: Context) -> Outcome:
        raise PeerLost("gone for a while")

    for _ in range(2):
        with pytest.raises(SystemExit):
            call(root, fail, tmp_path, iteration=2)
    # Killed: its entry says that it runs.
    uri = layout.stage_log(root, "toy", 2, 0)
    write_json(uri, {**read_json(uri), "state": "running", "error": None, "exit_code": None})
    call(root, lambda context: Outcome(), tmp_path, iteration=2)
    call(root, lambda context: Outcome(), tmp_path, iteration=2)
    failed, killed = (read_json(event) for event in store.list_uris(layout.events(root)))
    assert failed["begin_seconds"] <= failed["end_seconds"] <= killed["begin_seconds"]
    facts = {"kind": "attempt", "stage": "toy", "iteration": 2, "shard": 0, "exit_code": 75}
    assert facts.items() <= failed.items()
    assert "gone for a while" in failed["error"]
    assert killed["exit_code"] is None
    assert killed["end_seconds"] == pytest.approx(read_json(uri)["start_seconds"], abs=30)


def test_an_attempt_that_found_the_work_done_replaces_no_record(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = layout.stage_log(root, "toy", 2, 0)

    def work(_: Context) -> Outcome:
        logging.getLogger("planish.toy").info("working hard")
        return Outcome(metrics={"good": 2.0})

    def finds_it_done(_: Context) -> Outcome:
        assert read_json(uri)["state"] == "running"
        logging.getLogger("planish.toy").info("nothing to do")
        return Outcome(already_done=True)

    def is_killed(_: Context) -> Outcome:
        monkeypatch.setattr("planish.run.stage_log.write_json", lambda *_: None)
        raise SystemExit(137)

    call(root, work, tmp_path, iteration=2)
    first = read_json(uri)
    call(root, finds_it_done, tmp_path, iteration=2)
    assert read_json(uri) == {**first, "already_done": True}
    assert "working hard" in store.read(f"{root}/logs/00002-toy-00-0.txt").decode()
    with pytest.raises(SystemExit):
        call(root, is_killed, tmp_path, iteration=2)
    monkeypatch.undo()
    call(root, finds_it_done, tmp_path, iteration=2)
    assert read_json(uri) == {**first, "already_done": True}
    call(root, work, tmp_path, iteration=2)
    assert read_json(uri)["start_seconds"] > first["start_seconds"]


LIMIT = 300.0
"""Seconds after which a test that hangs ends."""

STAGE = """
import subprocess, sys, time
from planish.run import signals
from planish.run.stage import Outcome, execute

signals.STOP_SECONDS = float(sys.argv[3])

def work(context):
    subprocess.Popen(["sleep", "600"])
    open(sys.argv[2], "w").close()
    while True:
        try:
            time.sleep(600)
        except BaseException:
            if sys.argv[4] == "obedient":
                raise
        if sys.argv[4] == "wrapped":
            raise ValueError("of a library")

execute("toy", work, root=sys.argv[1], config_sha256=None, outputs={})
"""


def stop_stage(tmp_path: Path, number: int, how: str, limit_seconds: float) -> int:
    """Send a signal to a stage at work; return its exit code."""
    begun = tmp_path / "begun"
    words = [tmp_path.as_uri(), str(begun), str(limit_seconds), how]
    process = subprocess.Popen([sys.executable, "-c", STAGE, *words], env=marks(tmp_path))
    wait_for(lambda: begun.exists() or process.poll() is not None, LIMIT)
    process.send_signal(number)
    return process.wait(timeout=LIMIT)


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGTERM, "obedient"), (signal.SIGINT, "obedient"), (signal.SIGTERM, "wrapped")],
)
def test_a_stage_that_must_stop_says_so_and_may_be_tried_again(
    tmp_path: Path, number: int, how: str
) -> None:
    assert stop_stage(tmp_path, number, how, 10 * LIMIT) == 75
    (log,) = (tmp_path / "logs").glob("*.json")
    entry = json.loads(log.read_text())
    assert (entry["state"], entry["exit_code"]) == ("failed", 75)
    told = {signal.SIGTERM: "stopped by SIGTERM", signal.SIGINT: "interrupted"}
    assert entry["error"] == told[number]
    for pid in marked(tmp_path):
        os.kill(pid, signal.SIGKILL)


def test_a_stage_that_does_not_stop_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    assert stop_stage(tmp_path, signal.SIGTERM, "stubborn", 1.0) == 75
    wait_until_none(tmp_path, LIMIT)


ENDS_ALL = """
import signal, subprocess, sys
from planish.run.signals import end_descendants

deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
nest = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
command = [sys.executable, "-c", nest]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
end_descendants(0.5)
print(child.wait(timeout=120))
"""


def test_descendants_end_in_sessions_of_their_own_and_when_they_ignore_the_signal(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_ALL],
        env=marks(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(-signal.SIGTERM)]
    wait_until_none(tmp_path, LIMIT)


@pytest.mark.slow
def test_a_keyboard_interrupt_of_a_command_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def reward(response, answer):\n"
        "    pathlib.Path(__file__).with_name('begun').touch()\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "planish", "verifier", "check", "slow:reward"]
    process = subprocess.Popen(
        [*command, "--timeout-seconds", "600"],
        env={**marks(tmp_path), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (tmp_path / "begun").exists() or process.poll() is not None, LIMIT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, errors) == (130, "planish: interrupted; the same command resumes\n")
    wait_until_none(tmp_path, LIMIT)


SUPERVISOR = """
import sys
from planish.run import again
again.PAUSE_SECONDS = float(sys.argv[1])
sys.exit(again.main(sys.argv[2:]))
"""

PROGRAM = """
import os, signal, subprocess, sys, time
attempts = open(sys.argv[1], "a")
print(os.environ["KFP_RETRY_INDEX"], file=attempts, flush=True)
is_first = open(sys.argv[1]).read().count("\\n") == 1
subprocess.Popen(["sleep", "600"], start_new_session=True)
match sys.argv[2]:
    case "killed once" if is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    case "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("ready", file=attempts, flush=True)
        time.sleep(600)
    case code if code.isdecimal():
        sys.exit(int(code))
"""


def begin(
    tmp_path: Path, what: str, pause_seconds: float = 0.0, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "attempts"), what]
    words = [sys.executable, "-c", SUPERVISOR, str(pause_seconds), *command]
    return subprocess.Popen(words, env={**marks(tmp_path), "KFP_RETRY_INDEX": "1"}, stderr=stderr)


@pytest.mark.parametrize(
    ("what", "attempts", "code"),
    [("killed once", "23", 0), ("0", "2", 0), ("1", "23", 1), ("75", "23", 75), ("2", "2", 2)],
)
def test_what_failed_is_run_once_more_and_a_fault_of_the_settings_is_not(
    tmp_path: Path, what: str, attempts: str, code: int
) -> None:
    assert begin(tmp_path, what).wait(timeout=60) == code
    # Each attempt has a number, and so a log, of its own.
    assert (tmp_path / "attempts").read_text().split() == [*attempts]
    # Nor does an attempt leave anything behind for the next one, such as a rank on its GPU.
    wait_until_none(tmp_path, seconds=60)


def test_a_program_that_is_asked_to_end_is_not_run_again(tmp_path: Path) -> None:
    process = begin(tmp_path, "waits")
    told, end = tmp_path / "attempts", time.monotonic() + 60
    while not told.exists() or "ready" not in told.read_text():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert told.read_text().split() == ["2", "ready"]


def test_a_pod_that_is_asked_to_end_between_attempts_does(tmp_path: Path) -> None:
    process = begin(tmp_path, "1", pause_seconds=600.0, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline() == b"exit code 1: once more in this pod, as attempt 3\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 1
    process.stderr.close()
    assert (tmp_path / "attempts").read_text().split() == ["2"]


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_every_stage_of_the_table_can_be_called(stage):
    assert callable(stage_run(stage))


def test_the_help_of_a_stage_names_the_command_that_was_typed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["reward", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m planish.run reward [-h] --root ROOT")
    assert "--num-shards" in text


def test_the_help_without_a_stage_lists_the_stages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m planish.run [-h] STAGE ...")
    assert all(stage in text for stage in STAGES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rewards"], "a stage must be one of prepare, curate, sft, .*, got 'rewards'; did you"),
        ([], "the following arguments are required: STAGE"),
        (["reward"], "the following arguments are required: --root"),
        (["reward", "--root", "file:///r", "--number", "one"], "invalid int value: 'one'"),
    ],
)
def test_a_wrong_command_ends_with_2_and_says_what_is_wrong(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.search(words, capsys.readouterr().err)
