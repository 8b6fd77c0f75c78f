"""Compiled layers and LM head: whole graphs, compiled once, that keep what the plan says."""

import functools
import os

import numpy as np
import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import transformers
from torch.autograd.graph import saved_tensors_hooks

from planish.base.parallel import Grid
from planish.models import logprobs
from planish.models.packing import pack_rows
from planish.models.shapes import shape_of
from planish.run.layer_clock import time_layers
from planish.stages.prepare.memory import Precision, kept_by_layer
from planish.stages.train.config import TrainConfig
from planish.stages.train.fsdp2 import Fsdp2Sharding
from planish.stages.train.trainer import set_up_torch
from tests.unit.models.packed_kernel import use_kernel

PACKINGS = ([9, 5, 7], [30, 2], [3], [8, 8, 8, 8], [17, 4, 4, 25, 6], [60])
CPU = torch.device("cpu")

# The compiler asks results of other operations for gradients.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def compile_with(monkeypatch):
    """Return a function that sets the backend; a break in a graph is an error."""
    use_kernel(monkeypatch)
    torch._dynamo.reset()
    logprobs.fused_head.cache_clear()
    plain = torch.compile

    def choose(backend):
        compiled = functools.partial(plain, backend=backend, fullgraph=True)
        monkeypatch.setattr(torch, "compile", compiled)

    yield choose
    logprobs.fused_head.cache_clear()
    torch._dynamo.reset()


def sharded(family="Qwen2", layers=3, half=False, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=96, hidden_size=48, intermediate_size=112, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.3,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    settings = TrainConfig(compute_dtype="bfloat16", **changes)
    model = model.bfloat16() if half else model
    made = Fsdp2Sharding(model, config=settings, grid=Grid(), device=CPU, is_frozen=False)
    time_layers(made.scorer)
    return made


def step(sharding, lengths, *, half):
    """Log-probabilities and gradients of random rows, with and without a graph."""
    lengths, width = np.array(lengths), max(lengths)
    ids = torch.randint(3, 96, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    select = torch.arange(width)[None] < torch.from_numpy(lengths)[:, None]
    select[:, 0] = False
    packing = pack_rows(lengths, width)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        found, _ = sharding.scorer(ids, packing, select, 0.9)
    found.sum().backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        again, _ = sharding.scorer(ids, packing, select, 0.9)
    if sharding.is_sharded:
        sharding.scorer.reshard()
    gradients = [p.grad for p in sharding.parameters.values()]
    sharding.scorer.zero_grad()
    return [found.detach(), again, *(getattr(x, "full_tensor", lambda x=x: x)() for x in gradients)]


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"offload": True}])
def test_layers_and_head_compile_once_for_all_packings_and_give_equal_values(compile_with, changes):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compile_with(backend)
    half = "offload" not in changes  # sharded layers cast by themselves
    wanted, ours = (sharded(compile=compiles, **changes) for compiles in (False, True))
    after_first = 0
    for lengths in PACKINGS:
        pairs = zip(step(ours, lengths, half=half), step(wanted, lengths, half=half), strict=True)
        assert all(torch.equal(mine, right) for mine, right in pairs)
        after_first = after_first or len(graphs)
    # A layer with and without gradients, or when it is computed again, and two parts of the head.
    assert after_first == len(graphs) <= 5


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("half", [True, False])
def test_a_compiled_layer_keeps_the_bytes_that_are_counted(compile_with, family, half):
    compile_with("aot_eager_decomp_partition")
    config = TrainConfig(compile=True, deterministic=False)
    with torch._functorch.config.patch({"ban_recompute_materialized_backward": True}):
        set_up_torch(config, CPU)
        kept = [kept_bytes(sharded(family, n, half, compile=True), half=half) for n in (2, 3)]
    model = sharded(family, 1, half).scorer.model
    precision = Precision.of("bfloat16", gathers=half)
    counted = kept_by_layer(shape_of(model.config.to_dict()), precision, compiled=True)
    assert kept[1] - kept[0] == counted


def kept_bytes(sharding, *, half):
    """Bytes for each token of what a decoder keeps for its backward pass."""
    packing, body = pack_rows(np.array([129, 65]), 129), sharding.scorer.model.model
    weights = {p.untyped_storage().data_ptr() for p in body.parameters()}
    tokens, saved = len(packing.tokens), {}

    def keep(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and tokens in tensor.shape:
            saved[place] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.zeros((1, tokens), dtype=torch.int64)
    options = {"position_ids": packing.positions[None], "packing": packing, "use_cache": False}
    with (
        saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=not half),
    ):
        body(input_ids=ids, **options)
    return sum(saved.values()) / tokens


def test_vllm_leaves_the_compiler_its_threads():
    rule = {"ban_recompute_materialized_backward": True}
    with (
        torch._functorch.config.patch(rule),
        torch._inductor.config.patch({"compile_threads": 0}),
    ):
        set_up_torch(TrainConfig(compile=True, deterministic=False), CPU)
        assert torch._inductor.config.compile_threads == len(os.sched_getaffinity(0))
