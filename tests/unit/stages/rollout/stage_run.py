"""Roots on which the rollout stage can be called, as curation and training would leave them."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import torch

from planish import store
from planish.base.config import config_sha256
from planish.checkpoint.train_state import save
from planish.models.config import ModelConfig
from planish.models.policy import build_policy, save_policy
from planish.records import layout
from planish.records.io import read_manifest, write_set
from planish.records.prompts import PromptSet, prompt_id
from planish.records.refs import Ref
from planish.records.stream import StreamState, advance
from planish.run.stage import PathArtifact
from planish.stages.rollout import stage
from planish.store.documents import write_json

ROLLOUT = {
    "prompts_per_iteration": 6,
    "group_size": 4,
    "max_response_tokens": 8,
    "generation_prompts_factor": 1.0,
    "max_generation_rounds": 40,
    "max_rows": 16,
}


@functools.cache
def trained_weights(spaces=0, num_experts=0, **sizes):
    """Weights that answer any sum with one of the digits 0 to 3 and stop: a few quick updates.

    Args:
        spaces: most spaces before the digit that the updates show, for responses that take long.
        num_experts: of the layer.
        sizes: of the model, where they are not those of one small layer.
    """
    config = ModelConfig(**{"num_layers": 1, "num_experts": num_experts, **sizes})
    policy = build_policy(config, 0)
    encode = policy.tokenizer.encode_prompt
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        digits = torch.randint(0, 4, (32,), generator=draw).tolist()
        rows = [
            [*encode([{"role": "user", "content": f"{k % 10}+{k % 10}="}]), *[4 + d, 2]]
            for k, d in enumerate(digits)
        ]
        if spaces:
            space = 4 + ModelConfig().alphabet.index(" ")
            before = torch.randint(0, spaces + 1, (len(rows),), generator=draw).tolist()
            rows = [
                [*row[:-2], *[space] * n, *row[-2:], *[2] * (spaces - n)]
                for row, n in zip(rows, before, strict=True)
            ]
        ids = torch.tensor(rows)
        logits = policy.model(input_ids=ids).logits[:, 4:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.model.state_dict()


def easy_policy(spaces=0, num_experts=0, **sizes):
    config = ModelConfig(**{"num_layers": 1, "num_experts": num_experts, **sizes})
    policy = build_policy(config, 0)
    policy.model.load_state_dict(trained_weights(spaces, num_experts, **sizes))
    return policy


def write_template(folder: Path, *, num_prompts=10, spaces=0, policy=None) -> None:
    """Write a root with at most 400 prompts and a policy, to be copied for each test."""
    root = folder.as_uri()
    sums = [f"{k % 10}{'+-*/'[k // 100]}{(k + k // 10) % 10}=" for k in range(num_prompts)]
    asks = [[{"role": "user", "content": text}] for text in sums]
    answers = [str(k % 4) for k in range(num_prompts)]
    prompts = PromptSet(
        prompt_id=[prompt_id(m, a) for m, a in zip(asks, answers, strict=True)],
        messages=asks,
        answer=answers,
        verifier=["exact"] * num_prompts,
        source=["sums"] * num_prompts,
        pass_rate=np.full(num_prompts, np.nan, np.float32),
    )
    write_set(layout.prompts(root), prompts, parents={}, attributes={"config_sha256": "c"})
    policy = policy or easy_policy(spaces)
    save_policy(layout.policy(root, 0), policy, version=0, parents={}, attributes={})


class Run:
    """One root, and calls of the stage on it."""

    def __init__(self, template: Path, folder: Path, *, tables=None, **changes) -> None:
        shutil.copytree(template, folder / "root")
        self.folder, self.root = folder, (folder / "root").as_uri()
        self.config = {"run": {"seed": 3}, "rollout": {**ROLLOUT, **changes}}
        self.config |= tables or {}
        self.digest = config_sha256(self.config)
        run = {"config": self.config, "config_sha256": self.digest}
        write_json(layout.run_file(self.root), run)
        manifest = read_manifest(layout.policy(self.root, 0))
        self.policy_pin = f"{layout.policy(self.root, 0)}#sha256={manifest.sha256}"

    def call(self, shard=0, num_shards=1, state_pin="", number=1):
        out = {n: PathArtifact(str(self.folder / "out" / n)) for n in ("rollouts", "metrics")}
        stage.run(
            self.root, self.digest, number, 0, shard, num_shards, self.policy_pin, state_pin, **out
        )
        ref = Ref.from_json(Path(out["rollouts"].path).read_text())
        metrics = json.loads(Path(out["metrics"].path).read_text())
        return ref, metrics

    def attributes(self, number=1, shard=0):
        return read_manifest(layout.rollouts(self.root, number, shard)).attributes

    def log(self, shard=0):
        uri = layout.stage_log(self.root, "rollout", 1, shard)
        return json.loads(store.read(uri))


def after_iteration(run, number, num_shards, *, spaces=0):
    """Write a train state as the train stage would, and the policy after it; returns its pin."""
    found = [run.attributes(number, s) for s in range(num_shards)]
    pins = {
        kind: [
            f"iterations/{number:05d}/{kind}/{s:02d}#sha256={a[f'{kind}_sha256']}"
            for s, a in enumerate(found)
            if a.get(f"{kind}_sha256")
        ]
        for kind in ("surplus", "carry")
    }
    cursor = advance(found[0]["cursor"], [k for a in found for k in a["consumed"]])
    uri = layout.policy(run.root, number)
    policy = easy_policy(spaces)
    run.policy_pin = save_policy(uri, policy, version=number, parents={}, attributes={}).pin()
    extra = {"data": StreamState(cursor, **pins).to_data()}
    state = {"model": {"x": torch.zeros(1)}, "extra": extra}
    return save(layout.state(run.root, number), state, parents={}, attributes={}).pin()
