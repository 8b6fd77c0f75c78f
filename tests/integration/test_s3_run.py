"""A whole run on a bucket of a real MinIO server leaves the sets that one on a folder leaves."""

from __future__ import annotations

import pytest

from planish.__main__ import main
from planish.records import RolloutSet, layout, read_set
from tests.integration import runs

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_run_on_s3_has_the_digests_of_the_run_on_files(s3_root, tmp_path, capsys):
    on_files, on_s3 = f"file://{tmp_path}/run", f"{s3_root}/team/run"
    runs.run(on_files, tmp_path / "files.txt")
    runs.run(on_s3, tmp_path / "s3.txt")
    digests = runs.digests(on_files)
    assert runs.digests(on_s3) == digests
    kinds = {path.split("/")[0] for path in digests}
    assert {"prompts", "iterations", "policies", "states", "evals"} <= kinds
    assert len(digests) >= 10

    place = layout.rollouts(on_s3, 1, 1)
    rollouts = read_set(RolloutSet, place)
    assert rollouts == read_set(RolloutSet, layout.rollouts(on_files, 1, 1))
    assert main(["show", on_s3]) == 0
    assert "policies/00001" in capsys.readouterr().out
