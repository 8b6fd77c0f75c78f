"""A training step on paper: bytes, operations and kernels of the program's own modules.

    python -m tests.benchmarks.bench_roofline

Layers and LM head of published sizes run on the device `meta`, forward and backward, with no
numbers in them. A step between products reads its inputs and writes its result. A compiled graph
reads what enters a chain of such steps once, and once more for each sum over a vocabulary that the
next one waits for. Seconds follow from the stated rates, and are no measurement.
"""

import contextlib
import functools
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from unittest import mock

import numpy as np
import torch
import transformers
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from planish.base.parallel import Grid
from planish.models import logprobs
from planish.models.packing import pack_rows
from planish.models.shapes import shape_of
from planish.stages.train.config import TrainConfig
from planish.stages.train.fsdp2 import Fsdp2Sharding
from planish.stages.train.trainer import set_up_torch
from tests.benchmarks.facts import write_result
from tests.gpu.models import HALF, ONE_AND_A_HALF, PEAK_FLOPS, Size

META = torch.device("meta")
SIZES = (
    HALF,
    ONE_AND_A_HALF,
    Size("Qwen2.5-7B", 3584, 18_944, 28, 28, 4, 152_064),
    Size("Qwen2.5-32B", 5120, 27_648, 64, 40, 8, 152_064),
)
PROMPT, ROW = 256, 2048
"""Tokens of a prompt, and of a row with its response."""
GPUS, STEP_ROWS = 8, 512
"""GPUs that share a model, and rows of one optimizer step."""
LONG = 1 << 14
"""A row with more numbers does not stay on a processor of the GPU between two sums."""


@dataclass(frozen=True)
class Rates:
    """Sustained rates of one H200 SXM.

    Source: NVIDIA's data sheet (989 and 67 TFLOP/s, 4.8 TB/s, 450 GB/s of NVLink each way);
    FlashAttention-3, arXiv 2407.08608, section 1 (FlashAttention-2 reaches 35 % of the peak). The
    other shares are guesses.
    """

    half_flops: float = 0.7 * PEAK_FLOPS
    """Products of bfloat16 operands."""
    float_flops: float = 0.8 * 67e12
    """Products of float32 operands, outside of tensor cores."""
    attention_flops: float = 0.35 * PEAK_FLOPS
    memory_bytes: float = 0.85 * 4.8e12
    link_bytes: float = 0.8 * 450e9
    kernel_seconds: float = 5e-6
    """Shortest time from one kernel to the next."""


@dataclass(frozen=True)
class Way:
    """What differs between two programs."""

    operands: torch.dtype
    """Of the LM head."""
    chunk: int
    compiles: bool
    checkpoints: bool
    tokens: int
    """Of a micro-batch."""


BEFORE = Way(torch.float32, 1024, False, True, 24_576)
WAYS = {
    "before": BEFORE,
    "head": replace(BEFORE, operands=torch.bfloat16, chunk=logprobs.TOKENS_PER_CHUNK["cuda"]),
    "head, compiled": Way(torch.bfloat16, 8192, True, True, 24_576),
    "after": Way(torch.bfloat16, 8192, True, False, 12_288),
}
VIEWS = {
    *("getitem", "view", "reshape", "_unsafe_view", "t", "transpose", "permute"),
    *("expand", "unsqueeze", "squeeze", "slice", "select", "alias", "detach"),
    *("as_strided", "split", "split_with_sizes", "unbind", "sym_size", "sym_numel"),
    *("lift_fresh"),
}  # fmt: skip
PRODUCTS = frozenset(["mm", "addmm", "addmm_", "bmm", "baddbmm", "linear"])
ATTENTION = frozenset(["_varlen_attn", "_varlen_attn_backward"])


@dataclass
class Work:
    """Bytes, operations and kernels of one kind."""

    bytes: int = 0
    flops: int = 0
    kernels: int = 0
    seconds: float = 0.0


class Ledger(TorchDispatchMode):
    """Work by part of the model and kind of kernel."""

    def __init__(self, rates, attended):
        super().__init__()
        self.rates, self.attended = rates, attended
        self.part, self.work = "", defaultdict(Work)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if name not in VIEWS and not name.startswith("empty"):
            self.add(name, tensors((args, kwargs)), tensors(result))
        return result

    def add(self, name, given, made, reads=1):
        """Add one kernel."""
        size = reads * num_bytes(given) + num_bytes(made)
        kind, flops, rate = "steps", 0, 1.0
        if name in PRODUCTS:
            left, right = [x for x in given if x.ndim >= 2][-2:]
            kind, flops = "products", 2 * left.numel() * right.shape[-1]
            rate = self.rates.half_flops
            if left.dtype == torch.float32:
                kind, rate = "float32 products", self.rates.float_flops
        elif name in ATTENTION:
            # Two products of half a square forward; five backward.
            query = given[1] if "backward" in name else given[0]
            products = 5 if "backward" in name else 2
            kind, rate = "attention", self.rates.attention_flops
            flops = products * query.shape[1] * query.shape[2] * self.attended
        work = self.work[self.part, kind]
        work.bytes, work.flops = work.bytes + size, work.flops + flops
        work.kernels += reads
        least = max(flops / rate, size / self.rates.memory_bytes)
        work.seconds += max(least, reads * self.rates.kernel_seconds)


def tensors(values):
    return list({id(x): x for x in tree_leaves(values) if isinstance(x, torch.Tensor)}.values())


def num_bytes(found):
    return sum(x.numel() * x.itemsize for x in found)


def count_graph(graph, ledger):
    """Return the kernels of a graph: name, inputs, outputs and reads of each."""
    values = {n: tensors(n.meta.get("val")) for n in graph.nodes}
    name_of = {n: n.target.__name__.partition(".")[0] for n in graph.nodes if callable(n.target)}
    is_view = {n: name_of.get(n) in VIEWS for n in graph.nodes}

    def source(node):
        while is_view[node] and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    alone = PRODUCTS | ATTENTION | {"index_put", "scatter", "scatter_add", "embedding"}
    fused = [n for n, name in name_of.items() if name not in alone and not is_view[n]]
    fused = [n for n in fused if values[n]]
    inputs = {n: list(dict.fromkeys(map(source, n.all_input_nodes))) for n in graph.nodes}
    group = {n: n for n in fused}

    def root(node):
        while group[node] is not node:
            node = group[node]
        return node

    levels = dict.fromkeys(fused, 0)
    for node in fused:
        for other in inputs[node]:
            if other in group:
                group[root(other)] = root(node)
                levels[node] = max(levels[node], levels[other])
        wide = max((x.shape[-1] for i in inputs[node] for x in values[i] if x.ndim), default=0)
        first = values[node][0]
        is_sum = any(word in name_of[node] for word in ("sum", "amax", "max", "mean"))
        levels[node] += is_sum and wide > LONG and (first.ndim == 0 or first.shape[-1] != wide)
    kernels = [
        (name_of[n], [x for i in n.all_input_nodes for x in values[i]], values[n], 1)
        for n, name in name_of.items()
        if name in alone
    ]
    wanted = {i for n in graph.nodes if n not in group and not is_view[n] for i in inputs[n]}
    for top in {root(n) for n in fused}:
        members = [n for n in fused if root(n) is top]
        enters = dict.fromkeys(i for n in members for i in inputs[n] if i not in group)
        leaves = [x for n in members if n in wanted for x in values[n]]
        if leaves:
            reads = max(1, *(levels[n] for n in members))
            kernels.append(("fused", [x for i in enters for x in values[i]], leaves, reads))
    return kernels


def counting_backend(ledger):
    """Return a backend of torch.compile that adds the kernels of each graph when it runs."""

    def compiler(module, _):
        def run(*args):
            with ledger_of_shapes(module, args) as graph:
                for kernel in count_graph(graph, ledger):
                    ledger.add(*kernel)
            with _disable_current_modes():
                return module(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)


@contextlib.contextmanager
def ledger_of_shapes(module, args):
    """Fill the graph's values from real sizes in place of symbols."""

    class Shapes(torch.fx.Interpreter):
        def run_node(self, node):
            node.meta["val"] = super().run_node(node)
            return node.meta["val"]

    with _disable_current_modes():
        Shapes(module).run(*args)
    yield module.graph


@functools.cache
def packed(tokens):
    return pack_rows(np.full(tokens // ROW, ROW + 1), ROW + 1)


def without(kind):
    """Say that nothing casts by itself, which torch does not say of the device `meta`."""
    return False


def plain(*_, **__):
    return contextlib.nullcontext()


def micro_batch(size, way, rates=Rates()):
    """Return the work of a forward and a backward pass over one layer, and over the head."""
    torch._dynamo.reset()
    logprobs.fused_head.cache_clear()
    settings = TrainConfig(
        compute_dtype="bfloat16", compile=way.compiles, deterministic=False,
        activation_checkpointing=way.checkpoints, tokens_per_microbatch=way.tokens,
    )  # fmt: skip
    config = size.config()
    config.num_hidden_layers = 1
    ledger = Ledger(rates, way.tokens * ROW)
    backend, compiler = counting_backend(ledger), torch.compile

    def compiled(body, **options):
        made = compiler(body, backend=backend, fullgraph=True, **options)

        @functools.wraps(body)
        def call(*args, **kwargs):
            # Its graphs count themselves.
            with _disable_current_modes():
                return made(*args, **kwargs)

        return call

    with (
        mock.patch.object(torch, "compile", compiled),
        mock.patch.object(torch, "is_autocast_enabled", without),
        mock.patch.object(torch, "autocast", plain),
        torch._functorch.config.patch({"ban_recompute_materialized_backward": True}),
    ):
        set_up_torch(settings, META)
        with META:
            model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
        sharding = Fsdp2Sharding(model, config=settings, grid=Grid(), device=META, is_frozen=False)
        packing, body = packed(way.tokens).to(META), model.model
        hidden = torch.empty(1, way.tokens, size.hidden, dtype=torch.bfloat16, device=META)
        turn = body.rotary_emb(hidden, packing.positions[None])
        with ledger:
            ledger.part = "layers"
            out = body.layers[0](
                hidden.requires_grad_(), attention_mask=None, position_embeddings=turn,
                packing=packing,
            )  # fmt: skip
            torch.autograd.backward(out, torch.empty_like(out))
            ledger.part = "head"
            scored = way.tokens * (ROW - PROMPT) // ROW
            states = hidden.detach()[0, :scored].requires_grad_()
            weight = sharding.scorer.model.lm_head.weight.detach()
            if way.operands == torch.float32:
                states, weight = states.float(), weight.float()
            kind = logprobs.fused_head() if way.compiles else logprobs.Head
            given = kind(
                config, 1.0, logprobs.WholeVocabulary(size.vocabulary), way.chunk, True,
                torch.float32, way.operands,
            )  # fmt: skip
            targets = torch.empty(scored, dtype=torch.int64, device=META)
            found, _ = logprobs._Scores.apply(given, targets, states, weight.requires_grad_(), None)
            torch.autograd.backward(found, torch.empty_like(found))
    for (part, _), work in ledger.work.items():
        times = size.layers if part == "layers" else 1
        for name in ("bytes", "flops", "kernels", "seconds"):
            setattr(work, name, times * getattr(work, name))
    return ledger.work


def model_flops(size, tokens):
    """Operations of a forward and a backward pass, nothing computed again (see `test_speed`)."""
    shape = shape_of(size.config().to_dict())
    outer = size.vocabulary * size.hidden * tokens * (ROW - PROMPT) / ROW
    body = shape.layers * shape.layer_parameters * tokens
    return 6 * (body + outer) + 6 * shape.layers * shape.q_size * tokens * ROW


def step(size, way, rates=Rates()):
    """Return the work of an optimizer step on one GPU by part, and its share of the peak."""
    work = micro_batch(size, way, rates)
    count = STEP_ROWS * ROW / GPUS / way.tokens
    found = {}
    for (part, kind), one in work.items():
        found[f"{part}, {kind}"] = {key: value * count for key, value in asdict(one).items()}
    parameters = shape_of(size.config().to_dict()).parameters
    # Gathered twice in bfloat16 (received, copied out), summed once in float32.
    moved = 22 * parameters * count
    # Parameter, gradient and two moments are read; all but the gradient are written.
    stepped = 28 * parameters / GPUS
    for name, size_bytes in (("gathering", moved), ("optimizer", stepped)):
        found[name] = {"bytes": size_bytes, "seconds": size_bytes / rates.memory_bytes}
    computed = sum(one["seconds"] for one in found.values())
    sent = 8 * parameters * count * (GPUS - 1) / GPUS / rates.link_bytes
    seconds = max(computed, sent)
    flops = model_flops(size, way.tokens) * count
    total = {"seconds": seconds, "model_flops": flops, "link_seconds": sent}
    return {"parts": found, **total, "mfu": flops / seconds / PEAK_FLOPS}


def main():
    """Print and write the shares."""
    rates, result = Rates(), {}
    for size in SIZES:
        result[size.name] = {name: step(size, way, rates) for name, way in WAYS.items()}
        shares = (f"{name} {found['mfu']:.1%}" for name, found in result[size.name].items())
        print(f"{size.name:14}", ", ".join(shares), flush=True)
    path = write_result(
        "roofline", "simulated", {"rates": asdict(rates), "steps": result},
        "tests.benchmarks.bench_roofline",
    )  # fmt: skip
    print(path)


if __name__ == "__main__":
    main()
