"""A stand-in package `planish` whose stages do nothing but write down that they ran.

It lets the tests drive the real components and pipelines through the real local runner in
seconds. Behaviour is steered by files under the run root, so that it survives process borders:
`<root>/break/<stage>-<iteration>` makes a stage fail, once when the file holds `once`.
"""

import json
import textwrap
from pathlib import Path

from planish import __version__

REAL = Path(__file__).resolve().parents[2] / "src" / "planish"

_COMMON = '''
import json, os, sys, time
from pathlib import Path

# What is not a stage is the real one.
__path__.append({real!r})
# No stage computes: what the warm process would load for seconds is as if it were not installed.
sys.modules.update(dict.fromkeys(("torch", "transformers")))


def note(stage, iteration=0, shard=0, **facts):
    """Append one event and fail when told to."""
    from planish.store import parse_uri

    root = Path("/" + parse_uri(facts["root"]).key)
    for value in facts.values():
        assert type(value) in (str, int, float, bool), (stage, value)
    event = dict(facts, stage=stage, iteration=iteration, shard=shard, pid=os.getpid(),
                 time=time.time(), threads=os.environ.get("OMP_NUM_THREADS", ""))
    with (root / "events.jsonl").open("a") as log:
        log.write(json.dumps(event) + "\\n")
    order = root / "break" / f"{stage}-{iteration}"
    if order.exists():
        text = order.read_text()
        if text == "once":
            order.unlink()
        sys.exit(2 if text == "config" else 1)


def meet(root, number):
    """Wait until as many rollouts have begun."""
    from planish.store import parse_uri

    log = Path("/" + parse_uri(root).key) / "events.jsonl"
    while log.read_text().count('"stage": "rollout"') < number:
        time.sleep(0.02)


def write(*artifacts):
    """Write each output artifact as a stage would."""
    for artifact in artifacts:
        Path(artifact.path).parent.mkdir(parents=True, exist_ok=True)
        Path(artifact.path).write_text("{}")
'''

_STAGES = {
    "prepare": """
        from collections import namedtuple
        Prepared = namedtuple(
            "Prepared", "config_sha256 offset chain_index node_affinity unfinished")
        def run(*, root, preset, config, overrides, model, dataset, seed, chain, num_iterations,
                num_shards, requests, max_avoided_nodes, summary):
            note("prepare", root=root, preset=preset, seed=seed, chain=chain,
                 num_iterations=num_iterations, num_shards=num_shards, requests=requests)
            write(summary)
            return Prepared("c" * 64, 2, json.loads(chain or "{}").get("index", 0), {}, True)
    """,
    "curate": """
        def run(*, root, config_sha256, prompts, report):
            note("curate", root=root, config_sha256=config_sha256)
            write(prompts, report)
    """,
    "sft": """
        from collections import namedtuple
        Start = namedtuple("Start", "policy_pin state_pin")
        def run(*, root, config_sha256, prompts, policy, metrics):
            note("sft", root=root, config_sha256=config_sha256)
            assert Path(prompts.path).exists()
            write(policy)
            return Start("policy-2", "")
    """,
    "rollout": """
        def run(*, root, config_sha256, number, offset, shard, num_shards, policy_pin, state_pin,
                rollouts, metrics):
            note("rollout", root=root, iteration=offset + number, shard=shard, number=number,
                 offset=offset, num_shards=num_shards, policy_pin=policy_pin,
                 state_pin=state_pin)
            time.sleep(float(os.environ.get("FAKE_ROLLOUT_SECONDS", "0")))
            if os.environ.get("FAKE_ROLLOUTS_MEET"):
                meet(root, num_shards)
            note("rollout-end", root=root, iteration=offset + number, shard=shard)
            write(rollouts)
    """,
    "reward": """
        def run(*, root, config_sha256, number, offset, num_shards, policy_pin, rewards, metrics):
            note("reward", root=root, iteration=offset + number, num_shards=num_shards,
                 policy_pin=policy_pin)
            write(rewards)
    """,
    "train": """
        from collections import namedtuple
        Trained = namedtuple("Trained", "state_pin")
        def run(*, root, config_sha256, number, offset, num_shards, policy_pin, state_pin, rewards,
                state, metrics):
            note("train", root=root, iteration=offset + number, num_shards=num_shards,
                 policy_pin=policy_pin, state_pin=state_pin)
            assert Path(rewards.path).exists()
            write(state)
            metrics.log_metric("loss", 0.5)
            return Trained(f"state-{offset + number}")
    """,
    "export": """
        from collections import namedtuple
        Exported = namedtuple("Exported", "policy_pin")
        def run(*, root, config_sha256, number, offset, policy_pin, state, policy):
            note("checkpoint", root=root, iteration=offset + number, policy_pin=policy_pin)
            assert Path(state.path).exists()
            write(policy)
            return Exported(f"policy-{offset + number}")
    """,
    "evaluate": """
        def run(*, root, config_sha256, baseline_pin, policy_pin, evaluation, metrics):
            note("evaluate", root=root, baseline_pin=baseline_pin, policy_pin=policy_pin)
            write(evaluation)
    """,
    "evaluate/iteration": """
        def run(*, root, config_sha256, number, offset, policy_pin):
            note("evaluate-iteration", root=root, iteration=offset + number, policy_pin=policy_pin)
    """,
    "monitor_check": """
        from collections import namedtuple
        Checked = namedtuple("Checked", "faulty_machine")
        def run(*, root, config_sha256, number, offset, settings, trace, job, watch_seconds, result,
                metrics):
            note("monitor_check", root=root, iteration=offset + number, settings=settings,
                 trace=trace, watch_seconds=watch_seconds)
            write(result)
            return Checked("node-3")
    """,
    "next_run": """
        def run(*, root, config_sha256, chain_index, chain):
            note("next", root=root, chain_index=chain_index, chain=chain)
    """,
    "report": """
        def run(*, root, state, failed_task, error_message, max_restarts, report, summary):
            note("report", root=root, state=state, failed_task=failed_task,
                 error_message=error_message)
            write(report, summary)
            from planish.store.documents import write_json
            numbers = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after")
            numbers += ("iterations", "mismatch_k3_max", "last_policy")
            write_json(f"{root}/report/summary.json", dict.fromkeys(numbers, 1))
    """,
}


def write_fake_stages(folder: Path) -> Path:
    """Write the package below `folder` and return what belongs in front of the module path."""
    package = folder / "planish"
    package.mkdir(parents=True)
    common = _COMMON.replace("{real!r}", repr(str(REAL)))
    (package / "__init__.py").write_text(f"__version__ = {__version__!r}\n{common}")
    (package / "stages").mkdir()
    # What pipelines ask stages for without running one comes from the real ones.
    real = f"__path__.append({str(REAL / 'stages')!r})\n"
    (package / "stages" / "__init__.py").write_text(real)
    for stage, body in _STAGES.items():
        name, _, module = stage.partition("/")
        folder_of_stage = package / "stages" / name
        folder_of_stage.mkdir(exist_ok=True)
        real = f"__path__.append({str(REAL / 'stages' / name)!r})\n"
        (folder_of_stage / "__init__.py").write_text(real)
        head = "import json, os, time\nfrom pathlib import Path\n"
        head += "from planish import meet, note, write\n"
        (folder_of_stage / f"{module or 'stage'}.py").write_text(head + textwrap.dedent(body))
    return folder


def read_events(root: Path) -> list[dict]:
    """Return what the stages wrote down, in order."""
    path = root / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
