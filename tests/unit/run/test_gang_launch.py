"""What is there already when a gang is submitted: it is attached to, makes way, or is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from planish.base.errors import ClusterError, ConfigError
from planish.run.gang import launch
from planish.run.gang.cluster import GangCluster
from planish.run.gang.launch import run_gang, serve, submit
from planish.run.gang.manifests import Gang, job_manifest, service_manifest

GANG = Gang("ab" * 32, 2, 1, ("m",), work="w1", labels={"planish/stage": "train"})
POD = {
    "metadata": {"name": "stage", "uid": "u-stage"},
    "spec": {"containers": [{"name": "main", "image": "planish/train:0.1.0"}]},
}


class Namespace(GangCluster):
    """A namespace in memory: answers what a client of Kubernetes would ask an API server.

    Pods outlive their job for `linger` looks at them, as pods that are asked to end do.
    """

    def __init__(self, launcher="job"):
        super().__init__(None, "n", "stage", launcher=launcher)
        self.objects, self.deleted = {}, []
        self.pods_left, self.forbidden = [], "nothing"

    def call(self, function, *arguments, **options):
        name = function.__name__
        verb = name.partition("_")[0]
        if self.forbidden in arguments:
            raise ConfigError(f"the service account must be allowed to {name}")
        if name == "read_namespaced_pod":
            return POD
        if name == "list_namespaced_pod":
            left, self.pods_left = self.pods_left, self.pods_left[:-1]
            return {"items": [{"metadata": {"name": each}} for each in left]}
        kind = "service" if "service" in name else arguments[3].removesuffix("s")
        if verb == "create":
            manifest = arguments[-1]
            key = (kind, manifest["metadata"]["name"])
            if key in self.objects:
                raise ClusterError("there is one", status=409)
            uid = f"u-{kind}-{len(self.objects) + len(self.deleted)}"
            metadata = {**manifest["metadata"], "uid": uid}
            self.objects[key] = {**manifest, "metadata": metadata}
            return self.objects[key]
        key = (kind, GANG.name)
        assert GANG.name in arguments
        if key not in self.objects:
            raise ClusterError("not found", status=404)
        if verb == "delete":
            self.deleted.append((kind, options["body"]["propagationPolicy"]))
            del self.objects[key]
        if verb == "patch":
            metadata, change = self.objects[key]["metadata"], arguments[-1]["metadata"]
            merged = {**metadata["labels"], **change.pop("labels")}
            metadata["labels"] = {k: v for k, v in merged.items() if v is not None}
            metadata.update(change)
        return self.objects.get(key)

    def put(self, gang, **metadata):
        """Leave a gang as an earlier run did."""
        kind = "trainjob" if gang.launcher == "trainjob" else "job"
        job = job_manifest(gang, POD)
        job["metadata"] |= {"uid": "u-earlier", **metadata}
        self.objects[kind, gang.name] = job
        return job


@pytest.fixture
def looks(monkeypatch):
    """Count pauses, and take none."""
    taken = []
    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=taken.append, monotonic=lambda: 0.0))
    return taken


@pytest.mark.parametrize("launcher", ["job", "trainjob"])
@pytest.mark.parametrize("run_id", ["r2", ""])
def test_whoever_attaches_owns_the_gang_and_cleans_it_up(looks, launcher, run_id):
    cluster = Namespace(launcher)
    of_first = {"planish/stage": "train", "pipeline/runid": "r1"}
    first = replace(GANG, launcher=launcher, labels=of_first, queue="team")
    job = cluster.put(first)
    job["metadata"]["labels"]["of/others"] = "stays"
    job["metadata"]["ownerReferences"][0]["uid"] = "u-of-r1"
    of_run = {"pipeline/runid": run_id} if run_id else {}
    again = replace(first, labels={"planish/stage": "train", **of_run})
    attached = submit(cluster, again, pytest.fail)
    seen = cluster.objects[launcher, GANG.name]["metadata"]
    assert [each["uid"] for each in seen["ownerReferences"]] == ["u-stage"]
    assert seen["labels"] == {
        "planish/stage": "train",
        "planish/gang": GANG.digest[:63],
        "kueue.x-k8s.io/queue-name": "team",
        "of/others": "stays",
        **of_run,
    }
    # A service that named its run would be deleted with the run that the gang was taken from.
    assert service_manifest(again, attached)["metadata"]["labels"] == {
        "planish/stage": "train",
        "planish/gang": GANG.digest[:63],
    }


def test_a_gang_of_the_other_launcher_makes_way_too(looks):
    cluster, other = Namespace("trainjob"), replace(GANG, launcher="trainjob")
    cluster.put(GANG)
    assert submit(cluster, other, lambda: None)["kind"] == "TrainJob"
    assert cluster.deleted == [("job", "Foreground")]
    cluster = Namespace("job")
    cluster.put(other)
    assert submit(cluster, GANG, lambda: None)["kind"] == "Job"
    assert cluster.deleted == [("trainjob", "Background")]


def test_an_account_that_may_not_see_the_other_kind_has_none_of_it(looks):
    cluster = Namespace()
    cluster.forbidden = "trainjobs"
    assert submit(cluster, GANG, lambda: None)["kind"] == "Job"


def test_a_gang_that_is_being_deleted_is_waited_for_and_not_deleted_again(looks, monkeypatch):
    cluster = Namespace()
    cluster.put(replace(GANG, work="w2"), deletionTimestamp="2026-01-01T00:00:00Z")

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            cluster.objects.clear()

    monkeypatch.setattr(launch.time, "sleep", sleep)
    assert submit(cluster, GANG, lambda: None)["metadata"]["uid"] != "u-earlier"
    assert (cluster.deleted, len(looks)) == ([], 3)


def test_a_service_of_somebody_else_is_refused_and_the_gang_goes(looks):
    cluster = Namespace()
    foreign = {"metadata": {"name": GANG.name, "labels": {"app": "theirs"}, "uid": "u-theirs"}}
    cluster.objects["service", GANG.name] = foreign
    with pytest.raises(ConfigError, match=r"the service `planish-abab.*must have the label"):
        run_gang(cluster, GANG, before=lambda: None)
    assert cluster.objects == {("service", GANG.name): foreign}
    assert cluster.deleted == [("job", "Foreground")]


def test_a_service_goes_with_the_gang_before_and_is_made_again(looks, monkeypatch):
    cluster = Namespace()
    before = service_manifest(GANG, cluster.put(GANG))
    cluster.objects["service", GANG.name] = before
    job = {"metadata": {"name": GANG.name, "uid": "u-next"}}

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            del cluster.objects["service", GANG.name]

    monkeypatch.setattr(launch.time, "sleep", sleep)
    serve(cluster, GANG, job)
    made = cluster.objects["service", GANG.name]
    assert [each["uid"] for each in made["metadata"]["ownerReferences"]] == ["u-next"]
    serve(cluster, GANG, job)
    assert cluster.objects["service", GANG.name] is made
    assert len(looks) == 3


def test_pods_that_do_not_end_are_left_to_the_next_attempt(monkeypatch, caplog):
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += seconds

    fake = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(launch, "time", fake)
    cluster = Namespace()
    cluster.put(GANG)
    cluster.pods = lambda digest: [{"metadata": {"name": "on-a-machine-that-is-off"}}]
    launch.remove(cluster, GANG, patience_seconds=5.0)
    assert 120.0 <= now.seconds <= 121.0
    assert "its pods have not ended" in caplog.text
