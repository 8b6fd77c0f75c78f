"""Break a machine while a gang trains, and follow the run until it has recovered on other ranks.

`python -m tests.integration.recovery --times 5` plays a fault again and again: at a random moment
of an iteration a machine becomes slow and unlike its peers; the monitor names it, cordons its node
and evicts its pod; the gang ends, and the run is submitted again with fewer machines and another
grid. It must go on from the newest commit and consume the prompts that an undisturbed run has
consumed, in this iteration and in the next one. `--seed` repeats the moments and the grids.
`--break state` hands the second attempt no train state, `--break prompts` other prompts: both must
be found out, and the exit code is 1.

API server, controllers, scheduler, MinIO, Prometheus, monitor, stages and ranks are real; nodes
run pods as processes of this machine, and metrics of machines come from a program.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml

from planish import store
from planish.base.errors import EXIT_TRANSIENT
from planish.checkpoint.train_state import read_state_info
from planish.minder.act.kube import names
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.reports import UpdateReport, read_report
from planish.records.rollouts import RolloutSet
from planish.run.chain import with_settings
from planish.run.signals import stops_with
from planish.run.stage import PathArtifact
from planish.stages.export import stage as export_stage
from planish.stages.prepare.cluster import ClusterApi
from planish.stages.prepare.stage import Wish, prepare
from planish.stages.report import stage as report_stage
from planish.stages.report.events import ROWS
from planish.stages.report.gather import gather
from planish.stages.reward import stage as reward_stage
from planish.stages.rollout import stage as rollout_stage
from planish.stages.train import stage as train_stage
from planish.store.documents import read_json
from tests.images.containers import Here
from tests.images.node import Node
from tests.integration.gang_launcher import connect
from tests.integration.minder_service import Served, raw_settings, serving
from tests.integration.scheduling import running_scheduler
from tests.integration.slowness import Slowness
from tests.integration.test_minder_end_to_end import Timeline, past
from tests.integration.waiting import wait_for
from tests.servers.exporter_fleet import Fleet
from tests.servers.program import REPOSITORY
from tests.servers.run_control_plane import ControlPlane
from tests.servers.run_minio import Minio
from tests.servers.run_prometheus import PrometheusServer
from tests.unit.stages.rollout.stage_run import easy_policy, write_template

MACHINES = 4
"""The fewest that the monitor compares."""
SIZES = {"num_layers": 2, "hidden_size": 32, "head_dim": 16, "num_heads": 4, "num_kv_heads": 2}
OVERRIDES = " ".join(
    [
        *(f"model.{name}={value}" for name, value in SIZES.items()),
        "curate.num_prompts=200 rollout.prompts_per_iteration=8 rollout.group_size=4",
        "rollout.max_generation_rounds=0 train.rollouts_per_minibatch=8 train.num_passes=40",
        # A smaller one makes a step of the order in which ranks add up, where a gradient is near 0.
        "train.adam_epsilon=1e-5 train.learning_rate=1e-4 train.device=cpu",
    ]
)
BEFORE = {
    "tp 2, dp 2": "train.trainer=megatron train.tensor_parallel=2",
    "pp 2, dp 2": "train.trainer=megatron train.pipeline_parallel=2",
    "tp 2, pp 2": "train.trainer=megatron train.tensor_parallel=2 train.pipeline_parallel=2",
    "FSDP2 on 4": "train.trainer=fsdp2",
}
"""Name of a grid of four ranks to its overrides."""
AFTER = {
    "dp 3": "train.trainer=megatron train.num_nodes=3",
    "FSDP2 on 3": "train.trainer=fsdp2 train.num_nodes=3",
    "tp 2": "train.trainer=megatron train.tensor_parallel=2 train.num_nodes=2",
    "pp 2": "train.trainer=megatron train.pipeline_parallel=2 train.num_nodes=2",
}
"""The same of at most three."""
PAUSE = 0.5
"""Seconds between two looks at the store, the cluster or a log."""
SLOWEST_SECONDS = 900.0
"""Of one attempt, however much else this machine has to do."""
RANK = {"cpu": "3"}
"""What a pod of the gang requests: a machine."""
REQUESTS = {"pod": RANK, "total": {"cpu": "12"}, "num_nodes": MACHINES, "rank": RANK}
"""What the profile of this cluster would tell the first stage."""
ALONE = "train.num_nodes=1 train.num_processes=1"
LATEST_SECONDS = 5.0
"""From the first step to the fault; what is left of the iteration lasts until the monitor acts."""
WINDOW_SECONDS = 60
"""What the monitor looks back on."""
LOSS_TOLERANCE = 1e-3
"""Between the losses of a recovered iteration and those of an undisturbed one."""
BUCKET = f"s3://recovery-{os.getpid()}"
"""Two programs at once must have gangs of different names: both meet on this machine."""
BREAKS = ("state", "prompts")


class Site:
    """A cluster of four machines for training and one for stages, with its store and monitor."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        """Start everything but the monitor."""
        self.folder, self.number, self.healed = folder, 0, 0.0
        self.minio = Minio(folder / "minio" / "data")
        stack.callback(self.minio.kill)
        self.minio.start()
        self.minio.make_bucket(BUCKET.removeprefix("s3://"))
        stack.enter_context(mock.patch.dict(os.environ, self.minio.environment))
        self.plane = ControlPlane(folder / "plane")
        stack.callback(self.plane.stop)
        self.plane.start()
        overlay = self.plane.kubectl("kustomize", str(REPOSITORY / "manifests/overlays/local"))
        kinds = ("Namespace", "ServiceAccount", "Role", "RoleBinding", "ClusterRole")
        wanted = (*kinds, "ClusterRoleBinding")
        self.plane.apply(*(o for o in yaml.safe_load_all(overlay.stdout) if o["kind"] in wanted))
        self.plane.kubectl("label", "namespace", "planish", f"{names.OPT_IN_LABEL}=evict")
        token = self.plane.kubectl("-n", "planish", "create", "token", "planish-runner").stdout
        self.access = {
            "server": f"https://127.0.0.1:{self.plane.port}",
            "certificate": str(self.plane.folder / "certificates" / "apiserver.crt"),
            "token": token.strip(),
        }
        self.api = ClusterApi(connect(**self.access, pod="").client.configuration, "planish")
        stack.enter_context(running_scheduler(self.plane))
        self.machines = [f"machine-{number}" for number in range(MACHINES)]
        self.nodes = {
            name: stack.enter_context(Node(self.plane, Here(), folder / name, name=name, cpu="4"))
            for name in (*self.machines, "stages")
        }
        for name in self.nodes:
            pool = "stages" if name == "stages" else "training"
            self.plane.kubectl("label", "node", name, f"pool={pool}")
        self.exporters = Fleet(tuple(self.machines))
        stack.callback(self.exporters.close)
        self.prometheus = PrometheusServer(folder / "prometheus")
        stack.callback(self.prometheus.stop)
        self.prometheus.config = self.exporters.scrape_config()
        self.prometheus.backfill(past(self.exporters, int(time.time())))
        self.prometheus.start()

    @contextlib.contextmanager
    def monitor(self) -> Iterator[Served]:
        """Run the monitor, which neither remembers nor sees earlier faults."""
        time.sleep(max(0.0, self.healed + WINDOW_SECONDS - time.monotonic()))
        self.number += 1
        folder = self.folder / f"monitor-{self.number}"
        folder.mkdir()
        raw = raw_settings(
            folder,
            self.prometheus.url,
            [],
            kubernetes={
                "kubeconfig": str(self.plane.kubeconfig),
                "namespaces": ["planish"],
                "own_namespace": "planish",
                "run_roots": [BUCKET],
            },
            alertmanager={"honour_silences": False},
            service={"window_seconds": WINDOW_SECONDS},
            # Scrapes are late where this machine has much else to do.
            preprocess={"silent_after_seconds": 30},
            act={
                "mode": "evict",
                "dry_run": False,
                "gpu_resource": "",
                "max_node_share": 1.0,
            },
        )
        del raw["jobs"]
        served = serving(folder, raw)
        try:
            yield served
        finally:
            served.terminate()

    def stage_pod(self, words: Sequence[str], run_id: str) -> str:
        """Create the pod of a train stage as the profile of this cluster would; return its name."""
        self.number += 1
        name = f"train-{self.number}"
        gang = {
            "num_nodes": MACHINES,
            "container": {"resources": {"requests": RANK}},
            "spec": {"nodeSelector": {"pool": "training"}},
        }
        variables = {
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY)),
            "OMP_NUM_THREADS": "1",
            "PLANISH_GANG": json.dumps(gang),
            "GANG_ACCESS": json.dumps(self.access),
            "RUN_ID": run_id,
            **self.minio.environment,
        }
        env: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in variables.items()]
        of_pod = {"fieldRef": {"fieldPath": "metadata.name"}}
        env.append({"name": "POD_NAME", "valueFrom": of_pod})
        main = {
            "name": "main",
            "image": "planish/train:0.1.0",
            "command": ["python", "-m", "tests.integration.stage_in_pod", "train", *words],
            "env": env,
        }
        self.plane.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": "planish"},
                "spec": {
                    "restartPolicy": "Never",
                    "nodeSelector": {"pool": "stages"},
                    "activeDeadlineSeconds": 1800,
                    "automountServiceAccountToken": False,
                    "containers": [main],
                },
            }
        )
        return name

    def exit_code(self, pod: str) -> int | None:
        """Return how the process of a stage has ended; None before its end."""
        process = self.nodes["stages"].processes.get(pod)
        return None if process is None else process.poll()

    def is_cordoned(self, machine: str) -> bool:
        """Tell whether the node of a machine takes no pods."""
        node = self.nodes["stages"].core.read_node(machine)
        return bool(node.spec.unschedulable)

    def alerted(self, root: str) -> list[str]:
        """Return the machines that the monitor has named in a run."""
        uris = store.list_uris(f"{layout.alerts(root)}/")
        return [alert["machine"] for alert in map(read_json, uris) if alert["kind"] == "dissimilar"]

    def wait_for_end(self, pod: str, seconds: float = SLOWEST_SECONDS) -> int:
        """Return the exit code of the pod of a stage."""
        log = self.nodes["stages"].log
        wait_for(lambda: self.exit_code(pod) is not None, seconds, lambda: log(pod))
        code = self.exit_code(pod)
        assert code is not None
        return code

    def gang_pods(self) -> dict[str, str]:
        """Return the pods of gangs whose process lives, and the machine of each."""
        return {
            pod: name
            for name in self.machines
            for pod, process in [*self.nodes[name].processes.items()]
            if process.poll() is None
        }

    def said(self, pods: Mapping[str, str], words: str) -> list[str]:
        """Return the lines of the logs of some pods with these words."""
        logs = [self.nodes[name].log(pod).splitlines() for pod, name in pods.items()]
        return [line for lines in logs for line in lines if words in line]

    def repair(self) -> None:
        """Do what a person does after machines were mended."""
        kept = dict.fromkeys(names.OWNED)
        change = {"spec": {"unschedulable": None, "taints": None}}
        patch = json.dumps({**change, "metadata": {"annotations": kept}})
        for machine in self.machines:
            self.plane.kubectl("patch", "node", machine, "--type=merge", "-p", patch)


class Training:
    """One run on a root: iteration 1 is done, and the rollouts of iteration 2 are scored."""

    def __init__(self, site: Site, root: str, placement: str) -> None:
        """Submit the run, as far as its first stage."""
        self.site, self.root = site, root
        self.out = site.folder / root.rpartition("/")[2]
        self.submit(placement)

    def submit(self, placement: str) -> None:
        """Do what the first stage of a submitted run does; on other machines it is the same run."""
        wish = Wish(
            preset="dapo-tiny", config="", overrides=f"{OVERRIDES} {placement}", model="",
            dataset="", seed=3, chain=with_settings("", index=-1), num_iterations=3, num_shards=1,
            requests=json.dumps(REQUESTS), max_avoided_nodes=0,
        )  # fmt: skip
        self.digest = str(prepare(self.root, wish, api=self.site.api).values["config_sha256"])

    def artifact(self, name: str, number: int) -> PathArtifact:
        """Return an artifact of an iteration as a file."""
        return PathArtifact(str(self.out / f"{number}-{name}"))

    def policy_pin(self, version: int) -> str:
        """Return the pin of a policy."""
        uri = layout.policy(self.root, version)
        return read_manifest(uri).ref(uri).pin()

    def sample(self, number: int, state_pin: str) -> None:
        """Sample the rollouts of an iteration and score them."""
        policy = self.policy_pin(number - 1)
        rollouts, metrics = (self.artifact(name, number) for name in ("rollouts", "metrics"))
        rollout_stage.run(
            self.root, self.digest, number, 0, 0, 1, policy, state_pin, rollouts, metrics
        )
        rewards = self.artifact("rewards", number)
        reward_stage.run(self.root, self.digest, number, 0, 1, policy, rewards, metrics)

    def train_options(self, number: int, state_pin: str) -> dict[str, Any]:
        """Return the inputs and outputs of the train stage."""
        uri = layout.rewards(self.root, number)
        rewards = self.artifact("rewards", number)
        self.out.mkdir(exist_ok=True)
        Path(rewards.path).write_text(read_manifest(uri).ref(uri).to_json())
        return {
            "root": self.root, "config_sha256": self.digest, "number": number, "offset": 0,
            "num_shards": 1, "policy_pin": self.policy_pin(number - 1), "state_pin": state_pin,
            "rewards": rewards, "state": self.artifact("state", number),
            "metrics": self.artifact("metrics", number),
        }  # fmt: skip

    def start_training(self, number: int, state_pin: str, run_id: str) -> str:
        """Start the train stage in a pod; return its name."""
        options = self.train_options(number, state_pin)
        options["values"] = self.out / f"{number}-values"
        words = [
            f"--{name.replace('_', '-')}={value.path if isinstance(value, PathArtifact) else value}"
            for name, value in options.items()
        ]
        return self.site.stage_pod(words, run_id)

    def export(self, number: int, state_pin: str) -> None:
        """Export the policy after an iteration."""
        export_stage.run(
            self.root, self.digest, number, 0, self.policy_pin(number - 1),
            self.artifact("state", number), self.artifact("policy", number),
        )  # fmt: skip

    def consumed(self, state_pin: str) -> str:
        """Return a digest of the prompts of all iterations, and of where the stream stands."""
        told: list[Any] = [read_state_info(state_pin)["data"]["next"]]
        for number in (1, 2, 3):
            uri = layout.rollouts(self.root, number, 0)
            told.append(read_manifest(uri).attributes["consumed"])
            told.append(read_set(RolloutSet, uri).prompt_id)
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def losses(self) -> list[float]:
        """Return the losses of the steps of iteration 2."""
        steps = read_report(UpdateReport, layout.update(self.root, 2)).minibatches
        return [step["loss"] for step in steps]

    def finish(self, state_pin: str) -> str:
        """Export the policy of iteration 2, sample for iteration 3, and return `consumed`."""
        self.export(2, state_pin)
        self.sample(3, state_pin)
        return self.consumed(state_pin)


@dataclass
class Undisturbed:
    """The same run without a fault."""

    root: str
    """Where trials begin: it is copied."""
    state_path: str
    """Pin of the state after iteration 1, without the root."""
    digest: str
    """Of what was consumed."""
    losses: list[float]


def copy(source: str, target: str) -> None:
    """Copy all objects below a root."""
    for uri in store.list_uris(f"{source}/"):
        store.write(target + uri.removeprefix(source), store.read(uri))


def undisturbed(site: Site) -> Undisturbed:
    """Train two iterations in one process, and keep what stood before the second."""
    template, root = site.folder / "template", f"{BUCKET}/undisturbed"
    template.mkdir()
    write_template(template, num_prompts=200, policy=easy_policy(**SIZES))
    copy(template.as_uri(), root)
    training = Training(site, root, ALONE)
    training.sample(1, "")
    state_pin = train_stage.run(**training.train_options(1, "")).state_pin
    training.export(1, state_pin)
    training.sample(2, state_pin)
    begin = f"{BUCKET}/begin"
    copy(root, begin)
    after = train_stage.run(**training.train_options(2, state_pin)).state_pin
    path = state_pin.removeprefix(root)
    return Undisturbed(begin, path, training.finish(after), training.losses())


@dataclass
class Trial:
    """One fault and what came of it."""

    before: str
    after: str
    moment: float
    """Seconds from the first step to the fault."""
    machine: str
    """Which becomes slow."""
    faults: list[str] = field(default_factory=list)
    """What was not as it must be."""
    timeline: Timeline = field(default_factory=Timeline)

    def expect(self, holds: bool, fault: str) -> bool:
        """Note a fault where something does not hold, and return whether it holds."""
        self.faults += [] if holds else [fault]
        return holds


def disturb(site: Site, training: Training, trial: Trial, state_pin: str, monitor: Served) -> None:
    """Let a gang train, make one of its machines slow, and wait until the stage has ended."""
    timeline, root = trial.timeline, training.root
    pod = training.start_training(2, state_pin, "first")
    timeline.note(f"submitted, {trial.before}")

    def training_pods() -> dict[str, str]:
        pods = site.gang_pods()
        return pods if len(pods) == MACHINES and site.said(pods, "rank leaves before") else {}

    def train_or_ended() -> bool:
        return bool(training_pods()) or site.exit_code(pod) is not None

    log = site.nodes["stages"].log
    wait_for(train_or_ended, SLOWEST_SECONDS, lambda: log(pod), longest_pause=PAUSE)
    pods = training_pods()
    assert pods, f"no gang of {MACHINES} trains:\n{log(pod)[-3000:]}"
    timeline.note("ranks train")
    time.sleep(trial.moment)
    slow = next(each for each, machine in pods.items() if machine == trial.machine)
    site.exporters.shifts[trial.machine, "gpu_duty_cycle"] = -45.0
    timeline.note(f"{trial.machine} is slow, its duty cycle has fallen by half")
    with Slowness(site.nodes[trial.machine].processes[slow].pid):
        wait_for(
            lambda: trial.machine in site.alerted(root),
            120,
            lambda: monitor.log,
            longest_pause=PAUSE,
        )
        timeline.note(f"alert on {trial.machine}")
        wait_for(
            lambda: site.is_cordoned(trial.machine), 60, lambda: monitor.log, longest_pause=PAUSE
        )
        timeline.note(f"{trial.machine} is cordoned")
        code = site.wait_for_end(pod)
    wait_for(lambda: not site.gang_pods(), 120)
    # What the monitor sees of the next gang begins before the gang does.
    site.exporters.shifts.clear()
    site.healed = time.monotonic()
    timeline.note(f"stage ended with {code}")
    trial.expect(code == EXIT_TRANSIENT, f"the stage must end with 75, got {code}")
    cordoned = [machine for machine in site.machines if site.is_cordoned(machine)]
    trial.expect(cordoned == [trial.machine], f"the monitor cordoned {cordoned}")


def recover(site: Site, training: Training, trial: Trial, state_pin: str) -> bool:
    """Submit the run again on another grid; return whether it has trained the iteration."""
    timeline, digest = trial.timeline, training.digest
    training.submit(AFTER[trial.after])
    trial.expect(training.digest == digest, "the run has another digest on other machines")
    pod = training.start_training(2, state_pin, "second")
    timeline.note(f"submitted again, {trial.after}")
    pods: dict[str, str] = {}
    while site.exit_code(pod) is None:
        pods |= site.gang_pods()
        time.sleep(PAUSE)
    code = site.wait_for_end(pod)
    timeline.note(f"stage ended with {code}")
    trial.expect(trial.machine not in pods.values(), "a pod was on the cordoned machine")
    if code:
        print(site.nodes["stages"].log(pod)[-3000:], file=sys.stderr)
    return trial.expect(not code, f"the second attempt ended with {code}")


def play(site: Site, calm: Undisturbed, trial: Trial, root: str, broken: str) -> None:
    """Break a machine, let the run recover, and note in the trial what is wrong."""
    copy(calm.root, root)
    state_pin = root + calm.state_path
    training = Training(site, root, BEFORE[trial.before])
    with site.monitor() as monitor:
        disturb(site, training, trial, state_pin, monitor)
    if broken == "prompts":
        for part in ("rollouts", "rewards"):
            for uri in store.list_uris(f"{layout.iteration(root, 2)}/{part}/"):
                store.delete(uri)
        training.sample(2, "")
    if not recover(site, training, trial, "" if broken == "state" else state_pin):
        return
    values = json.loads((training.out / "2-values").read_text())
    consumed = training.finish(values["state_pin"])
    trial.expect(consumed == calm.digest, "other prompts were consumed than undisturbed")
    losses = np.array(training.losses())
    difference = np.abs(losses - calm.losses).max() if len(losses) == len(calm.losses) else np.inf
    trial.timeline.note(f"largest difference of {len(losses)} losses {difference:.1e}")
    trial.expect(difference < LOSS_TOLERANCE, f"losses differ by {difference:.1e}")
    # The exit task of the run draws what has happened.
    page, summary = (PathArtifact(str(training.out / name)) for name in ("report.html", "summary"))
    report_stage.run(root, "SUCCEEDED", "", "", 0, page, summary)
    told = {event.row for event in gather(root).events}
    trial.expect(told == {*ROWS}, f"the report tells of {sorted(told)} alone")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play all trials; return 1 if one of them did not recover as it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--break", dest="broken", choices=BREAKS, default="")
    parser.add_argument("--keep", type=Path, help="folder for the reports of the runs")
    given = parser.parse_args(arguments)
    rng, failed = random.Random(given.seed), 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(stops_with(EXIT_TRANSIENT))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        site = Site(stack, folder)
        calm = undisturbed(site)
        print(f"seed {given.seed}, undisturbed: {len(calm.losses)} steps, {calm.digest[:16]}")
        for number in range(given.times):
            trial = Trial(
                before=rng.choice([*BEFORE]) if number else "tp 2, dp 2",
                after=rng.choice([*AFTER]) if number else "dp 3",
                moment=rng.uniform(0.0, LATEST_SECONDS),
                machine=rng.choice(site.machines),
            )
            play(site, calm, trial, f"{BUCKET}/trial-{number}", given.broken)
            site.repair()
            page = folder / f"trial-{number}" / "report.html"
            if given.keep and page.exists():
                given.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(page, given.keep / f"trial-{number}.html")
            text = "; ".join(trial.faults) or "recovered, the prompts are those of undisturbed"
            print(f"{number}: {trial.before} -> {trial.after}, {text}", flush=True)
            failed += bool(trial.faults)
    print(f"verdict: {given.times - failed} of {given.times} recovered")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
