"""The runbooks are followed word by word: what a machine can run is run, as it is printed.

An alert goes on for half an hour after its fault has ended, and so must the queries about it.
"""

import argparse
import os
import re
import shlex
import subprocess
import time

import pytest

from planish.minder.cli.command import add_commands
from tests.golden.write_rules import MONITORING
from tests.integration.minder_cluster import Fleet
from tests.integration.test_minder_dashboards import LABELS
from tests.integration.test_minder_dashboards import series as every_series
from tests.integration.waiting import wait_for
from tests.servers.program import BIN, REPOSITORY
from tests.servers.run_alertmanager import AlertmanagerServer, require_alertmanager
from tests.servers.run_prometheus import PrometheusServer, require_prometheus

pytestmark = [pytest.mark.server, pytest.mark.slow]

RUNBOOKS = sorted((MONITORING / "runbooks").glob("*.md"))
STEP = 30
ENDED = 25 * 60
"""Seconds for which the fault has been over."""
OF_A_FAULT = re.compile(
    r"minder_(alert_info|silent_machines|(machine_score|candidate_seconds|machine_faulty)"
    r'.*node="node-0")|ALERTS'
)
"""What is gone when a fault has ended."""
GOES_ON = {"minder_machine_faulty == 1"}
"""Queries that ask whether a fault goes on."""
MACHINES = 'node="node-0",gpu="0",modelName="H100"'
OTHERS = [
    'up{job="node",node="node-0",instance="x"} 0',
    'up{job="minder"} 1',
    'scrape_duration_seconds{job="node"} 0.1',
    'prometheus_engine_query_duration_seconds{quantile="0.9"} 0.1',
    'node_ethtool_transmitted_prio3_pause{node="node-0",job="node"} 5',
    'ALERTS{alertname="MachineGpuError",alertstate="firing",node="node-0"} 1',
    'DCGM_FI_DEV_GPU_UTIL{node=""} 90',
    *(f"DCGM_FI_{name}{{{MACHINES}}} 79" for name in (
        "DEV_GPU_UTIL", "DEV_POWER_USAGE", "DEV_XID_ERRORS", "PROF_GR_ENGINE_ACTIVE")),
]  # fmt: skip
WORDS = {
    "EXPORTER_POD": "exporter-1",
    "DCGM_POD": "exporter-2",
    "NAMESPACE": "team",
    "RUN_ID": "7f3a",
    "JOB": LABELS["job_name"][0],
    "LABEL=NAME": "workflows.argoproj.io/workflow=pretrain",
    "NAME": "pretrain",
    "NODE": "node-0",
    "POD": "pretrain-0",
}
"""What a reader puts in."""
NEEDS_A_KUBELET = ("logs", "exec", "top")


def filled(text):
    for word, value in WORDS.items():
        text = re.sub(rf"(?<![\w/]){word}(?!\w)|(?<=[/]){word}(?!\w)", value, text)
    return text


def commands(path):
    """Return what a runbook says to type, in its order."""
    found = []
    text = path.read_text("utf-8")
    for block, inline in re.findall(r"```\n(.+?)```|(?<!`)`([^`]+)`", text, re.DOTALL):
        lines = [line.strip() for line in block.splitlines()] if block else [inline]
        found += [
            line for line in lines if re.match(r"(promtool|amtool|kubectl|planish minder) ", line)
        ]
    return [filled(line) for line in found]


EVERY = [(path.stem, line) for path in RUNBOOKS for line in commands(path)]


def test_there_is_something_to_follow_and_every_word_is_filled_in():
    assert len(EVERY) > 90
    left = [line for _, line in EVERY if re.search(r"(?<![A-Z_$])[A-Z]{3,}(?![A-Z_=])", line)]
    assert [line for line in left if not re.search("DCGM_|ECC|GPU|ALERTS|SHELL|TELEM", line)] == []


def samples(now):
    begin = now - 3600
    lines = [(text, first, growth) for text, first, growth in every_series()]
    lines += [(*line.rsplit(" ", 1), 0.0) for line in OTHERS]
    for text, first, growth in lines:
        is_past = OF_A_FAULT.match(text) and "MachineGpuError" not in text
        end = now - ENDED if is_past else now + 1800
        for number, at in enumerate(range(begin, end, STEP)):
            yield f"{text} {float(first) + growth * number} {at}"


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Prometheus with what a fault has left, and Alertmanager."""
    require_prometheus()
    require_alertmanager()
    now = int(time.time()) // STEP * STEP
    prometheus = PrometheusServer(tmp_path_factory.mktemp("prometheus"))
    prometheus.backfill(samples(now))
    prometheus.start()
    alertmanager = AlertmanagerServer(tmp_path_factory.mktemp("alertmanager"))
    alertmanager.start()
    yield {"PROMETHEUS": prometheus.url, "ALERTMANAGER": alertmanager.url}
    prometheus.stop()
    alertmanager.stop()


def run(line, **variables):
    """Type a line, without the filters behind it, whose code says whether something was there."""
    return subprocess.run(
        ["bash", "-c", re.sub(r" \| grep .*", "", line)],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "line"), [one for one in EVERY if one[1].startswith(("promtool", "amtool"))]
)
def test_a_query_or_a_silence_works_as_it_is_printed(addresses, name, line):
    done = run(line, **addresses)
    assert done.returncode == 0, done.stderr
    asked = re.search("'(.+)'", line)
    if asked is None or asked[1] not in GOES_ON:
        assert done.stdout.strip(), f"{name}: {line} gives nothing"


def test_a_command_of_ours_has_the_options_that_are_printed():
    parser = argparse.ArgumentParser()
    add_commands(parser)
    ours = [line for _, line in EVERY if re.match("planish .* --", line)]
    assert len(ours) > 3
    for line in ours:
        parser.parse_args(shlex.split(line)[2:])


@pytest.fixture(scope="module")
def kubectl(control_plane, tmp_path_factory):
    """A cluster with what the runbooks speak of, and a folder with a `kubectl` for it."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\nexec "{BIN}/kubernetes" kubectl "$@"\n')
    program.chmod(0o755)
    control_plane.kubectl("create", "namespace", "planish")
    fleet = Fleet(control_plane)
    fleet.namespace = "team"
    for namespace in ("team", "monitoring"):
        control_plane.kubectl("create", "namespace", namespace)
    labels = {"matchLabels": {"app": "x"}}
    template = {"metadata": {"labels": {"app": "x"}},
                "spec": {"containers": [{"name": "main", "image": "none"}]}}  # fmt: skip
    for name in ("node-exporter", "dcgm-exporter"):
        metadata = {"name": name, "namespace": "monitoring"}
        control_plane.apply({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata,
                             "spec": {"selector": labels, "template": template}})  # fmt: skip
    return fleet, {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "KUBECONFIG": str(control_plane.kubeconfig),
    }


def prepared(fleet):
    """Put the node and the pods there that a runbook may have removed."""
    fleet.number, name = "", WORDS["NODE"]
    fleet.plane.kubectl("delete", "node", name, "--ignore-not-found")
    fleet.nodes, fleet.name = [], lambda number: name
    fleet.add_nodes(1)
    owner = fleet.plane.get("/api/v1/namespaces/team/configmaps/kube-root-ca.crt")["metadata"]
    owned = {"apiVersion": "v1", "kind": "ConfigMap", "controller": True,
             "name": owner["name"], "uid": owner["uid"]}  # fmt: skip
    for namespace, pod in (
        ("monitoring", "exporter-1"), ("monitoring", "exporter-2"), ("team", "pretrain-0"),
    ):  # fmt: skip
        fleet.plane.kubectl("delete", "pod", pod, "-n", namespace, "--ignore-not-found",
                             "--grace-period=0", "--force")  # fmt: skip
        fleet.namespace = namespace
        labels = {"workflows.argoproj.io/workflow": "pretrain"} if namespace == "team" else {}
        options = {"name": pod, "labels": labels, "ownerReferences": [owned] if labels else []}
        fleet.add_pod(pod, name, job="", metadata=options)


@pytest.mark.parametrize("name", sorted({name for name, line in EVERY if "kubectl" in line}))
def test_what_is_said_to_kubernetes_is_understood(kubectl, name):
    fleet, variables = kubectl
    prepared(fleet)
    for of, line in EVERY:
        if of != name or not line.startswith("kubectl"):
            continue
        words = [w for w in line.split() if not w.startswith("-")]
        if set(NEEDS_A_KUBELET) & set(words[1:4]) or " debug " in line:
            continue
        if "delete pod" in line and "exporter" not in line:
            prepared(fleet)
        done = run(line, **variables)
        assert done.returncode == 0 or "can-i" in line, f"{name}: {line}\n{done.stderr}"
        assert "can-i" not in line or done.stdout.strip() in ("yes", "no"), done.stderr


def test_a_shell_on_a_machine_may_do_what_the_runbooks_do_there(kubectl):
    fleet, variables = kubectl
    prepared(fleet)
    shells = [line for _, line in EVERY if "kubectl debug" in line]
    assert len(shells) > 5
    assert all(" --profile=sysadmin " in line for line in shells)
    line = re.sub(r" \| grep .*", "", shells[0])
    # Nobody starts the pod here, so the command would wait for it.
    typed = subprocess.Popen(
        ["bash", "-c", f"SHELL_IMAGE=busybox; exec timeout 60 {line}"],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
    )

    def debugger():
        pods = fleet.plane.list("/api/v1/namespaces/default/pods")
        return next((pod for pod in pods if "node-debugger" in pod["metadata"]["name"]), None)

    try:
        spec = wait_for(debugger, 30)["spec"]
    finally:
        typed.terminate()
        typed.wait()
    assert spec["containers"][0]["securityContext"]["privileged"] is True
    assert spec["nodeName"] == WORDS["NODE"]
    assert spec["hostPID"] is True
