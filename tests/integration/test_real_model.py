"""A trained model of 135 M parameters: engines, trainer and whole runs against plain transformers.

The engine `vllm` is tested where it is installed: in the environment of `make engines`.
"""

import random
from importlib.util import find_spec
from itertools import islice

import numpy as np
import pytest
import torch

from planish.base.parallel import Grid
from planish.engines import open_engine
from planish.engines.config import EngineConfig
from planish.engines.measure import generate_rollouts
from planish.engines.requests import ModelRef, Sampling
from planish.models.config import ModelConfig
from planish.models.policy import DTYPES, name_head_dtype, save_policy
from planish.models.pretrained import load_pretrained
from planish.records import layout
from planish.records.io import fetch_files
from planish.records.reports import EvalReport, UpdateReport, read_report
from planish.records.rollouts import FinishReason
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.pass_rate import prompt_set
from planish.stages.curate.tasks import short_sums
from planish.stages.train.batching import train_batch
from planish.stages.train.config import TrainConfig
from planish.stages.train.trainer import Trainer
from tests.integration.resident_equal import compare
from tests.real_model import require_model
from tests.unit.stages.train.runs import rewards_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CPU = torch.device("cpu")
ENGINES = [name for name in ("transformers", "vllm") if find_spec(name)]
END = "<|im_end|>"
NUM_TOKENS = 24
SHORT = (
    "rollout.prompts_per_iteration=8", "rollout.group_size=4", "train.rollouts_per_minibatch=16",
    "evaluate.max_prompts=8", "evaluate.num_samples=2", "evaluate.pass_at=[1, 2]",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder():
    return require_model()


def opened(folder, dtype):
    """Return the policy as a run imports it."""
    policy = load_pretrained(ModelConfig(path=str(folder)))
    policy.model.to(DTYPES[dtype])
    name_head_dtype(policy.model.config, ModelConfig(dtype=dtype))
    return policy


def prompts_of(count):
    return prompt_set(list(islice(short_sums(random.Random(7), CurateConfig()), count)))


def sampled(policy, prompts, *, engine="transformers", **sampling):
    cache = {"cache_bytes": 256 << 20} if engine == "vllm" else {}
    settings = EngineConfig(name=engine, **cache)
    with open_engine(settings, ModelRef(policy=policy), max_rows=16, max_model_len=256) as served:
        return generate_rollouts(
            served, policy.tokenizer, prompts, num_samples=1, run_seed=0,
            sampling=Sampling(max_new_tokens=NUM_TOKENS, **sampling),
        )  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_texts_are_those_of_plain_transformers(folder, engine):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = prompts_of(32)
    found = sampled(opened(folder, "float32"), prompts, engine=engine, temperature=0.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row, messages in enumerate(prompts.messages):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert found.prompt_tokens.row(row).tolist() == ids
        whole = model.generate(
            torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=2
        )
        text = tokenizer.decode(whole[0, len(ids) :])
        assert tokenizer.decode(found.response_tokens.row(row)) == text
        ends = text.endswith(END)
        assert found.finish[row] == (FinishReason.STOP if ends else FinishReason.LENGTH)
        assert found.response[row] == text.removesuffix(END)


@pytest.mark.parametrize(
    ("dtype", "median", "largest"), [("float32", 1e-5, 1e-3), ("bfloat16", 0.02, 1.0)]
)
def test_trainer_and_engine_agree_on_log_probabilities(folder, tmp_path, dtype, median, largest):
    policy = opened(folder, dtype)
    rollouts = sampled(policy, prompts_of(32))
    pin = save_policy(
        (tmp_path / "policy").as_uri(), policy, version=0, parents={}, attributes={}
    ).pin()
    settings = TrainConfig(compute_dtype=dtype, tokens_per_microbatch=2048)
    trainer = Trainer(settings, pin, temperature=1.0, seed=0, grid=Grid(), device=CPU)
    batch = train_batch(rollouts, rewards_for(rollouts, 1))
    trained = trainer.logprobs(batch)[0][batch.policy_mask]
    gaps = (trained - batch.rollout_logprobs[batch.policy_mask]).abs()
    assert len(gaps) > 300
    assert gaps.median() < median
    assert gaps.max() < largest


def test_a_run_learns_the_same_in_one_task_and_in_tasks_apart(folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = (*SHORT, f"model.path={folder}")
    assert compare(tmp_path, "dapo-small", 2, settings, sizes=[2]) == []
    root = (tmp_path / "apart").as_uri()
    for iteration in (1, 2):
        update = read_report(UpdateReport, layout.update(root, iteration))
        assert 0 < update.scalars["grad_norm"] < 100
    scores = [
        read_report(EvalReport, f"{layout.evaluation(root, version)}/{layout.REPORT}").scalars
        for version in (0, 2)
    ]
    assert all(0 <= score["greedy"] <= 1 for score in scores)
    assert {score["num_prompts"] for score in scores} == {8}

    exported = fetch_files(layout.policy(root, 2))
    model = AutoModelForCausalLM.from_pretrained(exported)
    before = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    pairs = zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    moved = [float((new.float() - old.float()).abs().max()) for new, old in pairs]
    assert 0 < np.max(moved) < 1e-2
    tokenizer = AutoTokenizer.from_pretrained(exported)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    texts = [
        each.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for each in (tokenizer, AutoTokenizer.from_pretrained(folder))
    ]
    assert texts[0] == texts[1]
    assert texts[0].endswith(f"What is 2 + 2?{END}\n<|im_start|>assistant\n")
