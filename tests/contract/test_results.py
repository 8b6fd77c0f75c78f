"""A figure of a GPU, which not every change can measure again, says when its code is newer."""

import json
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "tests/benchmarks/results"
SOURCE = "src/planish"
MEASURES = {
    "gpu.json": [
        "algorithms",
        "checkpoint/saving",
        "engines/transformers",
        "models",
        "stages/train",
    ],
    "gpu_profile.json": ["engines/planner"],
}
"""Results with the label `measured-1gpu`, to the folders whose speed they measure."""
NEWER = "{name}: the code has changed since"


def git(*words):
    command = ["git", "-C", str(REPOSITORY), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def test_every_result_of_a_gpu_names_what_it_measures():
    labels = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    found = {
        n for n, d in labels.items() if isinstance(d, dict) and d.get("label") == "measured-1gpu"
    }
    assert found == set(MEASURES)
    assert all(
        (REPOSITORY / SOURCE / folder).is_dir() for own in MEASURES.values() for folder in own
    )


@pytest.mark.parametrize("name", MEASURES)
def test_a_figure_of_a_gpu_says_that_its_code_is_newer(name):
    commit = json.loads((RESULTS / name).read_text())["commit"]
    if git("merge-base", commit, "HEAD")[:12] != commit[:12]:
        pytest.skip("needs the history of the repository: git fetch --unshallow")
    folders = [f"{SOURCE}/{folder}" for folder in MEASURES[name]]
    changed = git("log", "-1", "--format=%h", f"{commit}..HEAD", "--", *folders)
    said = NEWER.format(name=name) in (REPOSITORY / "docs/results.md").read_text("utf-8")
    assert said == bool(changed), f"measured at {commit[:12]}, changed at {changed or 'no time'}"
