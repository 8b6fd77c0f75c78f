"""Nodes, pods and jobs as objects of a real API server, for tests of the monitor."""

import itertools
import json
import time

import yaml

from planish.base.errors import ClusterError
from planish.minder.act.alerts import Alert
from planish.minder.act.config import KubernetesConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.detect.result import Finding, Result
from tests.integration.waiting import wait_for
from tests.servers.program import REPOSITORY

JOB_LABEL = names.JOB_LABELS[0]
WORKFLOWS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "workflows.argoproj.io"},
    "spec": {
        "group": "argoproj.io",
        "scope": "Namespaced",
        "names": {"plural": "workflows", "singular": "workflow", "kind": "Workflow"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}
"""The least by which an API server takes workflows of Argo."""

_numbers = itertools.count()


class Fleet:
    """A namespace of its own with nodes, and everything that a test puts there."""

    def __init__(self, plane, *, action="evict"):
        self.plane = plane
        self.number = next(_numbers)
        self.namespace = f"fleet-{self.number}"
        self.admin = self.cluster()
        self.core = self.admin.core
        self.nodes = []
        labels = {names.OPT_IN_LABEL: action} if action else {}
        self.call(
            self.core.create_namespace, {"metadata": {"name": self.namespace, "labels": labels}}
        )

    def cluster(self, kubeconfig=None, **settings):
        """Return a connection, as administrator unless another account is given."""
        settings = {"namespaces": (f"fleet-{self.number}",), **settings}
        return Cluster.connect(
            KubernetesConfig(kubeconfig=str(kubeconfig or self.plane.kubeconfig), **settings)
        )

    def call(self, function, *arguments, **options):
        return self.admin.call(function, *arguments, **options)

    def name(self, number):
        return f"node-{self.number}-{number}"

    def add_nodes(self, count, *, gpus=8, **labels):
        for number in range(len(self.nodes), len(self.nodes) + count):
            name = self.name(number)
            room = {"cpu": "64", "memory": "512Gi", "pods": "20", "nvidia.com/gpu": str(gpus)}
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            ready["lastHeartbeatTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            status = {"allocatable": room, "capacity": room, "conditions": [ready]}
            body = {"metadata": {"name": name, "labels": labels}, "status": status}
            self.call(self.core.create_node, body)
            # The server marks new nodes as not ready; nobody here would take that away at once.
            self.call(self.core.patch_node, name, {"spec": {"taints": []}})
            self.nodes.append(name)

    def add_pod(self, name, node, *, job="train", labels=None, annotations=None, gpus=8, **changes):
        limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
        container = {"name": "main", "image": "none", "resources": {"limits": limits}}
        container.update(changes.pop("container", {}))
        metadata = {
            "name": name,
            "labels": {**({JOB_LABEL: job} if job else {}), **(labels or {})},
            "annotations": annotations or {},
            **changes.pop("metadata", {}),
        }
        spec = {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]}
        body = {"metadata": metadata, "spec": spec}
        # The account that a pod needs is made by a controller, a moment after the namespace.
        for _ in range(100):
            try:
                self.call(self.core.create_namespaced_pod, self.namespace, body)
                break
            except ClusterError as error:
                if "serviceaccount" not in str(error):
                    raise
                time.sleep(0.1)
        status = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
        self.call(self.core.patch_namespaced_pod_status, name, self.namespace, {"status": status})

    def add_job(self, machines, **options):
        """Start a pod of one job on each of the first nodes."""
        for number in range(machines):
            self.add_pod(f"train-{number}", self.name(number), **options)

    def add_workflow(self, name):
        """Make a workflow of Argo, of which the server must know (`install_workflows`)."""
        metadata = {"name": name, "namespace": self.namespace}
        body = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": metadata}
        wait_for(lambda: self.plane.apply(body, check=False).returncode == 0, 20)

    def anomaly(self, name):
        """Return what the annotation of a workflow tells of a machine; None for nothing."""
        found = self.plane.kubectl("get", "workflow", name, "-n", self.namespace, "-o", "json")
        text = json.loads(found.stdout)["metadata"].get("annotations", {}).get(names.ANOMALY)
        return json.loads(text) if text else None

    def node(self, number):
        return self.admin.node(self.name(number))

    def raw_node(self, number):
        return self.call(self.core.read_node, self.name(number))

    def pods(self):
        found = self.call(self.core.list_namespaced_pod, self.namespace)["items"]
        return sorted(pod["metadata"]["name"] for pod in found)

    def versions(self):
        """Return the version of every node and pod: equal when nothing has changed."""
        pods = self.call(self.core.list_namespaced_pod, self.namespace)["items"]
        nodes = [self.raw_node(number) for number in range(len(self.nodes))]
        return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in pods} | {
            node["metadata"]["name"]: json.dumps([node["spec"], node["metadata"]["annotations"]])
            for node in (
                {**node, "metadata": {"annotations": None, **node["metadata"]}} for node in nodes
            )
        }

    def events(self, thing):
        """Return the reasons and counts of all Events about a node or pod, sorted."""
        found = self.call(
            self.core.list_event_for_all_namespaces,
            field_selector=f"involvedObject.name={thing}",
        )["items"]
        here = [e for e in found if e["metadata"]["namespace"] in ("default", self.namespace)]
        ours = [event for event in here if event["source"].get("component") == "minder"]
        return sorted((event["reason"], event["count"]) for event in ours)

    def remove(self):
        for name in self.nodes:
            self.call(self.core.delete_node, name)
        self.call(self.core.delete_namespace, self.namespace)


def alert(fleet, number=0, **changes):
    """Return a firing alert about a machine of the job of a fleet."""
    facts = {
        "id": f"a{fleet.number}",
        "job": f"{fleet.namespace}/train",
        "machine": fleet.name(number),
        "kind": "dissimilar",
        "metric": "cpu_usage",
        "since": 1000.0,
        "seen": 1300.0,
        "score": 2.5,
        **changes,
    }
    return Alert(**facts)


def result(of, end, *, confirms=True):
    """Return the result of a call that ends at a second."""
    finding = Finding(of.machine, of.metric, "dissimilar", 1000, 1241, 250.0, 2.5)
    return Result(
        *(of.job, "fault" if confirms else "ok", end - 900, end, 4, "default", 1.35, "euclidean"),
        findings=(finding,) if confirms else (),
    )


def install_workflows(plane):
    """Let the server know workflows of Argo."""
    plane.apply(WORKFLOWS)
    plane.kubectl("wait", "--for=condition=Established", "crd/workflows.argoproj.io")


def account(plane, overlays=()):
    """Install the monitor's own roles and return a kubeconfig of its service account."""
    folders = ["base/minder", *(f"overlays/{overlay}" for overlay in overlays)]
    built = "\n---\n".join(
        plane.kubectl("kustomize", str(REPOSITORY / "manifests" / folder)).stdout
        for folder in folders
    )
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    chosen = [
        item
        for item in yaml.safe_load_all(built)
        if item["metadata"]["name"].startswith("minder") and item["kind"] in (*kinds, "ConfigMap")
    ]
    plane.kubectl("create", "namespace", "planish", check=False)
    plane.apply(*chosen)
    return token_config(plane, "minder", "planish")


def token_config(plane, name, namespace):
    """Return a kubeconfig by which a service account connects."""
    token = plane.kubectl("create", "token", name, "-n", namespace).stdout.strip()
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"] = [{"name": "admin", "user": {"token": token}}]
    path = plane.folder / f"kubeconfig-{name}"
    path.write_text(yaml.safe_dump(config))
    return path
