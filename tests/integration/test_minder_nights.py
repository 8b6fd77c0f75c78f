"""What goes wrong at night, with all servers real: rights that are missing, nodes that die.

The rules are those that ship, with their waits cut to seconds; `rules/tests` hold the waits.
"""

import re

import pytest
import yaml

from tests.golden.write_rules import MONITORING, RULES
from tests.integration.minder_cluster import Fleet as KubernetesFleet
from tests.integration.minder_cluster import account
from tests.integration.minder_service import raw_settings, serving
from tests.integration.waiting import wait_for
from tests.servers.exporter_fleet import GPUS, Fleet
from tests.servers.program import free_port
from tests.servers.scripted_http import Reply, ScriptedServer

pytestmark = [pytest.mark.server, pytest.mark.slow]

MACHINES = 16
DEAD = (2, 5, 7, 11)
WAITS = {
    "keep_firing_for: 10m": "keep_firing_for: 30s",
    "for: 1m": "for: 2s",
    "for: 2m": "for: 2s",
    "> 180": "> 10",
}


def rules(folder):
    """Write the shipped rules with short waits."""
    folder.mkdir()
    for path in RULES.glob("*.yaml"):
        text = path.read_text("utf-8")
        for long, short in WAITS.items():
            text = text.replace(long, short)
        (folder / path.name).write_text(text)
    return folder


class Kubelets:
    """What kube-state-metrics says of nodes."""

    def __init__(self, nodes):
        self.nodes, self.down = nodes, set()
        self.server = ScriptedServer(self._answer)

    def _answer(self, request):
        name = 'kube_node_status_condition{condition="Ready",status="true",node="%s"} %d'
        lines = [name % (node, node not in self.down) for node in self.nodes]
        return Reply(body=("\n".join(lines) + "\n").encode())


@pytest.fixture
def night(prometheus, alertmanager, control_plane, tmp_path):
    """A job on sixteen nodes, everything that watches it, and people who are told."""
    cluster = KubernetesFleet(control_plane, action="")
    cluster.add_nodes(MACHINES)
    cluster.add_job(MACHINES)
    exporters = Fleet(tuple(cluster.nodes))
    kubelets = Kubelets(cluster.nodes)
    people = ScriptedServer(lambda request: Reply())
    port = free_port()

    routes = yaml.safe_load((MONITORING / "alertmanager.yaml").read_text("utf-8"))
    for receiver in routes["receivers"]:
        receiver["webhook_configs"][0]["url"] = f"{people.url}/{receiver['name']}"
    alertmanager.config = yaml.safe_dump(routes)
    alertmanager.start()

    config = yaml.safe_load(exporters.scrape_config())
    config["global"] |= {"evaluation_interval": "1s", "external_labels": {"cluster": "test"}}
    config["rule_files"] = [str(rules(tmp_path / "rules") / "*.yaml")]
    targets = [alertmanager.url.removeprefix("http://")]
    config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": targets}]}]}
    config["scrape_configs"][0]["job_name"] = "dcgm"
    for name, target in (
        ("minder", f"127.0.0.1:{port}"),
        ("kube-state-metrics", kubelets.server.url.removeprefix("http://")),
    ):
        scrape = {"job_name": name, "honor_labels": True}
        config["scrape_configs"].append({**scrape, "static_configs": [{"targets": [target]}]})
    prometheus.config = yaml.safe_dump(config)
    prometheus.start()
    running = []

    def monitor(kubeconfig, **kubernetes):
        raw = raw_settings(
            tmp_path,
            prometheus.url,
            [],
            jobs=[],
            detect={"continuity_seconds": 60},
            preprocess={"silent_after_seconds": 120},
            kubernetes={"kubeconfig": str(kubeconfig), **kubernetes},
            server={"leader_election": True, "state_file": ""},
        )
        running.append(serving(tmp_path, raw, port=port))
        return running[-1]

    yield cluster, exporters, kubelets, people, monitor
    for one in running:
        one.kill()
    for server in (exporters, kubelets.server, people):
        server.close()
    cluster.remove()


def firing(prometheus):
    found = prometheus.query('ALERTS{alertstate="firing"}')
    return {(one["metric"]["alertname"], one["metric"].get("node", "")) for one in found}


def set_ready(night, names, *, status):
    """Let nodes die or come back: their exporters, kubelets and what the cluster says of them."""
    cluster, exporters, kubelets, *_ = night
    for known in (exporters.gone, kubelets.down):
        known.difference_update(names) if status == "True" else known.update(names)
    for name in names:
        body = {"status": {"conditions": [{"type": "Ready", "status": status}]}}
        cluster.call(cluster.core.patch_node_status, name, body)


@pytest.mark.parametrize(
    ("binding", "what", "right"),
    [
        (("rolebinding", "minder", "-n", "planish"), "lease", "leases"),
        (("clusterrolebinding", "minder-observe"), "discovery", "pods"),
    ],
)
def test_a_monitor_without_a_right_says_so_everywhere(
    night, prometheus, control_plane, binding, what, right
):
    cluster, *_, monitor = night
    kubeconfig = account(control_plane)
    control_plane.kubectl("delete", *binding)
    served = monitor(kubeconfig, namespaces=[cluster.namespace], own_namespace="planish")

    def refused():
        status, text = served.get("/readyz")
        return status == 503 and re.match(rf"not ok: {what}: .*{right}.*forbidden", text)

    wait_for(refused, 60, lambda: served.get("/readyz")[1] + served.log)
    wait_for(lambda: ("MinderBlind", "") in firing(prometheus), 60, lambda: served.log)
    told = [line for line in served.log.splitlines() if f"{what} works=false" in line]
    assert len(told) == 1
    assert "WARNING" in told[0] or "warning" in told[0]
    account(control_plane)
    wait_for(lambda: served.get("/readyz")[0] == 200, 60, lambda: served.log)
    wait_for(lambda: ("MinderBlind", "") not in firing(prometheus), 60)
    assert f"{what} works=true" in served.log


def test_dead_machines_are_paged_and_no_warning_holds_the_page_back(
    night, prometheus, alertmanager, control_plane
):
    cluster, _, _, people, monitor = night
    names = [cluster.name(number) for number in DEAD]
    served = monitor(control_plane.kubeconfig, namespaces=[cluster.namespace],
                     own_namespace="default")  # fmt: skip
    wait_for(lambda: served.metric("minder_jobs") == 1, 60, lambda: served.log)
    speaking = f"count(count_over_time(DCGM_FI_DEV_GPU_UTIL[1m]) > 10) == {GPUS * MACHINES}"
    wait_for(lambda: prometheus.query(speaking), 120)
    wait_for(lambda: "minder_machine_faulty{" in served.get("/metrics")[1], 120)
    set_ready(night, names, status="Unknown")
    wait_for(lambda: {("NodeNotReady", name) for name in names} <= firing(prometheus), 60)
    faulty = {("MinderFaultyMachine", name) for name in names}
    wait_for(lambda: faulty <= firing(prometheus), 180, lambda: served.log)

    def paged():
        pages = [one.json for one in people.requests if one.path == "/operations-page"]
        return {alert["labels"]["node"]: alert for page in pages for alert in page["alerts"]}

    wait_for(lambda: set(names) <= paged().keys(), 60, lambda: str(alertmanager.alerts()))
    assert {paged()[name]["labels"]["kind"] for name in names} == {"silent"}
    assert all("is faulty since 2" in paged()[name]["annotations"]["summary"] for name in names)
    held = [
        one["labels"]["node"]
        for one in alertmanager.alerts()
        if one["labels"]["alertname"] == "MinderFaultyMachine" and one["status"]["inhibitedBy"]
    ]
    assert held == []
    assert not {name for name, _ in firing(prometheus)} & {"MinderTelemetryOutage", "MinderJobWide"}
    # The warnings about the same machines wait behind the page.
    warned = [one for one in alertmanager.alerts() if one["labels"]["alertname"] == "NodeNotReady"]
    assert {one["labels"]["node"] for one in warned} == set(names)
    assert all(one["status"]["inhibitedBy"] for one in warned)


def test_a_dead_machine_is_one_page_and_one_resolve_whatever_is_restarted(
    night, prometheus, alertmanager, control_plane
):
    cluster, _, _, people, monitor = night
    name = cluster.name(DEAD[0])
    settings = {"namespaces": [cluster.namespace], "own_namespace": "default"}
    served = monitor(control_plane.kubeconfig, **settings)
    speaking = f"count(count_over_time(DCGM_FI_DEV_GPU_UTIL[1m]) > 10) == {GPUS * MACHINES}"
    wait_for(lambda: prometheus.query(speaking), 120)
    wait_for(lambda: "minder_machine_faulty{" in served.get("/metrics")[1], 120)
    set_ready(night, [name], status="Unknown")
    page = ("MinderFaultyMachine", name)

    def told():
        pages = [one.json for one in people.requests if one.path == "/operations-page"]
        alerts = [alert for found in pages for alert in found["alerts"]]
        names = [(one["labels"]["alertname"], one["labels"].get("node", "")) for one in alerts]
        return [(one["status"], *name) for one, name in zip(alerts, names, strict=True)]

    wait_for(lambda: ("firing", *page) in told(), 180, lambda: f"{told()} {firing(prometheus)}")
    # The monitor dies, and its place is taken.
    served.kill()
    served.start()
    wait_for(lambda: "minder_machine_faulty{" in served.get("/metrics")[1], 120, lambda: served.log)
    # So does the server of metrics; the one of alerts is restarted politely, as a node that drains.
    prometheus.stop()
    prometheus.start()
    wait_for(lambda: page in firing(prometheus), 60, lambda: served.get("/metrics")[1][:3000])
    assert alertmanager.program.terminate() == 0
    alertmanager.start()
    wait_for(lambda: name in str(alertmanager.alerts()), 60)
    assert page in firing(prometheus)
    set_ready(night, [name], status="True")
    wait_for(lambda: ("resolved", *page) in told(), 180, lambda: f"{told()} {firing(prometheus)}")
    # While the monitor was away its own page may have come and gone.
    about = [one for one in told() if one[1:] == page]
    assert about == [("firing", *page), ("resolved", *page)]
