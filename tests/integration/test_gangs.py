"""Gangs on a real control plane: API server, controllers, scheduler, and nodes that run processes.

Every request is made with the account and the role of `manifests/runs`.
"""

import contextlib
import gc
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace

import pytest
import yaml
from kubernetes.config import new_client_from_config

from planish import store
from planish.base.config import config_sha256
from planish.base.errors import ConfigError, PeerLost
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.refs import parse_pin
from planish.run.gang.cluster import PERMISSIONS, TRAINER_PERMISSIONS
from planish.run.gang.launch import run_gang
from planish.run.gang.manifests import GANG_LABEL, Gang, GangPods, Network, job_manifest
from planish.run.kube import Kube
from planish.stages.iterate.job import Block
from planish.stages.iterate.stage import RANK as BLOCK
from planish.stages.prepare.cluster import ClusterApi, Permission
from planish.stages.train.ranks.job import TrainJob, write_job
from planish.stages.train.stage import in_ranks, launch, train
from planish.submit.cleanup import delete_labelled
from tests.images.node import Node
from tests.integration.ckpt_forks import run_ranks
from tests.integration.gang_site import STAND_IN, Images, Site
from tests.integration.resident_equal import run as run_preset
from tests.integration.resident_kill import copy_start
from tests.integration.scheduling import running_scheduler
from tests.integration.waiting import wait_for
from tests.servers.program import REPOSITORY
from tests.servers.run_trainer import start_trainer
from tests.unit.stages.train.runs import add_iteration, start_run, tiny_config

pytestmark = [
    pytest.mark.server,
    # Clients of the package `kubernetes` keep a connection until they are collected.
    pytest.mark.filterwarnings("ignore:.*ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"),
]

ONE_A_NODE = {"resources": {"requests": {"cpu": "3"}}}


@pytest.fixture(autouse=True)
def collected():
    """Collect what a test has left while its warnings are still those of this file."""
    yield
    gc.collect()


@pytest.fixture
def site(shared_site):
    """The control plane; what earlier tests have left of gangs and their logs is gone."""
    for path in shared_site.folder.glob("node-*/logs/planish-*"):
        path.unlink()
    yield shared_site
    if shared_site.objects():
        kinds = "trainjobs,jobs" if shared_site.has_trainer else "jobs"
        words = ("delete", kinds, "-l", GANG_LABEL, "--wait=true")
        shared_site.plane.kubectl("-n", "planish", *words, check=False)


@pytest.fixture(scope="module")
def shared_site(control_plane, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gangs")
    overlay = control_plane.kubectl("kustomize", str(REPOSITORY / "manifests/overlays/local"))
    kinds = ("Namespace", "ServiceAccount", "Role", "RoleBinding")
    objects = [each for each in yaml.safe_load_all(overlay.stdout) if each["kind"] in kinds]
    control_plane.apply(*objects)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_scheduler(control_plane))
        nodes = [
            stack.enter_context(Node(control_plane, Images(), folder / name, name=name, cpu="4"))
            for name in ("node-1", "node-2")
        ]
        site = Site(control_plane, nodes, folder)
        stack.callback(site.close)
        yield site


def stand_in(line, mark, **changes):
    """A gang of two pods that run a line of shell, one on each node."""
    gang = Gang(
        digest=f"{mark:064x}"[::-1],
        num_nodes=2,
        num_processes=1,
        words=(STAND_IN, line),
        pods=GangPods(container=ONE_A_NODE),
        labels={"planish/stage": "train", "pipeline/runid": "r1"},
    )
    return replace(gang, **changes)


def node_of(site, pod):
    return site.get("pod", pod)["spec"]["nodeName"]


def run_in_thread(cluster, gang):
    """Run a gang beside the test; returns the thread and where its error goes."""
    errors = []

    def work():
        try:
            run_gang(cluster, gang, before=lambda: None)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, errors


def test_the_role_that_ships_allows_every_request_and_no_more(site):
    api = ClusterApi(site.cluster("none").client.configuration, "planish")
    asked = [Permission(*each) for each in {*PERMISSIONS, *TRAINER_PERMISSIONS}]
    assert [each.describe() for each in asked if not api.allowed(each, namespaced=True)] == []
    for other in (("batch", "jobs", "list"), ("", "pods", "delete"), ("", "services", "delete")):
        assert not api.allowed(Permission(*other), namespaced=True), other


def job_of(root):
    """Return a train job of a tiny run on a root; all of them have equal digests."""
    changes = {"tokens_per_microbatch": 96, "num_passes": 12}
    tiny = start_run(root, tiny_config(num_nodes=2, **changes))
    add_iteration(tiny, 1)
    rewards = layout.rewards(tiny.root, 1)
    return TrainJob(
        root=tiny.root,
        config=tiny.config,
        config_sha256=tiny.digest,
        iteration=1,
        num_shards=2,
        policy_pin=tiny.policy_pin,
        state_pin="",
        rewards_pin=read_manifest(rewards).ref(rewards).pin(),
    )


def test_two_pods_train_what_two_processes_train_also_after_they_were_asked_to_leave(
    site, minio, s3_root, tmp_path, caplog
):
    caplog.set_level("INFO", logger="planish")
    job = job_of(f"{s3_root}/gang")
    cluster = site.cluster(site.stage_pod(env=minio.environment))
    errors = []

    def first_attempt():
        try:
            train(job, cluster)
        except PeerLost as error:
            errors.append(error)

    thread = threading.Thread(target=first_attempt)
    began = time.monotonic()
    thread.start()
    pod = wait_for(lambda: site.log_with("rank leaves before")).stem
    print(f"submit to the first rank that hears {time.monotonic() - began:.1f} s")
    site.plane.kubectl("-n", "planish", "delete", "pod", pod, "--wait=false")
    asked = time.monotonic()
    thread.join(60)
    print(f"asked to gone {time.monotonic() - asked:.1f} s")
    (error,) = errors
    # The other pod has ended by itself, or the controller has taken it away before.
    assert re.search("got 75 from|no pod of it tells why", str(error)), str(error)
    assert site.has_nothing_left()
    assert not store.exists(layout.update(job.root, 1))
    outcome = train(job, cluster)
    assert train(job, cluster).already_done
    submitted = [m for m in caplog.messages if m.startswith("gang submitted")]
    assert len(submitted) == 2
    assert site.has_nothing_left()
    pin = write_job(job_of((tmp_path / "here").as_uri()))
    here, _ = run_ranks("tests.integration.train_forks:train_rank", 2, tmp_path / "ranks", pin=pin)
    uri, digest = parse_pin(here)
    assert digest == outcome.refs["state"].manifest_sha256
    assert read_manifest(uri).attributes["dp"] == 2


def test_a_gang_runs_two_tasks_of_iterations_and_a_lost_pod_costs_nothing(
    site, minio, s3_root, tmp_path
):
    source = tmp_path / "source"
    run_preset(source, "dapo-tiny", 1, (), "--resident", "0")
    run = json.loads((source / "run.json").read_text())
    run["config"]["train"] |= {"num_nodes": 2, "num_processes": 1}
    digest = config_sha256(run["config"])
    run["config_sha256"] = digest

    def start(root):
        copy_start(source, root)
        store.write(layout.run_file(root), json.dumps(run).encode())
        policy = layout.policy(root, 0)
        return read_manifest(policy).ref(policy).pin(), ""

    def block(root, first, pins):
        return Block(root, run["config"], digest, first, 2, *pins, "", count=2)

    here, there = (tmp_path / "here").as_uri(), f"{s3_root}/gang"
    pins = start(here)
    for first in (1, 3):
        pins = json.loads(launch(block(here, first, pins), 2, BLOCK))
    pins, cluster = start(there), site.cluster(site.stage_pod(env=minio.environment))
    pins = json.loads(in_ranks(block(there, 1, pins), BLOCK, cluster))
    second, errors = block(there, 3, pins), []

    def first_attempt():
        try:
            in_ranks(second, BLOCK, cluster)
        except PeerLost as error:
            errors.append(error)

    thread = threading.Thread(target=first_attempt)
    thread.start()
    pod = wait_for(lambda: site.log_with("sampled iteration=3")).stem
    site.plane.kubectl("-n", "planish", "delete", "pod", pod, "--wait=false", "--force")
    thread.join(120)
    assert len(errors) == 1
    assert site.has_nothing_left()
    in_ranks(second, BLOCK, cluster)
    assert site.has_nothing_left()
    for iteration in range(1, 5):
        updates = [store.read(layout.update(root, iteration)) for root in (here, there)]
        assert updates[0] == updates[1]
        policies = [read_manifest(layout.policy(root, iteration)) for root in (here, there)]
        assert policies[0].sha256 == policies[1].sha256


def test_a_killed_rank_ends_the_gang_and_its_log_reaches_the_stage(site, tmp_path, caplog):
    gang = stand_in("", 1, words=("tests.integration.gang_rank", str(tmp_path)))
    began = time.monotonic()
    thread, errors = run_in_thread(site.cluster(site.stage_pod()), gang)
    ranks = [tmp_path / f"rank-{rank}" for rank in range(2)]
    wait_for(lambda: all(path.exists() and path.read_text() for path in ranks))
    print(f"submit to both ranks {time.monotonic() - began:.1f} s")
    os.kill(int(ranks[1].read_text()), signal.SIGKILL)
    thread.join(60)
    (error,) = errors
    assert isinstance(error, PeerLost)
    assert "got 137 from" in str(error)
    (log,) = [m for m in caplog.messages if m.startswith("log of the first pod that failed")]
    assert "rank 1 of 2" in log
    assert site.has_nothing_left()


def test_a_drained_node_ends_a_gang_with_a_network_of_its_own(site):
    pods = {"container": {"resources": {"requests": {"cpu": "100m"}, "limits": {}}}}
    network = {"resources": {"rdma/hca": "1"}, "capabilities": ["IPC_LOCK"], "host_network": True}
    Network(**network, env={"NCCL_IB_HCA": "mlx5"}).join(pods)
    gang = stand_in("sleep 300", 2, pods=GangPods(**pods))
    enforce = ("label", "namespace", "planish", "--overwrite", "pod-security.kubernetes.io/enforce")
    site.plane.kubectl(*enforce[:-1], f"{enforce[-1]}=privileged")
    thread, errors = run_in_thread(site.cluster(site.stage_pod()), gang)
    wait_for(lambda: len(site.running()) == 2, 30)
    stays = site.running()
    assert len({node_of(site, pod) for pod in stays}) == 2
    spec = site.get("pod", stays[0])["spec"]
    (container,) = spec["containers"]
    assert spec["hostNetwork"]
    assert container["resources"]["limits"] == {"rdma/hca": "1"}
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in container["env"]
    site.plane.kubectl(*enforce[:-1], f"{enforce[-1]}=baseline")
    # The pod of the stage is on one of them; the other is drained.
    stage = f"stage-{site.number}"
    away = next(node.name for node in site.nodes if node.name != node_of(site, stage))
    site.plane.kubectl("drain", away, "--force", "--grace-period=1", "--timeout=30s")
    thread.join(60)
    site.plane.kubectl("uncordon", away)
    (error,) = errors
    assert isinstance(error, PeerLost), stays
    assert site.has_nothing_left()


def test_a_retry_attaches_to_the_gang_of_a_killed_stage_and_there_is_never_a_second(site, tmp_path):
    gang = stand_in(f"until test -e {tmp_path}/go; do sleep 0.1; done", 3)
    pod = site.stage_pod()
    first = site.launcher(gang, pod, tmp_path)
    wait_for(lambda: len(site.running()) == 2, 30)
    first.kill()
    first.wait(10)
    uid = site.get("job", gang.name)["metadata"]["uid"]
    site.plane.kubectl("-n", "planish", "delete", "service", gang.name)
    retry = site.stage_pod()
    of_next_run = replace(gang, labels={**gang.labels, "pipeline/runid": "r2"})
    began = time.monotonic()
    thread, errors = run_in_thread(site.cluster(retry), of_next_run)

    def owner():
        return site.get("job", gang.name)["metadata"]["ownerReferences"][0]["name"]

    wait_for(lambda: owner() == retry, 60)
    print(f"attached after {time.monotonic() - began:.2f} s")
    assert site.get("job", gang.name)["metadata"]["labels"]["pipeline/runid"] == "r2"
    # The pod of the killed stage may go now, and the gang stays.
    site.plane.kubectl("-n", "planish", "delete", "pod", pod)
    assert site.get("job", gang.name)["metadata"]["uid"] == uid
    wait_for(lambda: f"service/{gang.name}" in site.objects(), 10)
    (tmp_path / "go").touch()
    thread.join(60)
    assert errors == []
    assert site.has_nothing_left()


def test_a_gang_of_other_work_has_ended_before_the_next_begins(site, tmp_path, caplog):
    """Leave a gang behind and submit the same digest with other work; the pods must not overlap."""
    gang = stand_in("", 11)
    slow = f"trap 'sleep 1; echo over >> {tmp_path}/ends; exit 75' TERM; touch {tmp_path}/up-$$; "
    old = replace(gang, words=(STAND_IN, slow + "while :; do sleep 0.1; done"), work="old")
    first = site.launcher(old, site.stage_pod(), tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 2, 60)
    first.kill()
    first.wait(10)
    check = f"cp {tmp_path}/ends {tmp_path}/seen-$$; exit 3"
    new = replace(gang, words=(STAND_IN, check), work="new")
    with pytest.raises(PeerLost, match="got 3 from"):
        run_gang(site.cluster(site.stage_pod()), new, before=lambda: None)
    assert "gang of other work, removed" in caplog.text
    seen = [path.read_text() for path in tmp_path.glob("seen-*")]
    assert seen == ["over\nover\n"] * len(seen) != []
    assert site.has_nothing_left()


def test_a_finished_gang_is_read_and_a_failed_one_makes_way(site, tmp_path):
    for line, end in (("true", "Complete"), (f"test -e {tmp_path}/Failed-ok", "Failed")):
        ran = tmp_path / end
        gang = stand_in(f"echo x >> {ran}; {line}", 4)
        cluster = site.cluster(site.stage_pod())
        # As a stage that was killed leaves it.
        cluster.create_job(job_manifest(gang, cluster.own_pod()))

        def condition(gang=gang):
            return [c["type"] for c in site.get("job", gang.name)["status"].get("conditions", ())]

        wait_for(lambda end=end: end in condition(), 30)
        before = len(ran.read_text().split())
        (tmp_path / f"{end}-ok").touch()
        run_gang(cluster, gang, before=lambda: None)
        again = len(ran.read_text().split()) - before
        assert again == (0 if end == "Complete" else 2)
        assert site.has_nothing_left()


def test_an_api_server_that_is_gone_for_a_while_costs_nothing(site, tmp_path):
    gang = stand_in(f"until test -e {tmp_path}/go; do sleep 0.1; done; echo x >> {tmp_path}/ran", 5)
    thread, errors = run_in_thread(site.cluster(site.stage_pod()), gang)
    wait_for(lambda: len(site.running()) == 2, 30)
    site.plane.program("kube-apiserver").kill()
    (tmp_path / "go").touch()
    time.sleep(60)
    assert thread.is_alive()
    site.plane.start_again("kube-apiserver")
    # Controllers ask a server that was gone at longer and longer intervals.
    thread.join(240)
    assert not thread.is_alive()
    assert errors == []
    assert (tmp_path / "ran").read_text() == "x\nx\n"
    assert site.has_nothing_left()


def test_a_gang_ends_with_the_deadline_of_its_stage(site):
    pod = site.stage_pod(deadline=4)
    with pytest.raises(PeerLost, match="DeadlineExceeded"):
        run_gang(site.cluster(pod), stand_in("sleep 300", 6), before=lambda: None)
    assert site.has_nothing_left()


def test_a_cancelled_stage_takes_its_gang_with_it(site, tmp_path):
    words = ("tests.integration.gang_rank", str(tmp_path))
    gang = stand_in("", 7, words=words, num_processes=2)
    launcher = site.launcher(gang, site.stage_pod(), tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("rank-*"))) == 4)
    launcher.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert launcher.wait(120) == 75, (tmp_path / "launcher.log").read_text()
    assert site.has_nothing_left()
    print(f"SIGTERM to nothing left of four ranks {time.monotonic() - asked:.1f} s")


def test_a_gang_goes_with_the_pod_of_its_stage(site, tmp_path):
    pod = site.stage_pod()
    launcher = site.launcher(stand_in("sleep 300", 8), pod, tmp_path)
    wait_for(lambda: len(site.running()) == 2, 30)
    launcher.kill()
    launcher.wait(10)
    site.plane.kubectl("-n", "planish", "delete", "pod", pod)
    assert site.has_nothing_left()


def test_without_kubeflow_trainer_its_gangs_are_refused(site):
    gang = stand_in("true", 10, launcher="trainjob")
    with pytest.raises(ConfigError, match="install Kubeflow Trainer"):
        run_gang(site.cluster(site.stage_pod(), launcher="trainjob"), gang, before=lambda: None)


def test_a_gang_of_somebody_else_under_our_name_is_refused_and_stays(site):
    pod = site.stage_pod()
    cluster, gang = site.cluster(pod), stand_in("sleep 300", 9)
    foreign = job_manifest(gang, cluster.own_pod())
    foreign["metadata"]["labels"] = {GANG_LABEL: "other"}
    foreign["spec"]["suspend"] = True
    site.plane.apply({**foreign, "metadata": {**foreign["metadata"], "namespace": "planish"}})
    with pytest.raises(ConfigError, match="must have the label"):
        run_gang(cluster, gang, before=lambda: None)
    assert site.get("job", gang.name)["metadata"]["labels"] == {GANG_LABEL: "other"}
    site.plane.kubectl("-n", "planish", "delete", "job", gang.name)


@pytest.fixture
def trained(site):
    """The site with the controllers of Kubeflow Trainer and JobSet, and our runtime."""
    if not site.has_trainer:
        start_trainer(site.plane)
        site.plane.kubectl("apply", "-k", str(REPOSITORY / "manifests/trainer"))
        site.has_trainer, site.kinds = True, []
    return site


def trainjob(line, mark, **changes):
    return stand_in(line, mark, launcher="trainjob", **changes)


def test_kubeflow_trainer_runs_a_gang_and_nothing_is_left(trained, tmp_path):
    gang = trainjob("", 21, words=("tests.integration.gang_rank", str(tmp_path)))
    (tmp_path / "go").touch()
    cluster = trained.cluster(trained.stage_pod(), launcher="trainjob")
    run_gang(cluster, gang, before=lambda: None)
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}
    assert trained.has_nothing_left()


def test_a_pod_of_kubeflow_trainer_that_fails_ends_the_gang(trained, caplog):
    gang = trainjob("echo the disk is full; exit 3", 22)
    cluster = trained.cluster(trained.stage_pod(), launcher="trainjob")
    with pytest.raises(PeerLost, match="got 3 from `planish-"):
        run_gang(cluster, gang, before=lambda: None)
    assert "the disk is full" in caplog.text
    assert trained.has_nothing_left()


def test_a_gang_of_kubeflow_trainer_is_attached_to_drained_and_cancelled(trained, tmp_path):
    gang = trainjob("sleep 300", 23)
    first = trained.launcher(gang, trained.stage_pod(), tmp_path)
    wait_for(lambda: len(trained.running()) == 2, 60)
    first.kill()
    first.wait(10)
    uid = trained.get("trainjob", gang.name)["metadata"]["uid"]
    retry = trained.stage_pod()
    of_next_run = replace(gang, labels={**gang.labels, "pipeline/runid": "r2"})
    second = trained.launcher(of_next_run, retry, tmp_path)

    def job():
        return trained.get("trainjob", gang.name)["metadata"]

    wait_for(lambda: job()["ownerReferences"][0]["name"] == retry, 20)
    assert (job()["uid"], job()["labels"]["pipeline/runid"]) == (uid, "r2")
    second.send_signal(signal.SIGTERM)
    assert second.wait(20) == 75
    assert trained.has_nothing_left()
    thread, errors = run_in_thread(trained.cluster(retry, launcher="trainjob"), gang)
    wait_for(lambda: len(trained.running()) == 2, 60)
    away = next(node.name for node in trained.nodes if node.name != node_of(trained, retry))
    trained.plane.kubectl("drain", away, "--force", "--grace-period=1", "--timeout=30s")
    thread.join(60)
    trained.plane.kubectl("uncordon", away)
    (error,) = errors
    assert isinstance(error, PeerLost)
    assert trained.has_nothing_left()


def test_a_gang_with_a_queue_of_kueue_waits_for_it(trained):
    pod = trained.stage_pod()
    for launcher in ("job", "trainjob"):
        gang = stand_in("true", 25, launcher=launcher, queue="team")
        cluster = trained.cluster(pod, launcher=launcher)
        thread, errors = run_in_thread(cluster, gang)
        wait_for(lambda launcher=launcher: f"{launcher}" in str(trained.objects()), 20)
        found = trained.get(launcher, gang.name)
        assert found["spec"]["suspend"] is True
        assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        # What Kueue does once the quota has room.
        change = json.dumps({"spec": {"suspend": False}})
        words = ("patch", launcher, gang.name, "--type=merge", "-p", change)
        trained.plane.kubectl("-n", "planish", *words)
        thread.join(60)
        assert errors == []
        assert trained.has_nothing_left()


def test_the_cleanup_of_a_run_deletes_its_gangs_of_both_kinds(trained):
    pod = trained.stage_pod()
    for launcher in ("job", "trainjob"):
        gang = stand_in("true", 26, launcher=launcher, queue="team")
        cluster = trained.cluster(pod, launcher=launcher)
        cluster.create_job(job_manifest(gang, cluster.own_pod()))
    admin = new_client_from_config(str(trained.plane.kubeconfig))
    trained.clients.append(admin)
    kube = Kube(admin.configuration, "planish")
    assert delete_labelled(kube, "pipeline/runid=other,planish/stage") == []
    gone = delete_labelled(kube, "pipeline/runid=r1,planish/stage")
    assert gone == [f"job/{gang.name}", f"trainjob/{gang.name}"]
    assert trained.has_nothing_left()
