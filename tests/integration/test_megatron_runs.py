"""Three iterations of each algorithm on the trainer `megatron`, through the stages of a run."""

import pytest

from planish.checkpoint.train_state import read_record
from planish.records import layout
from planish.records.reports import UpdateReport, read_report
from planish.run.__main__ import stage_run
from planish.run.stage import PathArtifact
from tests.unit.stages.rollout.stage_run import Run, write_template

pytestmark = pytest.mark.slow

WINDOWS = {"window_tokens": 4}
DECAY = {"lambda_alpha": 0.5, "lambda_min": 0.5}
TABLES = {
    "dapo": ({"name": "dapo"}, {}),
    "vapo": ({"name": "vapo", **DECAY}, {}),
    "tppo": (
        {"name": "tppo", "ignored_tail_tokens": 1, **DECAY, **WINDOWS},
        {"dynamic_sampling": False, **WINDOWS},
    ),
}
TRAIN = {
    "learning_rate": 1e-3,
    "warmup_iterations": 0,
    "rollouts_per_minibatch": 12,
    "device": "cpu",
}
CRITIC = {"learning_rate": 2e-3, "warmup_iterations": 0, "pretrain_iterations": 1}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A root whose policy answers with up to six spaces and a digit: in windows some go on."""
    folder = tmp_path_factory.mktemp("template")
    write_template(folder, num_prompts=40, spaces=6)
    return folder


def three_updates(template, folder, algorithm, trainer):
    """Sample, reward, train and export three times; return the reports and the last state's."""
    table, rollout = TABLES[algorithm]
    tables = {"algorithm": table, "critic": CRITIC, "train": {**TRAIN, "trainer": trainer}}
    folder.mkdir()
    run = Run(template, folder, tables=tables, temperature=1.0, **rollout)
    state_pin = ""
    for number in (1, 2, 3):
        run.call(number=number, state_pin=state_pin)
        made = {
            name: PathArtifact(f"{folder}/{name}")
            for name in ("rewards", "state", "policy", "metrics")
        }
        ours = {
            "root": run.root,
            "config_sha256": run.digest,
            "number": number,
            "offset": 0,
            "policy_pin": run.policy_pin,
        }
        rewards, state, metrics = made["rewards"], made["state"], made["metrics"]
        batch = {**ours, "num_shards": 1, "rewards": rewards, "metrics": metrics}
        stage_run("reward")(**batch)
        state_pin = stage_run("train")(**batch, state_pin=state_pin, state=state).state_pin
        exported = stage_run("checkpoint")(**ours, state=state, policy=made["policy"])
        run.policy_pin = exported.policy_pin
    reports = [read_report(UpdateReport, layout.update(run.root, n)) for n in (1, 2, 3)]
    return reports, read_record(state_pin)[1].attributes


@pytest.mark.parametrize("algorithm", TABLES)
def test_three_iterations_are_those_of_the_trainer_fsdp2(template, tmp_path, algorithm):
    reports, attributes = three_updates(template, tmp_path / "megatron", algorithm, "megatron")
    others, _ = three_updates(template, tmp_path / "fsdp2", algorithm, "fsdp2")
    assert attributes["framework"] == "megatron"
    assert attributes["policy_version"] == 3
    for number, (seen, wanted) in enumerate(zip(reports, others, strict=True), 1):
        # What was exported and sampled from is what is trained.
        assert seen.scalars["mismatch_logprob_max"] < 1e-4
        assert len(seen.minibatches) == len(wanted.minibatches) > 0
        names = ["value_loss", "value_grad_norm"] if algorithm != "dapo" else []
        names += ["loss", "grad_norm"] if algorithm == "dapo" or number > 1 else []
        for one, other in zip(seen.minibatches, wanted.minibatches, strict=True):
            assert [one.get(n) for n in names] == pytest.approx(
                [other.get(n) for n in names], abs=1e-4, rel=1e-4
            )
        assert all(seen.scalars[name] != 0 for name in names)
