"""Adapters on real files: states that go on, exports of merged weights, critics, references."""

import pytest
import torch

from planish.checkpoint import train_state as api
from planish.checkpoint.convert.export_hf import export
from planish.checkpoint.reshard.verify import compare_policy
from planish.models.policy import load_policy
from planish.stages.export.stage import run as run_export
from tests.integration.test_train_critic import critic_config, scalars_of
from tests.integration.test_train_processes import largest_difference, trained_by_one_and_two
from tests.integration.test_train_reference import reference_of
from tests.integration.test_train_stage import (
    all_tensors,
    failing,
    train_all,
)
from tests.rounding import MOMENTS, STEPS
from tests.unit.stages.train.runs import add_iteration, artifact, start_run, tiny_config

LORA = {"lora_rank": 4, "lora_alpha": 16.0}


def lora_config(algorithm="dapo", **model):
    config = critic_config(algorithm) if algorithm == "vapo" else tiny_config(algorithm)
    return {**config, "model": {**LORA, **model}}


def split(tensors, part):
    """Tensors of a part of a state: adapters, and the rest without the scale."""
    own = {n: t for n, t in tensors.items() if n.startswith(f"{part}.")}
    adapters = {n: t for n, t in own.items() if ".lora_A." in n or ".lora_B." in n}
    rest = {n: t for n, t in own.items() if n not in adapters and "lora_scale" not in n}
    return adapters, rest


def test_weights_stay_and_adapters_with_their_moments_are_trained_and_kept(file_root, tmp_path):
    tiny = start_run(file_root, lora_config("vapo"))
    first, second = (all_tensors(pin) for pin in train_all(tiny, tmp_path, (1, 2)))
    start = load_policy(tiny.policy_pin).model.state_dict()
    for tensors in (first, second):
        adapters, rest = split(tensors, "model")
        # Two layers of seven linear ones each, A and B.
        assert len(adapters) == 28
        assert all(torch.equal(t, start[n.removeprefix("model.")]) for n, t in rest.items())
        moments = {n.rpartition(".")[0] for n in tensors if n.startswith("optimizer.")}
        assert moments == {n.replace("model.", "optimizer.", 1) for n in adapters}
        critic, _ = split(tensors, "critic")
        trained = {n.rpartition(".")[0] for n in tensors if n.startswith("critic_optimizer.")}
        heads = {"critic_optimizer.head.weight", "critic_optimizer.head.bias"}
        assert trained - heads == {n.replace("critic.", "critic_optimizer.", 1) for n in critic}
        assert heads < trained
        assert tensors["model.lora_scale"] == tensors["critic.lora_scale"] == 4.0
    for part in ("model", "critic"):
        before, after = (split(tensors, part) for tensors in (first, second))
        assert all(not torch.equal(after[0][n], t) for n, t in before[0].items()), part
        assert all(torch.equal(after[1][n], t) for n, t in before[1].items() if "head" not in n)
    scalars = scalars_of(tiny, 2)
    trained = sum(t.numel() for t in split(second, "model")[0].values())
    assert scalars["num_trained_parameters"] == trained
    assert scalars["num_parameters"] == trained + sum(
        t.numel() for n, t in start.items() if n != "lm_head.weight"
    )
    head = 1 + first["critic.head.weight"].numel()
    assert scalars["num_trained_critic_parameters"] == trained + head


def test_the_export_is_merged_and_computes_what_the_trainer_computes(file_root, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny = start_run(file_root, lora_config())
    (pin,) = train_all(tiny, tmp_path, (1,))
    made = run_export(
        tiny.root, tiny.digest, 1, 0, tiny.policy_pin,
        artifact(tmp_path / "1", "state"), artifact(tmp_path / "export", "policy"),
    )  # fmt: skip
    policy = load_policy(made.policy_pin)
    plain = load_policy(tiny.policy_pin).model.state_dict()
    tensors = all_tensors(pin)
    for name, weight in policy.model.state_dict().items():
        layer = f"model.{name.removesuffix('.weight')}"
        wanted = plain[name]
        if f"{layer}.lora_A.weight" in tensors:
            up, down = tensors[f"{layer}.lora_B.weight"], tensors[f"{layer}.lora_A.weight"]
            wanted = wanted + 4.0 * (up @ down)
            assert not torch.allclose(weight, plain[name], atol=1e-5)
        assert torch.allclose(weight, wanted, atol=1e-6), name
    opened = AutoModelForCausalLM.from_pretrained(policy.folder)
    ids = torch.arange(4, 12)[None]
    assert torch.equal(opened(ids).logits, policy.model(ids).logits)
    # A merged copy of a state is verified against the sums, too.
    ref = api.checkpoint_pin(pin)
    facts = {"parents": {}, "attributes": {"role": "policy"}}
    merged = export(ref, f"{file_root}/merged", policy=tiny.policy_pin, **facts)
    findings = compare_policy(merged, ref)
    assert (findings.faults, findings.num_tensors) == ([], len(plain) - 1)


def test_a_reference_is_the_policy_without_adapters(file_root, tmp_path):
    config = lora_config("grpo")
    config["algorithm"]["kl_coefficient"] = 0.5
    tiny = start_run(file_root, config)
    first, second = train_all(tiny, tmp_path, (1, 2))
    assert reference_of(first) == reference_of(second)
    assert f"{file_root}/{reference_of(second)}" == tiny.policy_pin
    assert scalars_of(tiny, 2)["reference_kl"] > scalars_of(tiny, 1)["reference_kl"] > 0


def test_a_critic_of_another_run_is_taken_whole_and_only_with_its_own_adapters(tmp_path):
    states = {}
    for name, model in (("dense", {}), ("lora", LORA)):
        donor = start_run(f"file://{tmp_path}/{name}", {**critic_config(), "model": model})
        (states[name],) = train_all(donor, tmp_path / f"{name}-out", (1,))
    for name, pin in states.items():
        config = {**critic_config(init="state", path=pin), "model": LORA}
        # No step of the critic is left over after the first iteration: what was taken is kept.
        config["critic"]["learning_rate"] = 1e-30
        tiny = start_run(f"file://{tmp_path}/from-{name}", config)
        (taken,) = train_all(tiny, tmp_path / f"from-{name}-out", (1,))
        theirs, ours = (split(all_tensors(p), "critic") for p in (pin, taken))
        assert all(torch.equal(ours[1][n], t) for n, t in theirs[1].items())
        assert all(torch.equal(ours[0][n], t) for n, t in theirs[0].items())
        assert bool(theirs[0]) == (name == "lora")
    config = critic_config(init="state", path=states["lora"])
    tiny = start_run(f"file://{tmp_path}/refused", config)
    code, error = failing(tiny, 1, "", add_iteration(tiny, 1), tmp_path / "refused-out")
    assert code == 2
    assert "rank 4" in error


@pytest.mark.slow
def test_two_processes_have_losses_and_adapters_of_one(tmp_path_factory):
    config = lora_config(lora_rank=3)
    config["train"]["tokens_per_microbatch"] = 96
    runs = trained_by_one_and_two(tmp_path_factory, "lora", config)
    (_, _, steps, tensors), (_, _, others, moved) = (runs[processes] for processes in (1, 2))
    for one, two in zip(steps, others, strict=True):
        for name in ("loss", "grad_norm"):
            assert two[name] == pytest.approx(one[name], abs=STEPS, rel=STEPS), name
    assert largest_difference(tensors, moved) < MOMENTS
