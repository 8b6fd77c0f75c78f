"""vLLM in training processes: what it samples after weights came from the trainer."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from planish.engines import open_engine
from planish.engines.requests import ModelRef
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, save_policy
from planish.records.files import WEIGHTS
from planish.records.manifest import read_manifest
from tests.contract.engines.resident_rank import CONFIG, sampled

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM: `make test-engines`"),
]


@pytest.mark.parametrize(("num_ranks", "shared"), [(2, 1), (4, 2)])
def test_after_each_of_five_refreshes_it_samples_as_a_fresh_engine(tmp_path, num_ranks, shared):
    policy = build_policy(ModelConfig(), seed=3)
    place = f"{tmp_path.as_uri()}/first"
    ref = save_policy(place, policy, version=0, parents={}, attributes={})
    (tmp_path / "first.json").write_text(json.dumps(ref.pin()))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", str(num_ranks), "-m", "tests.contract.engines.resident_rank"]
    line += [str(tmp_path), str(shared)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    exported = read_manifest(f"{tmp_path.as_uri()}/second").attributes[WEIGHTS]
    fresh = []
    for name in ("first", "second"):
        pin = json.loads((tmp_path / f"{name}.json").read_text())
        with open_engine(CONFIG, ModelRef(pin=pin), max_rows=4, max_model_len=64) as engine:
            fresh.append(sampled(engine))
    assert fresh[0] != fresh[1]
    assert [told["checksum"] for told in ranks] == [exported] * num_ranks
    assert not any(told["refreshed"] for rank, told in enumerate(ranks) if rank % shared)
    for told in ranks[::shared]:
        assert [one["policy"] for one in told["refreshed"]] == [1, 0, 1, 0, 1]
        for one in told["refreshed"]:
            pairs = zip(one["sampled"], fresh[one["policy"]], strict=True)
            for (ids, logprobs), (wanted, like) in pairs:
                assert ids == wanted
                assert np.abs(np.subtract(logprobs, like)).max() <= 1e-5
