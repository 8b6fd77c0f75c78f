"""Trackers of `planish track`: TensorBoard, MLflow and Weights & Biases.

Each tracker gets the same points. Its only state is the identifier of its run, so a killed follower
can continue.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from planish import store
from planish.base.errors import ConfigError
from planish.base.telemetry import redact
from planish.records import layout
from planish.store import normal_uri

_BATCH = 1000
_MAX_PARAMETERS = 100
_MAX_CHARACTERS = 500


@dataclass(frozen=True)
class Point:
    """One value of one curve."""

    name: str
    """`group/metric`; within a group `step` has one meaning."""
    step: int
    """Iteration, optimizer step or policy version, depending on the group."""
    value: float
    """Value, as in the record; may be NaN or infinite."""
    seconds: float


class Tracker:
    """A target for the curves of a run."""

    run_id = ""
    """Identifier of the run at the target; a restarted follower passes it to `open`."""

    def open(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Create a run with its settings by dotted name, or continue an earlier follower's run."""

    def write(self, points: Sequence[Point], batch: int) -> None:
        """Write points, in any order; they are stored when the call returns.

        `batch` grows by one with every successful call, over all followers of a run.
        """
        raise NotImplementedError

    def close(self, *, has_ended: bool, has_failed: bool) -> None:
        """Close the run, which has ended or is continued later; `has_failed`: a task failed
        permanently.
        """


class TensorBoard(Tracker):
    """Event files, one for each batch of points, below a folder of the run or another folder."""

    def __init__(self, root: str, place: str) -> None:
        self._folder = normal_uri(place or f"{layout.trackers(root)}/tensorboard")
        self._files = import_module("tensorboard.summary.writer.event_file_writer")
        self._protocol = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")

    def write(self, points: Sequence[Point], batch: int) -> None:
        """Write one complete file, named after the batch; a second try replaces it."""
        with tempfile.TemporaryDirectory() as scratch:
            writer = self._files.EventFileWriter(scratch)
            for point in sorted(points, key=lambda p: (p.seconds, p.step)):
                value = self._summaries.Summary.Value(tag=point.name, simple_value=point.value)
                summary = self._summaries.Summary(value=[value])
                writer.add_event(
                    self._protocol.Event(wall_time=point.seconds, step=point.step, summary=summary)
                )
            writer.close()
            (written,) = Path(scratch).iterdir()
            # TensorBoard reads the files of a folder in the order of their names.
            name = f"events.out.tfevents.{batch:010d}.planish"
            store.write(f"{self._folder}/{name}", written.read_bytes())


class MLflow(Tracker):
    """A run on a tracking server of MLflow."""

    def __init__(self, root: str, place: str, experiment: str, name: str) -> None:
        # The client would print the URL of the run to standard output.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        tracking = import_module("mlflow.tracking")
        self._entities = import_module("mlflow.entities")
        self._root, self._experiment, self._name = root, experiment, name
        self._client = tracking.MlflowClient(tracking_uri=place or None)

    def open(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Find the run by its identifier or its root, or create one with the given settings."""
        client = self._client
        self.run_id = run_id
        if not run_id:
            known = client.get_experiment_by_name(self._experiment)
            number = known.experiment_id if known else client.create_experiment(self._experiment)
            quoted = self._root.replace("'", "")
            found = client.search_runs([number], f"tags.`planish.root` = '{quoted}'")
            if found:
                self.run_id = found[0].info.run_id
            else:
                tags = {"planish.root": self._root}
                run = client.create_run(number, tags=tags, run_name=self._name)
                self.run_id = run.info.run_id
                parameters = [
                    self._entities.Param(key, str(value)[:_MAX_CHARACTERS])
                    for key, value in config.items()
                ]
                for i in range(0, len(parameters), _MAX_PARAMETERS):
                    client.log_batch(self.run_id, params=parameters[i : i + _MAX_PARAMETERS])
        client.update_run(self.run_id, status="RUNNING")

    def write(self, points: Sequence[Point], batch: int) -> None:
        """Send the points; if they are sent twice, MLflow stores them twice, with the same step and
        time.
        """
        metrics = [
            self._entities.Metric(p.name, p.value, int(p.seconds * 1000), p.step) for p in points
        ]
        for i in range(0, len(metrics), _BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[i : i + _BATCH])

    def close(self, *, has_ended: bool, has_failed: bool) -> None:
        """Set the final status of the run."""
        if has_ended:
            status = "FAILED" if has_failed else "FINISHED"
            self._client.set_terminated(self.run_id, status=status)


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in `WANDB_DIR`."""

    def __init__(self, root: str, place: str, name: str) -> None:
        self._wandb = import_module("wandb")
        self._root, self._project, self._name = root, place or "planish", name
        self._run: Any = None
        self._groups: set[str] = set()

    def open(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin or resume the run, whose identifier is derived from the root."""
        self.run_id = run_id or hashlib.sha256(self._root.encode()).hexdigest()[:16]
        self._run = self._wandb.init(
            project=self._project,
            name=self._name,
            id=self.run_id,
            resume="allow",
            config=dict(config),
            settings=self._wandb.Settings(console="off", silent=True),
        )

    def write(self, points: Sequence[Point], batch: int) -> None:
        """Log the points of each group and step together, with the group's own axis."""
        rows: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for point in sorted(points, key=lambda p: (p.seconds, p.step)):
            rows[point.name.rpartition("/")[0], point.step][point.name] = point.value
        for (group, step), values in rows.items():
            axis = f"{group}/step"
            if group not in self._groups:
                self._groups.add(group)
                self._run.define_metric(f"{group}/*", step_metric=axis)
            self._run.log({**values, axis: step})

    def close(self, *, has_ended: bool, has_failed: bool) -> None:
        """Send the remaining points."""
        self._run.finish(exit_code=int(has_failed))


def open_tracker(target: str, root: str, *, experiment: str, name: str) -> Tracker:
    """Return the tracker for an option: `tensorboard[=FOLDER]`, `mlflow[=URI]` or
    `wandb[=PROJECT]`.

    `experiment` is MLflow's; an empty `name` takes the last part of the root's path.
    """
    kind, _, place = target.partition("=")
    name = name or root.rpartition("/")[2]
    if kind == "tensorboard":
        return TensorBoard(root, place)
    if kind == "mlflow":
        if not place and not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ConfigError(
                "a tracker `mlflow` needs the URI of its server, got none: write "
                "mlflow=http://HOST:PORT or set MLFLOW_TRACKING_URI"
            )
        return MLflow(root, place, experiment, name)
    if kind == "wandb":
        return WeightsAndBiases(root, place, name)
    raise ConfigError(
        f"a tracker must be tensorboard[=FOLDER], mlflow[=URI] or wandb[=PROJECT], got "
        f"{redact(target)!r}"
    )
