"""The synthetic run, as one with a critic and windows: three iterations of value pretraining."""

from __future__ import annotations

import json
from typing import Any

from planish import store
from planish.records import layout
from planish.records.reports import UpdateReport, read_report, write_report
from planish.store.documents import read_json
from tests.unit.stages.report.synthetic_run import ITERATIONS, build_run, write_json

PRETRAINING = 3


def critic_scalars(iteration: int) -> dict[str, float]:
    """Return what an update says of its critic; targets of iteration 2 are all equal."""
    told = 1 - 0.7**iteration
    scalars = {
        "pretraining": float(iteration <= PRETRAINING),
        "critic_learning_rate": 6e-4 * min(1.0, iteration / 2),
        "learning_rate": 0.0 if iteration <= PRETRAINING else 3e-4,
        "value_loss": 0.30 - 0.2 * told,
        "fresh_value_loss": 0.34 - 0.2 * told,
        "explained_variance": -7.5 if iteration == 1 else 0.6 * told,
        "ev_undefined": float(iteration == 2),
        "value_mean": 0.02 + 0.3 * told,
        "return_mean": 0.31 + 0.02 * iteration,
        "value_clipfrac": 0.02 * told,
        "value_grad_norm": 2.1 - told,
        "num_finished": 96.0 + 7 * (iteration % 3),
        "advantage_mean": 0.2 - 0.15 * told,
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
    """Write a whole run with a critic."""
    run: dict[str, Any] = build_run(root)
    run["config"] = {**run["config"], "algorithm": {"name": "tppo" if windows else "vapo"}}
    run["config"]["rollout"] = {**run["config"]["rollout"], "dynamic_sampling": False}
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
            store.write(log, json.dumps(entry).encode())
