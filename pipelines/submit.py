"""Start, schedule, watch, stop and clean up runs on a cluster.

    python -m pipelines.submit run s3://bucket/run --profile gpu-1x8 -p preset=dapo-qwen2.5-7b
    python -m pipelines.submit schedule s3://bucket/run --cron "0 0 2 * * *"
    python -m pipelines.submit wait RUN_ID
    python -m pipelines.submit status RUN_ID
    python -m pipelines.submit cleanup RUN_ID
    python -m pipelines.submit stop s3://bucket/run
    python -m pipelines.submit avoid s3://bucket/run NODE

The client of kfp finds the server by --host, by its environment, or by the kubeconfig. A server for
one user puts the pods of all runs into its own namespace (--kfp-namespace); one for several users
wants the namespace of a profile (--namespace).
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from components.images import PROFILES, Profile, resolve_images
from components.pod_settings import STAGE_LABEL
from pipelines.compile import compile_text, parse_images
from pipelines.compiled import PARAMETERS
from pipelines.connect import KFP_NAMESPACE, Kubeflow, connect
from pipelines.lint import lint
from pipelines.monitor import Monitor, monitor_of, monitor_options
from pipelines.post_train import DEFAULT_PRESET, largest_requests, profile_named, with_data
from planish.base.config import parse_override
from planish.base.errors import EXIT_FAILED, EXIT_TRANSIENT, ConfigError, PlanishError
from planish.run.chain import FIRST_UNFINISHED, parse_chain, with_settings
from planish.run.kubeflow import description, title
from planish.stages.prepare.cluster import PodRequests
from planish.stages.prepare.devices import demands, device_faults, device_warnings, find_shape
from planish.stages.prepare.settings import build_config
from planish.store import normal_uri

RUN_LABEL = "pipeline/runid"
"""Label that Kubeflow puts on every pod of a run, and we on every job of one."""

SUCCEEDED = "SUCCEEDED"


def parse_parameters(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` pairs as the types of the public run parameters.

    `chain.key=value` sets one key of the JSON of `chain`.

    Raises:
        ValueError: an unknown parameter, or a value of the wrong type; all at once.
    """
    faults: list[str] = []
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if equals and key.startswith("chain."):
            try:
                _, name, setting = parse_override(pair)
                parsed["chain"] = with_settings(parsed.get("chain", ""), **{name: setting})
            except ConfigError as error:
                faults.append(str(error))
            continue
        if not equals or key not in PARAMETERS:
            faults.append(
                f"a parameter must read key=value with one of {sorted(PARAMETERS)}, got {pair!r}"
            )
            continue
        kind = PARAMETERS[key]
        if kind == "STRING":
            parsed[key] = value
        elif kind == "NUMBER_INTEGER" and value.removeprefix("-").isdecimal():
            parsed[key] = int(value)
        else:
            faults.append(f"`{key}` must be {_KIND_WORDS[kind]}, got {value!r}")
    if faults:
        raise ValueError("; ".join(faults))
    return parsed


_KIND_WORDS = {"NUMBER_INTEGER": "an integer"}


def check_root(root: str) -> str:
    """Return the root without a slash at its end.

    Raises:
        ValueError: a folder of this machine, which no pod sees.
    """
    if "://" not in root:
        raise ValueError(
            f"the root must be a URI like s3://bucket/prefix, got {root!r}; pods see no folder of "
            "this machine"
        )
    return root.rstrip("/")


def check_settings(parameters: Mapping[str, Any], profile: Profile) -> list[str]:
    """Refuse settings that the pods of a profile can not carry; return what to be warned of.

    Raises:
        ConfigError: a fault of the settings, devices that the pods do not have, or a model that
            does not fit in them.
    """
    keys = ("preset", "config", "overrides", "model", "dataset", "seed")
    start = {**dict.fromkeys(keys, ""), "preset": DEFAULT_PRESET, "seed": -1}
    given = {key: parameters.get(key, start[key]) for key in keys}
    requests = PodRequests.parse(largest_requests(profile))
    try:
        config = build_config(**given)
    except (PlanishError, OSError) as error:
        if "://" not in given["config"]:
            raise
        return [f"only `prepare` will check the settings: {error}"]
    if faults := device_faults(config, requests):
        raise ConfigError("; ".join(faults))
    warnings = device_warnings(config, requests)
    try:
        shape = find_shape(config)
    except (PlanishError, OSError) as error:
        # The model may lie where pods can read and this machine can not.
        return [*warnings, f"only `prepare` will count the memory of the model: {error}"]
    if faults := [each.fault for each in demands(config, shape, requests) if each.fault]:
        raise ConfigError("; ".join(faults))
    return warnings


def write_package(
    folder: Path,
    profile: Profile,
    images: Mapping[str, str] | None = None,
    monitor: Monitor | None = None,
) -> Path:
    """Compile and lint the pipeline into a folder and return the file.

    Raises:
        ValueError: a lint fault.
    """
    text = compile_text(profile, images, monitor=monitor)
    faults = lint(text, images=images)
    if faults:
        raise ValueError("; ".join(str(fault) for fault in faults))
    path = folder / "post-train.yaml"
    path.write_text(text, "utf-8")
    return path


def _experiment_id(client: Any, name: str, namespace: str) -> str:
    return str(client.create_experiment(name, namespace=namespace or None).experiment_id)


def pipeline_root(root: str) -> str:
    """Return where Kubeflow keeps the small artifacts of a run: beside the root, in its bucket.

    Example:
        >>> pipeline_root("s3://bucket/team/run"), pipeline_root("file:///shared/run")
        ('s3://bucket/kfp', '')
    """
    scheme, _, path = root.partition("://")
    return f"s3://{path.partition('/')[0]}/kfp" if scheme == "s3" else ""


def default_experiment(root: str) -> str:
    """Return the experiment of a run: the first folder of its root, else the bucket.

    Example:
        >>> default_experiment("s3://bucket/team/run"), default_experiment("s3://bucket/run")
        ('team', 'bucket')
    """
    bucket, *folders = root.partition("://")[2].strip("/").split("/")
    return folders[0] if len(folders) > 1 else bucket


def default_name(parameters: Mapping[str, Any], command: str = "run") -> str:
    """Return the name of a run; a schedule has no place in the chain.

    Example:
        >>> default_name({"root": "s3://bucket/first", "preset": "dapo-tiny"})
        'first dapo-tiny #0'
    """
    index = parse_chain(parameters.get("chain", "")).index
    place = f"#{index}" if command == "run" and index >= 0 else ""
    return title(parameters["root"], parameters.get("preset", DEFAULT_PRESET), place)


def start_run(
    client: Any,
    package: Path,
    parameters: Mapping[str, Any],
    *,
    name: str,
    experiment: str,
    namespace: str = "",
    service_account: str = "",
) -> str:
    """Start one run and return its id; the namespace is that of a profile, or empty."""
    import kfp_server_api as api

    spec, *platform = yaml.safe_load_all(package.read_text("utf-8"))
    root = str(parameters.get("root", ""))
    # `run_pipeline` of the client takes no description.
    run = client._run_api.run_service_create_run(
        run=api.V2beta1Run(
            display_name=name,
            description=description(root),
            experiment_id=_experiment_id(client, experiment, namespace),
            pipeline_spec={"pipeline_spec": spec, "platform_spec": platform[0]},
            runtime_config=api.V2beta1RuntimeConfig(
                parameters=dict(parameters), pipeline_root=pipeline_root(root) or None
            ),
            service_account=service_account or None,
        )
    )
    return str(run.run_id)


def start_schedule(
    client: Any,
    package: Path,
    parameters: Mapping[str, Any],
    *,
    name: str,
    cron: str = "",
    interval_seconds: int = 0,
    experiment: str,
    namespace: str = "",
    service_account: str = "",
) -> str:
    """Start a recurring run, one at a time and without catching up; return its id.

    Every firing takes the first unfinished place of the chain on the same root.

    Raises:
        ValueError: not exactly one of a cron expression of six fields and an interval.
    """
    if bool(cron) == bool(interval_seconds):
        raise ValueError("a schedule must have either --cron or --interval-seconds")
    if cron and len(cron.split()) != 6:
        raise ValueError(f"a cron expression must have six fields, seconds first, got {cron!r}")
    chain = with_settings(parameters.get("chain", ""), index=FIRST_UNFINISHED)
    recurring = client.create_recurring_run(
        experiment_id=_experiment_id(client, experiment, namespace),
        job_name=name,
        description=description(str(parameters.get("root", ""))),
        pipeline_package_path=str(package),
        params={**parameters, "chain": chain},
        cron_expression=cron or None,
        interval_second=interval_seconds or None,
        max_concurrency=1,
        no_catchup=True,
        pipeline_root=pipeline_root(str(parameters.get("root", ""))) or None,
        service_account=service_account or None,
    )
    return str(recurring.recurring_run_id)


def wait(client: Any, run_id: str, *, timeout_seconds: int, poll_seconds: int = 5) -> str:
    """Wait for the end of a run and return its state.

    Raises:
        TimeoutError: it did not end in time.
    """
    run = client.wait_for_run_completion(run_id, timeout_seconds, poll_seconds)
    return str(run.state)


class Janitor(Protocol):
    """What can delete the objects that a run may leave in a namespace."""

    def delete_labelled(self, selector: str) -> list[str]:
        """Delete jobs and services with these labels and return their names."""


class KubernetesJanitor:
    """Meets `Janitor` through the official client."""

    def __init__(self, client: Any, namespace: str) -> None:
        """Use an `ApiClient` that is already configured."""
        from kubernetes.client import BatchV1Api, CoreV1Api

        self._batch, self._core = BatchV1Api(client), CoreV1Api(client)
        self._namespace = namespace

    def delete_labelled(self, selector: str) -> list[str]:
        """Delete jobs and services with these labels and return their names."""
        gone = []
        jobs = self._batch.list_namespaced_job(self._namespace, label_selector=selector)
        for job in jobs.items:
            self._batch.delete_namespaced_job(
                job.metadata.name, self._namespace, propagation_policy="Background"
            )
            gone.append(f"job/{job.metadata.name}")
        services = self._core.list_namespaced_service(self._namespace, label_selector=selector)
        for service in services.items:
            self._core.delete_namespaced_service(service.metadata.name, self._namespace)
            gone.append(f"service/{service.metadata.name}")
        return gone


def cleanup(client: Any, janitor: Janitor, run_id: str) -> list[str]:
    """End a run that is still alive and delete what it created; return what was deleted."""
    state = str(client.get_run(run_id).state)
    if state in ("PENDING", "RUNNING", "PAUSED"):
        client.terminate_run(run_id)
    return janitor.delete_labelled(f"{RUN_LABEL}={run_id},{STAGE_LABEL}")


def stop(root: str, *, undo: bool = False) -> list[str]:
    """Ask a run to end after the iteration in progress, or take that back.

    Returns:
        URIs of the objects that were written or deleted.
    """
    from planish import store
    from planish.records import layout

    root = normal_uri(root)
    uri = layout.stop_file(root)
    if not undo:
        store.write(uri, json.dumps({"reason": "operator"}).encode())
        return [uri]
    folder = layout.iteration(root, 0).rpartition("/")[0]
    marks = [mark for mark in store.list_uris(folder) if mark.endswith("/stopped.json")]
    present = [mark for mark in (uri, *marks) if store.exists(mark)]
    for mark in present:
        store.delete(mark)
    return present


def avoid(root: str, node: str, *, undo: bool = False) -> list[str]:
    """Keep the following runs on a root away from a node, or take that back.

    Only runs that are submitted with `--max-restarts` keep away from anything.

    Returns:
        URIs of the objects that were written or deleted.

    Raises:
        ValueError: no node can have that name.
    """
    from planish import store
    from planish.records import layout
    from planish.run import avoid as nodes

    root = normal_uri(root)
    uri = layout.avoided_node(root, node)
    if not undo:
        return [uri] if nodes.avoid(root, nodes.AvoidedNode(node, "operator")) else []
    if not nodes.is_node_name(node) or not store.exists(uri):
        return []
    store.delete(uri)
    return [uri]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument("--host", default="", help="URL of the Kubeflow Pipelines API")
    server.add_argument("--kfp-namespace", default=KFP_NAMESPACE, help="where Kubeflow runs")
    server.add_argument("--namespace", default="", help="where runs go: that of your profile")
    server.add_argument(
        "--token-file",
        type=Path,
        help="who asks, for several users: kubectl create token --audience=pipelines.kubeflow.org",
    )
    start = argparse.ArgumentParser(add_help=False, parents=[server])
    start.add_argument("root", help="s3://bucket/prefix")
    start.add_argument("--profile", default="gpu-1x8", choices=sorted(PROFILES))
    start.add_argument("--iterations", type=int)
    start.add_argument("--shards", type=int)
    start.add_argument(
        "--compact", action="store_true", help="reward, train and checkpoint as one task"
    )
    start.add_argument("--image", action="append", default=[], metavar="NAME=REFERENCE")
    start.add_argument("-p", "--parameter", action="append", default=[], metavar="KEY=VALUE")
    start.add_argument("--name", default="", help="name on the run page")
    start.add_argument("--experiment", default="", help="that of the root's first folder if empty")
    start.add_argument("--service-account", default="planish-runner")
    start.add_argument("--store-secret", default="", help="secret with endpoint and keys")
    start.add_argument("--dataset-map", default="", help="columns: prompt=question,answer=label")
    start.add_argument("--hub-secret", default="", help="secret with the hub's token")
    start.add_argument("--cache-claim", default="", help="volume claim for models and data")
    start.add_argument("--dry-run", action="store_true", help="compile, ask nobody, print as JSON")
    start.add_argument("--gpu-memory", type=int, default=0, metavar="GB", help="of one GPU, 80")
    monitor_options(start, on_cluster=True)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", parents=[start], help="start one run")
    schedule = commands.add_parser("schedule", parents=[start], help="start a recurring run")
    schedule.add_argument("--cron", default="", help="six fields, seconds first")
    schedule.add_argument("--interval-seconds", type=int, default=0)
    waiting = commands.add_parser("wait", parents=[server], help="wait for the end of a run")
    waiting.add_argument("run_id")
    waiting.add_argument("--timeout-seconds", type=int, default=24 * 3600)
    asking = commands.add_parser("status", parents=[server], help="print the state of a run")
    asking.add_argument("run_id")
    cleaning = commands.add_parser("cleanup", parents=[server], help="end a run, delete its jobs")
    cleaning.add_argument("run_id")
    stopping = commands.add_parser("stop", help="end a run after the iteration in progress")
    stopping.add_argument("root")
    stopping.add_argument("--undo", action="store_true", help="let it go on")
    avoiding = commands.add_parser("avoid", help="keep the following runs away from a node")
    avoiding.add_argument("root")
    avoiding.add_argument("node")
    avoiding.add_argument("--undo", action="store_true", help="use the node again")
    return parser


def _server(arguments: argparse.Namespace) -> Kubeflow:
    token = arguments.token_file.read_text("utf-8").strip() if arguments.token_file else ""
    return connect(arguments.host, arguments.kfp_namespace, token)


def _connect(arguments: argparse.Namespace) -> Kubeflow:
    """Connect, and say where runs go."""
    server = _server(arguments)
    line = server.describe(server.namespace_of_runs(arguments.namespace))
    sys.stderr.write(f"{line}\n")
    return server


def _start(arguments: argparse.Namespace) -> str:
    root = check_root(arguments.root)
    parameters = {**parse_parameters(arguments.parameter), "root": root}
    parameters = with_data(parameters, arguments.dataset_map)
    profile = profile_named(
        arguments.profile,
        num_iterations=arguments.iterations,
        num_shards=arguments.shards,
        compact=arguments.compact,
        store_secret=arguments.store_secret,
        hub_secret=arguments.hub_secret,
        cache_claim=arguments.cache_claim,
        gpu_memory_gb=arguments.gpu_memory,
    )
    for line in check_settings(parameters, profile):
        sys.stderr.write(f"warning: {line}\n")
    images = parse_images(arguments.image)
    monitor = monitor_of(arguments.monitor, max_restarts=arguments.max_restarts)
    options = {
        "name": arguments.name or default_name(parameters, arguments.command),
        "experiment": arguments.experiment or default_experiment(root),
        "service_account": arguments.service_account,
    }
    with tempfile.TemporaryDirectory() as folder:
        if arguments.dry_run:
            size = write_package(Path(folder), profile, images, monitor).stat().st_size
            told = {"profile": profile.name, "parameters": parameters, "pipeline_bytes": size}
            return json.dumps({**options, **told, "images": resolve_images(images)}, indent=1)
        server = _connect(arguments)
        package = write_package(Path(folder), profile, images, monitor)
        options["namespace"] = arguments.namespace if server.is_multi_user else ""
        if arguments.command == "run":
            return start_run(server.client, package, parameters, **options)
        return start_schedule(
            server.client,
            package,
            parameters,
            cron=arguments.cron,
            interval_seconds=arguments.interval_seconds,
            **options,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; prints ids and states, one a line."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    lines: list[str]
    code = 0
    try:
        if arguments.command in ("run", "schedule"):
            lines = [_start(arguments)]
        elif arguments.command == "wait":
            client = _server(arguments).client
            state = wait(client, arguments.run_id, timeout_seconds=arguments.timeout_seconds)
            lines, code = [state], 0 if state == SUCCEEDED else EXIT_FAILED
        elif arguments.command == "status":
            lines = [str(_server(arguments).client.get_run(arguments.run_id).state)]
        elif arguments.command == "cleanup":
            from kubernetes import client as kubernetes_client
            from kubernetes import config

            server = _connect(arguments)
            config.load_config()
            namespace = server.namespace_of_runs(arguments.namespace)
            janitor = KubernetesJanitor(kubernetes_client.ApiClient(), namespace)
            lines = cleanup(server.client, janitor, arguments.run_id)
        elif arguments.command == "avoid":
            lines = avoid(arguments.root, arguments.node, undo=arguments.undo)
        else:
            lines = stop(arguments.root, undo=arguments.undo)
    except ValueError as error:
        parser.error(str(error))
    except ConnectionError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_TRANSIENT
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command resumes\n")
        return 128 + signal.SIGINT
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
