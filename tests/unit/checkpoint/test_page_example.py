"""The program on docs/checkpoint.md runs as it stands there, and goes on when it is run again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from planish.checkpoint import list_checkpoints

PAGE = Path(__file__).resolve().parents[3] / "docs" / "checkpoint.md"


@pytest.mark.long
def test_the_example_of_the_page_trains_stops_and_goes_on(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "out")]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    pin, weights = first.stdout.split()
    assert pin.startswith(f"file://{tmp_path}/out/run/step-00000020#sha256=")
    assert weights == f"file://{tmp_path}/out/weights-20"
    assert (tmp_path / "out/weights-20/model.safetensors").is_file()
    assert [entry.step for entry in list_checkpoints(f"{tmp_path}/out/run")] == [15, 20]
