"""Read a checkpoint back: every block against its checksum, every tensor against its source."""

from __future__ import annotations

from planish.checkpoint.api import STATE_SCHEMA
from planish.checkpoint.heatmap import bytes_text
from planish.checkpoint.reader import Opened, check_objects, open_state
from planish.checkpoint_verify.compare import Compared, check_blocks, compare_states
from planish.errors import CheckpointCorrupt, CheckpointIncomplete
from planish.records.refs import Ref
from planish.stage import Artifact, Context, Outcome, execute, read_ref

_MAX_LISTED = 50


def run(
    root: str, source_pin: str, checkpoint: Artifact, summary: Artifact, metrics: Artifact
) -> None:
    """Check a checkpoint or policy, and compare it with what it was made from.

    Args:
        root: URI of the run.
        source_pin: pin of the state that it was made from; empty to check it by itself.
        checkpoint: Ref of what is checked.
        summary: gets the findings in Markdown.
        metrics: gets counts.
    """

    def work(_: Context) -> Outcome:
        return verify(read_ref(checkpoint), source_pin)

    execute(
        "checkpoint_verify",
        work,
        root=root,
        config_sha256=None,
        outputs={"summary": summary, "metrics": metrics},
    )


def verify(ref: Ref, source_pin: str) -> Outcome:
    """Do the work of `run`; see there.

    Raises:
        CheckpointIncomplete: an object is missing or short.
        CheckpointCorrupt: a block or a tensor differs; all tensors are listed.
    """
    source = open_state(source_pin) if source_pin else None
    assert ref.schema == STATE_SCHEMA
    found, size = _state(ref, source)
    if not found.is_equal:
        raise CheckpointCorrupt(
            f"`{ref.uri}` must hold what `{source_pin}` holds, but {len(found.faults)} tensors "
            f"differ: {'; '.join(found.faults[:_MAX_LISTED])}; remove it and reshard again"
        )
    return Outcome(
        documents={"summary": _summary(ref, source_pin, found, size)},
        metrics={
            "checked_bytes": float(size),
            "compared_tensors": float(found.num_tensors),
            "compared_bytes": float(found.num_bytes),
        },
    )


def _state(ref: Ref, source: Opened | None) -> tuple[Compared, int]:
    opened = open_state(ref.pin())
    faults = check_objects(opened)
    if faults:
        raise CheckpointIncomplete(f"`{ref.uri}` must be whole: {'; '.join(faults[:_MAX_LISTED])}")
    size = check_blocks(opened)
    return (Compared() if source is None else compare_states(opened, source)), size


def _summary(ref: Ref, source_pin: str, found: Compared, size: int) -> str:
    rows = [
        ("checked", f"`{ref.uri}`"),
        ("sha256", f"`{ref.manifest_sha256}`"),
        ("read", f"{bytes_text(size)}, every block as its checksum says"),
    ]
    if source_pin:
        equal = f"{found.num_tensors} tensors, {bytes_text(found.num_bytes)}, bit by bit"
        rows += [("source", f"`{source_pin.partition('#')[0]}`"), ("equal to it", equal)]
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(["# Verified", "", "| | |", "| --- | --- |", *lines, ""])
