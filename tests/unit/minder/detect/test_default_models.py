"""The models that come with the package: complete, small, honest about themselves."""

import csv

import numpy as np
import pytest

from planish.minder.detect.config import minder_config
from planish.minder.detect.metrics_table import METRICS, PUBLISHED_ORDER
from planish.minder.detect.model_files import GATE, default_models, load_models, read_facts
from planish.minder.lab.files import read_frame
from planish.minder.lab.replay import replay

FOLDER = default_models()
MODELS = sorted(place.parent.name for place in FOLDER.glob("*/meta.json"))


def test_every_metric_that_detects_has_a_good_model_and_all_are_small():
    assert set(MODELS) == set(PUBLISHED_ORDER) < set(METRICS)
    assert {read_facts(FOLDER, name).quality for name in PUBLISHED_ORDER} == {"good"}
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 1 << 20


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_failed_its_gate_gives_way_to_principal_components(name):
    facts = read_facts(FOLDER, name)
    passed = facts.mse_held_out <= GATE * facts.variance_held_out
    for profile, fallen in (("default", "pca"), ("paper", "vae")):
        models = load_models(FOLDER, minder_config({"profile": profile}).denoise, (name,))
        assert models.denoisers[name].name == ("vae" if passed else fallen)
    assert facts.n_windows >= 50_000


def write_trace(path, *, odd, metrics=("cpu_usage", "gpu_power_draw"), seconds=1300):
    """Another generator: square waves, no noise but rounding, one late machine, odd start."""
    start, rng = 1_655_555_555.25, np.random.default_rng(5)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["value", "metric", "machine", "ts"])
        for machine in range(7):
            for second in range(0 if machine < 6 else 240, seconds):
                up = second % 12 < 8
                levels = {"cpu_usage": 25 if up else 17, "gpu_power_draw": 290 if up else 180}
                if odd and machine == 4 and second >= 700:
                    levels = {"cpu_usage": 9, "gpu_power_draw": 61}
                for name in metrics:
                    value = round(levels[name] + rng.uniform(-2, 2))
                    rows.writerow([value, name, f"gpu{machine}.example", start + second])


@pytest.mark.parametrize("odd", [False, True])
def test_traces_of_another_make_with_two_metrics_are_judged_rightly(tmp_path, odd):
    write_trace(tmp_path / "other.csv", odd=odd)
    frame = read_frame(tmp_path / "other.csv")
    config = minder_config()
    models = load_models(FOLDER, config.denoise, config.detect.metrics)
    alerts = [alert for call in replay(frame, models, config) for alert in call.alarms]
    assert [alert.machine for alert in alerts] == ["gpu4.example"] * odd
    for alert in alerts:
        assert 700 + 240 < alert.time - frame.ts[0] <= 700 + 310
