"""Speed of our DAPO against TRL's GRPOTrainer (`loss_type="dapo"`) on one CPU thread each.

Both start from the same weights, sample the same 128 prompts x 8 in each iteration, score by the
same verifier and length penalty, and make 16 updates of 64 sequences with the same AdamW and
learning rate. The processes take turns, an iteration each. What is timed is an iteration whole: on
our side the stages rollout, reward, train and checkpoint with everything that they read and write;
on TRL's side `train()` from one generation to the next. Process starts, imports, the loading of the
first model and evaluations are not timed. The policy after every iteration of every side is
evaluated by the same function, with our engine, on the held-out prompts.

`trl`            TRL; every group trains, a forward pass computes old log-probabilities
`ours`           the same: dynamic sampling off, old log-probabilities recomputed
`ours_bypass`    as `ours`, with the old log-probabilities of the sampler
`ours_dynamic`   the demo's preset as it is: dynamic sampling, log-probabilities of the sampler
`ours_dynamic_recomputed`  as `ours_dynamic`, old log-probabilities recomputed

TRL's environment is made as `equality.py` says. With `TRL_PYTHON=TRL/bin/python` in the
environment, `python -m tests.benchmarks.peers.bench_trl` writes `results/trl.json` and prints rows
for docs/results.md; `--rows` prints those of the last result. It needs an idle machine;
`--rehearse` does not, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planish.algorithms.advantages import group_advantages
from planish.base.config import config_sha256, load_preset, merge, resolve_config
from planish.engines import open_engine
from planish.engines.config import EngineConfig
from planish.engines.measure import generate_rollouts, judge
from planish.engines.requests import ModelRef, Sampling
from planish.models.policy import load_policy, save_policy
from planish.models.tokens import load_tokenizer
from planish.records import layout
from planish.records.io import fetch_files, read_manifest, read_set
from planish.records.prompts import PromptSet
from planish.records.refs import parse_pin
from planish.records.stream import position
from planish.run.stage import PathArtifact, write_json
from planish.stages.curate.stage import run as curate
from planish.stages.sft.stage import run as sft
from planish.verifiers import VerifierOptions, verify_many
from planish.verifiers.shaping import overlong_penalty
from tests.benchmarks.facts import RESULTS, require_idle_machine, write_result
from tests.benchmarks.peers.trl_table import ARMS, REACHES, SYSTEMS, result_rows, summary
from tests.benchmarks.peers.turns import Player

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
_ALL_GROUPS = ("rollout.dynamic_sampling=false", "reward.keep_uniform_groups=true")
_RECOMPUTED = ('algorithm.correction="off"',)
OVERRIDES: dict[str, tuple[str, ...]] = {
    "ours": (*_ALL_GROUPS, *_RECOMPUTED),
    "ours_bypass": _ALL_GROUPS,
    "ours_dynamic": (),
    "ours_dynamic_recomputed": _RECOMPUTED,
}
"""Arm to what it changes in the demo's preset."""
SEEDS = (0, 1, 2, 3, 4, 5)
"""Fixed before anything was measured."""
ITERATIONS = 8
EVALUATION_SAMPLES = 8
_SECONDS = {"start": 45.0, "trl": 4.0, "ours": 2.0, "evaluation": 1.5}
"""About what the parts of a run take, for the plan: of a seed, of an iteration, of a policy."""


def write_run(root: str, seed: int, *overrides: str) -> tuple[dict[str, Any], str]:
    """Begin a run of the demo's preset; returns its configuration and the digest."""
    config = resolve_config(
        merge(load_preset("dapo-tiny"), overrides=[f"run.seed={seed}", *overrides])
    )
    digest = config_sha256(config)
    nothing = {"policy": "", "state": ""}
    document = {"config": config, "config_sha256": digest, "code_version": "0",
                "resumed_from": "", "origin": nothing, "initial": nothing}  # fmt: skip
    write_json(layout.run_file(root), document)
    return config, digest


def make_start(folder: Path, seed: int) -> None:
    """Prompts and the policy of the cold start."""
    root = f"file://{folder}"
    _, digest = write_run(root, seed)

    def at(name: str) -> PathArtifact:
        return PathArtifact(str(folder / "artifacts" / name))

    curate(root=root, config_sha256=digest, prompts=at("prompts"), report=at("report"))
    sft(root=root, config_sha256=digest, prompts=at("prompts"), policy=at("policy"),
        metrics=at("sft"))  # fmt: skip


def our_job(start: Path, folder: Path, seed: int, *overrides: str) -> Player:
    """Start our trainer in a run of its own that begins with copies of the start's files."""
    for name in ("prompts", "policies"):
        shutil.copytree(start / name, folder / name)
    _, digest = write_run(f"file://{folder}", seed, *overrides)
    job = {"root": f"file://{folder}", "config_sha256": digest, "folder": str(folder)}
    path = folder / "job.json"
    path.write_text(json.dumps(job), "utf-8")
    command = [sys.executable, "-m", "tests.benchmarks.peers.our_trainer", str(path)]
    return Player(command, folder / "log.txt", {"OMP_NUM_THREADS": "1"})


def policy_folder(start: Path) -> Path:
    return start / "policies" / "00000"


def stream(start: Path, seed: int, count: int) -> list[dict[str, str]]:
    """The first prompts of the run's stream, as text under the chat template."""
    prompts = read_set(PromptSet, layout.prompts(f"file://{start}"))
    backend = load_tokenizer(policy_folder(start)).backend
    rows = [position(ordinal, prompts.num_rows, seed) for ordinal in range(count)]
    return [
        {
            "prompt": backend.apply_chat_template(
                [dict(m) for m in prompts.messages[row]], tokenize=False, add_generation_prompt=True
            ),
            "answer": prompts.answer[row],
            "verifier": prompts.verifier[row],
        }
        for row in rows
    ]


def trl_job(start: Path, folder: Path, seed: int, iterations: int) -> Player:
    config = resolve_config(merge(load_preset("dapo-tiny"), overrides=[f"run.seed={seed}"]))
    rollout, train = config["rollout"], config["train"]
    per_update = train["rollouts_per_minibatch"]
    num_prompts = rollout["prompts_per_iteration"]
    job = {
        "start": str(policy_folder(start)),
        "folder": str(folder),
        "seed": seed,
        "prompts": stream(start, seed, num_prompts * iterations),
        "group_size": rollout["group_size"],
        "updates": num_prompts * rollout["group_size"] // per_update,
        "rollouts_per_update": per_update,
        "max_iterations": iterations,
        "max_response_tokens": rollout["max_response_tokens"],
        "overlong_buffer_tokens": config["reward"]["overlong_buffer_tokens"],
        **{
            name: train[name]
            for name in ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon",
                         "weight_decay", "grad_clip")
        },
    }  # fmt: skip
    folder.mkdir()
    path = folder / "job.json"
    path.write_text(json.dumps(job), "utf-8")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    command = [os.environ["TRL_PYTHON"], str(HERE / "trl_trainer.py"), str(path)]
    return Player(command, folder / "log.txt", environment)


class Evaluator:
    """Mean accuracy over samples on the held-out prompts, with equal noise for all policies."""

    def __init__(self, start: Path, seed: int, max_response_tokens: int) -> None:
        self.start, self.seed = start, seed
        self.sampling = Sampling(max_new_tokens=max_response_tokens, temperature=1.0, top_p=1.0)
        self.prompts = read_set(PromptSet, layout.evaluation_prompts(f"file://{start}"))

    def __call__(self, pin: str) -> float:
        uri, digest = parse_pin(pin)
        tokenizer = load_tokenizer(fetch_files(uri, sha256=digest))
        with open_engine(EngineConfig(), ModelRef(pin=pin), max_rows=256, device="cpu") as engine:
            rollouts = generate_rollouts(
                engine, tokenizer, self.prompts, num_samples=EVALUATION_SAMPLES,
                sampling=self.sampling, run_seed=self.seed,
            )  # fmt: skip
        verdicts = judge(rollouts, VerifierOptions(), max_error_rate=0.01)
        return float(np.mean([verdict.accuracy for verdict in verdicts]))

    def as_policy(self, folder: Path) -> str:
        """Wrap weights that TRL saved as a policy; returns its pin."""
        from safetensors.torch import load_file

        uri = layout.policy(f"file://{self.start}", 0)
        policy = load_policy(read_manifest(uri).ref(uri).pin(), dtype=torch.float32)
        found = policy.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        assert set(found.missing_keys) <= {"lm_head.weight"}, found
        assert not found.unexpected_keys, found
        target = f"file://{folder}/policy"
        return save_policy(target, policy, version=0, parents={}, attributes={}).pin()


def check_rewards(folder: Path) -> dict[str, float]:
    """Compare rewards and advantages of TRL's first batch with what our functions make of it."""
    batch = json.loads((folder / "first_batch.json").read_text("utf-8"))
    config = resolve_config(load_preset("dapo-tiny"))["reward"]
    verdicts = verify_many(
        zip(batch["verifier"], batch["completions"], batch["answer"], strict=True)
    )
    outcome = [config["reward_correct"] if v.accuracy > 0 else config["reward_wrong"]
               for v in verdicts]  # fmt: skip
    penalty = overlong_penalty(
        batch["lengths"],
        max_tokens=config["max_response_tokens"],
        buffer_tokens=config["overlong_buffer_tokens"],
    )
    rewards = torch.tensor(outcome) + torch.from_numpy(penalty)
    group = torch.arange(len(rewards)) // batch["group_size"]
    advantages = group_advantages(rewards, group, epsilon=1e-4)
    gaps = {
        "rewards": (rewards - torch.tensor(batch["rewards"])).abs().max().item(),
        "advantages": (advantages - torch.tensor(batch["advantages"])).abs().max().item(),
    }
    assert gaps["rewards"] == 0.0, gaps
    return gaps


def one_seed(
    seed: int, folder: Path, starts: Path, iterations: int, began: float
) -> dict[str, Any]:
    """Train all systems from one start and evaluate the policy after every iteration."""

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  seed {seed}  {text}", flush=True)

    start = starts / f"start-{seed}"
    if not (start / "policies").exists():
        say("cold start")
        make_start(start, seed)
    players = {"trl": trl_job(start, folder / "trl", seed, iterations)}
    for name in ARMS:
        players[name] = our_job(start, folder / name, seed, *OVERRIDES[name])
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for number in range(iterations):
        first = number % len(SYSTEMS)
        for name in SYSTEMS[first:] + SYSTEMS[:first]:
            turns[name].append(players[name].turn())
        spent = {name: round(turns[name][-1]["seconds"], 2) for name in SYSTEMS}
        say(f"iteration {number + 1} of {iterations}  seconds {json.dumps(spent)}")
    for player in players.values():
        player.close()
    evaluate = Evaluator(start, seed, 48)
    uri = layout.policy(f"file://{start}", 0)
    result: dict[str, Any] = {
        "start_accuracy": evaluate(read_manifest(uri).ref(uri).pin()),
        "largest_gap": check_rewards(folder / "trl"),
    }
    for name in SYSTEMS:
        pins = [turn.pop("policy") for turn in turns[name]]
        if name == "trl":
            pins = [evaluate.as_policy(Path(pin)) for pin in pins]
        accuracy = [evaluate(pin) for pin in pins]
        result[name] = {"iterations": turns[name], "accuracy": accuracy}
        say(f"accuracy {name} {[round(a, 3) for a in (result['start_accuracy'], *accuracy)]}")
    return result


def show_plan(seeds: list[int], iterations: int) -> None:
    """Print what will be done and about how long it takes."""
    per_iteration = _SECONDS["trl"] + len(ARMS) * _SECONDS["ours"]
    evaluations = len(SYSTEMS) * iterations + 1
    per_seed = _SECONDS["start"] + iterations * per_iteration + evaluations * _SECONDS["evaluation"]
    print(
        f"seeds {seeds}, each: a cold start, {iterations} iterations of {', '.join(SYSTEMS)} in "
        f"turns, {evaluations} evaluations; about {len(seeds) * per_seed / 60:.0f} minutes",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers.bench_trl")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--starts", type=Path, help="keeps the cold starts for the next time")
    parser.add_argument(
        "--rehearse", action="store_true", help="run on a busy machine too; write no result"
    )
    parser.add_argument("--rows", action="store_true", help="print the rows of the page and end")
    options = parser.parse_args()
    if not options.rows and not Path(os.environ.get("TRL_PYTHON", "")).is_file():
        parser.error(
            "`TRL_PYTHON` must be the Python of an environment with TRL, got "
            f"{os.environ.get('TRL_PYTHON', '')!r}; make one as tests/benchmarks/peers/equality.py "
            "says"
        )
    return options


def print_rows() -> None:
    """Print the rows of docs/results.md for the last result."""
    document = json.loads((RESULTS / "trl.json").read_text("utf-8"))
    print("\n".join(result_rows(document["result"], document["label"])))


def main() -> None:
    options = arguments()
    if options.rows:
        print_rows()
        return
    busy = None if options.rehearse else require_idle_machine()
    began = time.monotonic()
    show_plan(options.seeds, options.iterations)
    torch.set_num_threads(1)
    seeds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        starts = (options.starts or Path(folder) / "starts").resolve()
        for seed in options.seeds:
            place = Path(folder) / str(seed)
            place.mkdir()
            seeds[str(seed)] = one_seed(seed, place, starts, options.iterations, began)
    result = {
        "busy_cores_before": busy,
        "reaches": REACHES,
        "seeds": seeds,
        "summary": summary(seeds),
    }
    if options.rehearse:
        print(json.dumps(result["summary"], indent=1))
        print("\n".join(result_rows(result, "rehearsed")))
        return
    print(write_result("trl", "measured-cpu", result, "tests.benchmarks.peers.bench_trl"))
    print_rows()


if __name__ == "__main__":
    main()
