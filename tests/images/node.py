"""A node of a real control plane that runs the one container of a pod in a built image.

It does what a kubelet does for such pods: registers, says that it lives, resolves environment,
secrets, fields and volumes, runs the command as the user of image and pod, and tells the state. It
pulls nothing, restarts nothing and probes nothing.
"""

from __future__ import annotations

import base64
import os
import re
import signal
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
from tests.servers.run_control_plane import ControlPlane

LOOK_SECONDS = 0.5
LEASE_SECONDS = 40


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

    def __enter__(self) -> Node:
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

    def log(self, pod: str) -> str:
        """Return what the container of a pod has printed."""
        return (self.folder / "logs" / f"{pod}.txt").read_text("utf-8", errors="replace")

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _live(self) -> None:
        """Say again and again that this node is ready."""
        room = {"cpu": self.cpu, "memory": self.memory, "pods": "20"}
        while not self.stopped.is_set():
            now = _now()
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            ready |= {"lastHeartbeatTime": now, "lastTransitionTime": now, "message": ""}
            status = {"capacity": room, "allocatable": room, "conditions": [ready]}
            self.core.patch_node_status(self.name, {"status": status})
            renewed = {"spec": {"renewTime": datetime.now(UTC).isoformat(timespec="microseconds")}}
            self.leases.patch_namespaced_lease(self.name, "kube-node-lease", renewed)
            self.stopped.wait(LEASE_SECONDS / 4)

    def _look(self) -> None:
        """Begin with each pod that the scheduler has put here."""
        while not self.stopped.wait(LOOK_SECONDS):
            here = self.core.list_pod_for_all_namespaces(
                field_selector=f"spec.nodeName={self.name},status.phase=Pending"
            )
            for pod in here.items:
                if pod.metadata.uid not in self.seen:
                    self.seen.add(pod.metadata.uid)
                    raw = self.core.api_client.sanitize_for_serialization(pod)
                    self._start(self._run, raw)

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
        deadline = time.monotonic() + float(pod["spec"].get("activeDeadlineSeconds") or 1e9)
        while process.poll() is None and not self.stopped.wait(LOOK_SECONDS):
            if time.monotonic() > deadline:
                break
        ended_by_us = process.poll() is None
        if ended_by_us:
            os.killpg(process.pid, signal.SIGTERM)
        code = process.wait(timeout=60)
        over = {"exitCode": code, "startedAt": started, "finishedAt": _now()}
        over["reason"] = "Error" if code else "Completed"
        phase = "Failed" if code or ended_by_us else "Succeeded"
        self._tell(pod, phase, {"terminated": over}, "DeadlineExceeded" if ended_by_us else None)

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
        meta = pod["metadata"]
        self.core.patch_namespaced_pod_status(meta["name"], meta["namespace"], {"status": status})

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
        line = self.containers.command(
            names[container["image"]],
            [*container["command"], *container.get("args", [])],
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
            label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
            if label:
                return str(pod["metadata"].get("labels", {}).get(label[1], ""))
            found: Any = pod
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
