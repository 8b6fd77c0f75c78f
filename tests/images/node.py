"""A node of a real control plane that runs the one container of a pod in a built image.

It does what a kubelet does for such pods: registers, says that it lives, resolves environment,
secrets, fields and volumes, runs the command as the user of image and pod, tells the state, serves
the log, and ends the pods that are deleted. It pulls nothing, restarts nothing and probes nothing.
All pods have the address of this machine, and so have the host names that a Job gives its pods.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import re
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client, config

from components.images import IMAGES
from tests.images.containers import Containers, Here
from tests.processes import below
from tests.servers.run_control_plane import ControlPlane

LOOK_SECONDS = 0.5
LEASE_SECONDS = 40
ADDRESS = "127.0.0.1"


class Refused(Exception):
    """Why a container is not made, in the words of a kubelet."""

    def __init__(self, reason: str, message: str):
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclass
class Node:
    """One node; use it as a context manager. `cpu` and `memory` are what it offers."""

    plane: ControlPlane
    containers: Containers | Here
    folder: Path
    name: str = "node-1"
    cpu: str = "2"
    memory: str = "8Gi"
    stopped: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    leaving: dict[str, float] = field(default_factory=dict)
    """Pods that are being deleted -> their seconds of grace."""
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    """Name of a pod -> its process, also after its end."""

    def __enter__(self) -> Node:
        self.server = self._serve_logs()
        connection = config.new_client_from_config(str(self.plane.kubeconfig))
        self.core = client.CoreV1Api(connection)
        self.leases = client.CoordinationV1Api(connection)
        labels = {"kubernetes.io/hostname": self.name}
        self.core.create_node({"metadata": {"name": self.name, "labels": labels}})
        holder = {"holderIdentity": self.name, "leaseDurationSeconds": LEASE_SECONDS}
        self.leases.create_namespaced_lease(
            "kube-node-lease", {"metadata": {"name": self.name}, "spec": holder}
        )
        for work in (self._live, self._look):
            self._start(work)
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(timeout=60)
        self.server.shutdown()
        self.server.server_close()

    def log(self, pod: str) -> str:
        """Return what the container of a pod has printed."""
        return (self.folder / "logs" / f"{pod}.txt").read_text("utf-8", errors="replace")

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _live(self) -> None:
        """Say again and again that this node is ready."""
        room = {"cpu": self.cpu, "memory": self.memory, "pods": "20", "rdma/hca": "1"}
        while not self.stopped.is_set():
            now = _now()
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            ready |= {"lastHeartbeatTime": now, "lastTransitionTime": now, "message": ""}
            status = {"capacity": room, "allocatable": room, "conditions": [ready]}
            status["addresses"] = [{"type": "InternalIP", "address": ADDRESS}]
            port = self.server.server_address[1]
            status["daemonEndpoints"] = {"kubeletEndpoint": {"Port": port}}
            with contextlib.suppress(Exception):
                # The API server may be away.
                self.core.patch_node_status(self.name, {"status": status}, _request_timeout=5)
                renewed = datetime.now(UTC).isoformat(timespec="microseconds")
                self.leases.patch_namespaced_lease(
                    *(self.name, "kube-node-lease", {"spec": {"renewTime": renewed}}),
                    _request_timeout=5,
                )
            self.stopped.wait(LEASE_SECONDS / 4)

    def _serve_logs(self) -> http.server.ThreadingHTTPServer:
        """Answer what the API server asks a kubelet for the log of a pod."""
        node = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = re.fullmatch(r"/containerLogs/[^/]+/([^/]+)/.*", self.path)
                lines = node.log(path[1]).encode() if path else b""
                self.send_response(200 if path else 404)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Length", str(len(lines)))
                self.end_headers()
                self.wfile.write(lines)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer((ADDRESS, 0), Handler)
        keys = self.plane.folder / "certificates"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "apiserver.crt", keys / "apiserver.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def _look(self) -> None:
        """Begin with each pod that the scheduler has put here, and end those that are deleted."""
        while not self.stopped.wait(LOOK_SECONDS):
            try:
                # As plain JSON: the classes of the client take most of a core to fill.
                answer = self.core.list_pod_for_all_namespaces(
                    field_selector=f"spec.nodeName={self.name}",
                    _request_timeout=5,
                    _preload_content=False,
                )
                pods = json.loads(answer.data)["items"]
            except Exception:
                # The API server is away: what runs goes on.
                continue
            for pod in pods:
                meta, phase = pod["metadata"], pod["status"]["phase"]
                uid = meta["uid"]
                if "deletionTimestamp" in meta:
                    self.leaving[uid] = float(meta.get("deletionGracePeriodSeconds") or 0)
                    is_over = phase in ("Succeeded", "Failed")
                    if is_over or uid not in self.seen:
                        self._forget(meta["name"], meta["namespace"], is_over=is_over)
                elif uid not in self.seen and phase == "Pending":
                    self.seen.add(uid)
                    self._start(self._run, pod)

    def _forget(self, name: str, namespace: str, *, is_over: bool) -> None:
        """Tell the API server that nothing of a deleted pod is left here."""
        with contextlib.suppress(Exception):
            if not is_over:
                # It never began; the controller of a job counts only pods that have ended.
                self.core.patch_namespaced_pod_status(
                    name, namespace, {"status": {"phase": "Failed"}}
                )
            self.core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)

    def _run(self, pod: dict[str, Any]) -> None:
        """Run the container of a pod to its end and tell its state."""
        container = pod["spec"]["containers"][0]
        try:
            line, environment = self._command(pod, container)
        except Refused as error:
            waiting = {"reason": error.reason, "message": str(error)}
            self._tell(pod, "Pending", {"waiting": waiting})
            return
        started = _now()
        self._tell(pod, "Running", {"running": {"startedAt": started}})
        path = self.folder / "logs" / f"{pod['metadata']['name']}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as log:
            process = subprocess.Popen(
                line, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.processes[pod["metadata"]["name"]] = process
        deadline = time.monotonic() + float(pod["spec"].get("activeDeadlineSeconds") or 1e9)
        uid = pod["metadata"]["uid"]
        while process.poll() is None and not self.stopped.wait(LOOK_SECONDS):
            if time.monotonic() > deadline or uid in self.leaving:
                break
        ended_by_us = process.poll() is None
        is_late = ended_by_us and time.monotonic() > deadline
        if ended_by_us:
            # As a kubelet does: the first process is asked, and then all are killed.
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=self.leaving.get(uid, 30.0))
            for member in (*below(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        code = process.wait(timeout=60)
        code = 128 - code if code < 0 else code
        over = {"exitCode": code, "startedAt": started, "finishedAt": _now()}
        over["reason"] = "Error" if code else "Completed"
        phase = "Failed" if code or ended_by_us else "Succeeded"
        self._tell(pod, phase, {"terminated": over}, "DeadlineExceeded" if is_late else None)

    def _tell(
        self,
        pod: Mapping[str, Any],
        phase: str,
        state: Mapping[str, Any],
        reason: str | None = None,
    ) -> None:
        """Write the state of a pod into its status."""
        container = pod["spec"]["containers"][0]
        of_container = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": phase == "Running",
            "restartCount": 0,
            "state": state,
        }
        status = {"phase": phase, "containerStatuses": [of_container], "reason": reason}
        status["podIP"] = ADDRESS
        ready = {"type": "Ready", "status": str(phase == "Running"), "lastTransitionTime": _now()}
        status["conditions"] = [ready]
        meta = pod["metadata"]
        patch = self.core.patch_namespaced_pod_status
        while not self.stopped.is_set():
            try:
                patch(meta["name"], meta["namespace"], {"status": status}, _request_timeout=5)
                return
            except client.ApiException as error:
                if error.status == 404:
                    return
            except Exception:
                # The API server is away: a kubelet tells it later.
                pass
            self.stopped.wait(LOOK_SECONDS)

    def _command(
        self, pod: Mapping[str, Any], container: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line of a container on this machine and the environment of buildah.

        Raises:
            Refused: an image that is not here, a secret or key that is not there, a user that must
                not be.
        """
        names = {reference: name for name, reference in IMAGES.items()}
        if container["image"] not in names:
            raise Refused("ErrImageNeverPull", f"{container['image']} is not on this node")
        variables = {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        variables["KUBERNETES_SERVICE_PORT"] = str(self.plane.port)
        for entry in container.get("env", []):
            value = self._value(pod, entry)
            if value is not None:
                variables[entry["name"]] = value
        sources = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        mounts = {
            mount["mountPath"]: self._volume(pod, sources[mount["name"]])
            for mount in container.get("volumeMounts", [])
        }
        security = {
            **pod["spec"].get("securityContext", {}),
            **container.get("securityContext", {}),
        }
        words = [*container["command"], *container.get("args", [])]
        words = [
            re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word)
            for word in words
        ]
        if subdomain := pod["spec"].get("subdomain"):
            # What the name server of a cluster knows of the pods behind a headless service.
            words = [re.sub(rf"[\w-]+-\d+\.{subdomain}\b", ADDRESS, word) for word in words]
        line = self.containers.command(
            names[container["image"]],
            words,
            environment=variables,
            mounts=mounts,
            user=security.get("runAsUser"),
        )
        return line, {**os.environ, **self.containers.settings}

    def _value(self, pod: Mapping[str, Any], entry: Mapping[str, Any]) -> str | None:
        """Return the value of a variable; None where its optional source is not there."""
        source = entry.get("valueFrom")
        if source is None:
            return str(entry.get("value", ""))
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            fact = re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path)
            if fact:
                return str(pod["metadata"].get(fact[1], {}).get(fact[2], ""))
            found: Any = {**pod, "status": {"podIP": ADDRESS}}
            for part in path.split("."):
                found = found[part]
            return str(found)
        wanted = source["secretKeyRef"]
        data = self._secret(pod, wanted["name"])
        if wanted["key"] in data:
            return data[wanted["key"]].decode()
        if wanted.get("optional"):
            return None
        raise Refused("CreateContainerConfigError", f"no {wanted['key']} in {wanted['name']}")

    def _secret(self, pod: Mapping[str, Any], name: str) -> dict[str, bytes]:
        """Return the entries of a secret beside a pod; none where it is not there."""
        try:
            secret = self.core.read_namespaced_secret(name, pod["metadata"]["namespace"])
        except client.ApiException as error:
            if error.status != 404:
                raise
            return {}
        return {key: base64.b64decode(value) for key, value in (secret.data or {}).items()}

    def _volume(self, pod: Mapping[str, Any], volume: Mapping[str, Any]) -> Path:
        """Return the folder of this machine that is a volume of a pod, filled."""
        if "persistentVolumeClaim" in volume:
            # The scheduler has waited for a controller to bind it.
            claim = volume["persistentVolumeClaim"]["claimName"]
            namespace = pod["metadata"]["namespace"]
            bound = self.core.read_namespaced_persistent_volume_claim(claim, namespace)
            disk = self.core.read_persistent_volume(bound.spec.volume_name)
            return Path(disk.spec.host_path.path)
        place = self.folder / "volumes" / pod["metadata"]["uid"] / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)
        for source in volume.get("projected", {}).get("sources", []):
            for name, data in self._projected(pod, source).items():
                (place / name).write_bytes(data)
        return place

    def _projected(self, pod: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the files of one source of what a service account sees."""
        namespace = pod["metadata"]["namespace"]
        if "serviceAccountToken" in source:
            wanted = {"expirationSeconds": source["serviceAccountToken"]["expirationSeconds"]}
            answer = self.core.create_namespaced_service_account_token(
                pod["spec"]["serviceAccountName"], namespace, {"spec": wanted}
            )
            return {source["serviceAccountToken"]["path"]: answer.status.token.encode()}
        if "configMap" in source:
            # The controller that copies it everywhere takes it from a file, which is this one.
            path = self.plane.folder / "certificates" / "apiserver.crt"
            return {item["path"]: path.read_bytes() for item in source["configMap"]["items"]}
        return {item["path"]: namespace.encode() for item in source["downwardAPI"]["items"]}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
