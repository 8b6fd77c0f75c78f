"""DAPO as TRL does it: one process that trains an iteration at each `go` on its input.

`python trl_trainer.py JOB.json` is run by the Python of TRL's environment, with `src` of this
project on PYTHONPATH for the verifiers and the length penalty, which import no model library.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import Turns

from planish.verifiers import verify_many
from planish.verifiers.shaping import overlong_penalty


class Reward:
    """The same rule as the reward stage: +1 or -1, and the soft overlong punishment."""

    __name__ = "reward"

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.seen: dict[str, list[Any]] = {}

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], **columns: list[Any]
    ) -> list[float]:
        verdicts = verify_many(
            zip(columns["verifier"], completions, columns["answer"], strict=True)
        )
        lengths = [len(ids) for ids in completion_ids]
        penalty = overlong_penalty(
            lengths,
            max_tokens=self.job["max_response_tokens"],
            buffer_tokens=self.job["overlong_buffer_tokens"],
        )
        outcome = [1.0 if verdict.accuracy > 0 else -1.0 for verdict in verdicts]
        rewards = [a + float(b) for a, b in zip(outcome, penalty, strict=True)]
        self.seen = {
            "accuracy": [verdict.accuracy for verdict in verdicts],
            "lengths": lengths,
            "completions": completions,
            "rewards": rewards,
            "verifier": columns["verifier"],
            "answer": columns["answer"],
        }
        return rewards


class Iterations(TrainerCallback):
    """Cuts training into iterations and keeps everything else out of the clock."""

    def __init__(self, turns: Turns, job: dict[str, Any], reward: Reward) -> None:
        self.turns, self.job, self.reward = turns, job, reward
        self.started = self.processor = 0.0
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.job["updates"]:
            return
        seconds = time.perf_counter() - self.started
        processor = time.process_time() - self.processor
        iteration = state.global_step // self.job["updates"]
        folder = Path(self.job["folder"]) / f"{iteration:05d}"
        self.trainer.model.save_pretrained(folder)
        seen = self.reward.seen
        if iteration == 1:
            first = {**seen, "advantages": self.trainer.advantages.tolist(),
                     "group_size": self.job["group_size"]}  # fmt: skip
            (folder.parent / "first_batch.json").write_text(json.dumps(first), "utf-8")
        self.turns.done(
            {
                "seconds": seconds,
                "processor_seconds": processor,
                "policy": str(folder),
                "accuracy": sum(seen["accuracy"]) / len(seen["accuracy"]),
                "num_rollouts": len(seen["lengths"]),
                "num_tokens": sum(seen["lengths"]),
            }
        )
        self._wait(control)

    def _wait(self, control: Any) -> None:
        if not self.turns.next():
            control.should_training_stop = True
        self.started, self.processor = time.perf_counter(), time.process_time()


class Trainer(GRPOTrainer):
    """TRL's trainer that remembers the advantages of its last batch."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found = super()._generate_and_score_completions(inputs)
        self.advantages = found["advantages"]
        return found


def arguments(job: dict[str, Any]) -> GRPOConfig:
    return GRPOConfig(
        output_dir=job["folder"],
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        num_generations=job["group_size"],
        per_device_train_batch_size=job["rollouts_per_update"],
        gradient_accumulation_steps=1,
        steps_per_generation=job["updates"],
        num_iterations=1,
        max_completion_length=job["max_response_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=job["adam_beta1"],
        adam_beta2=job["adam_beta2"],
        adam_epsilon=job["adam_epsilon"],
        weight_decay=job["weight_decay"],
        max_grad_norm=job["grad_clip"],
        max_steps=job["updates"] * job["max_iterations"],
        seed=job["seed"],
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        fp16=False,
        use_cpu=True,
        logging_steps=job["updates"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


def main(path: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(path).read_text("utf-8"))
    turns = Turns()
    reward = Reward(job)
    callback = Iterations(turns, job, reward)
    tokenizer = AutoTokenizer.from_pretrained(job["start"])
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(job["start"], dtype=torch.float32),
        args=arguments(job),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(job["prompts"]),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    callback.trainer = trainer
    turns.ready()
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
