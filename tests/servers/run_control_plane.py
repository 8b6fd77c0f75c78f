"""Start a Kubernetes control plane of our own on free ports: etcd, API server, controllers.

No kubelet: pods are created and stay pending, which is what manifests, RBAC and clients need.
"""

from __future__ import annotations

import json
import secrets
import ssl
import subprocess
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import urllib3

from tests.servers.program import (
    BIN,
    Program,
    few_variables,
    free_port,
    require,
    wait_for_answer,
)


def require_kubernetes() -> None:
    """Skip the test on a machine that lacks the programs."""
    remedy = "build them with `tests/servers/build.sh etcd kubernetes`"
    require(BIN / "etcd", BIN / "kubernetes", remedy=remedy)


@dataclass
class ControlPlane:
    """A running control plane; `kubeconfig` is what clients need."""

    folder: Path
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    programs: list[Program] = field(default_factory=list)
    lines: dict[str, list[str | Path]] = field(default_factory=dict)
    """Name of a program -> its command line."""
    _pool: urllib3.PoolManager | None = None

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def start(self, *, controllers: bool = True) -> None:
        """Start all programs and wait until the API server and the default namespace are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        etcd = self._start_etcd()
        self._write_keys()
        self._start_api_server(etcd)
        self._wait("/readyz")
        if controllers:
            self._run(
                ("kubernetes", "kube-controller-manager"),
                f"--kubeconfig={self.kubeconfig}",
                f"--service-account-private-key-file={self.folder}/service-account.key",
                "--leader-elect=false",
                "--secure-port=0",
                # Nodes of tests have nobody who says every few seconds that they live.
                "--node-monitor-grace-period=1h",
            )
            # Pods need the service account that a controller makes.
            self._wait("/api/v1/namespaces/default/serviceaccounts/default")

    def stop(self) -> None:
        """End all programs, the last started first."""
        for program in reversed(self.programs):
            program.kill()
        self.programs.clear()
        if self._pool is not None:
            self._pool.clear()

    def program(self, name: str) -> Program:
        """Return a program by its name."""
        return next(one for one in self.programs if one.log.stem == name)

    def start_again(self, name: str) -> None:
        """Start a program that was killed."""
        environment = few_variables(self.folder)
        self.program(name).start(self.lines[name], environment=environment)

    def kubectl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """Run kubectl as administrator and return what it printed."""
        return subprocess.run(
            [BIN / "kubernetes", "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
            capture_output=True,
            text=True,
            check=check,
            env=few_variables(self.folder),
        )

    def get(self, path: str) -> dict:
        """Return what the API server has at a path, without the second of CPU of a `kubectl`."""
        if self._pool is None:
            certificate = self.folder / "certificates" / "apiserver.crt"
            self._pool = urllib3.PoolManager(ca_certs=str(certificate), maxsize=4)
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = self._pool.request("GET", f"https://127.0.0.1:{self.port}{path}", headers=headers)
        assert answer.status == 200, answer.data
        return answer.json()

    def list(self, path: str) -> list[dict]:
        """Return the objects at a path."""
        return self.get(path)["items"]

    def namespaced_paths(self, namespace: str) -> list[tuple[str, str]]:
        """Return the path and the kind of everything but events that a namespace may hold."""
        groups = self.get("/apis")["groups"]
        versions = ["/api/v1", *(f"/apis/{g['preferredVersion']['groupVersion']}" for g in groups)]
        return [
            (f"{version}/namespaces/{namespace}/{each['name']}", each["kind"])
            for version in versions
            for each in self.get(version)["resources"]
            if each["namespaced"] and "list" in each["verbs"] and each["name"] != "events"
        ]

    def apply(self, *objects: dict, check: bool = True) -> subprocess.CompletedProcess:
        """Create or change objects."""
        path = self.folder / "objects.json"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
        return self.kubectl("apply", "-f", str(path), check=check)

    def _run(self, command: tuple[str, ...], *flags: str) -> None:
        self.programs.append(Program(self.folder / f"{command[-1]}.log"))
        self.lines[command[-1]] = [BIN / command[0], *command[1:], *flags]
        self.start_again(command[-1])

    def _start_etcd(self) -> str:
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._run(
            ("etcd",),
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        return client

    def _write_keys(self) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "service-account.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        (self.folder / "tokens.csv").write_text(f'{self.token},admin,admin,"system:masters"\n')
        certificate = str(self.folder / "certificates" / "apiserver.crt")
        server = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": certificate}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        }
        # JSON is YAML.
        self.kubeconfig.write_text(json.dumps(config))

    def _start_api_server(self, etcd: str) -> None:
        key = self.folder / "service-account.key"
        self._run(
            ("kubernetes", "kube-apiserver"),
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            # As clusters have it, whose own parts need it.
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
        )

    def _wait(self, path: str) -> None:
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            headers={"Authorization": f"Bearer {self.token}"},
        )

        def ask() -> None:
            # The server writes its certificate before it answers.
            certificate = self.folder / "certificates" / "apiserver.crt"
            context = ssl.create_default_context(cafile=certificate)
            urllib.request.urlopen(request, timeout=2, context=context).close()

        wait_for_answer(ask, self.programs)
