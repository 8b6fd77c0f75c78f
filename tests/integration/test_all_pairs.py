"""Every pair of settings that share out the training, each on its ranks against one process.

`ROWS` is a covering array: of any two settings each pair of values stands in one row at least, but
for pairs that `prepare` refuses.
"""

import functools
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from planish.algorithms import build_algorithm
from planish.base.config import parse_section, parse_settings
from planish.base.errors import ConfigError
from planish.base.parallel import Ranks
from planish.models.adapters import Adapters
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, load_policy, name_head_dtype, save_policy
from planish.stages.prepare.checks import check_run
from planish.stages.prepare.devices import device_faults, find_shape, this_machine, trainer_faults
from planish.stages.prepare.settings import build_config
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.progress import Progress
from planish.stages.train.trainer import Trainer
from planish.stages.train.update import run_update
from tests.golden.write import ALGORITHMS, EXPERTS, WIDE
from tests.integration.ckpt_forks import run_ranks
from tests.integration.test_megatron_training import CPU, preload, save
from tests.integration.test_train_stage import all_tensors
from tests.unit.stages.train.runs import TINY, own_batch, random_rollouts, rewards_for

SIZES = {"num_layers": 2, "hidden_size": 32, "head_dim": 16}
PLACES = {
    "trainer": ("fsdp2", "megatron"),
    "tensor_parallel": (1, 2),
    "pipeline_parallel": (1, 2),
    "expert_parallel": (1, 2),
    "context_parallel": (1, 2),
    "sequence_parallel": (False, True),
    "replicas": (1, 2),
    "offload": (False, True),
    "packing": (True, False),
    "num_processes": (2, 4, 1),
}
"""Settings of `[train]`, most of which refuse some of the others."""
MODELS = {"experts": (0, 4), "lora_rank": (0, 2), "replay_routing": (False, True)}
"""Settings that fit some places only."""
FREE = {
    "compute_dtype": ("float32", "bfloat16"),
    "head_dtype": ("float32", "bfloat16"),
    "activation_checkpointing": (False, True),
    "algorithm": ("dapo", "vapo", "grpo_penalty"),
}
"""Settings that go with all others: with a critic, and with a reference policy."""
FACTORS = {**PLACES, **MODELS, **FREE}
REFUSED = {
    ("trainer=fsdp2", "tensor_parallel=2"): 'must be "megatron" with',
    ("trainer=fsdp2", "pipeline_parallel=2"): 'must be "megatron" with',
    ("trainer=fsdp2", "expert_parallel=2"): 'must be "megatron" with',
    ("trainer=fsdp2", "sequence_parallel=True"): "must not be 1 with `train.sequence_parallel`",
    ("trainer=megatron", "replicas=2"): 'must be "fsdp2" with',
    ("trainer=megatron", "offload=True"): 'must be "fsdp2" with',
    ("trainer=megatron", "lora_rank=2"): 'must be "fsdp2" with `model.lora_rank`',
    ("context_parallel=2", "packing=False"): "packing` must be true with `train.context_parallel`",
}
"""Pairs that are refused, and why; what only one of the two brings with it is left out."""


def combinations(factors):
    """Return every choice of a value for each factor."""
    return [dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values())]


def faults_of(row):
    """Return what `prepare` says of a row; "" where it would start it."""
    row = {name: values[0] for name, values in FACTORS.items()} | row
    train = {name: row[name] for name in (*PLACES, "replay_routing", "compute_dtype")} | {
        "activation_checkpointing": row["activation_checkpointing"]
    }
    algorithm = ALGORITHMS[row["algorithm"]]
    settings = {f"train.{name}": value for name, value in train.items()}
    settings |= {f"algorithm.{name}": value for name, value in algorithm.items()}
    sizes = WIDE | ({"num_experts": row["experts"]} if row["experts"] else {})
    settings |= {f"model.{name}": value for name, value in sizes.items()}
    settings |= {f"model.{name}": row[name] for name in ("lora_rank", "head_dtype")}
    words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    preset = "vapo-tiny" if row["algorithm"] == "vapo" else "dapo-tiny"
    try:
        config = build_config(
            preset=preset, config="", overrides=" ".join(words), model="", dataset="", seed=-1
        )
    except ConfigError as error:
        return str(error)
    settings = parse_settings(config)
    return "; ".join(
        [
            *check_run(settings, 1),
            *device_faults(settings, this_machine()),
            *trainer_faults(settings, find_shape(settings)),
        ]
    )


def pairs_of(row):
    """Return the pairs of values of a row, each with the type of its products."""
    values = [f"{name}={row[name]}" for name in FACTORS if name != "compute_dtype"]
    return {(row["compute_dtype"], *pair) for pair in itertools.combinations(values, 2)}


@functools.cache
def accepted():
    """Return every row that `prepare` starts, as far as settings refuse each other."""
    rows = []
    for place in combinations(PLACES):
        try:
            train = parse_section(TrainConfig, place, section="train")
            train.grid(Ranks(0, place["num_processes"]))
        except ConfigError:
            continue
        models = [place | model for model in combinations(MODELS)]
        rows += [row | free for row in models if not faults_of(row) for free in combinations(FREE)]
    return rows


@functools.cache
def covering_rows():
    """Return rows that hold every pair that an accepted one holds: the row with most new ones."""
    rows = accepted()
    pairs = sorted(set().union(*map(pairs_of, rows)))
    places = {pair: place for place, pair in enumerate(pairs)}
    holds = np.zeros((len(rows), len(pairs)), dtype=bool)
    for number, row in enumerate(rows):
        holds[number, [places[pair] for pair in pairs_of(row)]] = True
    left, chosen = np.ones(len(pairs), dtype=bool), []
    while left.any():
        best = int((holds & left).sum(1).argmax())
        chosen.append(rows[best])
        left &= ~holds[best]
    return chosen


def label(row):
    """Return what a row has beside the first value of each factor."""
    names = [name.replace("parallel", "") + str(row[name]) for name in FACTORS]
    firsts = [name.replace("parallel", "") + str(values[0]) for name, values in FACTORS.items()]
    return "-".join(name for name in names if name not in firsts) or "plain"


def policy_of(row, root):
    """Save the policy of a row, once for each kind; returns its pin."""
    sizes = SIZES | (EXPERTS if row["experts"] else WIDE)
    policy = build_policy(ModelConfig(**sizes), seed=3)
    head = row["head_dtype"]
    name_head_dtype(policy.model.config, ModelConfig(dtype="bfloat16", head_dtype=head))
    uri = f"file://{root}/policy-{row['experts']}-{head}"
    return save_policy(uri, policy, version=0, parents={}, attributes={}).pin()


def trained(rank, size, folder, *, row, pin):
    """Train two steps; return old log-probabilities, values, norms of gradients, and the state.

    With an epsilon of 1 AdamW moves each weight by about its gradient: no rounding near 0 is
    magnified.
    """
    preload()
    places = {name: row[name] for name in PLACES}
    named = {name: row[name] for name in ("replay_routing", "compute_dtype")}
    config = TrainConfig(
        **TINY | places | named | {"tokens_per_microbatch": 48, "learning_rate": 0.1},
        activation_checkpointing=row["activation_checkpointing"], adam_epsilon=1.0,
    )  # fmt: skip
    algorithm = build_algorithm(ALGORITHMS[row["algorithm"]])
    critic = CriticConfig(
        head_std=0.3, learning_rate=0.1, warmup_iterations=0, pretrain_iterations=0
    )
    grid = config.grid(Ranks(rank, size))
    trainer = Trainer(
        config, pin, temperature=1.0, seed=7, grid=grid, device=CPU,
        critic=critic if algorithm.needs_values else None,
        adapters=Adapters(2, 32.0, ()) if row["lora_rank"] else None,
    )  # fmt: skip
    policy = load_policy(pin, dtype=torch.float32)
    rollouts = random_rollouts(policy, 11, experts=row["experts"] if row["replay_routing"] else 0)
    batch = own_batch(rollouts, rewards_for(rollouts, 12), config, grid)
    logprobs = batch.share.join(trainer.logprobs(batch)[0], batch.policy_mask)[0].tolist()
    result = run_update(
        trainer, algorithm, batch, config=config, progress=Progress(), seed=(7, 1),
        critic=critic, reference_pin=pin,
    )  # fmt: skip
    values = []
    if result.values is not None:
        values = batch.share.join(result.values, batch.value_mask)[0].tolist()
    norms = [step[name] for step in result.minibatches for name in step if "grad_norm" in name]
    state = save(trainer, Path(folder).as_uri(), grid)
    return {"logprobs": logprobs, "values": values, "norms": norms}, state


def test_a_pair_of_settings_is_covered_or_refused_by_name():
    assert len(covering_rows()) == NUM_ROWS
    held = set().union(*map(pairs_of, covering_rows()))
    refused = {}
    for one, other in itertools.combinations(FACTORS, 2):
        if "compute_dtype" in (one, other):
            continue
        for values in itertools.product(FACTORS[one], FACTORS[other]):
            pair = tuple(map("=".join, zip((one, other), map(str, values), strict=True)))
            found = {(kind, *pair) in held for kind in FREE["compute_dtype"]}
            if found != {True}:
                assert found == {False}, pair
                refused[pair] = faults_of(dict(zip((one, other), values, strict=True)))
    for (one, other), told in refused.items():
        names = [setting.partition("=")[0] for setting in (one, other)]
        assert any(f"{name}`" in told for name in names), (one, other, told)
    assert len(refused) == 29
    for pair, words in REFUSED.items():
        assert words in refused[pair], pair


NUM_ROWS = 32
"""Of `covering_rows`."""
ROUNDING = 3e-5
"""Of sums in float32 over relative norms: some 500 roundings of 6e-8, as gradients have terms."""
HALF_FACTOR = 4.0
"""Half precision of other ranks may be so much farther from full than that of one process."""
ALONE = {name: values[0] for name, values in PLACES.items()} | {"num_processes": 1}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return a function from a row to its numbers, each row on its ranks once."""
    root = tmp_path_factory.mktemp("pairs")

    @functools.cache
    def of_items(items):
        row = dict(items)
        size, folder = row["num_processes"], root / f"row-{len(list(root.glob('row-*')))}"
        found = run_ranks(f"{__name__}:trained", size, folder, row=row, pin=policy_of(row, root))
        assert all(each == found[0] for each in found)
        numbers, state = found[0]
        start = load_policy(policy_of(row, root)).model.state_dict()
        for name, tensor in all_tensors(state).items():
            part, _, rest = name.partition(".")
            if part in ("model", "critic") and not name.endswith("_scale"):
                before = start.get(rest.replace("body.", "model."))
                kind = f"{rest.split('.')[-2]} of" if before is None else "update of"
                moved = tensor if before is None else tensor - before
                numbers[f"{kind} {part}: {rest}"] = moved.flatten().numpy()
        return {name: np.array(numbers[name]) for name in sorted(numbers)}

    return lambda row: of_items(tuple(row.items()))


def distances(seen, wanted):
    """Return for each kind of numbers the norm of their difference, over the norm of all."""
    assert seen.keys() == wanted.keys()
    kinds = {name: name.partition(":")[0] for name in wanted}
    found = {}
    for kind in sorted(set(kinds.values())):
        a, b = (
            np.concatenate([side[name] for name in kinds if kinds[name] == kind])
            for side in (seen, wanted)
        )
        if len(b):
            # Beside adapters no weight moves at all.
            found[kind] = float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
    return found


@pytest.mark.parametrize("number", range(NUM_ROWS))
def test_ranks_train_as_one_process_does(outcome, number):
    row = covering_rows()[number]
    exact = {"compute_dtype": "float32", "head_dtype": "float32"}
    wanted = outcome(row | ALONE | exact)
    seen = distances(outcome(row), wanted)
    alone = distances(outcome(row | ALONE), wanted)
    print(label(row), {kind: f"{far:.1e} {alone[kind]:.1e}" for kind, far in seen.items()})
    limits = {kind: ROUNDING + HALF_FACTOR * far for kind, far in alone.items()}
    # Two gradients are at least as far apart as their norms, of which there are but a few.
    limits["norms"] = max(limits.values())
    assert {kind: far for kind, far in seen.items() if not far <= limits[kind]} == {}
