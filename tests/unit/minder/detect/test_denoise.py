"""The model in numpy gives what it gives in torch."""

import numpy as np
import pytest
import torch

from planish.minder.detect.denoise import Vae, shapes
from planish.minder.lab.vae import LstmVae


@pytest.mark.parametrize(("hidden", "latent"), [(4, 8), (6, 3)])
def test_reconstructions_and_latent_means_equal_those_of_torch(hidden, latent):
    torch.manual_seed(3)
    model = LstmVae(hidden=hidden, latent=latent)
    for tensor in model.parameters():
        tensor.data *= 4
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert {name: array.shape for name, array in weights.items()} == shapes(hidden, latent)
    windows = np.random.default_rng(0).uniform(0, 1, (5000, 8)).astype(np.float32)
    with torch.no_grad():
        restored, mean, _ = model(torch.from_numpy(windows)[..., None])
    found = Vae("cpu_usage", weights, version="v").embed(windows)
    np.testing.assert_allclose(found, restored[..., 0].numpy(), atol=2e-6)
    means = Vae("cpu_usage", weights, version="v", latent=True).embed(windows)
    np.testing.assert_allclose(means, mean.numpy(), atol=5e-6)
    assert found.std() > 0.005
