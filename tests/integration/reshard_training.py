"""Hand one training from trainer to trainer and from grid to grid, up to a Hugging Face folder.

`python -m tests.integration.reshard_training` trains an iteration on each of FSDP2 with two ranks,
Megatron with tensor parallelism, Megatron with pipeline stages and FSDP2 with three ranks. Every
hop loads the train state of the one before; saved again at once it must have equal bits, weights
and Adam moments, of policy and critic, and every step after it must have the numbers of one
process that has trained all iterations without ever saving. The last state is exported;
transformers and vLLM load it. A line for each hop and a verdict are printed; the exit code is 1
where something differs, or where a state that was damaged on purpose is not found out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from planish.algorithms import build_algorithm
from planish.base.parallel import Grid, Ranks
from planish.checkpoint import train_state
from planish.checkpoint.convert.export_hf import export
from planish.engines import open_engine
from planish.engines.config import EngineConfig
from planish.engines.requests import ModelRef, Request
from planish.models.policy import load_policy
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.reports import UpdateReport, read_report
from planish.stages.train.batching import train_batch
from planish.stages.train.progress import Progress
from planish.stages.train.ranks.job import TrainJob, read_inputs
from planish.stages.train.ranks.worker import train_iteration
from planish.stages.train.trainer import Trainer
from planish.stages.train.update import run_update
from tests.integration.ckpt_forks import run_ranks
from tests.integration.test_train_stage import all_tensors
from tests.unit.engines.tiny import reference_greedy, reference_logprobs, request
from tests.unit.stages.train.runs import TinyRun, add_iteration, start_run, tiny_config

HERE = "tests.integration.reshard_training"
"""This module, also where it is the program."""
REPOSITORY = Path(__file__).resolve().parents[2]
ENGINES_PYTHON = REPOSITORY / ".venv-engines/bin/python"
"""Where `make engines` puts vLLM, which this environment can not hold."""
TOLERANCE = 1e-6
"""Of a loss or a norm of gradients."""
LOGPROB_TOLERANCE = 2e-4
"""Between transformers and vLLM, as tests/contract/engines has it."""
ADAM_EPSILON = 1e-5
"""Where a gradient is near 0, a smaller one makes a step of the order in which ranks add up."""
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
"""Two ranks can share every matrix, and vLLM has kernels for such heads."""
COLUMNS = ("loss", "grad_norm", "entropy", "value_loss", "value_grad_norm")
DAMAGES = ("ulp", "swap")
"""One element of a weight is the next float32; second moments of two matrices change places."""


@dataclass(frozen=True)
class Hop:
    """One trainer on one grid."""

    name: str
    size: int
    """Ranks."""
    settings: dict[str, object]
    """Of `[train]`."""


HOPS = (
    Hop("FSDP2 on 2 ranks", 2, {}),
    Hop("Megatron tp 2", 2, {"trainer": "megatron", "tensor_parallel": 2}),
    Hop("Megatron pp 2", 2, {"trainer": "megatron", "pipeline_parallel": 2}),
    Hop("FSDP2 on 3 ranks", 3, {}),
)


def preload() -> None:
    """Import what takes long before ranks are forked."""
    import warnings

    from transformers import Qwen3ForCausalLM  # noqa: F401

    with warnings.catch_warnings(action="ignore"):
        import planish.stages.train.megatron.sharding  # noqa: F401


def job_of(tiny: TinyRun, iteration: int, hop: Hop | None = None, state_pin: str = "") -> TrainJob:
    """Return the job of one iteration on the grid of a hop; None is one process."""
    settings = hop.settings if hop else {}
    rewards = layout.rewards(tiny.root, iteration)
    return TrainJob(
        root=tiny.root,
        config={**tiny.config, "train": {**tiny.config["train"], **settings}},
        config_sha256=tiny.digest,
        iteration=iteration,
        num_shards=tiny.num_shards,
        policy_pin=tiny.policy_pin,
        state_pin=state_pin,
        rewards_pin=read_manifest(rewards).ref(rewards).pin(),
    )


def undisturbed(rank: int, size: int, folder: Path, *, jobs: list[str]) -> list[list[list[float]]]:
    """Train all iterations in one process that keeps its trainer; return the numbers of each."""
    first = TrainJob.from_json(jobs[0])
    trainer = Trainer(
        first.train,
        first.policy_pin,
        temperature=first.temperature,
        seed=first.seed,
        grid=Grid(),
        device=torch.device("cpu"),
        critic=first.critic,
    )
    progress, numbers = Progress(), []
    for job in map(TrainJob.from_json, jobs):
        inputs = read_inputs(job)
        result = run_update(
            trainer,
            build_algorithm(job.config["algorithm"]),
            train_batch(inputs.rollouts, inputs.rewards),
            config=job.train,
            progress=progress,
            seed=(job.seed, job.iteration),
            group_places=inputs.places,
            critic=job.critic,
            waiting=inputs.waiting,
        )
        progress = result.progress
        numbers.append([[step[name] for name in COLUMNS] for step in result.minibatches])
    trainer.close()
    return numbers


def hop_ranks(rank: int, size: int, folder: Path, *, job: str, again: str) -> tuple[str, str]:
    """Load the state before a job and save it `again`, then do the job.

    Returns:
        Pins of both states; the first is empty where the job begins without one.
    """
    work, ranks, saved = TrainJob.from_json(job), Ranks(rank, size), ""
    if work.state_pin:
        trainer = Trainer(
            work.train,
            work.policy_pin,
            temperature=work.temperature,
            seed=work.seed,
            grid=work.train.grid(ranks),
            device=torch.device("cpu"),
            critic=work.critic,
            critic_shape=work.info["critic"],
        )
        trainer.load(work.state_pin)
        held = trainer.state()
        saved = train_state.save(
            again,
            {**held.parts, "extra": work.info},
            parents={},
            attributes={},
            framework=held.framework,
            ranks=ranks,
        ).pin()
        trainer.close()
    return saved, train_iteration(work, ranks).state.pin()


def tensors(pin: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a state but for the random streams, which each rank has of its own."""
    return {name: t for name, t in all_tensors(pin).items() if not name.startswith("random.")}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not the same bit by bit."""
    return sorted(
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    )


def damaged(pin: str, uri: str, damage: str, seed: int) -> str:
    """Save a state with one fault in a place that the seed chooses; returns its pin."""
    found, rng = all_tensors(pin), np.random.default_rng(seed)
    if damage == "ulp":
        weights = sorted(n for n, t in found.items() if n.startswith("model.") and t.ndim == 2)
        flat = found[weights[rng.integers(len(weights))]].view(-1)
        place = int(rng.integers(len(flat)))
        flat[place] = torch.nextafter(flat[place], torch.tensor(torch.inf))
    else:
        left = sorted(n for n in found if n.endswith("gate_proj.weight.exp_avg_sq"))
        name = left[rng.integers(len(left))]
        other = name.replace("gate_proj", "up_proj")
        found[name], found[other] = found[other], found[name]
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in found.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    state = {**parts, "extra": train_state.read_state_info(pin)}
    attributes = train_state.read_record(pin)[1].attributes
    return train_state.save(uri, state, parents={}, attributes=attributes).pin()


def steps_of(tiny: TinyRun, iteration: int) -> list[list[float]]:
    """Return the numbers of the steps that the report of an iteration tells."""
    report = read_report(UpdateReport, layout.update(tiny.root, iteration))
    return [[step[name] for name in COLUMNS] for step in report.minibatches]


def largest_difference(seen: Sequence[object], wanted: Sequence[object]) -> float:
    """Return the largest difference of two tables, relative where the numbers are above 1."""
    left, right = np.array(seen), np.array(wanted)
    assert left.shape == right.shape, (left.shape, right.shape)
    return float((np.abs(left - right) / np.maximum(1.0, np.abs(right))).max())


Samples = list[tuple[list[int], list[float]]]
"""Tokens and their log-probabilities, of `requests`."""


def requests(temperature: float) -> list[Request]:
    """Return what an engine is asked that opens an export."""
    return [request(number, 10, temperature=temperature) for number in range(4)]


def sample(policy_pin: str, engine: str, temperature: float) -> Samples:
    """Return what an engine that is installed here samples from a policy, one after another."""
    cache = {"cache_bytes": 16 << 20} if engine.startswith("vllm") else {}
    opened = open_engine(EngineConfig(name=engine, **cache), ModelRef(pin=policy_pin), max_rows=4)
    with opened:
        made = [opened.generate([one])[0] for one in requests(temperature)]
    return [(output.token_ids, output.logprobs) for output in made]


def sample_elsewhere(policy_pin: str, temperature: float, *engines: str) -> dict[str, Samples]:
    """Return what engines on vLLM sample, one after another in the environment that has it.

    Raises:
        RuntimeError: it ended with an error.
    """
    words = ["-m", HERE, "--sample", policy_pin, str(temperature), *engines]
    done = subprocess.run(
        [sys.executable if find_spec("vllm") else ENGINES_PYTHON, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        text = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"{' and '.join(engines)} ended with {done.returncode}: {text}")
    found: dict[str, Samples] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_export(tiny: TinyRun, state_pin: str, with_vllm: bool) -> list[str]:
    """Export a state, load it with transformers and vLLM; return what is wrong."""
    uri, faults = f"{tiny.root}/exported", []
    pin = export(
        train_state.checkpoint_pin(state_pin),
        uri,
        policy=tiny.policy_pin,
        role=train_state.POLICY,
        parents={},
        attributes={"policy_version": len(HOPS)},
    ).pin()
    policy, held = load_policy(pin), all_tensors(state_pin)
    weights = {n.removeprefix("model."): t for n, t in held.items() if n.startswith("model.")}
    untrained = load_policy(tiny.policy_pin).model
    untrained.load_state_dict(weights, strict=False)
    ids = torch.arange(24).view(2, 12) % 50 + 4
    with torch.inference_mode():
        logits = [m(input_ids=ids, use_cache=False).logits for m in (policy.model, untrained)]
    is_equal = torch.equal(*logits)
    faults += [] if is_equal else ["the logits of the export are not those of the state"]
    print(f"Hugging Face export: logits {'equal' if is_equal else 'DIFFER'}", flush=True)
    if not with_vllm:
        return faults
    try:
        samples = sample_elsewhere(pin, 0.0, "vllm")["vllm"]
    except RuntimeError as error:
        return [*faults, str(error)]
    difference = 0.0
    for one, (token_ids, logprobs) in zip(requests(0.0), samples, strict=True):
        if token_ids != reference_greedy(policy, one.prompt_ids, 10):
            faults.append(f"vLLM takes other tokens than transformers for {one.request_id}")
        wanted = reference_logprobs(policy, one.prompt_ids, token_ids)
        difference = max(difference, largest_difference(logprobs, wanted))
    print(f"vLLM: largest difference of log-probabilities {difference:.1e}", flush=True)
    if difference > LOGPROB_TOLERANCE:
        faults.append(f"log-probabilities of vLLM differ by {difference:.1e}")
    return faults


def play(
    folder: Path, seed: int, *, hops: Sequence[Hop] = HOPS, with_vllm: bool = True
) -> list[str]:
    """Go all hops with one training and check each; return what is wrong."""
    config = tiny_config("vapo", learning_rate=1e-4, adam_epsilon=ADAM_EPSILON)
    config["run"]["seed"] = seed
    config["critic"] = {**config["critic"], "learning_rate": 2e-4}
    tiny = start_run(f"file://{folder}/root", config, **SIZES)
    for iteration in range(1, len(hops) + 1):
        add_iteration(tiny, iteration)
    plain = [job_of(tiny, iteration).to_json() for iteration in range(1, len(hops) + 1)]
    (wanted,) = run_ranks(f"{HERE}:undisturbed", 1, folder / "undisturbed", jobs=plain)
    faults, state_pin = [], ""
    for number, hop in enumerate(hops, start=1):
        job = job_of(tiny, number, hop, state_pin)
        # First, since they write what the hop writes again.
        for damage in DAMAGES if number == len(hops) else ():
            faults += check_damage(tiny, job, hop, folder / damage, (wanted[-1], damage, seed))
        saved, new_pin = go(job, hop, folder / f"hop-{number}")
        difference = largest_difference(steps_of(tiny, number), wanted[number - 1])
        text = f"{hop.name}: largest difference {difference:.1e} in {len(wanted[number - 1])} steps"
        if difference > TOLERANCE:
            faults.append(f"{hop.name} has other losses, by {difference:.1e}")
        if state_pin:
            before = tensors(state_pin)
            moved = changed(before, tensors(saved))
            text += f", {len(before) - len(moved)} of {len(before)} tensors bitwise as before"
            faults += (
                [f"{hop.name} has changed {moved[:3]} and {len(moved)} in all"] if moved else []
            )
        print(text, flush=True)
        state_pin = new_pin
    return faults + check_export(tiny, state_pin, with_vllm)


def go(job: TrainJob, hop: Hop, folder: Path) -> tuple[str, str]:
    """Do a job on the ranks of a hop; returns what `hop_ranks` does."""
    saved, new_pin = run_ranks(
        f"{HERE}:hop_ranks", hop.size, folder, job=job.to_json(), again=f"file://{folder}/again"
    )[0]
    return saved, new_pin


def check_damage(
    tiny: TinyRun, job: TrainJob, hop: Hop, folder: Path, case: tuple[list[list[float]], str, int]
) -> list[str]:
    """Do the job of a hop again from a state with a fault, which must be found; else say so."""
    wanted, damage, seed = case
    bad = damaged(job.state_pin, f"file://{folder}/state", damage, seed)
    saved, _ = go(replace(job, state_pin=bad), hop, folder)
    moved = changed(tensors(job.state_pin), tensors(saved))
    difference = largest_difference(steps_of(tiny, job.iteration), wanted)
    print(f"control '{damage}': found in {moved}, losses differ by {difference:.1e}", flush=True)
    expected = {"ulp": 1, "swap": 2}[damage]
    # The next float32 is far below what a loss shows; moments of another matrix are not.
    is_seen = len(moved) == expected and (damage == "ulp" or difference > TOLERANCE)
    return [] if is_seen else [f"the damage '{damage}' was not found"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play all hops; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7, help="of the training and the damages")
    parser.add_argument("--sample", nargs="+", default=(), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.sample:
        pin, temperature, *engines = given.sample
        print(json.dumps({name: sample(pin, name, float(temperature)) for name in engines}))
        return 0
    if not find_spec("vllm") and not ENGINES_PYTHON.exists():
        parser.exit(2, "vLLM must be installed in .venv-engines; `make engines` sets it up\n")
    with tempfile.TemporaryDirectory() as folder:
        faults = play(Path(folder), given.seed)
    print(*(f"failed: {fault}" for fault in faults), sep="\n") if faults else None
    print("verdict: " + (f"{len(faults)} faults" if faults else "one training on four grids"))
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
