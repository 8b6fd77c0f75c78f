"""What runs in a task is tested as it runs there."""

import sys
from pathlib import Path

import pytest

IN_A_TASK = tuple(Path(__file__).parent / name for name in ("stages", "run"))


@pytest.fixture(autouse=True)
def _as_in_a_task(request, monkeypatch):
    """Import kfp anew, in part, as its launcher has a task do."""
    if not any(request.path.is_relative_to(folder) for folder in IN_A_TASK):
        return
    monkeypatch.setenv("_KFP_RUNTIME", "true")
    for name in [name for name in sys.modules if name.partition(".")[0] == "kfp"]:
        monkeypatch.delitem(sys.modules, name)
