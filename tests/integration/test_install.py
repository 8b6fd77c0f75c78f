"""What is installed beside a Kubeflow, on a real API server, authoriser, scheduler and store."""

import io
import json
import subprocess

import minio
import pytest
import yaml

from tests.contract.kfp_needs import NEEDS
from tests.servers.program import BIN, REPOSITORY, require

pytestmark = pytest.mark.server

OVERLAYS = REPOSITORY / "manifests" / "overlays"


@pytest.mark.parametrize("overlay", ["local", "gpu", "kfp-single-user", "kfp-multi-user"])
def test_a_real_server_accepts_every_object_of_an_overlay(control_plane, overlay):
    built = control_plane.kubectl("kustomize", str(OVERLAYS / overlay)).stdout
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


def test_the_setup_of_the_store_makes_a_user_of_one_bucket_and_may_run_again(
    minio_server, tmp_path
):
    require(BIN / "mc", remedy="build it with `tests/servers/build.sh mc`")
    path = REPOSITORY / "manifests" / "base" / "minio-setup.yaml"
    script = next(yaml.safe_load_all(path.read_text()))["data"]["setup.sh"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mc").symlink_to(BIN / "mc")
    root = (minio_server.access_key, minio_server.secret_key)
    environment = {
        "PATH": str(tmp_path / "bin"),
        "HOME": str(tmp_path),
        "BUCKET": "of-runs",
        **dict(zip(("ROOT_USER", "ROOT_PASSWORD"), root, strict=True)),
        "RUN_USER": "runs",
        "RUN_PASSWORD": "secret-of-runs",
    }
    for _ in range(2):
        done = subprocess.run(
            [
                "/bin/sh",
                "-c",
                script.replace("http://minio:9000", f"http://{minio_server.endpoint}"),
            ],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    user = minio.Minio(minio_server.endpoint, "runs", "secret-of-runs", secure=False)
    user.put_object("of-runs", "a/b", io.BytesIO(b"x"), 1)
    assert [item.object_name for item in user.list_objects("of-runs", recursive=True)] == ["a/b"]
    with pytest.raises(minio.S3Error, match="AccessDenied"):
        user.make_bucket("other")
    admin = minio.Minio(minio_server.endpoint, *root, secure=False)
    (rule,) = admin.get_bucket_lifecycle("of-runs").rules
    assert (rule.rule_filter.prefix, rule.expiration.days) == ("kfp/", 30)
