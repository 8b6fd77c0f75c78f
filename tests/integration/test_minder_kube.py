"""Discovery, Events, the lease and the state on a real API server."""

import pytest
from kubernetes.client import CoordinationV1Api

from planish.base.errors import ClusterError
from planish.minder.act.kube import names
from planish.minder.act.kube.events import EventBook
from planish.minder.act.kube.lease import Lease
from planish.minder.service.state import ConfigMapState, load_jobs, save_jobs
from planish.run import kube
from tests.integration.minder_cluster import Fleet

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def fleet(control_plane):
    fleet = Fleet(control_plane)
    fleet.add_nodes(4)
    yield fleet
    fleet.remove()


def test_jobs_are_found_by_their_labels_page_by_page(fleet, monkeypatch):
    monkeypatch.setattr(kube, "PAGE_ITEMS", 2)
    workflow = {names.WORKFLOW_LABEL: "run-a", names.RUN_ID_LABEL: "77", names.STAGE_LABEL: "train"}
    for number in range(3):
        fleet.add_pod(f"op-{number}", fleet.name(number), job="op")
        labels = {**workflow, names.RANK_LABEL: str(number), names.ITERATION_LABEL: "5"}
        arguments = {"args": ["--root=s3://b/run-a"]}
        fleet.add_pod(f"wf-{number}", fleet.name(number), job="", labels=labels,
                      container=arguments)  # fmt: skip
    for name, index in (("gang-0", "0"), ("gang-1", "1"), ("single", None)):
        ranked = {names.RANK_LABEL: index} if index else {}
        labels = {names.BATCH_LABEL: name[:4], **ranked}
        fleet.add_pod(name, fleet.name(3), job="", labels=labels, gpus=0)
    driver = {names.KFP_ROLE: "driver"}
    fleet.add_pod("driver", fleet.name(3), job="", labels=workflow, annotations=driver)
    fleet.add_pod("plain", fleet.name(3), job="", gpus=0)
    ended = {"status": {"phase": "Succeeded"}}
    fleet.add_pod("ended", fleet.name(3), job="op", gpus=0)
    fleet.call(fleet.core.patch_namespaced_pod_status, "ended", fleet.namespace, ended)
    machines = tuple(fleet.nodes[:3])
    everywhere = [
        job for job in fleet.cluster(namespaces=()).jobs() if job.namespace == fleet.namespace
    ]
    gang, op, run = fleet.cluster().jobs()
    assert everywhere == [gang, op, run]
    assert [pod.name for pod in gang.pods] == ["gang-0", "gang-1"]
    assert (op.key, op.machines, op.started) == (f"{fleet.namespace}/op", machines, 1_767_225_600)
    assert (run.key, run.machines) == (f"{fleet.namespace}/run-a/train", machines)
    assert (run.run_id, run.stage, run.iteration) == ("77", "train", 5)
    assert run.run_root == "s3://b/run-a"
    assert fleet.cluster().pods("elsewhere") == []


def test_an_event_is_written_once_in_ten_minutes_for_each_object_and_reason(fleet):
    book, subject = EventBook(fleet.admin), fleet.node(2)
    for now in (0, 60, 599):
        book.note(subject, "MinderDryRun", "odd", now)
    assert fleet.events(fleet.name(2)) == [("MinderDryRun", 1)]
    book.note(subject, "MinderDryRun", "odd", 600)
    book.note(subject, "MinderFaultyMachine", "x" * 5000, 600)
    assert fleet.events(fleet.name(2)) == [("MinderDryRun", 1)] * 2 + [("MinderFaultyMachine", 1)]


def test_one_of_two_replicas_leads_until_it_falls_silent(fleet):
    time, cluster = [100.0], fleet.cluster(own_namespace=fleet.namespace)
    one, two = (
        Lease(cluster, each, name="place", clock=lambda: time[0]) for each in ("one", "two")
    )
    assert (one.renew(), two.renew()) == (True, False)
    time[0] += 9
    assert (one.is_leader(), one.renew(), two.renew()) == (True, True, False)
    # It renews no more. It knows that it may not act before anybody can take the place.
    time[0] += 10
    assert (one.is_leader(), two.renew()) == (False, False)
    time[0] += 4.9
    assert not two.renew()
    time[0] += 0.2
    assert two.renew()
    assert (one.renew(), one.is_leader(), two.is_leader()) == (False, False, True)
    two.release()
    assert (two.is_leader(), one.renew()) == (False, True)


def test_two_replicas_that_take_a_free_place_at_once_do_not_both_get_it(fleet):
    cluster = fleet.cluster(own_namespace=fleet.namespace)
    body = {"metadata": {"name": "free"}, "spec": {"holderIdentity": ""}}
    api = CoordinationV1Api(cluster.kube.client)
    fleet.call(api.create_namespaced_lease, fleet.namespace, body)

    class Slow(Lease):
        """Reads, and then another replica is faster."""

        def _write(self, found):
            assert Lease(cluster, "fast", name="free").renew()
            super()._write(found)

    assert not Slow(cluster, "slow", name="free").renew()


def test_the_state_is_saved_whole_and_what_does_not_fit_is_left_out(fleet):
    state = ConfigMapState(fleet.cluster(own_namespace=fleet.namespace), "state")
    with pytest.raises(ClusterError, match="must exist, but does not; apply manifests"):
        state.read()
    assert not save_jobs(state, {})
    fleet.call(
        fleet.core.create_namespaced_config_map, fleet.namespace, {"metadata": {"name": "state"}}
    )
    assert load_jobs(state) == {}
    jobs = {"a": {"alerts": {"open": [1]}, "monitor": "y" * 1_000_000}, "b": {"monitor": "x"}}
    assert save_jobs(state, jobs)
    assert load_jobs(state) == {"a": {"alerts": {"open": [1]}}, "b": {"monitor": "x"}}
    damaged = {"data": {"state.json": "{"}}
    fleet.call(fleet.core.patch_namespaced_config_map, "state", fleet.namespace, damaged)
    assert load_jobs(state) == {}
