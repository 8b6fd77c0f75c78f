"""One training on four grids; the whole of it, vLLM too, is the program `reshard_training`."""

import pytest

from tests.integration.reshard_training import HOPS, play

pytestmark = pytest.mark.slow


def test_a_training_goes_from_grid_to_grid_and_what_is_damaged_is_found(tmp_path, capsys):
    faults = play(tmp_path, 3, hops=[HOPS[0], HOPS[1], HOPS[3]], with_vllm=False)
    assert faults == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "FSDP2 on 2 ranks",
        "Megatron tp 2",
        "control 'ulp'",
        "control 'swap'",
        "FSDP2 on 3 ranks",
        "Hugging Face export",
    ]
