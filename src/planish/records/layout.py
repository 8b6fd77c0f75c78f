"""Paths of all records under the root URI of a run; no other module spells these paths."""

from __future__ import annotations

import re


def run_file(root: str) -> str:
    """Resolved configuration and identity of the run."""
    return f"{root}/run.json"


def locks(root: str) -> str:
    """Holders of the lock of this root, one object for each change of the holder."""
    return f"{root}/locks"


def lock_file(root: str, generation: int) -> str:
    """Holder of the lock of this root; the highest generation counts."""
    return f"{locks(root)}/{generation:06d}.json"


def handover_file(root: str, generation: int) -> str:
    """Present when the holder of this generation has submitted the run that follows it."""
    return f"{locks(root)}/{generation:06d}-handed-over.json"


def avoided_nodes(root: str) -> str:
    """Nodes that runs on this root avoid, one object each; delete an object to allow its node."""
    return f"{root}/avoid_nodes"


def avoided_node(root: str, name: str) -> str:
    """Reason why runs on this root avoid a node."""
    return f"{avoided_nodes(root)}/{name}.json"


def restarts(root: str) -> str:
    """Failed runs that were submitted again without a faulty machine, one object each."""
    return f"{root}/restarts"


def restart_file(root: str, counter: int) -> str:
    """The `counter`-th restart, from 1."""
    return f"{restarts(root)}/{counter:05d}.json"


def stop_file(root: str) -> str:
    """Operators write this object to end a run after the iteration in progress."""
    return f"{root}/stop.json"


def chain_file(root: str, index: int) -> str:
    """First iteration and length of the `index`-th run of a chain on this root."""
    return f"{root}/runs/{index:05d}.json"


def prompts(root: str) -> str:
    """Training prompts."""
    return f"{root}/prompts/train"


def evaluation_prompts(root: str, name: str = "") -> str:
    """Prompts of an evaluation set; without a name the held-out ones."""
    return f"{root}/prompts/sets/{name}" if name else f"{root}/prompts/evaluation"


def traces(root: str) -> str:
    """Worked solutions for the supervised cold start."""
    return f"{root}/prompts/traces"


def curation_report(root: str) -> str:
    """Counts in and out per filter, with examples (Markdown)."""
    return f"{root}/prompts/report.md"


def iteration(root: str, number: int) -> str:
    """Folder of one iteration; numbers start at 1."""
    return f"{root}/iterations/{number:05d}"


def stopped_file(root: str, number: int) -> str:
    """Present when the stop file was seen before this iteration began."""
    return f"{iteration(root, number)}/stopped.json"


def rollouts(root: str, number: int, shard: int) -> str:
    """Kept rollouts of one shard of one iteration."""
    return f"{iteration(root, number)}/rollouts/{shard:02d}"


def commits(root: str, number: int, shard: int) -> str:
    """Samples of one unfinished shard of one iteration; removed once its rollouts exist."""
    return f"{iteration(root, number)}/commits/{shard:02d}"


def surplus(root: str, number: int, shard: int) -> str:
    """Qualified groups of a shard that did not fit into the batch."""
    return f"{iteration(root, number)}/surplus/{shard:02d}"


def values(root: str, number: int) -> str:
    """Critic's values of the responses that go on in the next iteration."""
    return f"{iteration(root, number)}/values"


def waiting(root: str, number: int) -> str:
    """Finished responses on which the critic trains in a later iteration."""
    return f"{iteration(root, number)}/waiting"


def carry(root: str, number: int, shard: int) -> str:
    """Responses of a shard that go on in the next iteration."""
    return f"{iteration(root, number)}/carry/{shard:02d}"


def rewards(root: str, number: int) -> str:
    """Rewards of all shards' rollouts, rows in shard order."""
    return f"{iteration(root, number)}/rewards"


def update(root: str, number: int) -> str:
    """Scalars of the update (`update/1`)."""
    return f"{iteration(root, number)}/update.json"


def train_job(root: str, number: int, digest: str) -> str:
    """Messages between a stage and its train job: `job`, `result` and `error`, all JSON."""
    return f"{iteration(root, number)}/jobs/{digest[:16]}"


def state(root: str, step: int) -> str:
    """Sharded train state after `step` optimizer steps."""
    return f"{root}/states/step-{step:08d}"


def policy(root: str, version: int) -> str:
    """Export that engines load."""
    return f"{root}/policies/{version:05d}"


def best_policy(root: str) -> str:
    """Pin of the policy with the highest accuracy on the held-out prompts (`best-policy/1`)."""
    return f"{root}/policies/best.json"


def evaluation(root: str, version: int, name: str = "") -> str:
    """Evaluation of one policy version on one set of prompts (`eval/1` and its rollouts)."""
    return f"{root}/evals/{name}/{version:05d}" if name else f"{root}/evals/{version:05d}"


REPORT = "report.json"
"""Name of the file that an evaluation writes last, in its folder."""
_EVALUATION = re.compile(rf"/evals/(?:([a-z][^/]*)/)?(\d{{1,9}})/{re.escape(REPORT)}")


def parse_evaluation(root: str, uri: str) -> tuple[str, int] | None:
    """Return name and policy version of an evaluation by its report's URI; None for other URIs.

    Example:
        >>> parse_evaluation("file:///r", "file:///r/evals/gsm8k/00004/report.json")
        ('gsm8k', 4)
    """
    match = _EVALUATION.fullmatch(uri.removeprefix(root))
    return (match[1] or "", int(match[2])) if match else None


def logs(root: str) -> str:
    """Timing and outcome of each stage attempt; never part of a digest."""
    return f"{root}/logs"


def stage_log(root: str, stage: str, iteration_number: int, shard: int) -> str:
    """Timing and outcome of the newest attempt of one task."""
    return f"{logs(root)}/{iteration_number:05d}-{stage}-{shard:02d}.json"


def flight_record(root: str, iteration_number: int, rank: int) -> str:
    """Torch's record of the last collectives of a rank of training that got no further."""
    return f"{logs(root)}/{iteration_number:05d}-rank-{rank:05d}.flight"


def events(root: str) -> str:
    """Failed attempts and gangs, one object each."""
    return f"{root}/events"


def event(root: str, name: str) -> str:
    """One event; names begin with the time."""
    return f"{events(root)}/{name}.json"


def failed(root: str) -> str:
    """Tasks that failed for a reason that no retry mends, one object each."""
    return f"{root}/failed"


def failed_file(root: str, stage: str, iteration_number: int, shard: int) -> str:
    """Marks a task that failed for a reason that no retry mends."""
    return f"{failed(root)}/{iteration_number:05d}-{stage}-{shard:02d}.json"


def alerts(root: str) -> str:
    """Alerts of the monitor during the run."""
    return f"{root}/alerts"


def report(root: str) -> str:
    """Final report: report.html, report.md, summary.json."""
    return f"{root}/report"


def control(root: str) -> str:
    """Result of the control: the same seconds of supervised training, if measured."""
    return f"{report(root)}/control.json"


def trackers(root: str) -> str:
    """Progress of the trackers' followers, and the event files of TensorBoard."""
    return f"{root}/trackers"
