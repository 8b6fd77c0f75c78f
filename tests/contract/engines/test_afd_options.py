"""Launch files of the public plug-in against the parser of vLLM."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from planish.__main__ import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM: `make test-engines`"),
]


def test_vllm_knows_every_option(tmp_path):
    """With a later release than the plug-in's: its options are at least still those."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plan, out = tmp_path / "plan.json", tmp_path / "launch"
    sides = ["--model", "qwen3-30b", "--attention-gpus", "h20", "--expert-gpus", "h20"]
    sizes = ["--replicas", "12", "--expert-nodes", "4", "--tp-a", "1", "--tp-e", "1"]
    words = [*sides, *sizes, "--micro-batches", "3", "--json", str(plan)]
    assert main(["rollout", "plan", *words]) == 0
    machines = ["--ffn-machines", "f0", "--attention-machines", "a0,a1"]
    words = ["--policy", "/models/qwen3", "--max-model-len", "1024", "--out", str(out), "--anyway"]
    assert main(["rollout", "afd", str(plan), *words, *machines]) == 0
    launches = json.loads((out / "launch.json").read_text())["launches"]
    parser = make_arg_parser(FlexibleArgumentParser())
    for one in launches:
        parsed = parser.parse_args(one["argv"][2:])
        assert parsed.enable_dbo
        assert parsed.additional_config["afd"]["role"] == one["role"]
    assert {one["role"] for one in launches} == {"attention", "ffn"}
