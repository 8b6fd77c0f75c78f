"""The denoising model: one LSTM-VAE for each metric.

Source: Minder, arXiv 2411.01791, section 4.2: windows of 8 samples, hidden size 4, latent size 8,
one LSTM layer in encoder and decoder, mean squared error. The paper does not give optimizer,
schedule and weight of the divergence; these are ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from planish.minder.detect.frame import F32

_BATCH_ROWS = 8_192
"""Windows of one forward pass without gradients."""
_FIRST_LOGVAR = -6.0
_START_WINDOWS = 10_000
"""Windows of an epoch in which initial models are compared."""
_LAST_RATE = 0.02
"""Share of the learning rate that is left at the end; the rate follows half a cosine."""


class LstmVae(nn.Module):
    """Encoder LSTM(1 -> 4), latent Gaussian in 8 dimensions, decoder LSTM(8 -> 4)."""

    def __init__(self, *, hidden: int = 4, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.LSTM(1, hidden, batch_first=True)
        self.mean = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.LSTM(latent, hidden, batch_first=True)
        self.output = nn.Linear(hidden, 1)
        # With noise as large as the prior's, the model would learn no signal at first.
        nn.init.constant_(self.logvar.bias, _FIRST_LOGVAR)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance [M, latent] of windows [M, 8, 1]."""
        _, (last, _) = self.encoder(x)
        return self.mean(last[0]), self.logvar(last[0]).clamp(-10.0, 4.0)

    def decode(self, z: Tensor, length: int) -> Tensor:
        """Return windows [M, length, 1] of latent vectors [M, latent]."""
        states, _ = self.decoder(z[:, None].expand(-1, length, -1))
        decoded: Tensor = self.output(states)
        return decoded

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return reconstruction, mean and log-variance; without `noise` the latent vector is the
        mean.
        """
        mean, logvar = self.encode(x)
        z = mean if noise is None else mean + torch.exp(logvar / 2) * noise
        return self.decode(z, x.shape[1]), mean, logvar


def divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence from the standard normal, in nats."""
    return -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(dim=1).mean()


@dataclass(frozen=True)
class Training:
    """Settings of training."""

    learning_rate: float = 2e-2
    batch_size: int = 256
    max_epochs: int = 60
    patience: int = 12
    """Epochs without a better held-out error before training stops."""
    beta: float = 1e-5
    """Final weight of the divergence; it grows from 0 over the first third of the epochs."""
    grad_clip: float = 1.0
    starts: int = 4
    """Number of initial models; the one with the smallest error after a tenth of the epochs goes
    on."""
    max_windows: int = 200_000
    """Largest number of training windows; if there are more, a random subset is used."""
    max_seconds: float = math.inf
    """Longest CPU time in seconds; no epoch begins after it, and the learning rate reaches its
    minimum by then."""
    seed: int = 0


@dataclass(frozen=True)
class Losses:
    """Errors at the end of training."""

    mse_train: float
    mse_held_out: float
    """Mean squared error per sample of the best model on held-out jobs."""
    variance_held_out: float
    """Variance of the same samples, which is the error of a constant."""
    divergence: float
    """Divergence in nats; near 0, the latent variable has no information."""
    epochs: int


def train_vae(
    windows: F32,
    held_out: F32,
    training: Training,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[LstmVae, Losses]:
    """Return a model fitted to windows of healthy jobs, [M, 8] in 0 .. 1.

    `held_out` are windows of other jobs. `progress` is called with each epoch and its held-out
    error.

    Returns:
        The model with the smallest held-out error, and its losses.
    """
    generator = torch.Generator().manual_seed(training.seed)
    data, test = _tensor(windows), _tensor(held_out)
    if len(data) > training.max_windows:
        data = data[torch.randperm(len(data), generator=generator)[: training.max_windows]]
    start = time.process_time()

    def elapsed() -> float:
        return time.process_time() - start

    model, optimizer = _best_start(data, test, training, generator, elapsed)
    best, best_weights, stale, epoch, last_train = math.inf, _copy(model), 0, 0, math.inf
    for epoch in range(1, training.max_epochs + 1):
        spent = min(1.0, elapsed() / training.max_seconds)
        done = max((epoch - 1) / training.max_epochs, spent)
        fall = (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * fall)
        beta = training.beta * min(1.0, 3 * done)
        last_train = _epoch(model, optimizer, data, beta, training, generator)
        error = reconstruction_error(model, test)
        if progress:
            progress(epoch, error)
        if error < best * (1 - 1e-4):
            best, best_weights, stale = error, _copy(model), 0
        else:
            stale += 1
        if stale >= training.patience or elapsed() > training.max_seconds:
            break
    model.load_state_dict(best_weights)
    with torch.no_grad():
        nats = float(divergence(*model.encode(test[:65_536])))
    variance = float(test.var(correction=0))
    return model.eval(), Losses(last_train, best, variance, nats, epoch)


def _best_start(
    data: Tensor,
    test: Tensor,
    training: Training,
    generator: torch.Generator,
    elapsed: Callable[[], float],
) -> tuple[LstmVae, torch.optim.Optimizer]:
    """Return the one of several initial models that learns fastest, since some never learn."""
    data, test = (
        part[torch.randperm(len(part), generator=generator)[:_START_WINDOWS]]
        for part in (data, test)
    )
    starts = []
    for number in range(training.starts):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed + number)
            model = LstmVae()
        optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate)
        until = training.max_seconds / 3 * (number + 1) / training.starts
        for _ in range(max(1, training.max_epochs // 10) if training.starts > 1 else 0):
            _epoch(model, optimizer, data, 0.0, training, generator)
            if elapsed() > until:
                break
        starts.append((reconstruction_error(model, test), number, model, optimizer))
    _, _, model, optimizer = min(starts, key=lambda start: start[:2])
    return model, optimizer


def _epoch(
    model: LstmVae,
    optimizer: torch.optim.Optimizer,
    data: Tensor,
    beta: float,
    training: Training,
    generator: torch.Generator,
) -> float:
    total = 0.0
    order = torch.randperm(len(data), generator=generator)
    for rows in torch.split(order, training.batch_size):
        batch = data[rows]
        noise = torch.randn(len(batch), model.mean.out_features, generator=generator)
        restored, mean, logvar = model(batch, noise)
        error = nn.functional.mse_loss(restored, batch)
        optimizer.zero_grad(set_to_none=True)
        (error + beta * divergence(mean, logvar)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
        optimizer.step()
        total += float(error.detach()) * len(batch)
    return total / max(1, len(data))


@torch.no_grad()
def reconstruction_error(model: LstmVae, windows: Tensor) -> float:
    """Return the mean squared error per sample of windows [M, 8, 1]."""
    total = 0.0
    for batch in torch.split(windows, _BATCH_ROWS):
        total += float(((model(batch)[0] - batch) ** 2).sum())
    return total / max(1, windows.numel())


def _tensor(windows: F32) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(windows, np.float32))[..., None]


def _copy(model: LstmVae) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
