"""`planish rollout afd`: launch files for the public attention-FFN plug-in of vLLM, from a plan.

The plug-in is external and pinned to one release of vLLM, so that it has an environment of its own
and nothing of it is imported here. Its rules are checked against the plan, what must change to meet
them is said, and so is what it can not do. Nothing here has been run on GPUs.

Source: the documents of `vllm-afd-plugin` (github.com/vllm-project/afd-plugin) as of August 2026:
README, user guide of `P2pNcclAFDConnector`, request 216 for Qwen3-MoE.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from planish.base.errors import ConfigError
from planish.base.text import Table
from planish.engines.planner.deployment import Deployment
from planish.engines.planner.documents import PlannedRun, read_plan

VLLM = "0.26.0"
"""The only release of vLLM that the plug-in supports."""
MICRO_BATCHES = 2
"""Exactly so many: the dual-batch overlap of vLLM."""
CONNECTOR = "P2pNcclAFDConnector"
ARCHITECTURES = {
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "qwen3-235b": "Qwen3MoeForCausalLM",
    "qwen3-30b": "Qwen3MoeForCausalLM",
}
"""Of the models that the planner knows by name."""
SUPPORTED = (
    "DeepseekForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures that the plug-in registers."""
LIMITS = (
    "three or more micro-batches: it has exactly two, so that time on the network stays visible",
    "fewer attention ranks than FFN ranks, or a number that these do not divide",
    "replicas of busy experts, or a placement of experts by their load",
    "new weights while it serves: none of its documents says how the FFN role takes them",
    "requests to the FFN role: it has no scheduler and no cache; ask the attention role only",
    "another release of vLLM than 0.26.0, its model runner 2, graphs of other than decode steps",
    "several machines: its recipes show one, and say nothing of others",
)
"""What the plug-in can not do, or nobody has shown."""
PUBLISHED = (
    "published: it gained 1.0 % of throughput and lost 8.9 % of time to first token on 8 PCIe GPUs"
)
_RPC_OFFSET = 10


@dataclass(frozen=True)
class Launch:
    """One process to start on one machine."""

    role: str
    """`attention` or `ffn`."""
    machine: str
    """Address of the machine."""
    env: dict[str, str]
    """Environment beside that of the machine."""
    argv: list[str]
    """The command, word by word; no shell is needed."""


@dataclass(frozen=True)
class Topology:
    """Ranks of both roles, and what the plan had in their place."""

    replicas: int
    """Attention replicas: the plan's, or more, so that the rules hold."""
    rows: int
    """Requests of one replica at once, in two micro-batches."""
    attention_ranks: int
    """GPUs with attention."""
    ffn_ranks: int
    """GPUs with experts."""
    changes: tuple[str, ...]
    """What differs from the plan, in sentences."""


def afd(options: argparse.Namespace, _: object) -> Iterator[Table | str]:
    """Check, write the launch files into `--out`, and yield what was done.

    Raises:
        ConfigError: no plan, or one that the plug-in can not run.
    """
    planned = read_plan(options.plan)
    architecture = check(planned, options)
    topology = fit(planned)
    launches = launch(planned, options, topology)
    document = {
        "schema": "afd-launch/1",
        "plugin": {"name": "vllm-afd-plugin", "vllm": VLLM, "connector": CONNECTOR},
        "architecture": architecture,
        "topology": asdict(topology),
        "launches": [asdict(one) for one in launches],
        "cannot": list(LIMITS),
        "published": PUBLISHED,
    }
    text = describe(planned, topology, launches)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "launch.json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")
        (options.out / "launch.txt").write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"`--out` must be a folder that can be written, got {options.out}: {error}"
        ) from None
    rows = [[one.role, one.machine, one.env["CUDA_VISIBLE_DEVICES"]] for one in launches]
    yield Table(f"wrote launch.json and launch.txt for vLLM {VLLM}", ("role", "on", "GPUs"), rows)
    for title, lines in (("changed", topology.changes), ("it can not do", LIMITS)):
        if lines:
            yield "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
    yield PUBLISHED


def check(planned: PlannedRun, options: argparse.Namespace) -> str:
    """Return the architecture of a plan that the plug-in can run.

    Raises:
        ConfigError: it can not; all faults at once.
    """
    name = planned.deployment.model.name
    architecture = options.architecture or ARCHITECTURES.get(name, "")
    faults = []
    if architecture not in SUPPORTED:
        faults.append(
            f"the plug-in runs models of {', '.join(SUPPORTED)}, got {architecture or name!r}: "
            "take the engine `disagg`, or name the model's `--architecture`"
        )
    if options.vllm_version != VLLM:
        faults.append(f"the plug-in is for vLLM {VLLM}, got {options.vllm_version!r}")
    if planned.verdict == "do not disaggregate" and not options.anyway:
        faults.append(
            "the plan must be for disaggregating, got its verdict 'do not disaggregate': serve it "
            "colocated, or say `--anyway`"
        )
    if planned.workload.redundancy:
        faults.append(
            f"the plug-in has no replicas of experts, got {planned.workload.redundancy:g} of them: "
            "plan without `--redundancy`"
        )
    if planned.deployment.model.num_experts % (planned.deployment.n_e * planned.deployment.tp_e):
        faults.append(
            "FFN ranks hold whole experts, so their number must divide the "
            f"{planned.deployment.model.num_experts} of a layer, got "
            f"{planned.deployment.n_e * planned.deployment.tp_e}: plan with other `--tp-e`"
        )
    if faults:
        raise ConfigError("; ".join(faults))
    return architecture


def fit(planned: PlannedRun) -> Topology:
    """Return the ranks nearest to a plan that meet the rules of the plug-in.

    Attention ranks are at least as many as FFN ranks and a multiple of them; replicas are added
    until they are. The rows of a replica stay, in two micro-batches, as far as its memory holds
    them.

    Raises:
        ConfigError: no row fits.

    Example::

        4 replicas of 2 GPUs, 3 expert nodes of 2  ->  6 replicas: 12 attention, 6 FFN ranks
    """
    one = planned.deployment
    ffn = one.n_e * one.tp_e
    step = ffn // math.gcd(ffn, one.tp_a)
    replicas = math.ceil(one.n_a / step) * step
    changes = []
    if replicas != one.n_a:
        changes.append(
            f"{replicas} attention replicas in place of {one.n_a}: their {replicas * one.tp_a} "
            f"GPUs must be a multiple of the {ffn} with experts"
        )
    in_flight = planned.micro_batches * planned.rows
    rows = min(math.ceil(in_flight / MICRO_BATCHES), one.most_rows(MICRO_BATCHES))
    if rows < 1:
        raise ConfigError(
            "a replica must hold a row in each of two micro-batches, got memory for none; plan "
            "with more GPUs to a replica"
        )
    if planned.micro_batches != MICRO_BATCHES:
        changes.append(
            f"2 micro-batches of {rows} rows in place of {planned.micro_batches} of {planned.rows}"
        )
    if changes:
        rate, gpus = estimate(one, replicas, rows)
        changes.append(
            f"by the plan's own model {rate / gpus:.0f} tokens/s per GPU in place of "
            f"{planned.tokens_per_second / one.gpus:.0f} (simulated; the plug-in sends other "
            "messages, which no plan knows)"
        )
    if one.tp_e > 1:
        changes.append(
            f"each FFN rank holds whole experts, where the plan splits each over {one.tp_e} GPUs"
        )
    if one.attention_gpu.name != one.expert_gpu.name:
        changes.append(
            f"{one.attention_gpu.name} and {one.expert_gpu.name} in one instance, as planned; no "
            "recipe of the plug-in mixes types of GPU"
        )
    return Topology(replicas, MICRO_BATCHES * rows, replicas * one.tp_a, ffn, tuple(changes))


def estimate(one: Deployment, replicas: int, rows: int) -> tuple[float, int]:
    """Return tokens per second and GPUs of a deployment with other replicas and two micro-batches.

    Experts take as many times more rows as there are more replicas; the network is taken as it is.
    """
    factor = replicas / one.n_a
    times = one.times(rows)
    experts = one.experts.seconds(rows * one.expert_rows * factor)
    total = replace(times, experts=experts).iteration(MICRO_BATCHES, one.model.layers)
    gpus = replicas * one.tp_a + one.n_e * one.tp_e
    return replicas * MICRO_BATCHES * rows / total, gpus


def launch(planned: PlannedRun, options: argparse.Namespace, topology: Topology) -> list[Launch]:
    """Return the processes, those with FFN first.

    Raises:
        ConfigError: not as many machines as the GPUs need, or ports that meet.
    """
    one = planned.deployment
    roles = {
        "ffn": (one.n_e, one.tp_e, one.expert_gpu, options.ffn_machines),
        "attention": (topology.replicas, one.tp_a, one.attention_gpu, options.attention_machines),
    }
    machines = {}
    for role, (engines, tp, gpu, given) in roles.items():
        local = gpu.per_node // tp
        needed = math.ceil(engines / local) if local else 0
        names = [name for name in given.split(",") if name]
        if len(names) != needed or len(set(names)) != needed:
            raise ConfigError(
                f"`--{role}-machines` must name the {needed} machines of {gpu.per_node} "
                f"{gpu.name} that {engines} x {tp} GPUs need, got {names}"
            )
        machines[role] = names
    last = options.port + topology.ffn_ranks
    taken = {options.http_port + add for add in (0, 1, _RPC_OFFSET, _RPC_OFFSET + 1)}
    if last > 65535 or taken & set(range(options.port, last + 1)) or max(taken) > 65535:
        raise ConfigError(
            f"`--port` must leave {topology.ffn_ranks + 1} ports from {options.port} on free, got "
            f"`--http-port` {options.http_port}; choose others"
        )
    shared = set(machines["ffn"]) & set(machines["attention"])
    if shared and topology.attention_ranks + topology.ffn_ranks > one.expert_gpu.per_node:
        raise ConfigError(
            f"roles may share a machine only if both fit its {one.expert_gpu.per_node} GPUs, got "
            f"{topology.attention_ranks} and {topology.ffn_ranks} on {sorted(shared)}"
        )
    launches = []
    for number, (role, (engines, tp, gpu, _)) in enumerate(roles.items()):
        local = gpu.per_node // tp
        first_gpu = topology.ffn_ranks if role == "attention" and shared else 0
        for index, machine in enumerate(machines[role]):
            start = index * local
            count = min(local, engines - start)
            devices = range(first_gpu, first_gpu + count * tp)
            argv = command(options, topology, role, engines, tp, machines)
            if len(machines[role]) > 1:
                rpc = options.http_port + _RPC_OFFSET + number
                spread = {
                    "--data-parallel-size-local": count,
                    "--data-parallel-start-rank": start,
                    "--data-parallel-address": machines[role][0],
                    "--data-parallel-rpc-port": rpc,
                }
                argv += [str(word) for option in spread.items() for word in option]
                argv += ["--headless"] if index else []
            if not index:
                argv += ["--host", machine, "--port", str(options.http_port + 1 - number)]
            env = {
                "VLLM_USE_V2_MODEL_RUNNER": "0",
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
            }
            launches.append(Launch(role, machine, env, argv))
    return launches


def command(
    options: argparse.Namespace,
    topology: Topology,
    role: str,
    engines: int,
    tp: int,
    machines: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the words of one role that do not depend on the machine."""
    settings = {
        "role": role,
        "connector": CONNECTOR,
        "host": machines["ffn"][0],
        "port": options.port,
        "num_attention_ranks": topology.attention_ranks,
        "num_ffn_ranks": topology.ffn_ranks,
    }
    words: dict[str, Any] = {
        "--data-parallel-size": engines,
        "--tensor-parallel-size": tp,
        "--max-num-seqs": topology.rows,
        "--max-num-batched-tokens": max(topology.rows, options.batch_tokens),
        "--max-model-len": options.max_model_len,
        "--dbo-decode-token-threshold": MICRO_BATCHES,
        "--additional-config": json.dumps({"afd": settings}),
    }
    graph = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [topology.rows]}
    if not options.eager:
        words["--max-cudagraph-capture-size"] = topology.rows
        words["--compilation-config"] = json.dumps(graph)
    flags = ["--enable-expert-parallel", "--enable-dbo", *["--enforce-eager"] * options.eager]
    argv = ["vllm", "serve", options.policy, "--dtype", "bfloat16", *flags]
    return [*argv, *(str(word) for option in words.items() for word in option)]


def describe(planned: PlannedRun, topology: Topology, launches: Sequence[Launch]) -> str:
    """Return the readable form of the launch files."""
    lines = [
        f"Attention and FFN apart for {planned.deployment.model.name}, with vLLM {VLLM} and "
        "vllm-afd-plugin in one environment.",
        f"{topology.attention_ranks} attention ranks, {topology.ffn_ranks} FFN ranks, two "
        "micro-batches. Start all; ask the attention role only.",
        "",
    ]
    for one in launches:
        lines += [f"{one.role} on {one.machine}:"]
        lines += [f"  {name}={value}" for name, value in one.env.items()]
        lines.append(f"  {' '.join(one.argv[:3])}")
        for word in one.argv[3:]:
            if word.startswith("--"):
                lines.append(f"    {word}")
            else:
                lines[-1] += f" {word}"
        lines.append("")
    for title, sentences in (("Changed", topology.changes), ("It can not do", LIMITS)):
        if sentences:
            lines += [f"{title}:", *(f"- {sentence}" for sentence in sentences), ""]
    return "\n".join([*lines, PUBLISHED, ""])
