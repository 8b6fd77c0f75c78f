"""What the denoising model can learn, and what a few bad windows do to it."""

from types import SimpleNamespace

import numpy as np
import pytest

from planish.minder.detect.denoise import Identity, Pca, restoration_error, windows_of
from planish.minder.lab import vae
from planish.minder.lab.vae import Training, reconstruction_error, train_vae


def smooth(seed, *, machines=12, noise=0.003):
    """Return windows [M, 8] of sines of many periods and amplitudes, with 0.3 % noise."""
    rng = np.random.default_rng(seed)
    period, swing = rng.uniform(30, 60, machines), rng.uniform(0.3, 0.4, machines)
    phase, seconds = rng.uniform(0, 2 * np.pi, machines), np.arange(600)[:, None]
    values = 0.5 + swing * np.sin(2 * np.pi * seconds / period + phase)
    values += rng.normal(0, noise, values.shape)
    return np.ascontiguousarray(windows_of(values.astype(np.float32)).reshape(-1, 8))


@pytest.mark.long
def test_the_published_error_is_reached_on_smooth_windows():
    _, losses = train_vae(smooth(1), smooth(2), Training(seed=0))
    assert losses.variance_held_out > 1e-2
    assert losses.mse_held_out < 1e-4
    assert losses.divergence > 1.0


@pytest.mark.long
def test_one_window_in_a_hundred_from_faulty_machines_does_not_break_a_model():
    training = Training(max_epochs=20)
    clean, held_out = smooth(1, machines=8), smooth(2, machines=8)
    rng = np.random.default_rng(3)
    bad = clean.copy()
    rows = rng.choice(len(bad), len(bad) // 100, replace=False)
    bad[rows] = rng.choice([0.0, 1.0, 0.02], (len(rows), 1))
    models = [train_vae(windows, held_out, training)[0] for windows in (clean, bad)]
    errors = [reconstruction_error(model, _tensor(held_out)) for model in models]
    assert errors[0] < 0.1 * held_out.var()
    assert errors[1] < 2 * errors[0]
    # A machine that stands still at a level of its own is still far from the others.
    idle = np.full((50, 8), 0.02, np.float32)
    distances = [_embedded(model, held_out[:50]) - _embedded(model, idle) for model in models]
    near, far = (float(np.linalg.norm(one, axis=1).mean()) for one in distances)
    assert far > 0.8 * near


def _tensor(windows):
    import torch

    return torch.from_numpy(windows)[..., None]


def _embedded(model, windows):
    return model(_tensor(windows))[0].detach().numpy()[..., 0]


def test_the_error_on_what_is_seen_now_is_that_of_known_windows_alone():
    values = np.random.default_rng(0).random((60, 5), np.float32)
    values[:, 4] = 0.5
    known = np.ones((53, 5), bool)
    pca = Pca("cpu_usage", np.full(8, 0.5, np.float32), np.zeros((1, 8), np.float32))
    all_machines = restoration_error(pca, values, known)
    assert all_machines == pytest.approx(0.8 / 12, rel=0.2)
    known[:, :4] = False
    assert restoration_error(pca, values, known) == 0.0
    assert restoration_error(Identity("cpu_usage"), values, known) == 0.0
    assert np.isnan(restoration_error(pca, values, np.zeros((53, 5), bool)))
    assert np.isnan(restoration_error(pca, values[:5], np.zeros((0, 5), bool)))


def test_the_time_of_a_training_is_its_own_and_not_that_of_the_machine(monkeypatch):
    now, epochs = [0.0], []
    # There is no other clock.
    monkeypatch.setattr(vae, "time", SimpleNamespace(process_time=lambda: now[0]))

    def works(epoch, error):
        epochs.append(epoch)
        now[0] += 1.0

    training = Training(max_epochs=20, max_seconds=2.5, starts=1, patience=99)
    windows = smooth(1, machines=1)
    _, losses = train_vae(windows, windows, training, progress=works)
    assert epochs == [1, 2, 3]
    assert losses.epochs == 3
