"""The command line on files: lines, exit codes, wrong arguments."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from planish.__main__ import main
from planish.base.errors import ConfigError, RecordError
from planish.minder.detect.config import minder_config
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.result import Result
from planish.minder.lab.cases import (
    Case,
    Truth,
    facts_of,
    facts_path,
    read_case,
    trace_files,
    write_recorded,
)
from planish.minder.lab.files import write_frame, write_samples
from planish.minder.service.config import load_service_config
from tests.minder_lab.simulator import simulate


def run(capsys, *arguments):
    """Return exit code, and what was printed."""
    code = main(["minder", *map(str, arguments)])
    return code, capsys.readouterr()


def simulated(path, seed=0, **options):
    """Write a simulated job and return its truth."""
    case = simulate(seed, **options)
    write_frame(path, case.frame)
    return case.truth


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


BOARD = "NVIDIA H100 80GB HBM3"
RAW = '[denoise]\ndenoiser = "none"\n'


def other_board(case):
    """Return a case as machines with larger limits would report it."""
    values = {
        name: array * np.float32(2.1 if METRICS[name].limits is None else 1.0)
        for name, array in case.frame.values.items()
    }
    return replace(case, frame=replace(case.frame, values=values, mask={}), board=BOARD)


def recorded(folder, seed, fault=None, *, machines=6, minutes=20):
    """Write a simulated case of another board as `record` would, with its label."""
    case = other_board(simulate(seed, machines=machines, minutes=minutes, fault=fault))
    path = folder / f"{seed}.npz"
    write_frame(path, case.frame)
    facts_path(path).write_text(json.dumps(facts_of(case)), "utf-8")
    return path


def test_facts_of_a_trace_are_read_from_the_file_beside_it(tmp_path):
    path = recorded(tmp_path, 4_400_000, "nic-dropout")
    case, same = read_case(path), simulate(4_400_000, machines=6, minutes=20, fault="nic-dropout")
    assert (case.truth, dict(case.stages), case.board) == (same.truth, dict(same.stages), BOARD)
    facts_path(path).unlink()
    assert (read_case(path).truth, read_case(path).board) == (Truth(), "")
    assert trace_files([tmp_path]) == trace_files([path]) == [path]


def test_a_fault_is_labelled_by_hand_in_the_file_that_a_recording_leaves(tmp_path):
    frame = simulate(4_400_001, machines=4, minutes=20).frame
    path = tmp_path / "a.npz"
    waiting = {"node-001": [(int(frame.ts[5]), int(frame.ts[9]))]}
    write_recorded(path, Case(frame, Truth(), board=BOARD, waiting=waiting))
    assert not read_case(path).truth.faulty
    assert read_case(path).waiting == waiting
    facts = json.loads(facts_path(path).read_text("utf-8"))
    onset = int(frame.ts[0]) + 400
    facts["truth"] |= {"machines": ["node-002"], "kind": "ecc-error", "onset": onset}
    facts_path(path).write_text(json.dumps(facts), "utf-8")
    truth = read_case(path).truth
    assert (truth.machines, truth.onset, truth.halt) == (("node-002",), onset, frame.ts[-1] + 1)
    assert truth.detectable
    facts["truth"]["machines"] = ["node-009"]
    facts_path(path).write_text(json.dumps(facts), "utf-8")
    with pytest.raises(RecordError, match=r"node-009.*machines are"):
        read_case(path)


@pytest.mark.slow
def test_a_site_with_other_boards_fits_its_limits_and_scores_its_own_traces(tmp_path, capsys):
    healthy, labelled = tmp_path / "healthy", tmp_path / "labelled"
    for seed in range(4_500_000, 4_500_003):
        recorded(healthy, seed)
    path = recorded(labelled, 4_500_009, "nic-dropout")
    out, figures = tmp_path / "site.toml", tmp_path / "figures.json"
    code, shown = run(capsys, "calibrate", "--traces", healthy, labelled, "--out", out)
    assert code == 0, shown.err
    assert "10 labelled faults are needed, got 1" in shown.out
    tables = tomllib.loads(out.read_text("utf-8"))
    assert set(tables) == {"boards", "detect"}
    assert 0.05 < tables["detect"]["role_limits"]["gpu_power_draw"] < 0.2
    low, high = tables["boards"][BOARD]["gpu_power_draw"]
    assert low == 0.0
    assert 2.1 * 200 < high < 2.1 * 400
    raw = tmp_path / "raw.toml"
    raw.write_text(out.read_text("utf-8") + RAW, "utf-8")
    options = ("--config", raw, "--json", figures)
    code, shown = run(capsys, "evaluate", "--traces", labelled, *options)
    assert code == 0, shown.err
    assert "| nic-dropout | 1 | 1 (1) | 1.000" in shown.out
    assert json.loads(figures.read_text("utf-8"))["first"]["f1"]["value"] == 1.0
    code, shown = run(capsys, "run-once", "--from-file", path, "--config", out)
    result = json.loads(shown.out)
    assert result["clipped"]["gpu_power_draw"] < 0.05
    told = "gpu_power_draw lies outside its limits"
    one = trace_files([healthy])[0]
    assert told in run(capsys, "replay", "--from-file", one)[1].err
    assert told not in run(capsys, "replay", "--from-file", one, "--config", out)[1].err
    code, shown = run(capsys, "calibrate", "--traces", labelled)
    assert code == 3
    assert "healthy job" in shown.err


@pytest.mark.long
def test_ten_labelled_faults_are_enough_for_thresholds_of_the_site(tmp_path, capsys):
    for number in range(11):
        fault = "nic-dropout" if number else None
        recorded(tmp_path / "traces", 4_600_000 + number, fault, machines=4, minutes=12)
    out = tmp_path / "site.toml"
    (tmp_path / "raw.toml").write_text(RAW, "utf-8")
    options = ("--traces", tmp_path / "traces", "--config", tmp_path / "raw.toml", "--out", out)
    code, shown = run(capsys, "calibrate", *options)
    assert code == 0, shown.err
    tables = tomllib.loads(out.read_text("utf-8"))
    assert set(tables) == {"boards", "detect"}
    assert set(tables["detect"]) == {"theta", "kappa", "floors", "role_limits", "metrics"}
    settings, usual = minder_config(tables), minder_config({}).detect.metrics
    assert sorted(settings.detect.metrics) == sorted(usual)
    assert f"# |--- {settings.detect.metrics[0]} <= " in out.read_text("utf-8")
    assert settings.detect.floors == tables["detect"]["floors"]
    assert settings.site_limits("gpu_power_draw", BOARD) is not None


def test_what_was_fitted_counts_from_the_next_command_on_and_own_settings_win(tmp_path, capsys):
    recorded(tmp_path / "traces", 4_700_000, machines=4, minutes=4)
    settings = tmp_path / "minder.toml"
    settings.write_text('[prometheus]\nurl = "http://p:9090"\n[detect]\ntheta = 1.7\n', "utf-8")
    options = ("--traces", tmp_path / "traces", "--config", settings)
    assert run(capsys, "calibrate", *options)[0] == 0
    assert (tmp_path / "site.toml").is_file()
    found = load_service_config(settings)
    fitted = tomllib.loads((tmp_path / "site.toml").read_text("utf-8"))
    assert found.site_limits("gpu_power_draw", BOARD) == tuple(
        fitted["boards"][BOARD]["gpu_power_draw"]
    )
    assert found.detect.role_limits == fitted["detect"]["role_limits"]
    assert found.detect.theta == 1.7
    text = settings.read_text("utf-8")
    settings.write_text(f'{text}[boards."{BOARD}"]\ngpu_power_draw = [0, 1]\n', "utf-8")
    assert load_service_config(settings).site_limits("gpu_power_draw", BOARD) == (0, 1)
    (tmp_path / "site.toml").write_text("[act]\nmode = 'evict'\n", "utf-8")
    with pytest.raises(ConfigError, match=r"site.toml.*got \['act'\]"):
        load_service_config(settings)


def test_limits_that_can_not_be_are_refused(tmp_path, capsys):
    settings = tmp_path / "minder.toml"
    for text, told in (
        ("[limits]\ngpu_power_drow = [0, 1]\n", "did you mean `gpu_power_draw`"),
        ("[limits]\ngpu_power_draw = [7, 1]\n", "the lower one first"),
        ('[boards.H100]\ngpu_power_draw = ["a", 1]\n', "boards.H100.gpu_power_draw"),
    ):
        settings.write_text(text, "utf-8")
        code, shown = run(capsys, "calibrate", "--config", settings, "--traces", tmp_path)
        assert code == 3
        assert told in shown.err
