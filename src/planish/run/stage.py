"""The frame of every stage: configuration, logs, outputs, exit codes.

It does not depend on any single stage. KFP components and `stage_main` call the same `run` of a
stage.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import itertools
import json
import logging
import math
import os
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from planish import store
from planish.base.config import GONE, Section, check_limits, config_sha256, parse_section
from planish.base.errors import (
    EXIT_CONFIG,
    EXIT_TRANSIENT,
    ConfigError,
    ObjectExists,
    ObjectMissing,
    PlanishError,
    RecordError,
    RootInUse,
    StoreError,
    exit_code,
)
from planish.base.telemetry import LogFormatter, redact
from planish.records import layout
from planish.records.refs import Ref
from planish.run.events import write_aside
from planish.run.signals import Terminated, stops_with, unwrapped
from planish.run.stage_log import StageLog
from planish.run.stage_metrics import StageMetrics
from planish.store import normal_uri
from planish.store.documents import read_json

logger = logging.getLogger(__name__)

REPORT = "planish.stages.report.stage"
"""Module that draws the report; it is loaded by name because it lies above this one."""
LOCAL_RUN = "PLANISH_LOCAL_RUN"
"""Variable with the name of a local run, which has no id of a cluster."""
SectionT = TypeVar("SectionT", bound=Section)


class Artifact(Protocol):
    """An input or output of a stage; artifacts of KFP meet this protocol."""

    path: str
    metadata: dict[str, Any]
    """Scalars shown beside the artifact."""


@dataclass
class PathArtifact:
    """An artifact that is just a local file, for command lines and tests."""

    path: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result of a stage."""

    refs: dict[str, Ref] = field(default_factory=dict)
    """Output artifact name to its Ref."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Scalars for the `metrics` artifact, else for the first artifact, and for the stage log."""
    documents: dict[str, str] = field(default_factory=dict)
    """Output artifact name to its text (HTML, Markdown)."""
    values: dict[str, str | int] = field(default_factory=dict)
    already_done: bool = False
    """True if the output existed already and the stage computed nothing."""
    failure: PlanishError | None = None
    """Error to raise after the outputs, which help people, are written."""


@dataclass(frozen=True)
class Context:
    """Facts of one task of one run."""

    root: str
    stage: str
    iteration: int
    """1, 2, ... inside iterations, 0 outside."""
    shard: int
    config: Mapping[str, Mapping[str, Any]]
    """Resolved tables, as in `run.json`."""
    config_sha256: str
    run: Mapping[str, Any]
    """Content of `run.json`; empty if the stage runs without one."""

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.config["run"]["seed"])

    def section(self, cls: type[SectionT], name: str) -> SectionT:
        """Return the validated section `name`."""
        return parse_section(cls, self.config.get(name, {}), section=name)


def read_ref(artifact: Artifact) -> Ref:
    """Read the Ref in an input artifact; RecordError: no such file, or no Ref."""
    try:
        return Ref.from_json(Path(artifact.path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"an input artifact must be a Ref file, got {artifact.path!r} ({error}); "
            "the stage that writes it has not run"
        ) from None


def read_run(root: str) -> dict[str, Any]:
    """Read `run.json`; ObjectMissing: the root is new; ConfigError: it has no configuration."""
    uri = layout.run_file(root)
    remedy = "choose a new root"
    try:
        run = read_json(uri)
    except RecordError as error:
        raise ConfigError(f"{error}; {remedy}") from None
    config = run.get("config")
    if not isinstance(config, dict) or not all(isinstance(t, dict) for t in config.values()):
        raise ConfigError(
            f"`{uri}` must hold config, the tables of a configuration, got {run!r:.200}; {remedy}"
        )
    check_limits(config, uri)
    for section, gone in GONE.items():
        for name, value in gone.items():
            seen = config.get(section, {}).pop(name, value)
            # The place of a task's steps changes no result.
            if seen != value and name != "commit_steps":
                raise ConfigError(
                    f"`{section}.{name}` must be {value!r}, which this release holds fixed, got "
                    f"{seen!r:.200} in `{uri}`; go on with the release that began the run, or "
                    f"{remedy}"
                )
    return run


def load_run(root: str, digest: str) -> dict[str, Any]:
    """Load `run.json` and check that its configuration has the given digest."""
    uri = layout.run_file(root)
    try:
        run = read_run(root)
    except ObjectMissing:
        raise ConfigError(
            f"`{uri}` must exist before this stage runs; the prepare stage writes it"
        ) from None
    seen = config_sha256(run["config"])
    if seen != digest:
        raise ConfigError(
            f"`{uri}` must hold the configuration {digest[:12]}, got {seen[:12]}; another run "
            "with other settings uses this root: choose a new root"
        )
    return run


def is_stopped(root: str, iteration: int) -> bool:
    """Return whether the stop file skips this iteration."""
    uri = layout.stopped_file(root, iteration)
    return store.exists(uri)


def mark_stopped(root: str, iteration: int) -> bool:
    """Look for the stop file before an iteration, and record it so that later stages agree.

    Returns:
        True if this iteration must pass its inputs through.
    """
    if is_stopped(root, iteration):
        return True
    if not store.exists(layout.stop_file(root)):
        return False
    try:
        store.create(layout.stopped_file(root, iteration), b'{"reason": "stop file"}')
    except ObjectExists:
        logger.debug("stop already marked iteration=%d", iteration)
    logger.info("stopped iteration=%d", iteration)
    return True


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace each non-finite value `k` by `k_nonfinite = 1`; KFP refuses NaN and infinity."""
    result: dict[str, float] = {}
    for key, value in metrics.items():
        if math.isfinite(value):
            result[key] = float(value)
        else:
            result[f"{key}_nonfinite"] = 1.0
    return result


def _write_outputs(outcome: Outcome, outputs: Mapping[str, Artifact]) -> None:
    for name, ref in outcome.refs.items():
        _write_text(outputs[name].path, ref.to_json())
        outputs[name].metadata.update(ref.attributes, manifest_sha256=ref.manifest_sha256)
    for name, text in outcome.documents.items():
        _write_text(outputs[name].path, text)
    metrics = outputs.get("metrics")
    if metrics is None:
        for artifact in itertools.islice(outputs.values(), 1):
            artifact.metadata.update(outcome.metrics)
        return
    log_metric = getattr(metrics, "log_metric", None)
    if log_metric is None:
        _write_text(metrics.path, json.dumps(outcome.metrics, sort_keys=True))
        return
    for key, value in outcome.metrics.items():
        log_metric(key, value)


def _write_text(path: str, text: str) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")


def _run_id() -> str:
    return os.environ.get("RUN_ID", "") or os.environ.get(LOCAL_RUN, "")


def _failed_file(context: Context) -> str:
    return layout.failed_file(context.root, context.stage, context.iteration, context.shard)


def refuse_known_failure(context: Context, places: Sequence[str] | None = None) -> None:
    """End at once if an earlier attempt of the same run failed permanently.

    Raises:
        ConfigError: one of the markers `places` exists; by default that of the task.
    """
    run_id = _run_id()
    if not run_id:
        return
    for uri in (_failed_file(context),) if places is None else places:
        if not store.exists(uri):
            continue
        marker = read_json(uri)
        if (marker.get("config_sha256"), marker.get("run_id")) == (context.config_sha256, run_id):
            told = marker.get("error")
            raise ConfigError(f"an earlier attempt of this task failed for good: {told}")


def mark_failure(context: Context, error: BaseException) -> None:
    """Write the marker of a permanently failed task."""
    uri = _failed_file(context)
    marker = {"config_sha256": context.config_sha256, "run_id": _run_id()}
    marker["error"] = redact(str(error))
    write_aside(uri, marker)


def execute(
    stage: str,
    work: Callable[[Context], Outcome],
    *,
    root: str,
    config_sha256: str | None,
    outputs: Mapping[str, Artifact],
    iteration: int = 0,
    shard: int = 0,
) -> Outcome:
    """Run `work` as one task of a run and write its result.

    Args:
        stage: name of the stage.
        work: function that does the work, with the facts of the task as argument.
        root: URI of the run, without a slash at the end.
        config_sha256: digest of the configuration; None if the stage must run without one.
        outputs: output artifacts by name; `metrics` gets the scalars, or else the first artifact.
        iteration: 1, 2, ... inside iterations, else 0.
        shard: index among the parallel tasks of the stage.

    Raises:
        SystemExit: 2 wrong configuration (must not be retried), 75 transient or stopped, 1 else.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("planish").setLevel(logging.INFO)
    root = root.rstrip("/")
    context = Context(root, stage, iteration, shard, {}, config_sha256 or "", {})
    log = StageLog(root, stage, iteration, shard)
    with stops_with(EXIT_TRANSIENT) as told, StageMetrics(stage, iteration) as metrics, log:
        try:
            metrics.open()
            if config_sha256 is not None:
                run = load_run(root, config_sha256)
                context = replace(context, config=run["config"], run=run)
                refuse_known_failure(context)
                log.write("running")
            with unwrapped(told):
                outcome = work(context)
            metrics.publish(outcome.metrics)
            outcome.metrics = finite_metrics(outcome.metrics)
            _write_outputs(outcome, outputs)
            if outcome.failure:
                raise outcome.failure
            log.write("done", already_done=outcome.already_done, metrics=outcome.metrics, error="")
            draw_report(context)
        except PlanishError as error:
            code = exit_code(error)
            metrics.fail(code)
            logger.error("failed stage=%s iteration=%d error=%s", stage, iteration, error)
            if isinstance(error, (StoreError, RootInUse)):
                log.give_up()
            log.write("failed", error=redact(str(error)), exit_code=code)
            if code == EXIT_CONFIG and not isinstance(error, RootInUse):
                mark_failure(context, error)
            raise SystemExit(code) from None
        except Terminated as stop:
            metrics.fail(EXIT_TRANSIENT)
            logger.warning("stopped stage=%s iteration=%d reason=%s", stage, iteration, stop)
            log.write("failed", error=str(stop), exit_code=EXIT_TRANSIENT)
            raise
        except Exception as error:
            metrics.fail(1)
            # The scheduler sees only the exit code, so the log must contain the traceback.
            trace = traceback.format_exc()
            logger.error("failed stage=%s iteration=%d\n%s", stage, iteration, trace)
            reason = redact(f"{type(error).__name__}: {error}")
            log.write("failed", error=reason, exit_code=1)
            raise SystemExit(1) from None
    logger.info(
        "done stage=%s iteration=%d shard=%d seconds=%.2f already_done=%s",
        stage,
        iteration,
        shard,
        log.entry["seconds"],
        outcome.already_done,
    )
    return outcome


def draw_report(context: Context) -> None:
    """Draw the report of a run after an iteration; a failure is no failure of the run."""
    if context.stage != "checkpoint":
        return
    try:
        importlib.import_module(REPORT).write_running(context.root, context.iteration)
    except Exception:
        logger.warning("report not drawn iteration=%d", context.iteration, exc_info=True)


def stage_parser(run: Callable[..., Any], prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a stage's command line, made from the signature of its `run`."""
    hints = typing.get_type_hints(run)
    doc = inspect.getdoc(run) or ""
    parser = argparse.ArgumentParser(prog=prog, description=doc.partition("\n")[0])
    for name, parameter in inspect.signature(run).parameters.items():
        kind = hints[name]
        options: dict[str, Any] = {"dest": name}
        if parameter.default is inspect.Parameter.empty:
            options["required"] = True
        else:
            options["default"] = parameter.default
        if kind is bool:
            options["type"] = _parse_bool
        elif kind in (str, int, float):
            options["type"] = kind
        else:
            options.update(type=PathArtifact, metavar="PATH")
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    parser.add_argument("--values", default="", help="file that gets the output parameters")
    return parser


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return lowered == "true"


def stage_main(
    run: Callable[..., Any], argv: Sequence[str] | None = None, *, prog: str | None = None
) -> int:
    """Call a stage's `run` with the options of `stage_parser`.

    The file `--values` gets the output parameters as JSON. Every failure raises SystemExit with its
    own code.
    """
    arguments = vars(stage_parser(run, prog).parse_args(argv))
    values_path = arguments.pop("values")
    # The stage itself refuses an invalid root.
    with contextlib.suppress(ConfigError, KeyError):
        arguments["root"] = normal_uri(arguments["root"])
    result = run(**arguments)
    if values_path and result is not None:
        _write_text(values_path, json.dumps(result._asdict(), sort_keys=True))
    return 0
