"""A rank that trains nothing and refreshes vLLM again and again, for `test_vllm_resident.py`.

torchrun --nproc-per-node N -m tests.contract.engines.resident_rank FOLDER RANKS_OF_AN_ENGINE
"""

import json
import sys
from pathlib import Path

import torch

from planish.base.parallel import Grid, join, leave
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef
from planish.engines.weights import FolderWeights
from planish.models.policy import load_policy, save_policy
from planish.records.stream import StreamState, fresh_cursor
from planish.run.pins import Pins
from planish.stages.iterate.commit import Made, stored
from planish.stages.iterate.residents import Residents, TrainerWeights, check_weights
from planish.stages.train.config import TrainConfig
from planish.stages.train.trainer import Trainer
from tests.unit.engines.tiny import request
from tests.unit.stages.train.runs import TINY

ENGINE = {"name": "vllm", "cache_bytes": 16 << 20}
CONFIG = EngineConfig(**ENGINE)
SIZES = {"max_rows": 4, "max_prompt_tokens": 32, "max_response_tokens": 32}
REQUESTS = [request(row, 24, temperature=0.0) for row in range(4)]
SCALE = 1.05


def sampled(engine):
    """Return greedy ids and their log-probabilities."""
    return [[out.token_ids, out.logprobs] for out in engine.generate(REQUESTS)]


def main(folder: str, ranks_of_engine: str) -> None:
    """Refresh five times between two policies, and write what each refresh samples."""
    device, shared = torch.device("cpu"), {**ENGINE, "tensor_parallel": int(ranks_of_engine)}
    config = EngineConfig(**shared)
    settings = {"engine": shared, "rollout": {**SIZES, "device": "cpu"}}
    ranks = join(device, timeout_seconds=300.0)
    first = json.loads((Path(folder) / "first.json").read_text())
    trainer = Trainer(
        TrainConfig(**TINY), first, temperature=1.0, seed=0, grid=Grid(ranks), device=device,
        sets_weights=True,
    )  # fmt: skip
    parts = trainer.policy.weights()
    kept = {name: part.to_local().detach().clone() for name, part in parts.items()}
    pins = [first]
    if ranks.is_first:
        policy = load_policy(first)
        with torch.no_grad():
            for tensor in policy.model.parameters():
                tensor.mul_(SCALE)
        ref = save_policy(f"file://{folder}/second", policy, version=0, parents={}, attributes={})
        (Path(folder) / "second.json").write_text(json.dumps(ref.pin()))
    ranks.barrier()
    pins.append(json.loads((Path(folder) / "second.json").read_text()))
    residents = Residents(ranks, device, settings)
    told: list = []
    residents.refresh(stored(Pins(first, "")))
    residents.rest()
    for number in (1, 0, 1, 0, 1):
        with torch.no_grad():
            for name, part in parts.items():
                part.to_local().copy_(kept[name] * SCALE if number else kept[name])
        residents.trainer.keep(trainer, {})
        start = residents.refresh(Made(StreamState(fresh_cursor()), pins[number], version=0))
        check_weights(start, pins[number])

        def sample(number: int = number) -> None:
            with residents.serve(config, ModelRef(), device="cpu") as engine:
                told.append({"policy": number, "sampled": sampled(engine)})

        residents.lead(sample)
        residents.rest()
    source = TrainerWeights(trainer, FolderWeights(Path(folder) / "second"), ranks)
    for name in source.names():
        source.read(name)
    result = {"refreshed": told, "checksum": source.checksum()}
    (Path(folder) / f"rank-{ranks.rank}.json").write_text(json.dumps(result))
    ranks.barrier()
    # vLLM takes the process group with it.
    residents.close()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
