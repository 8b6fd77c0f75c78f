"""A real API server with LeaderWorkerSets accepts what `planish rollout manifests` renders.

Its controllers make the pods of StatefulSets, under the names by which a coordinator calls them;
there is no controller of LeaderWorkerSets here, only their definition.
"""

import json

import pytest

from planish.__main__ import main
from tests.integration.waiting import wait_for
from tests.servers.program import BIN
from tests.unit.engines.deploy.plans import tiny_plan

pytestmark = pytest.mark.server

NAMESPACE = "moe"


@pytest.fixture(scope="module")
def worker_sets(control_plane):
    """The control plane with the definition of LeaderWorkerSets."""
    definition = BIN / "lws.yaml"
    if not definition.exists():
        pytest.skip("no definition of LeaderWorkerSets here: `tests/servers/build.sh lws`")
    control_plane.kubectl("create", "-f", str(definition))
    asked = ("get", "leaderworkersets", "-A")
    wait_for(lambda: control_plane.kubectl(*asked, check=False).returncode == 0, 60.0)
    control_plane.kubectl("create", "namespace", NAMESPACE)
    return control_plane


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return tiny_plan(tmp_path_factory.mktemp("plan"))


def render(plan, kind, *options):
    """Return the file with the objects."""
    out = plan.with_name(f"{kind}.yaml")
    words = ["--image", "planish/rollout:0.1.0", "--kind", kind, "--namespace", NAMESPACE]
    arguments = [str(plan), *words, *options, "--anyway", "--out", str(out)]
    assert main(["rollout", "manifests", *arguments]) == 0
    return out


def apply(plane, path, *options, check=True):
    return plane.kubectl("apply", "--validate=strict", "-f", str(path), *options, check=check)


@pytest.mark.parametrize("kind", ["leaderworkerset", "statefulset"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_real_server_accepts_every_object(worker_sets, plan, kind, device):
    path = render(plan, kind, "--device", device)
    done = apply(worker_sets, path, "--dry-run=server", check=False)
    assert done.returncode == 0, done.stderr
    name = {"leaderworkerset": "leaderworkerset.leaderworkerset.x-k8s.io"}.get(kind, f"{kind}.apps")
    made = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert made == [
        "networkpolicy.networking.k8s.io/ranks",
        "service/ranks-attention",
        f"{name}/ranks-attention",
        "service/ranks-expert",
        f"{name}/ranks-expert",
    ]


def test_worker_sets_are_stored_with_the_replicas_of_the_plan(worker_sets, plan):
    apply(worker_sets, render(plan, "leaderworkerset", "--name", "stored"))
    told = worker_sets.kubectl("get", "leaderworkersets", "-n", NAMESPACE, "-o", "json").stdout
    kept = {one["metadata"]["name"]: one["spec"] for one in json.loads(told)["items"]}
    assert {name: spec["replicas"] for name, spec in kept.items()} == {
        "stored-attention": 2,
        "stored-expert": 2,
    }
    template = kept["stored-expert"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "None"
    (container,) = template["workerTemplate"]["spec"]["containers"]
    assert container["args"][:2] == ["--host", "$(POD_IP)"]


def test_pods_get_the_names_by_which_a_coordinator_calls_them(worker_sets, plan):
    path = render(plan, "statefulset", "--name", "called")
    apply(worker_sets, path)

    def pods():
        told = worker_sets.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json").stdout
        found = [one for one in json.loads(told)["items"] if one["spec"].get("subdomain")]
        return found if len(found) == 4 else None

    found = wait_for(pods, 60.0, "four pods")
    names = {f"{one['spec']['hostname']}.{one['spec']['subdomain']}" for one in found}
    lines = [line.strip('# ",') for line in path.read_text().splitlines() if ".svc:" in line]
    assert {line.partition(f".{NAMESPACE}.svc:")[0] for line in lines} == names
    for one in found:
        assert one["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert one["spec"]["automountServiceAccountToken"] is False
