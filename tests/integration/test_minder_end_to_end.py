"""A fault in a scraped fleet, from the exporter to the evicted pod and the end of the alert.

Prometheus, Alertmanager and the Kubernetes API server are real; the monitor is the program itself.
"""

import time

import pytest
import yaml

from planish import store
from planish.minder.act.kube import names
from planish.store.documents import read_json
from tests.golden.write_rules import MONITORING, RULES
from tests.integration.minder_cluster import Fleet as KubernetesFleet
from tests.integration.minder_cluster import install_workflows
from tests.integration.minder_service import raw_settings, serving
from tests.integration.waiting import wait_for
from tests.servers.exporter_fleet import Fleet
from tests.servers.program import free_port

pytestmark = [pytest.mark.server, pytest.mark.slow]

MACHINES = 8
FAULTY = 3
PAST_SECONDS = 100
"""History that is put into Prometheus, so that the test need not wait for it."""
CONTINUITY_SECONDS = 20
METRICS = ("cpu_usage", "gpu_duty_cycle", "gpu_tensor_core_activity")


class Timeline:
    """What happened, and how many seconds after the fault."""

    def __init__(self):
        self.begun = time.time()
        self.lines = []

    def note(self, what):
        self.lines.append(f"{time.time() - self.begun:7.1f} s  {what}")
        print(self.lines[-1], flush=True)

    def wait(self, what, check, seconds):
        """Wait until something holds, note when, and return it."""
        found = wait_for(check, seconds, lambda: "\n".join([*self.lines, f"never: {what}"]))
        self.note(what)
        return found


def past(exporters, end):
    """Yield what Prometheus would have scraped in the seconds before `end`."""
    for at in range(end - PAST_SECONDS, end):
        for machine in exporters.machines:
            extra = f'job="fleet",instance="{exporters.address}",node="{machine}"'
            for line in exporters.page(machine, float(at)).splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    yield f"{name.removesuffix('}')},{extra}}} {value} {at}"


def scraping(exporters, folder, alertmanager, port):
    """Return the configuration of Prometheus: the fleet, the monitor, the shipped rules."""
    config = yaml.safe_load(exporters.scrape_config())
    config["global"] |= {"evaluation_interval": "1s", "external_labels": {"cluster": "test"}}
    config["rule_files"] = [str(folder / "*.yaml")]
    targets = [alertmanager.url.removeprefix("http://")]
    config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": targets}]}]}
    monitor = {"static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    config["scrape_configs"].append({"job_name": "minder", "honor_labels": True, **monitor})
    return yaml.safe_dump(config)


def shortened_rules(folder):
    """Write the shipped rules, with an alert that ends seconds after its cause."""
    folder.mkdir()
    for path in RULES.glob("*.yaml"):
        text = path.read_text("utf-8").replace("keep_firing_for: 10m", "keep_firing_for: 5s")
        (folder / path.name).write_text(text)
    return folder


def routes():
    """Return the shipped configuration of Alertmanager, without anybody to call."""
    config = yaml.safe_load((MONITORING / "alertmanager.yaml").read_text("utf-8"))
    config["receivers"] = [{"name": one["name"]} for one in config["receivers"]]
    return yaml.safe_dump(config)


@pytest.fixture
def cluster(control_plane, tmp_path):
    """A namespace that allows evictions: eight machines of one job, and a spare one."""
    found = KubernetesFleet(control_plane)
    install_workflows(control_plane)
    found.add_workflow("post-train-7")
    found.add_nodes(MACHINES + 1)
    root = f"file://{tmp_path}/runs/7"
    found.add_job(
        MACHINES,
        job="",
        labels={
            names.WORKFLOW_LABEL: "post-train-7",
            names.RUN_ID_LABEL: "run-7",
            names.STAGE_LABEL: "train",
            names.ITERATION_LABEL: "4",
        },
        annotations={names.RUN_ROOT: root},
    )
    yield found
    found.remove()


def named(alertmanager):
    """Return the labels of all alerts on a faulty machine."""
    found = [one["labels"] for one in alertmanager.alerts()]
    return [labels for labels in found if labels["alertname"] == "MinderFaultyMachine"]


def reasons(cluster, thing):
    return {reason for reason, _ in cluster.events(thing)}


@pytest.fixture
def servers(prometheus, alertmanager, cluster, tmp_path):
    """Everything but the monitor, which scrapes and alerts with the shipped rules."""
    exporters = Fleet(tuple(cluster.name(number) for number in range(MACHINES)))
    port = free_port()
    alertmanager.config = routes()
    alertmanager.start()
    prometheus.config = scraping(exporters, shortened_rules(tmp_path / "rules"), alertmanager, port)
    prometheus.backfill(past(exporters, int(time.time())))
    prometheus.start()
    running = []

    def monitor(name, *, dry_run):
        folder = tmp_path / name
        folder.mkdir()
        raw = raw_settings(
            folder,
            prometheus.url,
            [],
            # Samples that came late must not move the beginning of the fault for the first monitor.
            prometheus={"late_seconds": 30},
            models={"folder": ""},
            denoise={"denoiser": "vae"},
            detect={
                "metrics": list(METRICS),
                "continuity_seconds": CONTINUITY_SECONDS,
                "gap_tolerance": 3,
            },
            preprocess={"silent_after_seconds": 60},
            service={"interval_seconds": 2},
            alertmanager={"url": alertmanager.url},
            kubernetes={
                "kubeconfig": str(cluster.plane.kubeconfig),
                "namespaces": [cluster.namespace],
                "own_namespace": cluster.namespace,
                "run_roots": [f"file://{tmp_path}/runs"],
            },
            act={"mode": "evict", "dry_run": dry_run, "max_node_share": 0.2},
            jobs=[],
        )
        running.append(serving(folder, raw, port=port))
        return running[-1]

    yield exporters, monitor
    for one in running:
        one.kill()
    exporters.close()


def test_a_faulty_machine_is_named_cordoned_emptied_and_resolved(
    servers, cluster, alertmanager, prometheus, tmp_path
):
    exporters, start = servers
    machine, pod = cluster.name(FAULTY), f"train-{FAULTY}"
    before = cluster.versions()
    timeline = Timeline()
    exporters.shifts[machine, "gpu_duty_cycle"] = -45.0
    timeline.note(f"{machine}: duty cycle falls by half")

    # dry run: everything is said, nothing is done
    monitor = start("dry", dry_run=True)
    timeline.note("monitor started, dry run")
    timeline.wait(
        "prometheus: minder_machine_faulty is 1",
        lambda: prometheus.query(f'minder_machine_faulty{{node="{machine}"}} == 1'),
        60,
    )
    (labels,) = timeline.wait("alertmanager has the alert", lambda: named(alertmanager), 30)
    assert labels == {
        "alertname": "MinderFaultyMachine",
        "severity": "critical",
        "cluster": "test",
        "namespace": cluster.namespace,
        "job_name": f"{cluster.namespace}/post-train-7/train",
        "node": machine,
        "kind": "dissimilar",
    }
    timeline.wait(
        "event on the node: what would be done",
        lambda: names.DRY_RUN in reasons(cluster, machine),
        20,
    )
    time.sleep(4)
    assert cluster.versions() == before
    assert len(cluster.pods()) == MACHINES
    assert monitor.terminate()[0] == 0
    timeline.note("monitor stopped; node and pods are as before")

    # in earnest, at first under a silence by a label that only Prometheus adds
    silence = alertmanager.silence([{"name": "cluster", "value": "test", "isRegex": False}])
    earnest = start("earnest", dry_run=False)
    timeline.note("monitor started, actions on, alerts of the cluster silenced")
    wanted = f"silence={silence}"
    timeline.wait("the silence is honoured", lambda: wanted in earnest.log, 40)
    time.sleep(4)
    assert cluster.versions() == before
    alertmanager.expire(silence)
    timeline.note("the silence has ended")
    timeline.wait("node is cordoned", lambda: cluster.node(FAULTY).is_unschedulable, 40)
    raw = cluster.raw_node(FAULTY)
    assert [taint["key"] for taint in raw["spec"]["taints"] if "minder" in taint["key"]] == [
        names.FAULTY_TAINT
    ]
    assert raw["metadata"]["annotations"][names.CORDONED_BY] == "minder"
    timeline.wait("pod is evicted", lambda: pod not in cluster.pods(), 30)
    others = [f"train-{number}" for number in range(MACHINES) if number != FAULTY]
    assert cluster.pods() == others
    assert not any(cluster.node(n).is_unschedulable for n in range(MACHINES + 1) if n != FAULTY)
    assert {names.FAULTY_MACHINE, names.CORDONED} <= reasons(cluster, machine)
    assert names.POD_REASON in reasons(cluster, pod)
    told = cluster.anomaly("post-train-7")
    assert {k: told[k] for k in ("machine", "run_id", "stage", "iteration", "kind")} == {
        "machine": machine,
        "run_id": "run-7",
        "stage": "train",
        "iteration": 4,
        "kind": "dissimilar",
    }
    timeline.note("events and the run's annotation are there")
    root = f"file://{tmp_path}/runs/7/alerts"
    (uri,) = store.list_uris(root)
    assert read_json(uri)["machine"] == machine

    # the machine has left the job: nothing is wrong with what is left
    timeline.wait("alertmanager: the alert has ended", lambda: not named(alertmanager), 60)
    assert cluster.node(FAULTY).is_unschedulable
    timeline.note("resolved; the node stays cordoned until a human looks")
    assert time.time() - timeline.begun < 150
