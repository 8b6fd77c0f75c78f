"""A real Prometheus watches a real run: stages and rollout ranks tell how it goes."""

import json

import pytest
import yaml

from planish import store
from planish.records import layout
from tests.golden.write_rules import RULES
from tests.integration import runs
from tests.servers.program import free_port

pytestmark = [pytest.mark.server, pytest.mark.slow]

WINDOW = "[10m]"


def scraping(first):
    targets = [f"127.0.0.1:{port}" for port in range(first, first + 16)]
    labels = {"run_id": "tiny", "namespace": "test"}
    job = {"job_name": "planish", "static_configs": [{"targets": targets, "labels": labels}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES / "training.yaml")],
        "scrape_configs": [job],
    }
    return yaml.safe_dump(config)


def scalars(root, stage):
    """Return what the tasks of a stage of the first iteration logged, one by one."""
    uris = [uri for uri in store.list_uris(layout.logs(root) + "/") if uri.endswith(".json")]
    logs = [json.loads(store.read(uri)) for uri in sorted(uris)]
    return [log["metrics"] for log in logs if (log["stage"], log["iteration"]) == (stage, 1)]


def test_a_run_is_seen_from_rollout_to_training(prometheus, file_root, tmp_path, monkeypatch):
    port = free_port()
    prometheus.config = scraping(port)
    prometheus.start()
    monkeypatch.setenv("PLANISH_METRICS_PORT", str(port))
    monkeypatch.setenv("PLANISH_METRICS_LAST_SCRAPE_SECONDS", "10")
    # a policy that has learnt nothing gives groups that are all wrong: train on them all the same
    overrides = "rollout.dynamic_sampling=false reward.keep_uniform_groups=true"
    runs.run(file_root, tmp_path / "log.txt", overrides=overrides)

    def seen(name, by=""):
        found = prometheus.query(f"max by ({by}) (max_over_time({name}{WINDOW}))")
        return {one["metric"].get(by, ""): float(one["value"][1]) for one in found}

    stages = seen("planish_stage_info", "stage")
    assert {"curate", "rollout", "reward", "train"} <= stages.keys()
    (reward,) = scalars(file_root, "reward")
    assert seen("planish_reward_mean")[""] == pytest.approx(reward["reward_mean"])
    assert seen("planish_reward_accuracy_ratio")[""] == pytest.approx(reward["accuracy_mean"])
    kept = reward["num_kept_rollouts"] / reward["num_rollouts"]
    assert seen("planish_reward_kept_ratio")[""] == pytest.approx(kept)

    rollouts = scalars(file_root, "rollout")
    assert len(rollouts) == 2
    tokens = prometheus.query(f"sum(max_over_time(planish_rollout_tokens_total{WINDOW}))")
    assert float(tokens[0]["value"][1]) >= max(r["num_generated_tokens"] for r in rollouts)
    fates = seen("planish_rollout_groups_total", "fate")
    assert sum(fates.values()) > 0

    (train,) = scalars(file_root, "train")
    steps = seen("planish_train_steps_total", "part")
    assert steps["policy"] == train["step"]
    assert seen("planish_train_entropy")[""] == pytest.approx(train["entropy"])

    # what the rules make of it, and that they find nothing wrong
    assert seen("run:planish_iteration:max", "run_id") == {"tiny": 1.0}
    assert seen("run:planish_reward_accuracy:ratio", "run_id")["tiny"] == pytest.approx(
        reward["accuracy_mean"]
    )
    wrong = 'ALERTS{alertname=~"PlanishStageStalled|PlanishNonFinite|PlanishStageFailing"}'
    assert prometheus.query(f"count_over_time({wrong}{WINDOW})") == []
