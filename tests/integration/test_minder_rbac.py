"""The roles that ship allow what the monitor does and nothing else, says the real authoriser."""

import argparse
import re
import tomllib

import pytest
import yaml

from planish.base.errors import ClusterError
from planish.minder.act.actor import Actor
from planish.minder.act.config import ActConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.lease import Lease
from planish.minder.cli.command import add_commands
from planish.minder.service.config import service_settings
from planish.minder.service.state import ConfigMapState
from tests.integration.minder_cluster import Fleet, account, alert, install_workflows, result
from tests.integration.waiting import wait_for
from tests.servers.program import REPOSITORY

NOW = 2_000_000_000
ACCESS = REPOSITORY / "manifests/base/minder/access.yaml"

CALLS = {
    "list_node": ("", "nodes", "list"),
    "read_node": ("", "nodes", "get"),
    "patch_node": ("", "nodes", "patch"),
    "patch_node_status": ("", "nodes/status", "patch"),
    "list_pod_for_all_namespaces": ("", "pods", "list"),
    "list_namespaced_pod": ("", "pods", "list"),
    "create_namespaced_pod_eviction": ("", "pods/eviction", "create"),
    "create_namespaced_event": ("", "events", "create"),
    "read_namespace": ("", "namespaces", "get"),
    "patch_namespaced_custom_object": ("argoproj.io", "workflows", "patch"),
    "read_namespaced_lease": ("coordination.k8s.io", "leases", "get"),
    "create_namespaced_lease": ("coordination.k8s.io", "leases", "create"),
    "replace_namespaced_lease": ("coordination.k8s.io", "leases", "update"),
    "read_namespaced_config_map": ("", "configmaps", "get"),
    "patch_namespaced_config_map": ("", "configmaps", "patch"),
}
"""Method of the client to group, resource and verb."""


def granted():
    found = {}
    for item in yaml.safe_load_all(ACCESS.read_text()):
        if item["kind"] in ("ClusterRole", "Role"):
            found[item["metadata"]["name"]] = {
                (group, resource, verb)
                for rule in item["rules"]
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
    return found


def test_the_roles_grant_exactly_what_the_code_calls():
    called = set()
    for path in sorted((REPOSITORY / "src/planish/minder").rglob("*.py")):
        called |= set(re.findall(r"\b(?:core|_api|custom)\.([a-z]+_[a-z_]+)\b", path.read_text()))
    assert called == set(CALLS)
    assert set().union(*granted().values()) == set(CALLS.values())


def test_no_role_has_more_than_the_list_allows():
    assert granted() == {
        "minder-observe": {
            *(("", "nodes", verb) for verb in ("get", "list")),
            ("", "pods", "list"),
            ("", "events", "create"),
            ("argoproj.io", "workflows", "patch"),
        },
        "minder-act": {
            ("", "nodes", "patch"),
            ("", "nodes/status", "patch"),
            ("", "pods/eviction", "create"),
            ("", "namespaces", "get"),
        },
        "minder": {
            *(("coordination.k8s.io", "leases", verb) for verb in ("create", "get", "update")),
            *(("", "configmaps", verb) for verb in ("get", "patch")),
        },
    }
    rules = ACCESS.read_text()
    assert "*" not in rules
    assert "secrets" not in rules
    assert "delete" not in rules


def test_the_settings_that_ship_are_valid_and_fit_the_roles():
    path = REPOSITORY / "manifests/base/minder/settings.yaml"
    shipped, state = yaml.safe_load_all(path.read_text())
    settings = service_settings(tomllib.loads(shipped["data"]["minder.toml"]))
    assert (settings.act.mode, settings.act.dry_run) == ("observe", True)
    assert settings.alertmanager.url
    assert settings.server.leader_election
    assert state["metadata"]["name"] == names.STATE
    assert settings.kubernetes.own_namespace == "planish"
    rules = next(
        item["rules"]
        for item in yaml.safe_load_all(ACCESS.read_text())
        if (item["kind"], item["metadata"]["name"]) == ("Role", "minder")
    )
    named = [rule["resourceNames"] for rule in rules if "resourceNames" in rule]
    assert named == [[names.LEASE], [names.STATE]]
    deployment = next(
        yaml.safe_load_all((REPOSITORY / "manifests/base/minder/deployment.yaml").read_text())
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    parser = argparse.ArgumentParser()
    add_commands(parser)
    options = parser.parse_args(words[2:])
    assert (options.verb, str(options.config)) == ("serve", "/etc/minder/minder.toml")
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "settings"]
    assert f"{mount['mountPath']}/minder.toml" == str(options.config)
    assert container["ports"][0]["containerPort"] == settings.server.port


@pytest.fixture
def fleet(control_plane):
    fleet = Fleet(control_plane)
    fleet.add_nodes(4)
    fleet.add_job(3)
    yield fleet
    fleet.remove()
    control_plane.kubectl("delete", "clusterrolebinding", "minder-act", check=False)


def actor_of(cluster):
    config = ActConfig(
        mode="evict",
        dry_run=False,
        max_node_share=1.0,
    )
    return Actor(cluster, config)


@pytest.mark.server
def test_every_verb_succeeds_with_the_roles_and_the_next_one_is_refused(control_plane, fleet):
    kubeconfig = account(control_plane, ["minder-act"])
    install_workflows(control_plane)
    cluster = fleet.cluster(kubeconfig, own_namespace="planish")
    wait_for(lambda: _allowed(lambda: cluster.opted_in(fleet.namespace)), 20)
    actor, about = actor_of(cluster), alert(fleet)
    waiting = actor.handle(about, result(about, NOW - 60), NOW - 60)
    assert (waiting.result, waiting.detail) == (
        "waiting",
        "for a second call that confirms the machine",
    )
    done = actor.handle(about, result(about, NOW), NOW)
    assert (done.action, done.result) == ("evict", "done")
    assert fleet.node(0).is_unschedulable
    assert fleet.pods() == ["train-1", "train-2"]
    lease = Lease(cluster, "me")
    assert lease.renew()
    assert lease.renew()
    state = ConfigMapState(cluster, names.STATE)
    state.write("{}")
    assert state.read() == "{}"
    control_plane.kubectl("uncordon", fleet.name(0))
    ((_, given_up),) = actor.reconcile(NOW)
    assert given_up.result == "refused"
    core, namespace = cluster.core, fleet.namespace
    for function, arguments in (
        (core.delete_namespaced_pod, ("train-1", namespace)),
        (core.delete_node, (fleet.name(1),)),
        (core.list_namespaced_secret, ("planish",)),
        (core.read_namespaced_config_map, ("minder-settings", "planish")),
        (core.list_namespaced_event, (namespace,)),
        (core.create_namespaced_config_map, ("planish", {"metadata": {"name": "x"}})),
        (core.patch_namespace, (namespace, {})),
        (core.patch_namespaced_pod, ("train-1", namespace, {})),
    ):
        with pytest.raises(ClusterError) as error:
            cluster.call(function, *arguments)
        assert error.value.status == 403, function.__name__
    wait_for(lambda: _allowed(lambda: cluster.call(core.list_node, limit=1)), 20)


def _allowed(ask):
    try:
        ask()
    except ClusterError as error:
        if error.status != 403:
            raise
        return False
    return True


@pytest.mark.server
def test_without_the_binding_everything_is_only_observed(control_plane, fleet):
    cluster = fleet.cluster(account(control_plane), own_namespace="planish")
    control_plane.kubectl("delete", "clusterrolebinding", "minder-act", check=False)
    wait_for(lambda: not _allowed(lambda: cluster.opted_in(fleet.namespace)), 20)
    before = fleet.versions()
    actor, about = actor_of(cluster), alert(fleet)
    refused = actor.handle(about, result(about, NOW), NOW)
    assert (refused.result, refused.has_changed) == ("forbidden", True)
    assert actor.mode == "observe"
    assert 'cannot get resource "namespaces"' in actor.forbidden
    next_time = actor.handle(about, result(about, NOW + 60), NOW + 60)
    assert (next_time.action, next_time.result) == ("none", "none")
    assert fleet.versions() == before
    assert fleet.events(fleet.name(0)) == [("MinderFaultyMachine", 1)]
