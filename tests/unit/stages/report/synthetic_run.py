"""A run root as a healthy run of eight iterations leaves it, with known numbers, in a second."""

from dataclasses import replace
from typing import Any

import numpy as np

from planish import store
from planish.base.config import config_sha256
from planish.records import layout
from planish.records.io import write_files, write_set
from planish.records.prompts import PromptSet, prompt_id
from planish.records.ragged import Ragged
from planish.records.reports import EvalReport, UpdateReport, read_report, write_report
from planish.records.rewards import RewardSet
from planish.records.rollouts import RolloutSet
from planish.run.events import record_event
from planish.store.documents import read_json, write_json
from planish.verifiers import Verdict
from planish.verifiers.judging import to_columns
from tests.unit.records.samples import build_rollouts

BEGAN = 1_760_000_000.0
ITERATIONS = 8
CONFIG = {
    "run": {"seed": 0},
    "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "dtype": "float32"},
    "rollout": {"engine": "transformers", "groups_per_iteration": 128, "group_size": 8},
    "reward": {"max_response_tokens": 48, "overlong_buffer_tokens": 12},
    "algorithm": {"name": "dapo", "clip_low": 0.2, "clip_high": 0.28},
    "train": {"learning_rate": 5e-4, "rollouts_per_minibatch": 64},
    "evaluate": {"num_samples": 8, "temperature": 1.0},
}
BEFORE = {
    "accuracy": 0.2784,
    "accuracy_standard_error": 0.0058,
    "accuracy_bootstrap_error": 0.0151,
    "accuracy_bootstrap_low": 0.2491,
    "accuracy_bootstrap_high": 0.3078,
    "greedy": 0.336,
    "cons@8": 0.41,
    "pass@1": 0.2784,
    "pass@4": 0.561,
    "pass@8": 0.688,
    "invalid_fraction": 0.061,
    "truncated_fraction": 0.012,
    "refused_fraction": 0.0,
    "verifier_errors": 0.0,
    "response_length_mean": 22.4,
    "num_generated_tokens": 71680.0,
    "num_prompts": 400.0,
    "num_samples": 8.0,
}
AFTER = {
    **BEFORE,
    "accuracy": 0.4831,
    "accuracy_standard_error": 0.0061,
    "accuracy_bootstrap_error": 0.0163,
    "accuracy_bootstrap_low": 0.4513,
    "accuracy_bootstrap_high": 0.5150,
    "greedy": 0.5025,
    "cons@8": 0.56,
    "pass@1": 0.4831,
    "pass@4": 0.69,
    "pass@8": 0.762,
    "invalid_fraction": 0.009,
    "truncated_fraction": 0.004,
    "response_length_mean": 23.1,
}


CURATION = """# Curation report

Source: `gsm8k.jsonl`, sha256 `00ff`

**4168** training prompts, **595** held out, **500** worked traces.

## Rows in and out

| filter | unit | in | out | dropped |
| --- | --- | ---: | ---: | ---: |
| readable lines | problems | 7473 | 7473 | 0 |
| worked steps | steps | 23716 | 22818 | 898 |
| integer operands | steps | 22818 | 17390 | 5428 |
| exact duplicates | steps | 17390 | 5011 | 12379 |
| length | steps | 5011 | 4763 | 248 |
| evaluation overlap | steps | 4763 | 4763 | 0 |

### integer operands

| reason | dropped | examples |
| --- | ---: | --- |
| `decimal` | 5428 | `1.5*4=6`, `<img src=x onerror=alert(1)>` |
"""


def trace(a: int, b: int) -> str:
    """Add by columns, as the demo's model does."""
    steps, carry, digits = [], 0, max(len(str(a)), len(str(b)))
    for place in range(digits):
        x, y = a // 10**place % 10, b // 10**place % 10
        steps.append(f"{x}+{y}+{carry}={x + y + carry}")
        carry = (x + y + carry) // 10
    return ";".join(steps)


def sums(count: int, seed: int) -> PromptSet:
    random = np.random.default_rng(seed)
    pairs = sorted({(int(a), int(b)) for a, b in random.integers(10, 9999, (count, 2))})
    messages = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]
    answers = [str(a + b) for a, b in pairs]
    return PromptSet(
        prompt_id=[prompt_id(m, a) for m, a in zip(messages, answers, strict=True)],
        messages=messages,
        answer=answers,
        verifier=["trace"] * len(pairs),
        source=["arithmetic"] * len(pairs),
        pass_rate=np.full(len(pairs), np.nan, np.float32),
    )


def respond(prompts: PromptSet, row: int, *, is_right: bool, noise: int) -> str:
    a, b = (int(part) for part in prompts.messages[row][0]["content"][:-1].split("+"))
    return f"{trace(a, b)}={a + b if is_right else a + b + 1 + noise}"


def rollouts_of(
    prompts: PromptSet, rows: list[int], *, size: int, chance: float, seed: int, version: int
) -> tuple[RolloutSet, np.ndarray]:
    """Return rollouts of some prompts and which of them are right."""
    random = np.random.default_rng(seed)
    right = random.random((len(rows), size)) < chance
    texts = [
        respond(prompts, row, is_right=bool(right[g, s]), noise=s)
        for g, row in enumerate(rows)
        for s in range(size)
    ]
    tokens = [[3 + ord(c) % 50 for c in text] + [1] for text in texts]
    made = build_rollouts(
        [[5, 6, 7]] * len(rows),
        tokens,
        rollout_logprobs=Ragged.from_lists([[-0.5] * len(t) for t in tokens], np.float32),
        policy_version=Ragged.from_lists([[version] * len(t) for t in tokens], np.int32),
        prompt_id=[prompts.prompt_id[row] for row in rows for _ in range(size)],
        response=texts,
        answer=[prompts.answer[row] for row in rows for _ in range(size)],
        verifier=["trace"] * len(texts),
    )
    return made, right.ravel()


def rewards_of(rollouts: RolloutSet, right: np.ndarray) -> RewardSet:
    ones = np.ones(rollouts.num_rows, np.float32)
    return RewardSet(
        accuracy=right.astype(np.float32),
        outcome=np.where(right, 1.0, -1.0).astype(np.float32),
        length_penalty=0 * ones,
        reward=np.where(right, 1.0, -1.0).astype(np.float32),
        has_reward=ones > 0,
        keep=ones > 0,
        extracted=[text.rpartition("=")[2] for text in rollouts.response],
    )


class Clock:
    """Writes stage logs one after another; times are invented but plausible."""

    def __init__(self, root: str) -> None:
        self.root, self.now = root, BEGAN

    def log(self, stage: str, seconds: float, *, iteration: int = 0, **facts: Any) -> None:
        self.entry(stage, self.now + 1.2, seconds, iteration=iteration, **facts)
        self.now += 1.2 + seconds

    def entry(
        self, stage: str, start: float, seconds: float, *, iteration: int = 0, shard: int = 0,
        state: str = "done", metrics: dict[str, float] | None = None, error: str = "",
    ) -> None:  # fmt: skip
        write_json(
            layout.stage_log(self.root, stage, iteration, shard),
            {
                "stage": stage, "iteration": iteration, "shard": shard, "state": state,
                "start_seconds": start, "startup_seconds": 0.9, "seconds": seconds,
                "metrics": metrics or {}, "error": error, "already_done": False,
            },
        )  # fmt: skip


def build_run(root: str, *, iterations: int = ITERATIONS, evaluate: bool = True) -> dict[str, Any]:
    """Write a whole run; return its `run.json`."""
    digest = config_sha256(CONFIG)
    run = {
        "config": CONFIG, "config_sha256": digest, "code_version": "0.1.0", "preset": "dapo-tiny",
        "initial": {"policy": "", "state": ""},
    }  # fmt: skip
    write_json(layout.run_file(root), run)
    clock, facts = Clock(root), {"config_sha256": digest}
    train, held_out = sums(300, 1), sums(120, 2)
    write_set(layout.prompts(root), train, parents={}, attributes=facts)
    write_set(layout.evaluation_prompts(root), held_out, parents={}, attributes=facts)
    clock.log("prepare", 0.4)
    clock.log(
        "curate", 2.1, metrics={"num_read": 5200, "prompts_train": 4168, "prompts_evaluation": 595}
    )
    store.write(layout.curation_report(root), CURATION.encode())
    clock.log("sft", 31.0, metrics={"steps": 610, "accuracy": 0.28})
    _policy(root, 0, facts)
    for iteration in range(1, iterations + 1):
        _iteration(clock, iteration, train, facts)
    if evaluate:
        clock.log("evaluate", 14.2, metrics={"accuracy_rise_standard_error": 0.0052})
        _evaluation(root, 0, BEFORE, held_out, chance=0.28, facts=facts)
        _evaluation(root, iterations, AFTER, held_out, chance=0.6, facts=facts)
    return run


def _policy(root: str, version: int, facts: dict[str, Any]) -> None:
    write_files(
        layout.policy(root, version), "policy/1", {"config.json": b"{%d}" % version},
        parents={}, attributes={**facts, "policy_version": version},
    )  # fmt: skip


def _iteration(clock: Clock, iteration: int, train: PromptSet, facts: dict[str, Any]) -> None:
    root, progress = clock.root, 1 - 0.78 ** (iteration - 1)
    wave = float(np.sin(iteration * 2.3))
    start = clock.now + 1.2
    chance = 0.30 + 0.24 * progress + 0.012 * wave
    parents, shards = {}, []
    for shard in range(2):
        rows = [(37 * iteration + 61 * shard + 7 * k) % train.num_rows for k in range(12)]
        found, right = rollouts_of(
            train, sorted(set(rows)), size=8, chance=chance, seed=iteration * 10 + shard,
            version=iteration - 1,
        )  # fmt: skip
        ref = write_set(
            layout.rollouts(root, iteration, shard), found, parents={},
            attributes={**facts, "iteration": iteration},
        )  # fmt: skip
        parents[f"rollouts-{shard:02d}"] = ref.manifest_sha256
        shards.append((found, right))
        seconds = 2.9 + 0.2 * shard + 0.15 * wave
        clock.entry(
            "rollout", start, seconds, iteration=iteration, shard=shard,
            metrics={
                "accuracy_mean": chance,
                "num_generated_groups": 124.0,
                "ds/gen_rounds": 2.0,
                "ds/kept_frac": 0.52 - 0.02 * progress,
                "ds/all_correct_frac": 0.05 + 0.2 * progress,
                "ds/all_wrong_frac": 0.43 - 0.18 * progress,
                "num_generated_tokens": 22500.0 + 300 * shard,
                "sample_seconds": 2.0 + 0.25 * shard,
                "response_length_mean": 22.4 + progress,
                "response_length_max": 48.0 if iteration % 3 else 44.0,
            },
        )  # fmt: skip
    clock.now = start + 3.3
    joined = RolloutSet.concat([found for found, _ in shards])
    rewards = rewards_of(joined, np.concatenate([right for _, right in shards]))
    write_set(layout.rewards(root, iteration), rewards, parents=parents, attributes=facts)
    reward = -0.42 + 0.33 * progress + 0.03 * wave
    clock.log(
        "reward", 0.5, iteration=iteration, metrics={"reward_mean": reward, "accuracy_mean": 0.5}
    )
    clock.log("train", 2.3 + 0.1 * wave, iteration=iteration)
    write_report(layout.update(root, iteration), _update(iteration, reward, progress, wave))
    clock.log("checkpoint", 0.3, iteration=iteration)
    write_files(
        layout.state(root, 16 * iteration), "train-state/1", {"a.bin": b"%d" % iteration},
        parents={}, attributes={**facts, "step": 16 * iteration},
    )  # fmt: skip
    _policy(root, iteration, facts)


def _update(iteration: int, reward: float, progress: float, wave: float) -> UpdateReport:
    scalars = {
        "reward_mean": reward,
        "accuracy_mean": 0.49 + 0.02 * wave,
        "entropy": 0.62 - 0.3 * progress + 0.01 * wave,
        "clipfrac_high": 0.011 + 0.006 * progress + 0.002 * wave,
        "clipfrac_low": 0.007 + 0.002 * wave,
        "clipfrac_dual": 0.0004,
        "approx_kl": 0.0061 + 0.0012 * wave,
        "grad_norm": 0.84 + 0.12 * wave - 0.2 * progress,
        "mismatch_probability_mean": 2.1e-7 + 2e-8 * wave,
        "mismatch_probability_max": 3.1e-6 + 6e-7 * wave,
        "response_tokens_mean": 24.0 + progress,
        "response_tokens_max": 48.0 if iteration % 3 else 44.0,
        "loss": -0.012,
    }
    return UpdateReport(
        scalars,
        [{"grad_norm": 0.6 + 0.05 * k + 0.2 * wave} for k in range(16)],
        {"iteration": iteration},
    )


def _evaluation(
    root: str, version: int, scalars: dict[str, float], held_out: PromptSet, *,
    chance: float, facts: dict[str, Any],
) -> None:  # fmt: skip
    sources = {
        "addition": {**scalars, "num_prompts": 250.0},
        "subtraction": {**scalars, "accuracy": scalars["accuracy"] - 0.06, "num_prompts": 150.0},
    }
    found, right = rollouts_of(
        held_out, list(range(24)), size=8, chance=chance, seed=7 + version, version=version
    )
    verdicts = [
        {"trace": Verdict(float(is_right), text.rpartition("=")[2])}
        for is_right, text in zip(right, found.response, strict=True)
    ]
    marks = ["".join("01"[int(mark)] for mark in row) for row in right.reshape(-1, 8)]
    write_report(
        f"{layout.evaluation(root, version)}/report.json",
        EvalReport(scalars, sources, {"marks": marks}),
    )
    found = replace(found, **to_columns(verdicts))
    write_set(
        f"{layout.evaluation(root, version)}/rollouts", found, parents={},
        attributes={**facts, "policy_version": version},
    )  # fmt: skip


PRETRAINING = 3


def critic_scalars(iteration: int) -> dict[str, float]:
    """Return what an update says of its critic; targets of iteration 2 are all equal."""
    risen = 1 - 0.7**iteration
    scalars = {
        "pretraining": float(iteration <= PRETRAINING),
        "critic_learning_rate": 6e-4 * min(1.0, iteration / 2),
        "learning_rate": 0.0 if iteration <= PRETRAINING else 3e-4,
        "value_loss": 0.30 - 0.2 * risen,
        "fresh_value_loss": 0.34 - 0.2 * risen,
        "explained_variance": -7.5 if iteration == 1 else 0.6 * risen,
        "ev_undefined": float(iteration == 2),
        "value_mean": 0.02 + 0.3 * risen,
        "return_mean": 0.31 + 0.02 * iteration,
        "value_clipfrac": 0.02 * risen,
        "value_grad_norm": 2.1 - risen,
        "num_finished": 96.0 + 7 * (iteration % 3),
        "advantage_mean": 0.2 - 0.15 * risen,
        "advantage_std": 0.45,
    }
    if iteration > PRETRAINING:
        scalars["positive_rollouts"] = 30.0 + 3 * iteration
    return scalars


def slot_metrics(iteration: int, *, windows: bool) -> dict[str, float]:
    """Return what one shard says of its slots; without windows no response goes on."""
    goes_on = windows and iteration > 1
    return {
        "num_live_slots": 64.0,
        "num_continued": 16.0 if goes_on else 0.0,
        "num_prefix_tokens": 900.0 + 40 * iteration if goes_on else 0.0,
        "slot_utilisation": 0.7 + 0.01 * iteration,
    }


def build_critic_run(root: str, *, windows: bool = True) -> None:
    """Write a whole run with a critic, three iterations of value pretraining, and windows."""
    run: dict[str, Any] = build_run(root)
    rollout = {**run["config"]["rollout"], "dynamic_sampling": False}
    algorithm = {"name": "tppo" if windows else "vapo"}
    run["config"] = {**run["config"], "rollout": rollout, "algorithm": algorithm}
    write_json(layout.run_file(root), run)
    for iteration in range(1, ITERATIONS + 1):
        uri = layout.update(root, iteration)
        report = read_report(UpdateReport, uri)
        scalars = {**report.scalars, **critic_scalars(iteration)}
        write_report(uri, UpdateReport(scalars, report.minibatches, report.attributes))
        for shard in range(2):
            log = layout.stage_log(root, "rollout", iteration, shard)
            entry = read_json(log)
            entry["metrics"] |= slot_metrics(iteration, windows=windows)
            write_json(log, entry)


GRID = {"nodes": 4, "trainer": "megatron", "dp": 2, "tp": 2, "pp": 1, "ep": 1}
SMALLER_GRID = {"nodes": 3, "trainer": "megatron", "dp": 3, "tp": 1, "pp": 1, "ep": 1}


def write_alert(root: str, name: str, **facts: Any) -> None:
    """Write an alert as the monitor does."""
    alert = {
        "machine": "machine-3", "machines": [], "metric": "gpu_duty_cycle", "kind": "dissimilar",
        "score": 3.0, "state": "firing", "stage": "train", "iteration": 2, "action": "",
        "first_second": BEGAN + 20, "last_second": BEGAN + 60,
    }  # fmt: skip
    write_json(f"{layout.alerts(root)}/{name}.json", {**alert, **facts})


def disturb(root: str) -> float:
    """Write what the stage and the monitor write when iteration 2 loses a machine."""
    begin: float = read_json(layout.stage_log(root, "train", 2, 0))["start_seconds"]
    failed = {"stage": "train", "shard": 0, "exit_code": 75, "error": "got 75 from `pod-3`"}
    record_event(root, "attempt", 2, begin_seconds=begin - 60, end_seconds=begin - 20, **failed)
    for second, end, grid in (
        (begin - 58, "every pod must end with code 0, got 75", GRID),
        (begin + 1, "complete", SMALLER_GRID),
    ):
        record_event(root, "gang", 2, begin_seconds=second, **grid)
        facts = {**grid, "end_seconds": second + 30, "end": end}
        record_event(root, "gang", 2, begin_seconds=second, **facts)
    told = [
        (begin - 38, "firing", ""),
        (begin - 37, "firing", "evict waiting: for a call"),
        (begin - 35, "acted", "evict done: cordon machine-3 and evict pod-3"),
    ]
    history = [dict(zip(("second", "state", "action"), one, strict=True)) for one in told]
    times = {"first_second": begin - 50, "last_second": begin - 35}
    write_alert(root, "a", state="acted", history=history, **times)
    return begin
