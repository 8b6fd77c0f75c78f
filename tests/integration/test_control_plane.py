"""The Kubernetes control plane of the tests does what manifests and clients need."""

from __future__ import annotations

import json

import pytest

from tests.servers.program import REPOSITORY

pytestmark = pytest.mark.server

JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "one"},
    "spec": {
        "template": {
            "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "none"}]}
        }
    },
}


def test_the_server_tells_the_pinned_version(control_plane):
    told = json.loads(control_plane.kubectl("version", "-o", "json").stdout)
    assert told["serverVersion"]["gitVersion"] == "v1.34.4"
    assert told["clientVersion"]["gitVersion"] == "v1.34.4"


def test_a_controller_makes_the_pod_of_a_job(control_plane):
    control_plane.apply(JOB)
    control_plane.kubectl("wait", "--for=jsonpath={.status.active}=1", "job/one", "--timeout=60s")
    pods = json.loads(
        control_plane.kubectl("get", "pods", "-l", "job-name=one", "-o", "json").stdout
    )
    assert [pod["status"]["phase"] for pod in pods["items"]] == ["Pending"]
    control_plane.kubectl("delete", "job", "one")


def test_a_manifest_with_an_unknown_field_is_refused(control_plane):
    path = control_plane.folder / "bad.json"
    path.write_text(json.dumps({**JOB, "spek": 1}))
    done = control_plane.kubectl("apply", "--dry-run=server", "-f", str(path), check=False)
    assert done.returncode == 1
    assert 'unknown field "spek"' in done.stderr


def test_rights_are_checked(control_plane):
    done = control_plane.kubectl(
        "auth", "can-i", "create", "jobs", "--as=system:serviceaccount:default:default", check=False
    )
    assert done.stdout.strip() == "no"
    assert control_plane.kubectl("auth", "can-i", "create", "jobs").stdout.strip() == "yes"


@pytest.mark.parametrize("overlay", ["local", "gpu", "kfp-single-user", "kfp-multi-user"])
def test_a_real_server_accepts_every_object_of_an_overlay(control_plane, overlay):
    folder = REPOSITORY / "manifests" / "overlays" / overlay
    built = control_plane.kubectl("kustomize", str(folder)).stdout
    path = control_plane.folder / f"{overlay}.yaml"
    path.write_text(built)
    for namespace in ("planish", "kubeflow", "team"):
        control_plane.kubectl("create", "namespace", namespace, check=False)
    done = control_plane.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "-f", str(path), check=False
    )
    assert done.returncode == 0, done.stderr
    accepted = [line for line in done.stdout.splitlines() if line.endswith("(server dry run)")]
    assert len(accepted) == built.count("\nkind: ") + built.startswith("kind: ")
