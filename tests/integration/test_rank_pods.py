"""Ranks as pods: what the rendered manifests start, run here as processes, with a real coordinator.

Each pod is a process with the command and the environment of its container on a loopback address of
its own; the mount /scratch is a folder of the test.
"""

import json
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from planish.__main__ import main
from planish.base.errors import ConfigError, EngineBusy, EngineError, ProtocolError
from planish.engines.config import EngineConfig
from planish.engines.deploy.connections import TOKEN_ENV
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.requests import ModelRef
from planish.models.policy import save_policy
from planish.records.rollouts import FinishReason
from tests import pages
from tests.integration.test_disagg_equality import weights
from tests.integration.waiting import wait_for
from tests.processes import below, marked, marks, wait_until_none
from tests.unit.engines.deploy.plans import tiny_plan
from tests.unit.engines.disagg.instances import moe_policy
from tests.unit.engines.pinned import PinnedWeights
from tests.unit.engines.tiny import ids_of, request, start

pytestmark = pytest.mark.slow

TOKEN = "the token of these pods"
REQUESTS = [request(i, 20) for i in range(6)]


@dataclass
class Pod:
    """A rank's container as a process."""

    name: str
    ip: str
    process: subprocess.Popen

    def page(self, path):
        status, text = pages.get(f"http://{self.ip}:9612{path}")
        return status, json.loads(text) if text.startswith("{") else text


class Cluster:
    """The pods of rendered manifests, and the settings of their coordinator."""

    def __init__(self, folder: Path, text: str, subnet: int) -> None:
        self.folder, self.pods, self.names = folder, [], {}
        for one in yaml.safe_load_all(text):
            if one["kind"] == "StatefulSet":
                for index in range(one["spec"]["replicas"]):
                    name, service = f"{one['metadata']['name']}-{index}", one["spec"]["serviceName"]
                    ip = f"127.{subnet}.{os.getpid() % 250 + 1}.{len(self.pods) + 1}"
                    self.names[f"{name}.{service}.planish.svc"] = ip
                    (container,) = one["spec"]["template"]["spec"]["containers"]
                    self.pods.append(Pod(name, ip, self.run(container, name, ip)))
        comment = [line[2:] for line in text.splitlines() if line.startswith("# ")]
        given = tomllib.loads("\n".join(comment[comment.index("[engine]") :]))
        self.rows, settings = given["rollout"]["max_rows"], given["engine"]
        peers = [peer.rpartition(":") for peer in settings.pop("peers")]
        peers = [f"{self.names[host]}:{port}" for host, _, port in peers]
        self.config = EngineConfig(**settings, peers=peers)

    def run(self, container, name, ip) -> subprocess.Popen:
        """Start a container as the kubelet would."""
        scratch = self.folder / name
        scratch.mkdir()
        values = {"POD_IP": ip, TOKEN_ENV: TOKEN}
        for variable in container["env"]:
            if "value" in variable:
                value = variable["value"].replace("/scratch", str(scratch))
                values[variable["name"]] = value
            source = variable.get("valueFrom", {})
            assert variable["name"] in values or source["secretKeyRef"]["optional"] is True
        # The image has the package and its commands; two cores are shared.
        values["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        values |= {"OMP_NUM_THREADS": "1", "TEST_FOLDER": str(self.folder)}
        values["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        words = [*container["command"], *container["args"]]
        words = [word.replace("$(POD_IP)", ip) for word in words]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(words, env=values, stdout=log, stderr=log, cwd=scratch)

    def log(self, name) -> str:
        return (self.folder / f"{name}.log").read_text()

    def engine(self, **changes) -> DisaggEngine:
        config = self.config.model_copy(update=changes)
        return DisaggEngine(max_rows=self.rows, config=config)

    def readiness(self) -> list:
        """Return status and held pin of each pod."""
        found = [pod.page("/readyz") for pod in self.pods]
        return [(status, page["held"] if page else None) for status, page in found]

    def close(self) -> list[int]:
        """End the pods as the kubelet does, and return their exit codes."""
        for pod in self.pods:
            pod.process.send_signal(signal.SIGTERM)
        return [pod.process.wait(20) for pod in self.pods]


@pytest.fixture(scope="module")
def pins(tmp_path_factory):
    """Two policies in a store that every pod reaches."""
    folder = tmp_path_factory.mktemp("store")
    refs = [
        save_policy(
            (folder / f"policy-{seed}").as_uri(),
            moe_policy("Qwen3Moe", seed),
            version=seed,
            parents={},
            attributes={},
        )
        for seed in range(2)
    ]
    return [ref.pin() for ref in refs]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    plan, out = tiny_plan(folder), folder / "ranks.yaml"
    options = ["--image", "planish/rollout:0.1.0", "--device", "cpu", "--kind", "statefulset"]
    words = [str(plan), *options, "--anyway", "--out", str(out)]
    assert main(["rollout", "manifests", *words]) == 0
    with ExitStack() as files, pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_ENV, TOKEN)
        cluster = Cluster(folder, out.read_text(), subnet=41)
        files.callback(wait_until_none, folder, 20.0)
        files.callback(cluster.close)
        wait_for(
            lambda: {pod.page("/healthz")[0] for pod in cluster.pods} == {200},
            60.0,
            lambda: "".join(cluster.log(pod.name) for pod in cluster.pods),
        )
        yield cluster


def idle(cluster):
    """Wait until every pod waits for a coordinator again."""
    wait_for(lambda: cluster.readiness() == [(503, "")] * 4)


def ready(cluster, pin):
    """Wait until every pod says that it holds these weights: a rank tells its pod by a pipe."""
    wait_for(lambda: cluster.readiness() == [(200, pin)] * 4)


def lose_a_rank(cluster, engine):
    """Stop a rank of one pod while it works; what was asked for must end."""
    engine.submit(REQUESTS)
    for _ in range(3):
        engine.poll(0.0)
    (victim,) = below(cluster.pods[3].process.pid)
    os.kill(victim, signal.SIGSTOP)
    outputs = {}
    while len(outputs) < len(REQUESTS):
        outputs.update((o.request_id, o) for o in engine.poll(1.0))
    assert {output.finish_reason for output in outputs.values()} == {FinishReason.ABORT}
    assert all("rank 3 is lost" in output.error for output in outputs.values())


def test_pods_give_the_tokens_of_the_wanted_weights_and_outlive_ranks_and_coordinators(
    cluster, pins, tmp_path
):
    idle(cluster)
    expected = [ids_of(start(moe_policy("Qwen3Moe", s)).generate(REQUESTS)) for s in range(2)]
    with cluster.engine() as engine:
        engine.start(ModelRef(pin=pins[0]))
        ready(cluster, pins[0])
        assert ids_of(engine.generate(REQUESTS)) == expected[0]
        with pytest.raises(EngineBusy, match="another coordinator has"):
            cluster.engine(rank_timeout_seconds=1.0).start(ModelRef(pin=pins[0]))
        engine.update_weights(PinnedWeights(pins[1]), 1)
        ready(cluster, pins[1])
        pod = cluster.pods[0]
        assert pod.page("/readyz")[1]["version"] == 1
        assert ids_of(engine.generate(REQUESTS)) == expected[1]
        with pytest.raises(EngineError, match="fetch a policy by its pinned URI"):
            engine.update_weights(weights(moe_policy("Qwen3Moe")), 2)
        assert ids_of(engine.generate(REQUESTS)) == expected[1]
        lose_a_rank(cluster, engine)
    # The next one calls while the ranks of the last still end.
    ranks_end_with_a_coordinator_that_is_killed(cluster, pins[0], tmp_path)


def test_a_coordinator_with_another_token_is_refused(cluster, pins, monkeypatch):
    idle(cluster)
    monkeypatch.setenv(TOKEN_ENV, "some other token of 16")
    with pytest.raises(ProtocolError, match="must have the token of this coordinator"):
        cluster.engine().start(ModelRef(pin=pins[0]))
    monkeypatch.delenv(TOKEN_ENV)
    with pytest.raises(ConfigError, match=TOKEN_ENV):
        cluster.engine().start(ModelRef(pin=pins[0]))
    assert "refused caller=" in cluster.log("ranks-attention-0")


def ranks_end_with_a_coordinator_that_is_killed(cluster, pin, tmp_path):
    code = (
        "import json, sys\n"
        "from planish.engines.config import EngineConfig\n"
        "from planish.engines.disagg.engine import DisaggEngine\n"
        "from planish.engines.requests import ModelRef\n"
        "config = EngineConfig(**json.loads(sys.argv[1]))\n"
        "engine = DisaggEngine(max_rows=6, config=config)\n"
        "engine.start(ModelRef(pin=sys.argv[2]))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    settings = json.dumps(cluster.config.model_dump(exclude_defaults=True))
    with subprocess.Popen(
        [sys.executable, "-c", code, settings, pin],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=marks(tmp_path),
    ) as coordinator:
        assert coordinator.stdout.readline() == b"ready\n"
        ready(cluster, pin)
        coordinator.kill()
    assert marked(tmp_path) == []
    idle(cluster)
    assert not [pid for pod in cluster.pods for pid in below(pod.process.pid)]


def test_a_pod_that_is_told_to_end_does_so_with_its_rank(cluster, pins, tmp_path):
    """The last test of this file: no pod is left."""
    idle(cluster)
    engine = cluster.engine()
    engine.start(ModelRef(pin=pins[0]))
    assert cluster.close() == [0] * 4
    wait_until_none(cluster.folder, 20.0)
    engine.close()
