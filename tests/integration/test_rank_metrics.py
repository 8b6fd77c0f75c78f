"""Metrics of ranks through a real Prometheus to the monitor, which names the slow one."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from planish.base import telemetry
from planish.minder.service.build import run_once
from planish.minder.service.config import service_settings
from planish.stages.rollout.progress import SamplingProgress
from tests.integration.minder_service import raw_settings

pytestmark = pytest.mark.server

SETTINGS = Path(__file__).parents[2] / "monitoring" / "minder-ranks.toml"
T0, SECONDS, ONSET = 1_700_000_000, 900, 400
NUM_ATTENTION, NUM_EXPERT = 2, 6
RANKS = [str(NUM_ATTENTION + number) for number in range(NUM_EXPERT)]
SERIES = "planish_rollout_rank_busy_seconds_total"


def shown(slow: str | None, rng: np.random.Generator):
    """Yield what a shard shows each second, as OpenMetrics.

    Attention ranks compute almost always, expert ranks four tenths of a second with some jitter;
    the slow one needs half as long again from `ONSET` on.
    """
    telemetry.forget(SERIES)
    progress, lines = SamplingProgress(64), {}
    busy = np.zeros(NUM_ATTENTION + NUM_EXPERT)
    for second in range(SECONDS):
        for rank in range(len(busy)):
            share = 0.95 if rank < NUM_ATTENTION else 0.4
            if str(rank) == slow and second >= ONSET:
                share *= 1.5
            busy[rank] += share + rng.normal(0.0, 0.01)
        ranks = [
            {
                "rank": rank,
                "role": "attention" if rank < NUM_ATTENTION else "expert",
                "busy_s": float(spent),
                "wait_s": 0.0,
                "rows": 8 * second,
                "queue": 0,
            }
            for rank, spent in enumerate(busy)
        ]
        progress.show_ranks({"step_seconds": second + 1.0, "ranks": ranks})
        for line in telemetry.metrics_text().splitlines():
            if line.startswith(SERIES + "{"):
                lines.setdefault(line.rpartition(" ")[0], []).append(f"{line} {T0 + second}")
    yield f"# TYPE {SERIES.removesuffix('_total')} counter"
    for series in lines.values():
        yield from series


def settings(folder, url):
    """Return those of the repository, for six expert ranks on this server."""
    given = tomllib.loads(SETTINGS.read_text("utf-8"))
    base = raw_settings(folder, url, RANKS)
    given["prometheus"] = base["prometheus"]
    given["models"] = base["models"]
    given["jobs"] = [{**given["jobs"][0], "machines": RANKS}]
    return service_settings(given)


@pytest.mark.parametrize("slow", ["4", None])
def test_a_slow_expert_rank_stands_out_and_busy_attention_is_no_peer_of_it(
    prometheus, tmp_path, slow
):
    prometheus.backfill(shown(slow, np.random.default_rng(0)))
    prometheus.start()
    result = run_once(settings(tmp_path, prometheus.url), "expert-ranks", end=T0 + SECONDS)
    if slow is None:
        assert (result.status, result.findings) == ("ok", ())
        return
    (finding,) = result.findings
    assert (result.status, finding.machine, finding.metric) == ("fault", slow, "cpu_usage")
    assert abs(finding.run_start - (T0 + ONSET)) <= 12
