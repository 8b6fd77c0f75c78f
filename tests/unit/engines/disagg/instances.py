"""Instances whose ranks are threads of the test: real messages and frames, no new process."""

import os
import socket
import sys
import threading
from gc import collect, unfreeze

import torch

from planish.base.child import Channel, Child
from planish.engines.config import EngineConfig
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.disagg.rank import serve
from planish.engines.requests import ModelRef
from tests.unit.engines.tiny import family_policy

FAMILIES = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Qwen2Moe": {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "Mixtral": {"num_local_experts": 8, "sliding_window": None},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
"""Tiny models with experts."""


def moe_policy(family: str, seed: int = 0, **changes):
    """A tiny policy of three layers in float64."""
    sizes = {"num_experts_per_tok": 2, "num_hidden_layers": 3, **FAMILIES[family], **changes}
    policy = family_policy(family, seed, **sizes)
    policy.model.double()
    policy.model.set_experts_implementation("eager")  # the grouped product knows no float64
    return policy


class ThreadRank(Child):
    """A rank in a thread."""

    pid = os.getpid()

    def __init__(self, number: int = 0, **options) -> None:
        here, there = socket.socketpair()
        super().__init__(Channel(here))
        self._far = Channel(there)
        self._options = options
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            serve(self._far, lambda: None, **self._options)
        except OSError:
            pass
        finally:
            groups = sys.modules.get("vllm.distributed.parallel_state")
            if groups and groups.model_parallel_is_initialized():
                # The vLLM of a thread takes process groups with it whenever it is collected.
                unfreeze()
                collect()
            self._far.close()

    def code(self, seconds: float = 0.0) -> int | None:
        self._thread.join(seconds)
        return None if self._thread.is_alive() else 0

    def close(self, seconds: float = 0.0) -> int | None:
        """Leave the end to the thread, which sees that the coordinator has closed its own."""
        self.channel.close()
        self._thread.join()
        return 0


class MortalRank(ThreadRank):
    """A rank in a thread that ends as a killed process does: nothing more comes from it."""

    is_dead = False

    def die(self):
        self.is_dead = True
        self._far.close()

    def code(self, seconds=0.0):
        return 9 if self.is_dead else super().code(seconds)


def disagg(
    policy, attention=1, expert=1, micro_batches=1, *, max_rows=8, launcher=ThreadRank, **options
):
    """Return a started engine; the settings of `[engine]` are taken out of the options."""
    own = ("redundant_experts", "batch_tokens", "transport")
    settings = {name: options.pop(name) for name in own if name in options}
    config = EngineConfig(
        name="disagg",
        attention_ranks=attention,
        expert_ranks=expert,
        micro_batches=micro_batches,
        **settings,
    )
    engine = DisaggEngine(max_rows=max_rows, config=config, launcher=launcher, **options)
    engine.start(ModelRef(policy=policy))
    return engine
