"""An engine of one process, and a place in memory to save to."""

import pytest

from planish.checkpoint.ranks.control import Control
from planish.checkpoint.saving.engine import SaveEngine


@pytest.fixture(name="engine")
def _engine():
    engine = SaveEngine(Control.single())
    yield engine
    engine.close()


@pytest.fixture(name="root")
def _root(tmp_path):
    """An empty memory of this test."""
    return f"mem://{tmp_path.name}/run"
