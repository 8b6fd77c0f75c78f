"""A control plane with two nodes, on which the pods of gangs run as processes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict

from planish.run.gang.manifests import GANG_LABEL
from tests.images.containers import Here
from tests.integration.gang_launcher import connect
from tests.integration.waiting import wait_for

STAND_IN = "stand-in"
PAUSE = 0.25
"""Seconds between two looks at all objects of a namespace."""
NAMESPACED = "namespaces/planish"
PATHS = {
    "pod": f"/api/v1/{NAMESPACED}/pods",
    "job": f"/apis/batch/v1/{NAMESPACED}/jobs",
    "trainjob": f"/apis/trainer.kubeflow.org/v1alpha1/{NAMESPACED}/trainjobs",
}
"""Kind of an object -> where the API server has those of the namespace of runs."""


class Images(Here):
    """The environment of the tests; a gang of `STAND_IN` runs a line of shell in every pod."""

    def command(self, name, words, **more):
        if STAND_IN in words:
            words = ["sh", "-c", words[-1]]
        return super().command(name, words, **more)


class Site:
    """A control plane with two nodes, and the account of a run."""

    def __init__(self, plane, nodes, folder):
        self.plane, self.nodes, self.folder = plane, nodes, folder
        token = plane.kubectl("-n", "planish", "create", "token", "planish-runner").stdout.strip()
        self.access = {
            "server": f"https://127.0.0.1:{plane.port}",
            "certificate": str(plane.folder / "certificates" / "apiserver.crt"),
            "token": token,
        }
        self.number = 0
        self.has_trainer = False
        self.kinds = []
        self.clients = []

    def stage_pod(self, *, deadline=600, env=()):
        """Create the pod of a stage, which sleeps; return its name."""
        self.number += 1
        name = f"stage-{self.number}"
        variables = {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1", **dict(env)}
        main = {
            "name": "main",
            "image": "planish/train:0.1.0",
            "command": ["sleep", "600"],
            "env": [{"name": key, "value": value} for key, value in variables.items()],
        }
        spec = {"restartPolicy": "Never", "containers": [main], "activeDeadlineSeconds": deadline}
        spec |= {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        manifest["metadata"]["namespace"] = "planish"
        self.plane.apply(manifest)
        wait_for(lambda: self.get("pod", name)["status"].get("phase") == "Running", 30)
        return name

    def cluster(self, pod, **options):
        cluster = connect(**self.access, pod=pod, **options)
        self.clients.append(cluster.client)
        return cluster

    def close(self):
        """Close the connections of all clients: none is left to be collected as garbage."""
        for each in self.clients:
            each.rest_client.pool_manager.clear()

    def get(self, kind, name):
        return self.plane.get(f"{PATHS[kind]}/{name}")

    def launcher(self, gang, pod, folder):
        """Submit a gang from a process of its own."""
        path = folder / "gang.json"
        path.write_text(
            json.dumps(
                {
                    "gang": asdict(gang),
                    "cluster": {**self.access, "pod": pod, "launcher": gang.launcher},
                }
            )
        )
        line = [sys.executable, "-m", "tests.integration.gang_launcher", str(path)]
        with (folder / "launcher.log").open("ab") as log:
            return subprocess.Popen(line, stderr=log)

    def objects(self):
        """Return kind and name of everything of gangs that is there, of whatever kind.

        What the controller of JobSet makes has no label of ours, but the name.
        """
        if not self.kinds:
            self.kinds = self.plane.namespaced_paths("planish")
        found = [
            {**each, "kind": kind} for path, kind in self.kinds for each in self.plane.list(path)
        ]
        return [
            f"{each['kind'].lower()}/{each['metadata']['name']}"
            for each in found
            if GANG_LABEL in each["metadata"].get("labels", {})
            or re.match("planish-[0-9a-f]{16}", each["metadata"]["name"])
        ]

    def has_nothing_left(self):
        wait_for(lambda: not self.running(), 30, lambda: str(self.running()))
        wait_for(lambda: not self.objects(), 30, lambda: str(self.objects()), longest_pause=PAUSE)
        return True

    def log_with(self, words):
        """Return the log of a pod that has printed some words; None while there is none."""
        for node in self.nodes:
            for path in (node.folder / "logs").glob("planish-*"):
                if words in path.read_text(errors="replace"):
                    return path
        return None

    def running(self):
        """Return the pods of gangs whose process lives."""
        return [
            name
            for node in self.nodes
            for name, process in node.processes.items()
            if name.startswith("planish-") and process.poll() is None
        ]
