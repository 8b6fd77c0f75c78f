"""The command line on files: lines, exit codes, wrong arguments."""

import json

import numpy as np
import pytest

from planish.__main__ import main
from planish.minder.detect.result import Result
from planish.minder.lab.files import write_frame, write_samples
from tests.minder_lab.simulator import simulate
from tests.unit.minder.cli.command import run, simulated


@pytest.mark.slow
def test_a_simulated_fault_is_found_by_replay_and_run_once(tmp_path, capsys):
    trace = tmp_path / "job.npz"
    truth = simulated(trace, 12, machines=8, minutes=25, fault="nic-dropout")
    assert truth.detectable
    code, shown = run(capsys, "replay", "--from-file", trace)
    *alerts, last = map(json.loads, shown.out.splitlines())
    assert code == 2
    assert [alert["machine"] for alert in alerts] == list(truth.machines)
    assert set(alerts[0]) == {"machine", "time", "kind", "metric"}
    assert truth.onset < alerts[0]["time"] <= truth.halt + 480
    assert set(last) == {"calls", "seconds_per_call", "seconds_max"}
    assert last["calls"] == 25
    code, shown = run(capsys, "run-once", "--from-file", trace, "--end", alerts[0]["time"] + 60)
    assert code == 2
    result = json.loads(shown.out)
    assert [one["machine"] for one in result["findings"]] == list(truth.machines)
    assert set(result) == set(Result.__dataclass_fields__)


def test_a_healthy_trace_is_clean(tmp_path, capsys):
    trace = tmp_path / "job.csv"
    write_samples(trace, simulate(0, machines=5, minutes=6, keep_samples=True).samples)
    code, shown = run(capsys, "run-once", "--from-file", trace, "--job", "mine")
    assert code == 0
    assert json.loads(shown.out)["job"] == "mine"


def test_a_trace_of_which_nothing_can_be_judged_is_bad_input_and_says_what_was_skipped(
    tmp_path, capsys
):
    trace = tmp_path / "job.csv"
    frame = simulate(1, machines=5, minutes=4).frame
    for mask in frame.mask.values():
        mask[:, 1:] &= np.arange(frame.num_seconds)[:, None] < 5
    write_frame(trace, frame)
    for verb in ("replay", "run-once"):
        code, shown = run(capsys, verb, "--from-file", trace)
        assert code == 3
        assert "gpu_power_draw was not judged in" in shown.err
        assert "nothing could be judged" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run-once", "--from-file", "{t}/none.npz"], "no file"),
        (["replay", "--from-file", "{t}/bad.csv"], "columns"),
        (["replay", "--from-file", "{t}/job.npz", "--metrics", "cpu"], "cpu"),
        (["run-once", "--from-file", "{t}/job.npz", "--models", "{t}"], "limits.json"),
        (["run-once", "--from-file", "{t}/job.npz", "--config", "{t}/bad.csv"], "TOML"),
        (["run-once", "--from-file", "{t}/job.npz", "--config", "{t}/c.toml"], "continuity_secs"),
        (["run-once", "--from-file", "{t}/job.npz", "--end", "5"], "--end"),
        (["evaluate", "--traces", "{t}/job.npz", "--workers", "0"], "--workers"),
        (["evaluate", "--traces", "{t}/job.npz", "--metrics", "cpu_usag"], "cpu_usage"),
        (["calibrate", "--traces", "{t}", "--config", "{t}/none.toml"], "TOML"),
        (["calibrate", "--traces", "{t}/none"], "must be a file"),
    ],
)
def test_bad_input_is_one_line_and_code_3(tmp_path, capsys, arguments, message):
    (tmp_path / "bad.csv").write_text("a,b\n")
    (tmp_path / "c.toml").write_text("[detect]\ncontinuity_secs = 3\n")
    simulated(tmp_path / "job.npz", machines=4, minutes=2)
    code, shown = run(capsys, *(text.format(t=tmp_path) for text in arguments))
    assert code == 3
    (line,) = shown.err.strip().splitlines()
    assert message in line


def test_the_password_of_an_address_is_not_printed(tmp_path, capsys):
    (tmp_path / "c.toml").write_text('server_url = "http://me:geheim@host:9090"\n')
    code, shown = run(capsys, "validate-config", "--config", tmp_path / "c.toml")
    assert code == 3
    assert "got 'http://***@host:9090'" in shown.err


def test_wrong_arguments_are_bad_input_not_a_fault(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["minder", "run-once", "--end", "soon"])
    assert ended.value.code == 3
    assert "usage: planish minder run-once" in capsys.readouterr().err
    code, shown = run(capsys, "replay", "--from-file", "x.csv", "--bogus")
    assert (code, "--bogus" in shown.err) == (3, True)


@pytest.mark.long
def test_train_writes_models_that_replay_takes(tmp_path, capsys):
    metrics = ("--metrics", "cpu_usage,gpu_duty_cycle")
    traces = [tmp_path / f"{seed}.npz" for seed in range(1_000_000, 1_000_003)]
    for path in traces:
        simulated(path, int(path.stem))
    code, shown = run(
        capsys, "train", tmp_path / "m", "--from-file", *traces, "--seconds", 0.1, *metrics
    )
    facts = [json.loads(line) for line in shown.out.splitlines()]
    assert code == 0
    assert [one["metric"] for one in facts] == ["cpu_usage", "gpu_duty_cycle"]
    assert all(one["n_windows"] > 10_000 for one in facts)
    simulated(tmp_path / "job.npz", machines=4, minutes=5)
    code, _ = run(
        capsys, "replay", "--from-file", tmp_path / "job.npz", "--models", tmp_path / "m", *metrics
    )
    assert code == 0
