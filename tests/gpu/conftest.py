"""Tests that need an accelerator: `python -m pytest tests/gpu`.

They run with torch, transformers and the base packages alone, whole runs apart, and also under
torch 2.11 and transformers 5.17. Figures go to `tests/benchmarks/results/gpu.json`.
"""

import functools
import gc

import pytest
import torch
from torch.nn.attention import varlen

from planish.base.parallel import pick_device
from tests.benchmarks.facts import write_result
from tests.gpu.models import DEVICE

if torch.__version__ < "2.12":

    @functools.wraps(varlen.varlen_attn)
    def _grouped(*parts, enable_gqa, _plain=varlen.varlen_attn, **options):
        # The same kernel; only the question whether heads may be grouped is newer.
        return _plain(*parts, **options)

    varlen.varlen_attn = _grouped


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
