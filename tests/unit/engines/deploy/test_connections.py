"""Coordinators and hosts of ranks show each other that they know one token."""

import contextlib
import json
import socket
import threading
import tomllib
from multiprocessing import AuthenticationError

import pytest
import yaml
from pydantic import ValidationError

from planish.__main__ import main
from planish.base.errors import ConfigError, EngineBusy, EngineError, ProtocolError
from planish.engines.config import EngineConfig
from planish.engines.deploy import connections
from planish.engines.deploy.connections import (
    address_of,
    answer_coordinator,
    call_rank,
    proven,
    ranks_token,
)
from tests.integration.waiting import wait_for
from tests.unit.engines.deploy.plans import tiny_plan

TOKEN = "a token of this test"
PEERS = ["a0:9610", "a1:9610", "e0:9610"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A machine that is busy holds up callers for longer than two seconds."""
    monkeypatch.setattr(connections, "HELLO_S", 60.0)


class Host:
    """Answers one caller after another in a thread."""

    def __init__(self, answer=None):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.answer = answer or (lambda caller: answer_coordinator(caller, TOKEN, is_busy=False))
        self.verdicts = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                caller, _ = self.listener.accept()
                with caller:
                    try:
                        self.verdicts.append(self.answer(caller))
                    except (AuthenticationError, OSError) as error:
                        self.verdicts.append(error)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(60)


def test_one_token_opens_a_connection_whose_end_the_kernel_finds_out():
    with Host() as host, call_rank(host.address, TOKEN, 60.0) as end:
        assert end.getpeername() == host.address
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert host.verdicts == [None]


def test_another_token_is_told_to_both():
    with Host() as host, pytest.raises(ProtocolError, match="must have the token of this coord"):
        call_rank(host.address, "the token of another", 60.0)
    assert isinstance(host.verdicts[0], AuthenticationError)


def test_a_host_that_only_says_that_it_knows_the_token_is_refused():
    def play(caller):
        connection = connections.Connection(caller.detach())
        connection.send_bytes(b"#CHALLENGE#" + b"0" * 20)
        connection.recv_bytes()
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes()
        connection.send_bytes(b"0" * 16)
        with contextlib.suppress(EOFError):
            connection.recv_bytes()

    with Host(play) as host, pytest.raises(ProtocolError, match="must have the token"):
        call_rank(host.address, TOKEN, 60.0)


def test_another_release_is_named():
    def old(caller):
        with proven(caller, TOKEN, 60.0, is_caller=False) as connection:
            connection.send_bytes(b'{"release": "0.0.1", "busy": false}')

    with Host(old) as host, pytest.raises(ProtocolError, match=r"release .*, got 0\.0\.1; run one"):
        call_rank(host.address, TOKEN, 60.0)


def test_a_busy_rank_is_called_until_it_is_free():
    def busy(caller):
        answer_coordinator(caller, TOKEN, is_busy=len(host.verdicts) < 2)

    with Host(busy) as host:
        call_rank(host.address, TOKEN, 60.0).close()
    assert host.verdicts == [None] * 3
    with (
        Host(lambda caller: answer_coordinator(caller, TOKEN, is_busy=True)) as host,
        pytest.raises(EngineBusy, match="another coordinator has"),
    ):
        call_rank(host.address, TOKEN, 0.5)


def test_nobody_there_and_somebody_else_there_are_told():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(EngineError, match=f"must listen at 127.0.0.1:{port} within 0.3 s"):
            call_rank(bound.getsockname(), TOKEN, 0.3)
    with (
        Host(lambda caller: caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as host,
        pytest.raises(EngineError, match=r"and whether the port is that of `planish rollout rank`"),
    ):
        call_rank(host.address, TOKEN, 0.3)


@pytest.mark.parametrize("words", [b"", b"\0"])
def test_a_caller_that_says_nothing_or_too_little_is_left_for_the_next_one(words, monkeypatch):
    monkeypatch.setattr(connections, "HELLO_S", 0.1)
    with Host() as host:
        with socket.create_connection(host.address) as stranger:
            stranger.sendall(words)
            wait_for(lambda: host.verdicts, 60.0)
        assert isinstance(host.verdicts[0], OSError)
        monkeypatch.setattr(connections, "HELLO_S", 60.0)
        call_rank(host.address, TOKEN, 60.0).close()


def test_a_token_must_be_there_and_long(monkeypatch):
    monkeypatch.delenv(connections.TOKEN_ENV, raising=False)
    with pytest.raises(ConfigError, match="PLANISH_RANKS_TOKEN must hold a token of at least 16"):
        ranks_token()
    monkeypatch.setenv(connections.TOKEN_ENV, "short")
    with pytest.raises(ConfigError, match="got 5 characters"):
        ranks_token()
    monkeypatch.setenv(connections.TOKEN_ENV, TOKEN)
    assert ranks_token() == TOKEN


@pytest.mark.parametrize("text", ["ranks-0", "ranks-0:", ":9610", "ranks-0:0", "ranks-0:65536"])
def test_an_address_has_a_host_and_a_port(text):
    with pytest.raises(ConfigError, match="must read `host:port`, got "):
        address_of(text)


def test_peers_name_every_rank_once_and_leave_other_digests_alone():
    def config(**settings):
        return EngineConfig(**{"name": "disagg", "attention_ranks": 2, **settings})

    assert config(peers=PEERS).model_dump()["peers"] == tuple(PEERS)
    assert {"peers", "rank_timeout_seconds"}.isdisjoint(config().model_dump())
    for peers in (PEERS[:2], [*PEERS, "e1:9610"], [*PEERS[:2], "a0:9610"]):
        with pytest.raises(ValidationError, match="must name each of the 3 ranks once, got "):
            config(peers=peers)


IMAGE = "registry.example/planish/rollout@sha256:" + "0" * 64


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return tiny_plan(tmp_path_factory.mktemp("plan"))


def render(plan, *options, image=IMAGE):
    """Return exit code and YAML; a tiny model is never worth it."""
    out = plan.with_name("ranks.yaml")
    out.unlink(missing_ok=True)
    words = ["--image", image, "--anyway", "--out", str(out), *options]
    code = main(["rollout", "manifests", str(plan), *words])
    return code, out.read_text() if out.exists() else ""


def objects(text):
    """Return the objects by kind and name."""
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(text)}


def settings(text):
    """Return the settings at the top, as a run's configuration would have them."""
    comment = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    return tomllib.loads("\n".join(comment[comment.index("[engine]") :]))


@pytest.mark.parametrize("kind", ["leaderworkerset", "statefulset"])
def test_every_role_has_its_replicas_gpus_and_service(plan, kind):
    code, text = render(plan, "--kind", kind, "--name", "moe", "--namespace", "team")
    assert code == 0
    made = objects(text)
    sets = "LeaderWorkerSet" if kind == "leaderworkerset" else "StatefulSet"
    names = ["moe-attention", "moe-expert"]
    assert list(made) == [
        ("NetworkPolicy", "moe"),
        *((word, name) for name in names for word in ("Service", sets)),
    ]
    for name in names:
        one = made[sets, name]
        assert one["metadata"]["namespace"] == "team"
        assert one["spec"]["replicas"] == 2
        template = one["spec"].get("template")
        if kind == "leaderworkerset":
            assert one["spec"]["leaderWorkerTemplate"]["size"] == 1
            template = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        else:
            assert one["spec"]["serviceName"] == name
            assert one["spec"]["podManagementPolicy"] == "Parallel"
        labels = template["metadata"]["labels"]
        selector = made["Service", name]["spec"]["selector"]
        assert selector.items() <= labels.items()
        assert labels["planish/rank-role"] == name.removeprefix("moe-")
        assert made["Service", name]["spec"]["clusterIP"] == "None"
        assert made["Service", name]["spec"]["publishNotReadyAddresses"] is True
        (container,) = template["spec"]["containers"]
        assert container["image"] == IMAGE
        assert container["command"] == ["planish", "rollout", "rank"]
        assert container["resources"] == {
            "requests": {"cpu": "10", "memory": "100Gi"},
            "limits": {"memory": "100Gi", "nvidia.com/gpu": 1},
        }
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "probes"}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"control": 9610, "rows": 9611, "probes": 9612}


def test_the_settings_at_the_top_make_a_coordinator_of_these_ranks(plan):
    text = render(plan, "--name", "moe", "--namespace", "team", "--port", "7000")[1]
    given = settings(text)
    config = EngineConfig(**given["engine"])
    assert (config.name, config.attention_ranks, config.expert_ranks) == ("disagg", 2, 2)
    assert config.micro_batches == 3
    assert config.peers == (
        "moe-attention-0.moe-attention.team.svc:7000",
        "moe-attention-1.moe-attention.team.svc:7000",
        "moe-expert-0.moe-expert.team.svc:7000",
        "moe-expert-1.moe-expert.team.svc:7000",
    )
    document = json.loads(plan.read_text())
    assert given["rollout"] == {"max_rows": 2 * 3 * document["plan"]["b_a"]}
    vllm = settings(render(plan, "--engine", "vllm_disagg")[1])["engine"]
    assert EngineConfig(**vllm).name == "vllm_disagg"


def test_two_types_of_gpus_go_to_nodes_of_their_own(tmp_path):
    plan = tiny_plan(tmp_path, "--expert-gpus", "l40s")
    h100, l40s = "h100:example.com/gpu=H100", "l40s:example.com/gpu=L40S"
    made = objects(render(plan, "--nodes", h100, "--nodes", l40s, "--kind", "statefulset")[1])
    for role, label in (("attention", "H100"), ("expert", "L40S")):
        pod = made["StatefulSet", f"ranks-{role}"]["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == {"example.com/gpu": label}


def test_ranks_on_the_cpu_ask_for_no_gpu(plan):
    made = objects(render(plan, "--device", "cpu", "--kind", "statefulset", "--cpu", "500m")[1])
    pod = made["StatefulSet", "ranks-expert"]["spec"]["template"]["spec"]
    assert "nodeSelector" not in pod
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "100Gi"}
    assert container["args"][-2:] == ["--device", "cpu"]
    assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "h100"], "`--nodes` must read GPU:LABEL=VALUE"),
        (["--nodes", "h200:a=b"], "must name a type of GPU of the plan, ['h100'], got 'h200'"),
        (["--name", "Ranks"], "`--name` must be a name of Kubernetes"),
        (["--namespace", "a: b"], "`--namespace` must be a name of Kubernetes"),
        (["--memory", "160GB"], "`--memory` must be a quantity"),
        (["--image", "a b"], "`--image` must be a reference of an image, got 'a b'"),
        (["--image", ""], "`--image` must be a reference of an image, got ''"),
        (["--out", "/nowhere/ranks.yaml"], "`--out` must be a file that can be written"),
    ],
)
def test_options_that_do_not_fit_are_refused(plan, capsys, options, said):
    assert render(plan, *options) == (2, "")
    assert said in capsys.readouterr().err


def test_a_plan_that_advises_against_it_is_refused(plan, capsys):
    document = json.loads(plan.read_text())
    document["verdict"] = "do not disaggregate"
    other = plan.with_name("against.json")
    other.write_text(json.dumps(document))
    assert main(["rollout", "manifests", str(other), "--image", IMAGE]) == 2
    assert (
        "got its verdict 'do not disaggregate': take the engine `vllm`" in capsys.readouterr().err
    )
    assert main(["rollout", "manifests", str(other), "--image", IMAGE, "--anyway"]) == 0


def test_ranks_that_would_share_a_layer_are_refused(tmp_path, capsys):
    plan = tiny_plan(tmp_path, "--tp-a", "2")
    assert render(plan)[0] == 2
    assert "got 2 for attention and 1 for experts: plan with `--tp-a 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"schema": "rollout-plan/9"},
            "schema: Input should be 'rollout-plan/1', got 'rollout-plan/9'",
        ),
        ({"schema": None}, "schema: Input should be 'rollout-plan/1', got None"),
        ({"gpus": {}}, "KeyError: 'h100'"),
        ({"plan": {}}, "plan.attention_gpu: Field required"),
    ],
)
def test_other_documents_are_refused(plan, capsys, change, said):
    other = plan.with_name("other.json")
    other.write_text(json.dumps({**json.loads(plan.read_text()), **change}))
    assert render(other)[0] == 2
    error = capsys.readouterr().err
    assert said in error
    assert "write it anew" in error


def test_redundant_experts_of_the_plan_become_replicas(tmp_path):
    plan = tiny_plan(tmp_path, "--redundancy", "0.5")
    assert settings(render(plan)[1])["engine"]["redundant_experts"] == 2
