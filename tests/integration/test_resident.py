"""Several iterations in one task: the records of tasks apart, under kills as well."""

from __future__ import annotations

import random

import pytest

from tests.integration.resident_equal import WAYS, compare, run
from tests.integration.resident_kill import killed_round

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("preset", "way"),
    [
        ("tppo-tiny", "one rank"),
        ("dapo-moe-tiny", "two ranks"),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in [("dapo-tiny", "megatron"), ("dapo-tiny", "adapters")]
        ),
    ],
)
def test_iterations_in_one_task_write_what_tasks_apart_write(preset, way, tmp_path):
    assert compare(tmp_path, preset, 3, WAYS[way], sizes=[2]) == []


def test_a_killed_task_goes_on_to_the_same_records(tmp_path):
    source = tmp_path / "apart"
    run(source, "dapo-tiny", 2, WAYS["two ranks"], "--resident", "0")
    folder = tmp_path / "round"
    folder.mkdir()
    draw = random.Random(random.SystemRandom().randrange(1 << 32))
    assert killed_round(source, folder, 2, draw, seconds=20.0) == []
