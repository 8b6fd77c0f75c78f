"""Pulling from a real Prometheus: samples of the past, and a fleet that is scraped now."""

import json
import math
import time

import numpy as np
import pytest

from planish.__main__ import main
from planish.base.errors import BackendUnavailable, ConfigError
from planish.minder.detect.metrics_table import METRICS, PUBLISHED_ORDER
from planish.minder.lab.cases import read_case
from planish.minder.service.build import run_once
from planish.minder.service.config import service_settings
from planish.minder.service.http import Deadline
from planish.minder.service.prometheus import Prometheus, PrometheusConfig, queries_of
from planish.minder.service.pull import Puller
from tests.integration.minder_service import raw_settings, write_toml

pytestmark = pytest.mark.server

T0 = 1_700_000_000
SECONDS = 900
LOST = 600
COLUMNS = {"cpu_usage", "gpu_duty_cycle", "gpu_duty_cycle_worst", "gpu_count"}
PHASES = [
    *(("node-0", 0, "sampling", 100, 200), ("node-0", 1, "waiting", 100, 200)),
    *(("node-0", 0, "waiting", 600, 700), ("node-0", 1, "waiting", 600, 700)),
    ("node-1", 0, "waiting", 300, 500),
    ("node-2", 0, "training", 300, 500),
]
BOARD = "NVIDIA H100 80GB HBM3"
MACHINES = tuple(f"node-{i}" for i in range(6))


def past(machines=MACHINES, *, faulty="node-2", onset=400, seconds=SECONDS, phases=()):
    """Yield what the exporters of some machines gave, in the form of OpenMetrics."""
    ts = range(T0, T0 + seconds)
    yield "# TYPE node_cpu_seconds counter"
    for name in machines:
        idle = 5000.0
        for t in ts:
            load = 0.25 + 0.05 * math.sin(t / 4) - (0.2 * (name == faulty and t >= T0 + onset))
            idle += 1 - load
            # The exporter of one machine starts again, and counts from 0.
            if name == "node-4" and t == T0 + 500:
                idle = 0.0
            yield f'node_cpu_seconds_total{{cpu="0",mode="idle",node="{name}"}} {idle:.5f} {t}'
    yield "# TYPE DCGM_FI_DEV_GPU_UTIL gauge"
    for name in machines:
        for gpu in range(2):
            for t in ts:
                # One exporter dies for good without a word.
                if name == "node-5" and t >= T0 + 700:
                    continue
                if (name, gpu) == ("node-0", 1) and t >= T0 + LOST:
                    continue
                value = "NaN" if name == "node-3" and t % 100 == 0 else f"{90 + gpu}"
                labels = f'node="{name}",Hostname="exporter",gpu="{gpu}",modelName="{BOARD}"'
                yield f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {value} {t}"
    yield "# TYPE planish_rank_phase gauge"
    for name, rank, phase, start, stop in phases:
        for t in range(T0 + start, T0 + stop, 5):
            yield f'planish_rank_phase{{node="{name}",phase="{phase}",rank="{rank}"}} 1 {t}'


@pytest.fixture
def filled(prometheus):
    prometheus.backfill(past())
    prometheus.start()
    return prometheus


def pulled(server, names=("cpu_usage", "gpu_duty_cycle"), **config):
    prometheus = Prometheus(PrometheusConfig(url=server.url, **config))
    one = Puller(prometheus, {name: METRICS[name] for name in names}, "job")
    return one, one.pull(MACHINES, SECONDS, Deadline.after(60), end=T0 + SECONDS)


def test_a_frame_of_the_past_has_every_second_without_spikes_or_stale_values(filled):
    one, frame = pulled(filled)
    assert (frame.machines, frame.num_seconds, int(frame.ts[0])) == (MACHINES, SECONDS, T0)
    cpu, gpu = frame.values["cpu_usage"], frame.values["gpu_duty_cycle"]
    # A rate needs a range full of samples, and none in which the counter starts anew.
    unknown = np.isnan(cpu).sum(axis=0)
    assert set(unknown[[0, 1, 2, 3, 5]]) == {4}
    assert unknown[4] == 4 + 5
    assert 0 <= np.nanmin(cpu) < 2
    assert 28 < np.nanmax(cpu) < 31
    # The mean over two GPUs, and never the value that Prometheus repeats for five minutes.
    np.testing.assert_allclose(np.nanmax(gpu, axis=0), 90.5)
    assert np.isnan(gpu[:, 5]).sum() == SECONDS - 700 - 5
    assert np.isnan(gpu[:, 3]).sum() == SECONDS // 100
    assert one.intervals == {"cpu_usage": 1.0, "gpu_duty_cycle": 1.0}


def test_pieces_of_a_long_range_give_what_one_answer_gives(filled):
    _, whole = pulled(filled)
    _, pieces = pulled(filled, max_samples=800)
    for name in whole.values:
        np.testing.assert_array_equal(whole.values[name], pieces.values[name])


def test_a_server_that_takes_less_than_we_ask_for_gives_the_same_in_halves(filled):
    _, whole = pulled(filled)
    filled.stop()
    filled.flags = ("--query.max-samples=2000",)
    filled.start()
    one, halves = pulled(filled)
    assert one._prometheus._max_samples < 10_000
    for name in whole.values:
        np.testing.assert_array_equal(whole.values[name], halves.values[name])


def test_beside_the_mean_come_the_worst_gpu_and_how_many_there_are(filled):
    _, frame = pulled(filled)
    known = np.isfinite(frame.values["gpu_duty_cycle"])
    assert set(frame.values) == COLUMNS
    assert set(frame.values["gpu_duty_cycle_worst"][known].tolist()) == {90.0}
    count = frame.values["gpu_count"]
    # A board of the first machine is gone without a word, as the exporter of the last one later.
    is_lost = frame.ts >= T0 + LOST + 6
    assert set(count[is_lost, 0].tolist()) == {1.0}
    assert set(count[frame.ts < T0 + LOST, 0].tolist()) == {2.0}
    assert set(count[:, 1:5][np.isfinite(count[:, 1:5])].tolist()) == {2.0}


def test_a_machine_waits_while_all_of_its_ranks_say_so(prometheus):
    prometheus.backfill(past(phases=PHASES))
    prometheus.start()
    one, frame = pulled(prometheus)
    waiting = one.waiting(frame, Deadline.after(60))
    # Without another sample Prometheus repeats the last one for five minutes.
    assert waiting["node-0"] == [(T0 + 600, T0 + 900)]
    assert waiting["node-1"] == [(T0 + 300, T0 + 796)]
    assert set(waiting) == {"node-0", "node-1"}


def test_a_single_call_names_the_machine(filled, tmp_path, capsys):
    sections = {
        "detect": {"metrics": ["cpu_usage", "gpu_duty_cycle"], "role_baseline": False},
        "service": {"window_seconds": SECONDS},
        # Their GPUs show one and the same value.
        "preprocess": {"silent_after_seconds": 60, "frozen_after_seconds": 0},
    }
    raw = raw_settings(tmp_path, filled.url, MACHINES, **sections)
    raw["detect"].pop("continuity_seconds", None)
    result = run_once(service_settings(raw), "job", end=T0 + SECONDS)
    finding, lost = result.findings
    assert (result.status, finding.machine, finding.metric) == ("fault", "node-2", "cpu_usage")
    assert (lost.machine, lost.metric) == ("node-0", "gpu_count")
    assert abs(finding.run_start - (T0 + 400)) <= 12
    assert result.silent == ()
    with pytest.raises(ConfigError, match="`--job`"):
        run_once(service_settings(raw), "another", end=T0 + SECONDS)
    config = str(write_toml(tmp_path / "minder.toml", raw))
    arguments = ["minder", "run-once", "--config", config, "--job", "job", "--end"]
    assert main([*arguments, str(T0 + SECONDS)]) == 2
    assert json.loads(capsys.readouterr().out)["findings"][0]["machine"] == "node-2"
    assert main([*arguments, str(T0 + 300)]) == 0


def test_a_recording_is_what_the_calls_saw_and_can_be_replayed(filled, tmp_path, capsys):
    sections = {"detect": {"metrics": ["cpu_usage", "gpu_duty_cycle", "memory_usage"]}}
    raw = raw_settings(tmp_path, filled.url, MACHINES, **sections)
    raw["service"] = {"window_seconds": 300}
    config, out = str(write_toml(tmp_path / "minder.toml", raw)), tmp_path / "traces" / "a.npz"
    arguments = ["minder", "record", "--config", config, "--job", "job", "--out", str(out)]
    ends = ["--hours", "0.25", "--end", str(T0 + SECONDS)]
    assert main([*arguments, *ends]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["machines"], told["seconds"], told["board"]) == (6, 900, BOARD)
    assert set(told["measured"]) == COLUMNS
    case = read_case(out)
    assert (case.board, case.truth.faulty, case.frame.num_seconds) == (BOARD, False, SECONDS)
    _, whole = pulled(filled)
    for name, values in whole.values.items():
        np.testing.assert_array_equal(case.frame.values[name], values)
    facts = json.loads(out.with_suffix(".json").read_text())
    facts["truth"] |= {"machines": ["node-2"], "kind": "other", "onset": T0 + 400}
    out.with_suffix(".json").write_text(json.dumps(facts))
    settings = str(write_toml(tmp_path / "windows.toml", {"denoise": {"denoiser": "none"}}))
    assert main(["minder", "evaluate", "--traces", str(out.parent), "--config", settings]) == 0
    assert "| minder | 1.000" in capsys.readouterr().out
    assert main([*arguments, "--end", str(T0 - 5000)]) == 3
    assert "got none of" in capsys.readouterr().err
    assert main([*arguments, "--hours", "0"]) == 3
    assert "--hours" in capsys.readouterr().err


def test_prometheus_parses_every_default_query(prometheus):
    prometheus.start()
    client = Prometheus(PrometheusConfig(url=prometheus.url))
    deadline = Deadline.after(30)
    for name in METRICS:
        queries = queries_of(METRICS[name], ["n1", "n2.x"], ("job", "instance"), 5)
        for query in (queries.values, queries.seen, queries.resets):
            if query:
                client.check(query, name, deadline)
    with pytest.raises(ConfigError, match=r"metrics.x.promql"):
        client.check("sum(", "metrics.x.promql", deadline)
    assert set(PUBLISHED_ORDER) < set(METRICS)
    assert abs(client.now(deadline) - time.time()) < 5


FLEET = tuple(f"big-{i}" for i in range(400))
CPUS = 192
COARSE = 20
"""Seconds between samples: each second of a rate counts, however few samples it rests on."""


def wide():
    """Yield what 400 machines of 192 CPUs gave; what one metric reads is 69 million values."""
    yield "# TYPE node_cpu_seconds counter"
    for name in FLEET:
        for cpu in range(CPUS):
            labels = f'cpu="{cpu}",mode="idle",node="{name}"'
            for t in range(0, SECONDS + 5 * COARSE, COARSE):
                yield f"node_cpu_seconds_total{{{labels}}} {t * 0.75} {T0 + t}"


@pytest.mark.full
def test_400_machines_of_192_cpus_are_pulled_under_the_limit_of_a_stock_server(prometheus):
    prometheus.backfill(wide())
    prometheus.start()
    client = Prometheus(PrometheusConfig(url=prometheus.url, timeout_seconds=300.0))
    deadline, metrics = Deadline.after(600), {"cpu_usage": METRICS["cpu_usage"]}
    whole = queries_of(METRICS["cpu_usage"], FLEET, (), 4 * COARSE).values
    with pytest.raises(BackendUnavailable, match="too many samples"):
        client.query_range(whole, T0, T0 + SECONDS, deadline)
    frame = Puller(client, metrics, "job").pull(FLEET, 700, deadline, end=T0 + SECONDS)
    assert np.isfinite(frame.values["cpu_usage"]).all()
    np.testing.assert_allclose(frame.values["cpu_usage"], 25.0, rtol=1e-4)
    # Nothing was refused on the way.
    assert client._max_samples == client.config.max_samples
