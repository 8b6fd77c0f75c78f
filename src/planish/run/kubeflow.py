"""The runs of a Kubeflow installation, and unique names so that no run starts twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planish.base.answers import bounded
from planish.base.errors import ClusterError, ConfigError
from planish.base.telemetry import redact
from planish.run.kube import Kube, in_pod

TOKEN_FILE = "/var/run/secrets/kubeflow/pipelines/token"
"""Path of the API token in pods of an installation for several users."""

REQUEST_SECONDS = 20
"""Time limit of a read request."""
WRITE_SECONDS = 120
"""Time limit of a request that starts or changes something."""

CANCELLED = {"CANCELING", "CANCELED", "CANCELLED"}
"""States of a run that a person has ended; Kubeflow 2.17 shows them only until its next sync."""

API = "ml-pipeline.kubeflow.svc.cluster.local"
"""Name of the API's service in Kubeflow's own namespace."""


@dataclass(frozen=True)
class KubeflowRun:
    """A run of Kubeflow, with everything needed to start its pipeline again."""

    experiment_id: str
    parameters: Mapping[str, Any]
    service_account: str
    pipeline_root: str
    """URI for artifacts of KFP; empty for the default."""
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    """Either `pipeline_version_reference` or `pipeline_spec`, as the API gave it."""
    state: str = ""
    """Current state of the run in the API's words; CANCELED if its workflow was terminated."""


class KfpRuns:
    """The runs of one Kubeflow installation, by the generated client; its import takes a second.

    Inside a task kfp has no client, because it is imported only in part (`_KFP_RUNTIME`).
    """

    def __init__(self, host: str = "", *, client: Any = None) -> None:
        """Connect to the API at a URL, by default that of this pod, or use an `ApiClient`."""
        import kfp_server_api

        if client is None:
            settings = kfp_server_api.Configuration(host=host or api_url())
            authorise(settings)
            client = api_client(settings)
        self._api = kfp_server_api
        self._runs = kfp_server_api.RunServiceApi(client)
        self._url = redact(client.configuration.host)

    def facts(self, run_id: str) -> KubeflowRun:
        """Return the facts of a run's start."""
        with asking(self._url):
            run = self._runs.run_service_get_run(run_id)
        runtime = run.runtime_config
        pipeline: dict[str, Any] = {}
        if run.pipeline_version_reference is not None:
            reference = run.pipeline_version_reference
            pipeline["pipeline_version_reference"] = {
                "pipeline_id": reference.pipeline_id,
                "pipeline_version_id": reference.pipeline_version_id,
            }
        else:
            pipeline["pipeline_spec"] = run.pipeline_spec
        return KubeflowRun(
            experiment_id=run.experiment_id or "",
            parameters=dict(runtime.parameters or {}) if runtime else {},
            service_account=run.service_account or "",
            pipeline_root=(runtime.pipeline_root or "") if runtime else "",
            pipeline=pipeline,
            state="CANCELED" if was_terminated(run_id) else str(run.state or ""),
        )

    def find(self, name: str, experiment_id: str) -> str:
        """Return the id of the run with a name; empty if there is none."""
        predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
        with asking(self._url):
            answer = self._runs.run_service_list_runs(
                page_size=1,
                experiment_id=experiment_id or None,
                filter=json.dumps({"predicates": [predicate]}),
            )
        return str(answer.runs[0].run_id) if answer.runs else ""

    def create(self, name: str, facts: KubeflowRun) -> str:
        """Start a run and return its id."""
        api = self._api
        reference = facts.pipeline.get("pipeline_version_reference")
        wanted = api.V2beta1Run(
            display_name=name,
            description=description(str(facts.parameters.get("root", ""))),
            experiment_id=facts.experiment_id or None,
            service_account=facts.service_account or None,
            pipeline_spec=facts.pipeline.get("pipeline_spec"),
            pipeline_version_reference=(
                api.V2beta1PipelineVersionReference(**reference) if reference else None
            ),
            runtime_config=api.V2beta1RuntimeConfig(
                parameters=dict(facts.parameters),
                pipeline_root=facts.pipeline_root or None,
            ),
        )
        with asking(self._url):
            return str(self._runs.run_service_create_run(run=wanted).run_id)


def api_client(settings: Any) -> Any:
    """Return the generated client, with a time limit on every request."""
    import kfp_server_api

    class Client(kfp_server_api.ApiClient):  # type: ignore[misc]
        def request(self, method: str, *words: Any, **options: Any) -> Any:
            seconds = REQUEST_SECONDS if method == "GET" else WRITE_SECONDS
            seconds = options.pop("_request_timeout", None) or seconds
            with bounded(seconds):
                return super().request(method, *words, _request_timeout=seconds, **options)

    return Client(settings)


@contextlib.contextmanager
def asking(url: str) -> Iterator[None]:
    """Turn refusals of the server into ConfigError, and its failures into ClusterError."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        status = int(error.status or 0)
        text = redact(" ".join(str(error.body or error.reason or "").split()))
        message = f"Kubeflow at {url} must do what is asked, got {status}: {text:.300}"
        if 400 <= status < 500 and status not in (408, 429):
            raise ConfigError(message) from None
        raise ClusterError(f"{message}; try again", status=status) from None
    except (HTTPError, OSError) as error:
        if isinstance(error, (ClusterError, ConfigError)):
            raise
        cause = redact(" ".join(str(error).split()))
        raise ClusterError(f"Kubeflow at {url} must answer, got {cause:.300}") from None


def was_terminated(run_id: str) -> bool:
    """Tell whether a person has ended the run of this pod; its state is FAILED soon after.

    Raises:
        ClusterError: the API server refuses to list workflows, or does not answer.

    Source: `GetTerminatePatch` of kubeflow/pipelines 2.17 sets `activeDeadlineSeconds` of the
    workflow to 0, the commands `argo stop` and `argo terminate` set `shutdown`.
    """
    if not in_pod():
        return False
    specs = [flow["spec"] for flow in Kube.connect(patience_seconds=0).workflows(run_id)]
    return any(spec.get("activeDeadlineSeconds") == 0 or spec.get("shutdown") for spec in specs)


def authorise(settings: Any, token: str = "") -> None:
    """Give a client a token, by default the one that Kubeflow mounts in its pods, if any."""
    mounted = Path(os.environ.get("KF_PIPELINES_SA_TOKEN_PATH", TOKEN_FILE))
    if token or mounted.is_file():
        settings.api_key_prefix["authorization"] = "Bearer"
        settings.api_key["authorization"] = token or mounted.read_text("utf-8").strip()


def api_url() -> str:
    """Return the URL of the API that this pod belongs to.

    It is `KF_PIPELINES_ENDPOINT` if set, else the service of the pod's own namespace, which
    Kubernetes names in the environment, else the service in the namespace `kubeflow`.
    """
    beside = os.environ.get("ML_PIPELINE_SERVICE_HOST", "")
    return os.environ.get("KF_PIPELINES_ENDPOINT", "") or f"http://{beside or API}:8888"


def title(root: str, preset: str, place: str) -> str:
    """Return the name of a run for people: last part of the root, preset, place in its chain."""
    return " ".join(word for word in (root.rpartition("/")[2], preset, place) if word)


def run_name(root: str, chain_index: int, preset: str = "") -> str:
    """Return the name of the `chain_index`-th run on a root; no run of another root has it."""
    return f"{title(root, preset, f'#{chain_index}')} {_mark(root)}"


def restart_name(root: str, counter: int, preset: str = "") -> str:
    """Return the name of the `counter`-th restart on a root; no run of another root has it."""
    return f"{title(root, preset, f'restart {counter}')} {_mark(root)}"


def description(root: str) -> str:
    """Return the description of a run, which the run page shows as plain text."""
    from planish.records import layout

    return f"The report lies at {layout.report(root)}/report.html from the first iteration on."


def _mark(root: str) -> str:
    return hashlib.sha256(root.encode()).hexdigest()[:12]
