"""The best deployment by trying everything, written from the formulas alone.

It shares shapes and data sheets with the planner, and no function.
"""

import itertools
import math
import random

from planish.engines.planner.gpus import GPUS
from planish.engines.planner.models import MoeModel
from planish.engines.planner.performance import Constants, Workload
from planish.engines.planner.query import Query, Space


def problem(seed):
    """Return a random small problem."""
    draw = random.Random(seed)
    heads, groups = draw.choice([4, 8, 16]), draw.choice([1, 2, 4])
    experts = draw.choice([4, 8, 16])
    model = MoeModel(
        name=f"random-{seed}",
        layers=draw.randint(4, 48),
        hidden_size=128 * draw.randint(8, 48),
        expert_size=256 * draw.randint(4, 40),
        num_experts=experts,
        experts_per_token=draw.randint(1, min(4, experts)),
        num_heads=heads,
        num_kv_heads=heads // groups,
        head_dim=128,
        vocab_size=1000 * draw.randint(8, 150),
    )
    priced = ["l20", "h800", "a800", "h20", "l40s"]
    sides = [[GPUS[name] for name in draw.sample(priced, draw.randint(1, 2))] for _ in range(2)]
    space = Space(
        tp_attention=(1, 2, 4),
        tp_experts=(1, 2),
        replicas=tuple(range(1, draw.randint(2, 6))),
        micro_batches=tuple(draw.sample((1, 2, 3, 4), 2)),
        expert_nodes=(experts, experts // 2),
        slo_seconds=draw.choice([0.01, 0.03, 0.15, math.inf]),
    )
    workload = Workload(input_tokens=draw.uniform(3000, 30000), imbalance=draw.choice([1.0, 1.3]))
    objective = draw.choice(["gpu", "cost", "watt"])
    return Query(model, *sides, workload=workload, objective=objective, space=space)


def gemm(rows, k, n, gpu, c):
    computing = 2 * rows * k * n / (gpu.flops * c.compute_efficiency)
    reading = 2 * k * n / (gpu.memory_rate * c.memory_efficiency)
    return max(computing, reading) + c.kernel_seconds


def reduced(rows, width, tp, gpu, c):
    if tp == 1:
        return 0.0
    volume = 2 * (tp - 1) / tp * 2 * rows * width
    return volume / (gpu.link_rate * c.link_efficiency) + c.link_seconds * math.log2(tp)


def iteration(model, load, a, e, tp_a, tp_e, n_a, n_e, m, rows, c):
    """Return the seconds of an iteration with `rows` on each replica."""
    h, local, kv = model.hidden_size, model.num_experts // n_e, min(tp_a, model.num_kv_heads)
    q = model.num_heads // tp_a * model.head_dim
    attention = gemm(rows, h, q + 2 * model.num_kv_heads * model.head_dim // kv, a, c)
    attention += gemm(rows, q, h, a, c)
    cached = load.length * rows * 4 * model.num_kv_heads * model.head_dim / kv
    attention += cached / (a.memory_rate * c.memory_efficiency) + c.kernel_seconds
    attention += reduced(rows, h, tp_a, a, c) + c.layer_seconds
    total = rows * n_a * model.experts_per_token / n_e * load.imbalance
    pair = [(h, 2 * model.expert_size // tp_e), (model.expert_size // tp_e, h)]
    experts = local * sum(gemm(total / local, *shape, e, c) - c.kernel_seconds for shape in pair)
    experts += 2 * c.kernel_seconds + reduced(total, h, tp_e, e, c) + c.layer_seconds
    sent = 2 * rows * h * model.experts_per_token / tp_a
    received = 2 * total * h / tp_e

    def transfer(size, gpu):
        return size / (gpu.network_rate * (size / (size + c.half_rate_bytes)))

    network = max(transfer(sent, a), transfer(received, e)) + c.network_seconds
    logits = gemm(rows, h, model.vocab_size // tp_a, a, c)
    slowest, trip = max(attention, experts, network), attention + experts + 2 * network
    inside = max(m * slowest, trip) * (model.layers - 1) + trip + (m - 1) * slowest
    return inside + m * logits


def best(problem):
    """Return (value, shape) of the best deployment, or None; every batch size is tried."""
    model, load, space, c, found = problem.model, problem.workload, problem.space, Constants(), []
    for a, e, tp_a, tp_e, n_a, n_e, m in itertools.product(
        *(problem.attention_gpus, problem.expert_gpus, space.tp_attention, space.tp_experts),
        *(space.replicas, space.expert_nodes, space.micro_batches),
    ):
        expert_weights = 2 * model.expert_parameters * model.num_experts / n_e
        uneven = model.num_heads % tp_a or model.expert_size % tp_e
        if uneven or expert_weights >= tp_e * e.memory_bytes * 0.9:
            continue
        kv = 4 * model.num_kv_heads * model.head_dim // min(tp_a, model.num_kv_heads)
        free = a.memory_bytes * 0.9 - model.attention_bytes(tp_a)
        unit = {
            "gpu": tp_a * n_a + tp_e * n_e,
            "cost": tp_a * n_a * a.price + tp_e * n_e * e.price,
            "watt": tp_a * n_a * a.watts + tp_e * n_e * e.watts,
        }[problem.objective]
        rows = 1
        while m * rows * load.length * kv * model.layers < free:
            took = iteration(model, load, a, e, tp_a, tp_e, n_a, n_e, m, rows, c)
            if took > space.slo_seconds:
                break
            value = rows * m * n_a / took / unit
            found.append((value, (a.name, e.name, tp_a, tp_e, n_a, n_e, m, rows)))
            rows += 1
    return max(found, default=None)
