"""What is installed beside a Kubeflow, on a real API server, authoriser, scheduler and store."""

from __future__ import annotations

import json

import pytest

from tests.contract.kfp_needs import NEEDS
from tests.servers.program import REPOSITORY

pytestmark = pytest.mark.server

OVERLAYS = REPOSITORY / "manifests" / "overlays"


@pytest.mark.parametrize(
    ("overlay", "namespace"), [("kfp-single-user", "kubeflow"), ("kfp-multi-user", "team")]
)
def test_the_account_of_runs_may_do_what_kubeflow_does_with_it_and_no_more(
    control_plane, overlay, namespace
):
    control_plane.kubectl("create", "namespace", namespace, check=False)
    control_plane.kubectl("apply", "-k", str(OVERLAYS / overlay))

    def may(verb, group, resource, name="", place=namespace):
        what = {"group": group, "resource": resource, "verb": verb, "name": name}
        return _may(control_plane, namespace, what | ({"namespace": place} if place else {}))

    for need in NEEDS:
        assert may(need.verb, need.group, need.resource, need.name), need
    assert may("list", "", "nodes", place="")
    assert not may("get", "", "secrets", "mlpipeline-minio-artifact")
    assert not may("get", "", "configmaps", "other")
    assert not may("delete", "", "pods")
    assert not may("get", "", "secrets", "planish-store", place="default")


def _may(plane, namespace, what):
    """Ask whether the account of runs in a namespace may do something."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{namespace}:planish-runner",
            "resourceAttributes": what,
        },
    }
    path = plane.folder / "review.json"
    path.write_text(json.dumps(review))
    answer = plane.kubectl("create", "-f", str(path), "-o", "jsonpath={.status.allowed}").stdout
    return answer == "true"


def test_two_namespaces_of_runs_keep_their_rights_beside_each_other(control_plane):
    for overlay, namespace in (("kfp-single-user", "kubeflow"), ("kfp-multi-user", "team")):
        control_plane.kubectl("create", "namespace", namespace, check=False)
        control_plane.kubectl("apply", "-k", str(OVERLAYS / overlay))
    for namespace in ("kubeflow", "team"):
        assert _may(control_plane, namespace, {"resource": "nodes", "verb": "list"})


def test_settings_of_the_launcher_are_added_to_those_of_kubeflow_and_replace_none(control_plane):
    def launcher(**data):
        metadata = {"name": "kfp-launcher", "namespace": "kubeflow"}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}

    def add():
        path = REPOSITORY / "manifests/runs/kfp-launcher.yaml"
        words = ("patch", "configmap", "kfp-launcher", "--type=json", f"--patch-file={path}")
        return control_plane.kubectl("-n", "kubeflow", *words, check=False)

    def value(key):
        path = f"jsonpath={{.data.{key}}}"
        words = ("-n", "kubeflow", "get", "configmap", "kfp-launcher", "-o", path)
        return control_plane.kubectl(*words).stdout

    control_plane.kubectl("create", "namespace", "kubeflow", check=False)
    control_plane.kubectl("-n", "kubeflow", "delete", "configmap", "kfp-launcher", check=False)
    control_plane.apply(launcher(defaultPipelineRoot="minio://mlpipeline/v2"))
    assert add().returncode == 0
    assert value("defaultPipelineRoot") == "minio://mlpipeline/v2"
    assert "planish" in value("providers")
    control_plane.kubectl("-n", "kubeflow", "delete", "configmap", "kfp-launcher")
    control_plane.apply(launcher(providers="s3: {}"))
    refused = add()
    assert refused.returncode != 0
    assert "The request is invalid" in refused.stderr
    assert value("providers") == "s3: {}"
    control_plane.kubectl("-n", "kubeflow", "delete", "configmap", "kfp-launcher")


def test_settings_of_the_workflow_controller_change_one_key(control_plane):
    def settings():
        words = (
            "-n",
            "kubeflow",
            "get",
            "configmap",
            "workflow-controller-configmap",
            "-o",
            "json",
        )
        return json.loads(control_plane.kubectl(*words).stdout)["data"]

    control_plane.kubectl("create", "namespace", "kubeflow", check=False)
    metadata = {"name": "workflow-controller-configmap", "namespace": "kubeflow"}
    data = {"executor": "resources: {}", "workflowDefaults": "spec: {}"}
    control_plane.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    )
    path = OVERLAYS / "kfp-patch" / "workflow-controller.yaml"
    words = ("patch", "configmap", "workflow-controller-configmap", f"--patch-file={path}")
    control_plane.kubectl("-n", "kubeflow", *words)
    after = settings()
    assert set(after) == set(data)
    assert after["executor"] == data["executor"]
    assert "planish-runner" in after["workflowDefaults"]
