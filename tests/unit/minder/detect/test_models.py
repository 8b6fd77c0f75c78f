"""Models on disk: what is read equals what was trained, and a strange folder is refused."""

import csv
import dataclasses
import json

import numpy as np
import pytest

from planish.base.errors import ConfigError
from planish.minder.detect.config import minder_config
from planish.minder.detect.frame import Frame
from planish.minder.detect.metrics_table import METRICS, PUBLISHED_ORDER
from planish.minder.detect.model_files import GATE, default_models, load_models, read_facts
from planish.minder.lab.cases import Case, Truth
from planish.minder.lab.files import read_frame
from planish.minder.lab.replay import replay
from planish.minder.lab.train import split_by_job, train_models
from planish.minder.lab.vae import Training

TRAINING = Training(max_epochs=16, batch_size=64, learning_rate=2e-2, starts=1, seed=3)
CONFIG = minder_config({"detect": {"metrics": ["cpu_usage", "gpu_power_draw"]}})


def frames():
    found = []
    for job in range(5):
        rng = np.random.default_rng(job)
        wave = np.sin(np.arange(120)[:, None] / (3 + job) + rng.random((1, 4)))
        cpu = 50 + 20 * wave + rng.normal(0, 0.3, (120, 4))
        power = 250 + 40 * wave + rng.normal(0, 1, (120, 4))
        names = tuple(f"n{i}" for i in range(4))
        values = {"cpu_usage": cpu.astype("f4"), "gpu_power_draw": power.astype("f4")}
        found.append(Frame(f"job-{job}", np.arange(120), names, values))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder, train_models(frames(), folder, CONFIG, TRAINING)


def test_a_job_is_never_on_both_sides():
    train, held_out = split_by_job(frames() + frames(), 0)
    assert len({f.job for f in train}) == 4
    assert not {f.job for f in train} & {f.job for f in held_out}
    with pytest.raises(ConfigError, match="at least two jobs"):
        split_by_job(frames()[:1], 0)


@pytest.mark.long
def test_training_again_gives_the_same_models(models, tmp_path):
    folder, facts = models
    one = minder_config({"detect": {"metrics": ["cpu_usage"]}})
    again = train_models(frames(), tmp_path, one, TRAINING)
    assert again["cpu_usage"] == facts["cpu_usage"]
    files = [f / "cpu_usage" / "model.safetensors" for f in (folder, tmp_path)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_a_model_explains_most_of_a_smooth_metric(models):
    _, facts = models
    assert facts["cpu_usage"].quality == "good"
    assert facts["cpu_usage"].mse_held_out < 0.3 * facts["cpu_usage"].variance_held_out
    # Limits are the quantiles of what was seen, and a rate keeps its zero.
    assert facts["gpu_power_draw"].limits[0] == 0.0
    assert facts["gpu_power_draw"].limits[1] == pytest.approx(291.5, abs=4.0)


@pytest.mark.slow
def test_what_is_read_denoises_as_what_was_trained(models):
    folder, facts = models
    found = load_models(folder, CONFIG.denoise, CONFIG.detect.metrics)
    windows = np.random.default_rng(0).random((50, 8), dtype=np.float32)
    one = found.denoisers["cpu_usage"]
    assert (one.name, one.version) == ("vae", facts["cpu_usage"].model_id)
    assert one.embed(windows).shape == (50, 8)
    assert np.array_equal(one.embed(windows), one.embed(windows))


@pytest.mark.slow
def test_a_degraded_model_falls_back_to_components_unless_as_published(models):
    folder, _ = models
    place = folder / "cpu_usage" / "meta.json"
    text = place.read_text("utf-8")
    try:
        place.write_text(json.dumps({**json.loads(text), "mse_held_out": 9.0}), "utf-8")
        for profile, expected in (("default", "pca"), ("paper", "vae")):
            denoise = minder_config({"profile": profile}).denoise
            one = load_models(folder, denoise, ("cpu_usage",)).denoisers["cpu_usage"]
            assert (one.name, one.quality) == (expected, "degraded")
    finally:
        place.write_text(text, "utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 9}, "must be of"),
        ({"metric": "disk_usage"}, "must be of"),
        ({"schema": "minder-model/2"}, "must be of"),
        ({"hidden": 10**9}, "sizes of 1 to 1,024"),
        ({"hidden": 5}, "must hold the weights"),
        ({"more": 1}, "must have the keys"),
    ],
)
def test_facts_of_another_model_are_refused(models, change, message):
    folder, _ = models
    place = folder / "cpu_usage" / "meta.json"
    text = place.read_text("utf-8")
    try:
        place.write_text(json.dumps({**json.loads(text), **change}), "utf-8")
        with pytest.raises(ConfigError, match=message):
            load_models(folder, CONFIG.denoise, ("cpu_usage",))
    finally:
        place.write_text(text, "utf-8")


@pytest.mark.slow
def test_missing_and_broken_files_are_named(models, tmp_path):
    folder, facts = models
    with pytest.raises(ConfigError, match=r"limits\.json` must be there"):
        load_models(tmp_path, CONFIG.denoise, ("cpu_usage",))
    with pytest.raises(ConfigError, match=r"disk_usage/meta\.json` must be there"):
        load_models(folder, CONFIG.denoise, ("disk_usage",))
    place = folder / "gpu_power_draw" / "model.safetensors"
    data = place.read_bytes()
    place.write_bytes(data[:40])
    with pytest.raises(ConfigError, match="must be a safetensors file"):
        load_models(folder, CONFIG.denoise, ("gpu_power_draw",))
    place.write_bytes(data)
    assert dataclasses.asdict(read_facts(folder, "gpu_power_draw"))["seed"] == 3
    assert facts["gpu_power_draw"] == read_facts(folder, "gpu_power_draw")


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


def write_trace(path, *, odd):
    """Another generator: square waves, no noise but rounding, one late machine, odd start."""
    start, rng = 1_655_555_555.25, np.random.default_rng(5)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["value", "metric", "machine", "ts"])
        for machine in range(7):
            for second in range(0 if machine < 6 else 240, 1300):
                up = second % 12 < 8
                levels = {"cpu_usage": 25 if up else 17, "gpu_power_draw": 290 if up else 180}
                if odd and machine == 4 and second >= 700:
                    levels = {"cpu_usage": 9, "gpu_power_draw": 61}
                for name, level in levels.items():
                    value = round(level + rng.uniform(-2, 2))
                    rows.writerow([value, name, f"gpu{machine}.example", start + second])


@pytest.mark.parametrize("odd", [False, True])
def test_traces_of_another_make_with_two_metrics_are_judged_rightly(tmp_path, odd):
    write_trace(tmp_path / "other.csv", odd=odd)
    frame = read_frame(tmp_path / "other.csv")
    config = minder_config()
    models = load_models(FOLDER, config.denoise, config.detect.metrics)
    alerts = [
        alert for call in replay(Case(frame, Truth()), models, config) for alert in call.alarms
    ]
    assert [alert.machine for alert in alerts] == ["gpu4.example"] * odd
    for alert in alerts:
        assert 700 + 240 < alert.time - frame.ts[0] <= 700 + 310
