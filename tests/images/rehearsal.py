"""The first day on a cluster: real API server, scheduler, controllers and store, built images."""

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from components.images import IMAGES
from pipelines.compile import compile_text
from pipelines.post_train import build_post_train, profile_named
from planish import store
from planish.__main__ import main as planish
from tests.contract.test_quickstart_page import GANG_PAGE, GPU_PAGE, ON_A_RUN, blocks, is_shown
from tests.images.containers import REPOSITORY, Containers, Here, can_mount
from tests.images.node import Node
from tests.images.pipeline import run_tasks
from tests.images.pods import ACCOUNT, pod_of
from tests.integration.own_model import make_model
from tests.integration.scheduling import running_scheduler
from tests.integration.test_own_model import SMALL, check_export, open_export, write_rows
from tests.servers.run_control_plane import ControlPlane
from tests.servers.run_minio import Minio
from tests.unit.submit.kfp_server import Server

NAMESPACE = "planish"
ROOT = "s3://planish/rehearsal"


def rehearse(containers: Containers | Here, folder: Path) -> None:
    """Install the manifests, submit a run, take its pods one by one, and open what it exported.

    Kubeflow is an API that records: what `planish submit` has sent to it is what the pods are made
    of, and the parameters that they get. It is submitted as the page for several machines does it
    without GPUs, and its train pod submits a gang where pods see the token of their account.

    The store of the manifests is a pod of an image that is not here: MinIO runs beside the cluster,
    and the secret of the store names it.

    Args:
        containers: what runs the commands of pods.
        folder: an empty one, which other users may enter.
    """
    profile = profile_named("cpu-tiny", num_iterations=1, num_shards=1)
    package = folder / "post-train.yaml"
    package.write_text(compile_text(profile))
    with contextlib.ExitStack() as stack:
        plane = ControlPlane(folder / "plane")
        stack.callback(plane.stop)
        plane.start()
        stack.enter_context(running_scheduler(plane))
        minio = Minio(folder / "minio")
        stack.callback(minio.kill)
        minio.start()
        minio.make_bucket("planish")
        plane.kubectl("apply", "-k", str(REPOSITORY / "manifests/overlays/local"))
        connect(plane, minio)
        model = make_model("Qwen2", folder / "model")
        rows = write_rows(folder / "mine.jsonl")
        # Pods shall have it from the secret alone.
        with mock.patch.dict(os.environ, minio.environment):
            for path in (*model.iterdir(), rows):
                store.write(f"s3://planish/mine/{path.name}", path.read_bytes())
            (line,) = (line for line, _ in blocks(GANG_PAGE) if "--profile cpu-tiny" in line)
            line = line.replace("s3://bucket/try1", ROOT)
            line = line.replace("--profile cpu-tiny", f"--pipeline {package}")
            words = shlex.split(line)[2:]
            has_gang = isinstance(containers, Containers) or can_mount()
            words[-1] = f"{words[-1]} {SMALL}" if has_gang else f"overrides={SMALL}"
            words += ["--dataset-map", "answer=label"]
            for pair in ("model=s3://planish/mine", f"dataset=s3://planish/mine/{rows.name}"):
                words += ["--parameter", pair]
            server = Server()
            stack.callback(server.close)
            run = submitted(server, *words)
        compiled = list(run["pipeline_spec"].values())
        node, other = (
            stack.enter_context(Node(plane, containers, folder / "node", name=name))
            for name in ("node-1", "node-2")
        )
        artifacts = folder / "artifacts"
        artifacts.mkdir()
        artifacts.chmod(0o777)
        plane.apply(*disk_and_claim("artifacts", artifacts))
        numbers = itertools.count()
        (run_id,) = server.objects["runs"]
        claims = {"artifacts": str(artifacts)}

        def run_task(image: str, command: Sequence[str], variables: Mapping[str, str]) -> int:
            name = f"rehearsal-{next(numbers):02d}"
            pod = pod_of(compiled, command, name=name, run_id=run_id, artifacts=claims)
            assert image in IMAGES.values()
            assert pod["spec"]["containers"][0]["image"] == image
            node.core.create_namespaced_pod(NAMESPACE, pod)
            phase = wait_for_end(node, name, NAMESPACE)
            sys.stdout.write(f"{name} {phase}\n{node.log(name)}")
            return phase != "Succeeded"

        pipeline = build_post_train(profile, one_machine=True)
        run_tasks(pipeline, run["runtime_config"]["parameters"], artifacts, run_task)
        ranks = [name for name in (*node.processes, *other.processes) if "rehearsal" not in name]
        assert len(ranks) == (2 if has_gang else 0), ranks
        left = plane.kubectl("-n", NAMESPACE, "get", "jobs,services", "-o", "name").stdout
        assert not re.search(r"planish-[0-9a-f]{16}", left), left
        words = ["cleanup", run_id, "--host", server.url, "--kfp-namespace", NAMESPACE]
        settings = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
        subprocess.run([sys.executable, "-m", "planish", *words], check=True, env=settings)
        with mock.patch.dict(os.environ, minio.environment):
            check_export(ROOT, 1, "Qwen2")
            follow_page(folder)


def follow_page(folder: Path) -> None:
    """Type what the page for GPUs types once there is a run, and compare what it shows."""
    places = {
        "s3://bucket/run1": ROOT,
        "/tmp/run1": str(folder / "curves"),
        "exported": str(folder / "exported"),
    }
    followed = set()
    for command, expected in blocks(GPU_PAGE):
        if not command.startswith(ON_A_RUN):
            continue
        words = [shlex.split(command)[0]]
        for word in shlex.split(command)[1:]:
            for shown, place in places.items():
                word = word.replace(shown, place)
            words.append(word)
        with contextlib.redirect_stdout(io.StringIO()) as told:
            assert planish(words[1:]) == 0, command
        printed = told.getvalue().strip()
        sys.stdout.write(f"$ {command}\n{printed}\n")
        assert printed, command
        expected = expected.replace(": exported", f": {places['exported']}")
        assert not expected or is_shown(expected, printed), (command, printed)
        followed.add(" ".join(words[:2]))
    assert followed == set(ON_A_RUN)
    open_export(folder / "exported", "Qwen2")


def submitted(server: Server, *words: str) -> dict[str, Any]:
    """Return the run that Kubeflow is asked for by `planish submit` with these words."""
    code = planish(["submit", *words, "--host", server.url, "--kfp-namespace", NAMESPACE])
    assert code == 0, code
    (run,) = server.posted("runs")
    assert run["service_account"] == ACCOUNT
    assert list(run["pipeline_spec"]) == ["pipeline_spec", "platform_spec"]
    found: dict[str, Any] = run
    return found


def disk_and_claim(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return a folder of the node as a volume, and the claim of a namespace to it."""
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    disk = {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}, **shared}
    wanted = {"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}, **shared}
    return [
        {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {"name": name, **({"namespace": NAMESPACE} if "Claim" in kind else {})},
            "spec": spec,
        }
        for kind, spec in (("PersistentVolume", disk), ("PersistentVolumeClaim", wanted))
    ]


def connect(plane: ControlPlane, minio: Minio) -> None:
    """Name a store in the secret of the manifests, as its README says."""
    values = {
        "endpoint": minio.endpoint,
        "access_key": minio.access_key,
        "secret_key": minio.secret_key,
    }
    patch = json.dumps({"stringData": values})
    plane.kubectl("-n", NAMESPACE, "patch", "secret", "planish-store", "-p", patch)


def wait_for_end(node: Node, name: str, namespace: str, seconds: float = 900.0) -> str:
    """Return the last phase of a pod, or why its container is not made."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = node.core.read_namespaced_pod(name, namespace).status
        for container in found.container_statuses or ():
            if container.state.waiting is not None:
                return str(container.state.waiting.message)
        if found.phase in ("Succeeded", "Failed"):
            return f"{found.phase} {found.reason or ''}".strip()
        time.sleep(0.5)
    return "too slow"
