"""A Kubeflow Pipelines server: connection, namespace of its runs, requests.

Source: kubeflow/pipelines 2.17.0. `backend/api/v2beta1/healthz.proto` has `multi_user`, which the
server of the UI also returns. By `ReplaceNamespace` of
`backend/src/apiserver/resource/resource_manager.go`, a server for one user puts every run into its
own namespace, whatever namespace the request has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kfp_server_api as api
from kubernetes import config as kubeconfig
from urllib3.exceptions import HTTPError

from planish.base.errors import ClusterError, ConfigError
from planish.base.telemetry import redact
from planish.run.chain import FIRST_UNFINISHED, with_settings
from planish.run.kube import own_namespace
from planish.run.kubeflow import (
    KfpRuns,
    KubeflowRun,
    api_client,
    asking,
    authorise,
    description,
)
from planish.submit.parameters import pipeline_root
from planish.submit.pipeline import CompiledPipeline

TIMEOUT_SECONDS = 10
ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
"""Final states of a run."""

PROXY = "/api/v1/namespaces/{}/services/ml-pipeline:http/proxy"
"""Path, by namespace, at which the Kubernetes API server forwards to Kubeflow's API server."""


@dataclass(frozen=True)
class Kubeflow:
    """A Kubeflow server that has answered a request."""

    client: Any
    """`ApiClient` of the generated client, which has no types."""
    url: str
    """URL for people, without user and password."""
    is_multi_user: bool
    """True if the server is for several users; runs are then in the namespaces of their
    profiles."""
    namespace: str
    """Namespace in which Kubeflow itself runs."""

    def namespace_of_runs(self, wanted: str) -> str:
        """Return the namespace of a run's pods; `wanted` is the caller's choice, or empty."""
        if self.is_multi_user and not wanted:
            raise ConfigError(
                "`--namespace` must name the namespace of your profile, got none; the Kubeflow at "
                f"{self.url} serves several users"
            )
        if not self.is_multi_user and wanted not in ("", self.namespace):
            raise ConfigError(
                f"`--namespace` must be left out or `{self.namespace}`, got {wanted!r}; the "
                f"Kubeflow at {self.url} serves one user and runs every pod there: apply "
                "manifests/overlays/kfp-single-user (`--kfp-namespace` says where Kubeflow runs)"
            )
        return wanted or self.namespace

    def describe(self, namespace: str) -> str:
        """Return a line that tells the user where runs go."""
        users = "several users" if self.is_multi_user else "one user"
        return f"Kubeflow at {self.url} serves {users}: runs go to namespace {namespace}"

    def asked(self) -> contextlib.AbstractContextManager[None]:
        """Convert refusals of the server in the block into ConfigError, and failures into
        ClusterError.
        """
        return asking(self.url)

    def experiment(self, name: str, namespace: str) -> str:
        """Return the id of an experiment; create it if there is none."""
        experiments = api.ExperimentServiceApi(self.client)
        more = {"namespace": namespace} if namespace else {}
        found = experiments.experiment_service_list_experiments(filter=_named(name), **more)
        if found.experiments:
            return str(found.experiments[0].experiment_id)
        wanted = api.V2beta1Experiment(display_name=name, namespace=namespace or None)
        made = experiments.experiment_service_create_experiment(experiment=wanted)
        return str(made.experiment_id)

    def start_run(
        self,
        pipeline: CompiledPipeline,
        parameters: Mapping[str, Any],
        *,
        name: str,
        experiment: str,
        namespace: str = "",
        service_account: str = "",
    ) -> str:
        """Start one run and return its id; the namespace is a profile's namespace, or empty."""
        facts = KubeflowRun(
            experiment_id=self.experiment(experiment, namespace),
            parameters=parameters,
            service_account=service_account,
            pipeline_root=pipeline_root(str(parameters.get("root", ""))),
            pipeline={"pipeline_spec": _spec(pipeline)},
        )
        return KfpRuns(client=self.client).create(name, facts)

    def start_schedule(
        self,
        pipeline: CompiledPipeline,
        parameters: Mapping[str, Any],
        *,
        name: str,
        cron: str = "",
        interval_seconds: int = 0,
        experiment: str,
        namespace: str = "",
        service_account: str = "",
    ) -> str:
        """Start a schedule of runs, one at a time and without catching up; return its id.

        Every run of the schedule continues the chain on the same root, at the first unfinished
        number.
        """
        check_times(cron, interval_seconds)
        trigger = api.V2beta1Trigger(
            cron_schedule=api.V2beta1CronSchedule(cron=cron) if cron else None,
            periodic_schedule=None
            if cron
            else api.V2beta1PeriodicSchedule(interval_second=str(interval_seconds)),
        )
        root = str(parameters.get("root", ""))
        chain = with_settings(parameters.get("chain", ""), index=FIRST_UNFINISHED)
        wanted = api.V2beta1RecurringRun(
            display_name=name,
            description=description(root),
            experiment_id=self.experiment(experiment, namespace),
            mode=api.RecurringRunMode.ENABLE,
            trigger=trigger,
            max_concurrency="1",
            no_catchup=True,
            pipeline_spec=_spec(pipeline),
            runtime_config=api.V2beta1RuntimeConfig(
                parameters={**parameters, "chain": chain},
                pipeline_root=pipeline_root(root) or None,
            ),
            service_account=service_account or None,
        )
        runs = api.RecurringRunServiceApi(self.client)
        made = runs.recurring_run_service_create_recurring_run(recurring_run=wanted)
        return str(made.recurring_run_id)

    def upload(
        self, pipeline: CompiledPipeline, *, name: str, version: str = "", namespace: str = ""
    ) -> tuple[str, str]:
        """Upload a pipeline, or a new version of it, unless the server has it already.

        An empty `version` is derived from the digest of the YAML.

        Returns:
            The ids of the pipeline and of the version.
        """
        text = pipeline.text()
        description = str(pipeline.spec["pipelineInfo"].get("description", ""))
        version = version or f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        pipelines = api.PipelineServiceApi(self.client)
        more = {"namespace": namespace} if namespace else {}
        found = pipelines.pipeline_service_list_pipelines(filter=_named(name), **more).pipelines
        if found:
            pipeline_id = str(found[0].pipeline_id)
        else:
            wanted = api.V2beta1Pipeline(
                display_name=name, namespace=namespace or None, description=description
            )
            made = pipelines.pipeline_service_create_pipeline(pipeline=wanted)
            pipeline_id = str(made.pipeline_id)
        versions = pipelines.pipeline_service_list_pipeline_versions(
            pipeline_id, filter=_named(version)
        ).pipeline_versions
        if versions:
            return pipeline_id, str(versions[0].pipeline_version_id)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.yaml"
            path.write_text(text, "utf-8")
            uploads = api.PipelineUploadServiceApi(self.client)
            sent = uploads.upload_pipeline_version(
                str(path), name=version, pipelineid=pipeline_id, description=description
            )
        return pipeline_id, str(sent.pipeline_version_id)

    def run(self, run_id: str) -> Any:
        """Return a run in the API's form, with the tasks that have started."""
        return api.RunServiceApi(self.client).run_service_get_run(run_id)

    def wait(self, run_id: str, *, timeout_seconds: float, poll_seconds: float = 5.0) -> str:
        """Wait for the end of a run and return its state.

        Raises:
            ClusterError: the run did not end in time.
        """
        end = time.monotonic() + timeout_seconds
        while (state := str(self.run(run_id).state)) not in ENDED:
            if time.monotonic() >= end:
                raise ClusterError(
                    f"the run {run_id} must end within {timeout_seconds:g} s, got state {state}; "
                    "the same command waits on"
                )
            time.sleep(poll_seconds)
        return state

    def terminate(self, run_id: str) -> str:
        """End a run that is still alive; return the state that it had before."""
        if (state := str(self.run(run_id).state)) not in ENDED:
            api.RunServiceApi(self.client).run_service_terminate_run(run_id)
        return state


def check_times(cron: str, interval_seconds: int) -> None:
    """Refuse a schedule that does not have exactly one rule."""
    if bool(cron) == bool(interval_seconds):
        raise ConfigError("a schedule must have either --cron or --interval-seconds")
    if cron and len(cron.split()) != 6:
        raise ConfigError(f"a cron expression must have six fields, seconds first, got {cron!r}")
    if interval_seconds < 0:
        raise ConfigError(f"`--interval-seconds` must be positive, got {interval_seconds}")


def _named(name: str) -> str:
    """Return the filter of the API for a name."""
    predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
    return json.dumps({"predicates": [predicate]})


def _spec(pipeline: CompiledPipeline) -> dict[str, Any]:
    return {"pipeline_spec": pipeline.spec, "platform_spec": pipeline.platform}


def connect(host: str = "", kfp_namespace: str = "kubeflow", token: str = "") -> Kubeflow:
    """Connect to the server at a URL, else at `KF_PIPELINES_ENDPOINT`, else through Kubernetes.

    Args:
        host: URL of the server or of its UI; empty to look for one.
        kfp_namespace: namespace of Kubeflow.
        token: identity for a server for several users; empty takes the token that Kubeflow
            mounts in its pods.
    """
    settings = api.Configuration(host="")
    # One request shows whether a server answers; urllib3 would log each of its retries.
    logging.disable(logging.WARNING)
    try:
        host = host or os.environ.get("KF_PIPELINES_ENDPOINT", "")
        if host:
            settings.host = (host if "://" in host else f"https://{host}").rstrip("/")
        elif own_namespace():
            settings.host = f"http://ml-pipeline.{kfp_namespace}.svc.cluster.local:8888"
        else:
            _load_kubeconfig(settings, kfp_namespace)
        authorise(settings, token)
        client = api_client(settings)
        health = api.HealthzServiceApi(client).healthz_service_get_healthz(
            _request_timeout=TIMEOUT_SECONDS
        )
    except (HTTPError, OSError, api.ApiException, kubeconfig.ConfigException) as error:
        reason = getattr(error, "reason", None) or error
        cause = " ".join(str(getattr(reason, "reason", reason)).split())
        address = redact(settings.host)
        raise ClusterError(
            f"Kubeflow Pipelines must answer{f' at {address}' if address else ''}, got "
            f"{redact(cause):.300}; type `kubectl -n {kfp_namespace} port-forward "
            "svc/ml-pipeline-ui 8080:80` in another terminal and add `--host http://localhost:8080`"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return Kubeflow(client, redact(settings.host), bool(health.multi_user), kfp_namespace)


def _load_kubeconfig(settings: Any, kfp_namespace: str) -> None:
    """Connect through the API server of Kubernetes, with the account of the kubeconfig."""
    kubeconfig.load_kube_config(client_configuration=settings)
    url = settings.host + PROXY.format(kfp_namespace)
    renew = settings.refresh_api_key_hook

    def renew_token(found: Any) -> None:
        # Before each request the hook of Kubernetes also sets its own host, which is replaced here.
        if renew is not None:
            renew(found)
        found.host = url

    settings.host, settings.refresh_api_key_hook = url, renew_token
