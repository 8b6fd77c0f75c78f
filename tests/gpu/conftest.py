"""Tests that need an accelerator: `python -m pytest tests/gpu`.

They run with torch, transformers and the base packages alone, and also under torch 2.11 and
transformers 5.17; whole runs need kfp. Figures go to `tests/benchmarks/results/gpu.json`.
"""

import gc

import pytest
import torch

from planish.base.parallel import pick_device
from tests.benchmarks.facts import write_result
from tests.gpu.models import DEVICE


def pytest_collection_modifyitems(items):
    has_device = pick_device("auto").type == DEVICE.type
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not has_device:
                item.add_marker(pytest.mark.skip(reason="no accelerator"))


_figures = {}


@pytest.fixture
def figures():
    """What was measured: name to figures."""
    yield _figures
    if _figures and DEVICE.type == "cuda":
        _figures["device"] = torch.cuda.get_device_name(DEVICE)
        write_result("gpu", "measured-1gpu", _figures, "pytest", ["tests/gpu"])


@pytest.fixture(autouse=True)
def _device_memory():
    """Each test begins with an empty device."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
    yield
    torch.use_deterministic_algorithms(False)
