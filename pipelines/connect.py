"""Connect to a Kubeflow Pipelines server, and find out in which namespace it puts the pods of runs.

Source: kubeflow/pipelines 2.17.0. `backend/api/v2beta1/healthz.proto` has `multi_user`, which the
server of the UI hands on. By `ReplaceNamespace` of
`backend/src/apiserver/resource/resource_manager.go` a run of a server for one user goes to the
server's own namespace, whatever the request says.
"""

import contextlib
import io
import logging
import warnings
from dataclasses import dataclass
from typing import Any

from planish.base.errors import ConfigError

KFP_NAMESPACE = "kubeflow"
TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class Kubeflow:
    """A server that has answered."""

    client: Any
    """A client of kfp, which carries no types."""
    url: str
    is_multi_user: bool
    """Runs of a server for several users live in the namespaces of their profiles."""
    namespace: str
    """Namespace in which Kubeflow itself runs."""

    def namespace_of_runs(self, wanted: str) -> str:
        """Return where pods of runs live.

        Args:
            wanted: namespace that the caller has named; empty for none.

        Raises:
            ConfigError: a profile that is missing, or that this server does not know of.
        """
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
        """Return one line for the person who submits."""
        users = "several users" if self.is_multi_user else "one user"
        return f"Kubeflow at {self.url} serves {users}: runs go to namespace {namespace}"


def connect(host: str = "", kfp_namespace: str = KFP_NAMESPACE, token: str = "") -> Kubeflow:
    """Connect to the server at a URL, or to the one that kfp's client finds by itself.

    Args:
        host: URL of the server or of its UI; empty to look for one.
        kfp_namespace: where it runs.
        token: of a service account for the audience `pipelines.kubeflow.org`, by which a server
            for several users knows who asks; empty for none.

    Raises:
        ConnectionError: nothing that answers as Kubeflow does; in one line that says what to type.
    """
    import kfp
    import kfp_server_api
    from urllib3.exceptions import HTTPError

    class Client(kfp.Client):  # type: ignore[misc]
        """Asks once whether the server is there; kfp asks five times and logs every traceback."""

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            """Return what the server says about itself."""
            return self._healthz_api.healthz_service_get_healthz(_request_timeout=TIMEOUT_SECONDS)

    url = host
    # kfp prints and logs that there is no kubeconfig; what matters of it stands in the error below.
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            # The client warns on every start that it needs a back end of version 2.
            warnings.simplefilter("ignore", FutureWarning)
            client = Client(
                host=host or None, namespace=kfp_namespace, existing_token=token or None
            )
        url = client._existing_config.host
        is_multi_user = bool(client.get_kfp_healthz().multi_user)
    except (HTTPError, OSError, kfp_server_api.ApiException) as error:
        reason = getattr(error, "reason", None) or error
        cause = " ".join(str(getattr(reason, "reason", reason)).split())
        raise ConnectionError(
            f"Kubeflow Pipelines must answer{f' at {url}' if url else ''}, got {cause}; type "
            f"`kubectl -n {kfp_namespace} port-forward svc/ml-pipeline-ui 8080:80` in another "
            "terminal and add `--host http://localhost:8080`"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return Kubeflow(client, url, is_multi_user, kfp_namespace)
