"""Commands `planish submit`, `schedule`, `upload`, `status`, `logs`, `stop`, `avoid`, `cleanup`.

Commands yield lines for the caller to print, and import the Kubeflow client only when they run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.base.errors import ClusterError, ConfigError, PlanishError
from planish.base.text import Table

if TYPE_CHECKING:
    from planish.submit.pipeline import CompiledPipeline
    from planish.submit.server import Kubeflow

SERVICE_ACCOUNT = "planish-runner"
"""Service account of a run's pods; the manifests create it."""

Progress = Callable[[str, int, int], None]
"""Function that is called with a text, steps done and steps in all; these commands do not call
it."""

Lines = Iterator[Table | str]
"""Output of a command, piece by piece."""


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers of `planish` (argparse does not export their class)."""
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument("--host", default="", help="URL of the Kubeflow Pipelines API or its UI")
    server.add_argument("--kfp-namespace", default="kubeflow", help="where Kubeflow runs")
    server.add_argument("--namespace", default="", help="where runs go: that of your profile")
    server.add_argument(
        "--token-file",
        type=Path,
        help="who asks, for several users: kubectl create token --audience=pipelines.kubeflow.org",
    )
    pipeline = argparse.ArgumentParser(add_help=False, parents=[server])
    pipeline.add_argument("--profile", default="gpu-1x8", help="pods of the run (default gpu-1x8)")
    pipeline.add_argument(
        "--pipeline", type=Path, metavar="FILE", help="compiled in a checkout, for other pods"
    )
    pipeline.add_argument("--iterations", type=int, help="of one run; that of the profile at most")
    pipeline.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="IMAGE",
        help="REGISTRY/FOLDER of all images, or NAME=REFERENCE; may be given again",
    )
    pipeline.add_argument("--store-secret", default="", help="secret with endpoint and keys")
    pipeline.add_argument("--hub-secret", default="", help="secret with the hub's token")
    pipeline.add_argument("--cache-claim", default="", help="volume claim for models and data")
    placement_options(pipeline)
    pipeline.add_argument("--gpu-memory", type=int, metavar="GB", help="of one GPU (default 80)")
    pipeline.add_argument(
        "--dry-run", action="store_true", help="ask nobody and print what would be submitted"
    )
    start = argparse.ArgumentParser(add_help=False, parents=[pipeline])
    start.add_argument("root", help="s3://bucket/prefix")
    start.add_argument("-p", "--parameter", action="append", default=[], metavar="KEY=VALUE")
    start.add_argument("--dataset-map", default="", help="columns: prompt=question,answer=label")
    start.add_argument("--name", default="", help="name on the run page")
    start.add_argument("--experiment", default="", help="that of the root's first folder if empty")
    start.add_argument("--service-account", default=SERVICE_ACCOUNT)

    commands.add_parser("submit", parents=[start], help="start a run on a cluster with Kubeflow")
    schedule = commands.add_parser("schedule", parents=[start], help="start a recurring run")
    schedule.add_argument("--cron", default="", help="six fields, seconds first")
    schedule.add_argument("--interval-seconds", type=int, default=0)
    upload = commands.add_parser(
        "upload", parents=[pipeline], help="upload a pipeline for the form of Kubeflow"
    )
    upload.add_argument("what", nargs="?", default="post-train", help="post-train or reshard")
    upload.add_argument("--name", default="", help="of the pipeline; with its profile if empty")
    upload.add_argument("--version-name", default="", help="made of its digest if empty")
    status = commands.add_parser("status", parents=[server], help="print the state of a run")
    status.add_argument("run", metavar="RUN_ID")
    status.add_argument("--wait", action="store_true", help="until the run has ended; 1 if failed")
    status.add_argument("--timeout-seconds", type=float, default=24 * 3600.0)
    _add_operations(commands, server)


def _add_operations(commands: Any, server: argparse.ArgumentParser) -> None:
    logs = commands.add_parser("logs", parents=[server], help="print the last lines of its tasks")
    logs.add_argument("run", metavar="RUN", help="id or root of a run")
    logs.add_argument(
        "--stage", default="", help="such as train or iterate; what failed, and the last one"
    )
    logs.add_argument("--iteration", type=int, default=-1, help="0 for what runs once")
    logs.add_argument("--lines", type=int, default=40, help="of each attempt (default 40)")
    logs.add_argument("--follow", action="store_true", help="go on until the run has ended")
    stop = commands.add_parser(
        "stop", parents=[server], help="end a run after the iteration in progress"
    )
    stop.add_argument("run", metavar="RUN", help="id or root of a run")
    stop.add_argument("--undo", action="store_true", help="let it go on")
    avoid = commands.add_parser("avoid", help="keep the following runs away from a node")
    avoid.add_argument("root")
    avoid.add_argument("node")
    avoid.add_argument("--undo", action="store_true", help="use the node again")
    cleanup = commands.add_parser("cleanup", parents=[server], help="end a run, delete its jobs")
    cleanup.add_argument("run", metavar="RUN_ID")


def placement_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `set_placement` (may be repeated), `set_network` and `set_gpu_nodes`."""
    for option, metavar, text in (
        ("--image-pull-secret", "NAME", "secret that opens the registry of the images"),
        ("--toleration", "KEY[=VALUE][:EFFECT]", "of every pod, for nodes with a taint"),
        ("--node-selector", "KEY=VALUE", "of every pod: a label of the nodes that it may go to"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    for option, text in (
        ("--node-gpus", "GPUs of one machine (default 8)"),
        ("--node-cpus", "cores of one machine for pods (default 80)"),
        ("--node-memory", "host memory of one machine for pods, GiB (default 800)"),
    ):
        parser.add_argument(option, type=int, default=0, metavar="N", help=text)
    parser.add_argument(
        "--gpu-label", default="", metavar="KEY=VALUE", help="of nodes for pods with GPUs"
    )
    parser.add_argument(
        "--network", type=Path, metavar="FILE", help="RDMA and NCCL of pods that train together"
    )


def gpu_nodes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed options of `set_gpu_nodes`."""
    return {
        "gpus": options.node_gpus,
        "cpus": options.node_cpus,
        "gibibytes": options.node_memory,
        "label": options.gpu_label,
    }


def run(options: argparse.Namespace, _: Progress) -> Lines:
    """Run the command of the parsed options, and yield its output."""
    yield from COMMANDS[options.command](options)


def _connected(options: argparse.Namespace) -> Kubeflow:
    from planish.submit.server import connect

    token = ""
    if options.token_file:
        try:
            token = options.token_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"`--token-file` must be a file with a token, got {error}") from None
    return connect(options.host, options.kfp_namespace, token)


def _pipeline(options: argparse.Namespace, what: str) -> CompiledPipeline:
    from planish.submit import pipeline as pipelines

    if what not in pipelines.NAMES:
        raise ConfigError(f"a pipeline must be one of {list(pipelines.NAMES)}, got {what!r}")
    opened = options.pipeline and pipelines.opened(options.pipeline)
    pipeline: CompiledPipeline = opened or pipelines.shipped(what, options.profile)
    if pipeline.name != what:
        raise ConfigError(f"`--pipeline` must hold {what}, got {pipeline.name}")
    pipelines.set_images(pipeline, pipelines.parse_images(options.image))
    pipelines.set_secrets(pipeline, store=options.store_secret, hub=options.hub_secret)
    pipelines.set_cache(pipeline, options.cache_claim)
    pipelines.set_placement(
        pipeline,
        pull_secrets=options.image_pull_secret,
        tolerations=options.toleration,
        node_selectors=options.node_selector,
    )
    pipelines.set_network(pipeline, options.network)
    pipelines.set_gpu_nodes(pipeline, **gpu_nodes(options))
    if what != "post-train" and (options.iterations, options.gpu_memory) != (None, None):
        raise ConfigError(f"`--iterations` and `--gpu-memory` must be left out for {what}")
    if options.gpu_memory is not None:
        pipelines.set_gpu_memory(pipeline, options.gpu_memory)
    if options.iterations is not None:
        pipelines.cut(pipeline, options.iterations)
    return pipeline


def start(options: argparse.Namespace) -> Lines:
    """Start a run or a schedule of runs, and yield its id."""
    from planish.submit.parameters import (
        check_root,
        check_settings,
        default_experiment,
        default_name,
        parse_parameters,
        with_data,
        with_local_file,
    )
    from planish.submit.server import check_times

    recurs = options.command == "schedule"
    if recurs:
        check_times(options.cron, options.interval_seconds)
    root = check_root(options.root)
    pipeline = _pipeline(options, "post-train")
    parameters = {**parse_parameters(options.parameter, pipeline.inputs), "root": root}
    parameters = with_local_file(with_data(parameters, options.dataset_map))
    for line in check_settings(parameters, pipeline, asks=not options.dry_run):
        sys.stderr.write(f"warning: {line}\n")
    preset = pipeline.inputs["preset"]["defaultValue"]
    name = options.name or default_name({"preset": preset, **parameters}, recurs=recurs)
    settings: dict[str, Any] = {
        "name": name,
        "experiment": options.experiment or default_experiment(root),
        "service_account": options.service_account,
    }
    if recurs:
        settings.update(cron=options.cron, interval_seconds=options.interval_seconds)
    if options.dry_run:
        yield from _shown(pipeline, {**settings, "parameters": parameters})
        return
    server, namespace = _described(options)
    with server.asked():
        begin = server.start_schedule if recurs else server.start_run
        yield begin(pipeline, parameters, namespace=namespace, **settings)


def _described(options: argparse.Namespace) -> tuple[Kubeflow, str]:
    """Connect, print where runs go, and return the namespace that requests must have."""
    server = _connected(options)
    sys.stderr.write(f"{server.describe(server.namespace_of_runs(options.namespace))}\n")
    return server, options.namespace if server.is_multi_user else ""


def _shown(pipeline: CompiledPipeline, settings: Mapping[str, Any]) -> Lines:
    sys.stderr.write(f"{json.dumps(settings, sort_keys=True)}\n")
    yield pipeline.text().removesuffix("\n")


def upload(options: argparse.Namespace) -> Lines:
    """Upload a pipeline or a new version of it, and yield both ids."""
    pipeline = _pipeline(options, options.what)
    stem = options.pipeline.stem if options.pipeline else f"{options.what}-{options.profile}"
    name = options.name or stem
    if options.dry_run:
        yield from _shown(pipeline, {"name": name})
        return
    server, namespace = _described(options)
    with server.asked():
        ids = server.upload(pipeline, name=name, version=options.version_name, namespace=namespace)
    yield "pipeline {} version {}".format(*ids)


def status(options: argparse.Namespace) -> Lines:
    """Yield the state of a run, the tasks that Kubeflow reports, and the last line of each running
    task.
    """
    from planish.submit.root import running
    from planish.submit.status import task_rows

    server = _connected(options)
    with server.asked():
        if options.wait:
            server.wait(options.run, timeout_seconds=options.timeout_seconds)
        found = server.run(options.run)
    yield str(found.state)
    if found.error and found.error.message:
        yield str(found.error.message)
    rows = task_rows(found)
    if rows and not options.wait:
        yield Table("tasks", ("task", "state", "start", "end", "error"), rows)
        yield from running(str(_parameters(found).get("root", "")))
    if options.wait and found.state != "SUCCEEDED":
        raise PlanishError(
            f"the run {options.run} must end as SUCCEEDED, got {found.state}; "
            f"`planish logs {options.run}` prints what its tasks said last, where the store of its "
            "root answers: in the pods, or with MINIO_ENDPOINT and its keys set (docs/operate.md)"
        )


def _parameters(run: Any) -> Mapping[str, Any]:
    return (run.runtime_config and run.runtime_config.parameters) or {}


def _root_of(options: argparse.Namespace) -> str:
    if "/" in options.run:
        return str(options.run)
    server = _connected(options)
    with server.asked():
        root = str(_parameters(server.run(options.run)).get("root", ""))
    if not root:
        raise ConfigError(f"the run {options.run} must have a parameter `root`, got none")
    return root


def logs(options: argparse.Namespace) -> Lines:
    """Yield the last lines of a run's tasks; with `--follow` also new lines."""
    from planish.submit import root as of_root
    from planish.submit.server import ENDED

    root = _root_of(options)
    which = {"stage": options.stage, "iteration": options.iteration, "num_lines": options.lines}
    if not options.follow:
        yield from of_root.logs(root, **which)
        return

    if "/" in options.run:
        yield from of_root.follow(root, lambda: of_root.has_report(root), **which)
        return
    server = _connected(options)

    def has_ended() -> bool:
        with server.asked():
            return str(server.run(options.run).state) in ENDED

    yield from of_root.follow(root, has_ended, **which)


def stop(options: argparse.Namespace) -> Lines:
    """Write or delete the stop file of a run; yield its URI and the effect."""
    from planish.submit.root import stop

    yield from stop(_root_of(options), undo=options.undo)


def avoid(options: argparse.Namespace) -> Lines:
    """Add a node to the avoided nodes or remove it; yield the URI of the object and the action."""
    from planish.submit.root import avoid

    yield from avoid(options.root, options.node, undo=options.undo)


def cleanup(options: argparse.Namespace) -> Lines:
    """End a run and delete its objects; yield its state and their names."""
    from kubernetes import client, config

    from planish.run.kube import Kube
    from planish.submit.cleanup import clean_up

    server, _ = _described(options)
    with server.asked():
        settings = client.Configuration()
        settings.retries = False
        try:
            config.load_config(client_configuration=settings)
        except config.ConfigException as error:
            raise ConfigError(f"`cleanup` must reach Kubernetes, got {error}") from None
        kube = Kube(settings, server.namespace_of_runs(options.namespace), patience_seconds=0)
        try:
            yield from clean_up(server, kube, options.run)
        except ClusterError as error:
            if not 400 <= error.status < 500:
                raise
            raise ConfigError(f"`cleanup` must reach Kubernetes, got {error}") from None


COMMANDS: dict[str, Callable[[argparse.Namespace], Lines]] = {
    "submit": start,
    "schedule": start,
    "upload": upload,
    "status": status,
    "logs": logs,
    "stop": stop,
    "avoid": avoid,
    "cleanup": cleanup,
}
