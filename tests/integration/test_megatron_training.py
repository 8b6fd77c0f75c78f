"""The trainer on megatron-core against the one on FSDP2: losses, and states that each resumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from planish.base.errors import ConfigError
from planish.base.parallel import Grid, Ranks
from planish.checkpoint import train_state as checkpoint
from planish.models.logprobs import TokenScorer
from planish.models.policy import load_policy
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.stage import train
from planish.stages.train.trainer import open_trainer
from tests.golden.write import LOSSES, WIDE, WIDE_ALGORITHMS, ten_steps
from tests.integration.ckpt_forks import run_ranks
from tests.integration.test_train_processes import job_of
from tests.integration.test_train_stage import all_tensors
from tests.unit.stages.train.runs import TINY, add_iteration, start_run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TOLERANCE = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2},
    "tp2-sequence": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "activation_checkpointing": True,
    },
    "dp2": {},
    "pp2": {"pipeline_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}


@dataclass
class Run:
    """What `ten_steps` needs to know of a run, as ranks are told it."""

    policy_pin: str

    @property
    def policy(self):
        return load_policy(self.policy_pin, dtype=torch.float32)


def preload():
    """Import what takes long before ranks are forked."""
    import warnings

    from transformers import Qwen3ForCausalLM  # noqa: F401

    with warnings.catch_warnings(action="ignore"):
        import planish.stages.train.megatron.sharding  # noqa: F401


def losses(rank, size, folder, *, pin, algorithms, settings):
    """Return the numbers of ten steps of each algorithm."""
    config = TrainConfig(**TINY, **settings)
    found = {}
    for algorithm in algorithms:
        trainer, steps = ten_steps(algorithm, Run(pin), config, config.grid(Ranks(rank, size)))
        trainer.close()
        found[algorithm] = steps
    return found


def golden(algorithm):
    lines = (LOSSES / f"wide_{algorithm}.txt").read_text().splitlines()
    return np.array([[float(number) for number in line.split()] for line in lines])


@pytest.fixture(scope="module")
def pin(tmp_path_factory):
    return start_run(f"file://{tmp_path_factory.mktemp('run')}/root", **WIDE).policy_pin


@pytest.mark.parametrize(
    ("layout", "algorithms"),
    [
        ("tp2", WIDE_ALGORITHMS),
        ("tp2-sequence", ["vapo"]),
        ("dp2", ["dapo"]),
        ("pp2", ["dapo", "vapo"]),
        ("tp2-pp2", ["tppo"]),
    ],
)
def test_ten_steps_have_the_losses_of_fsdp2(pin, tmp_path, layout, algorithms):
    settings = {"trainer": "megatron", **LAYOUTS[layout]}
    size = 4 if layout == "tp2-pp2" else 2
    found = run_ranks(
        f"{__name__}:losses", size, tmp_path, pin=pin, algorithms=algorithms, settings=settings
    )
    assert all(each == found[0] for each in found)
    for algorithm in algorithms:
        seen, wanted = np.array(found[0][algorithm]), golden(algorithm)
        print(f"{layout} {algorithm}: largest difference {np.abs(seen - wanted).max():.1e}")
        np.testing.assert_allclose(seen, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def save(trainer, uri, grid):
    held = trainer.state()
    extra = {"grid": grid.to_json(), "device": "cpu", "critic": trainer.critic_shape()}
    return checkpoint.save(
        uri, {**held.parts, "extra": extra}, parents={}, attributes={}, ranks=grid.ranks,
        framework=held.framework,
    ).pin()  # fmt: skip


def hops(rank, size, folder, *, pin, state_pin, root, settings):
    """Hand a state from trainer to trainer, then make ten steps; returns pins and numbers."""
    pins = []
    for name in ("megatron", "fsdp2"):
        config = TrainConfig(**TINY, trainer=name, **(settings if name == "megatron" else {}))
        grid = config.grid(Ranks(rank, size))
        trainer = open_trainer(
            config, pin, temperature=1.0, seed=1, grid=grid, device=CPU,
            critic=CriticConfig(head_std=0.5),
        )  # fmt: skip
        trainer.load(state_pin)
        state_pin = save(trainer, f"{root}/{name}", grid)
        trainer.close()
        pins.append(state_pin)
    config = TrainConfig(**TINY, trainer="megatron", **settings)
    _, steps = ten_steps("vapo", Run(pin), config, config.grid(Ranks(rank, size)), state_pin)
    return pins, steps


def without_random(pin):
    return {name: t for name, t in all_tensors(pin).items() if "random." not in name}


def test_a_state_goes_from_trainer_to_trainer_without_a_changed_bit(pin, tmp_path):
    root = f"file://{tmp_path}"
    first = save(ten_steps("vapo", Run(pin), TrainConfig(**TINY), Grid())[0], root, Grid())
    _, wanted = ten_steps("vapo", Run(pin), TrainConfig(**TINY), Grid(), first)
    before, state_pin = without_random(first), first
    assert before["optimizer.model.layers.1.self_attn.q_proj.weight.exp_avg_sq"].any()
    for layout in ("tp2", "pp2"):
        pins, steps = run_ranks(
            f"{__name__}:hops", 2, tmp_path / layout, pin=pin, state_pin=state_pin,
            root=f"{root}/{layout}", settings=LAYOUTS[layout],
        )[0]  # fmt: skip
        for hop in pins:
            moved = without_random(hop)
            assert moved.keys() == before.keys()
            assert all(torch.equal(moved[name], tensor) for name, tensor in before.items())
        np.testing.assert_allclose(steps, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        state_pin = pins[-1]


FAMILIES = {
    "qwen2": {"tie_word_embeddings": False},
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
        },
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Beside Qwen3, which all other tests train; 51 tokens leave the second rank one of padding."""


def tiny_model(family):
    import transformers

    name = {"qwen2": "Qwen2", "llama": "Llama"}[family]
    sizes = {
        "vocab_size": 51, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes, **FAMILIES[family])
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def scores(rank, size, folder):
    """Return the largest difference of log-probabilities and of entropies for each family."""
    from planish.stages.train.megatron.sharding import MegatronSharding

    config = TrainConfig(**TINY, trainer="megatron", tensor_parallel=size)
    ids = torch.randint(0, 51, (3, 17), generator=torch.Generator().manual_seed(2))
    select = torch.arange(17).expand(3, 17) > 0
    found = {}
    for family in FAMILIES:
        model = tiny_model(family)
        wanted = TokenScorer(model)(ids, None, select, 0.7)
        sharding = MegatronSharding(
            model, config=config, grid=config.grid(Ranks(rank, size)), device=CPU, is_frozen=True
        )
        seen = sharding.scorer(ids, None, select, 0.7)
        found[family] = [(a - b).abs().max().item() for a, b in zip(seen, wanted, strict=True)]
    return found


def test_every_family_has_the_log_probabilities_of_transformers(tmp_path):
    found = run_ranks(f"{__name__}:scores", 2, tmp_path)
    for differences in found:
        assert differences.keys() == FAMILIES.keys()
        for family, values in differences.items():
            assert max(values) < TOLERANCE, (family, values)


def test_a_model_that_does_not_divide_is_refused(pin):
    config = TrainConfig(**TINY, trainer="megatron", tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"must divide .* 2 x 1 for 1"):
        config.grid(Ranks(0, 1))
    with pytest.raises(ConfigError, match="heads, heads of keys and values"):
        build_gpt_of(tiny_model("qwen2").config, tp=4)


def build_gpt_of(model, tp):
    preload()
    from planish.stages.train.megatron.model import build_gpt

    config = TrainConfig(**TINY, trainer="megatron", tensor_parallel=tp)
    grid = Grid(Ranks(0, tp), tp=tp)
    return build_gpt(model, has_head=False, config=config, grid=grid, device=CPU)


def test_one_process_trains_and_goes_on_without_a_launcher(tmp_path):
    preload()
    tiny = start_run(f"file://{tmp_path}/root")
    state = ""
    for iteration in (1, 2):
        add_iteration(tiny, iteration)
        outcome = train(job_of(tiny, iteration, state, trainer="megatron"))
        state = outcome.values["state_pin"]
        assert not torch.distributed.is_initialized()
    attributes = checkpoint.read_record(state)[1].attributes
    names = ("framework", "world", "dp", "tp", "pp", "ep", "step")
    assert [attributes[name] for name in names] == ["megatron", 1, 1, 1, 1, 1, 8]
    assert outcome.metrics["grad_norm"] > 0
