"""What the caller of a save asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SaveOptions:
    """How to save; equal on all ranks.

    Example:
        >>> SaveOptions("mem://doc/step-1", step=1).snapshot
        'copy'
    """

    uri: str
    """Place of the checkpoint: `s3://bucket/key`, `file:///folder`, a path, `mem://name/key`."""
    step: int = 0
    """Training step, at least 0."""
    overwrite: bool = False
    """Replace what is committed there."""
    plan_cache: bool = True
    """Use the plan of an earlier save of the same tensors."""
    snapshot: Literal["copy", "lazy"] = "copy"
    """`copy`: all is copied when the call returns. `lazy`: copied while forward and backward run;
    the next `optimizer.step()` waits for it."""
    inflight: Literal["wait", "skip", "raise"] = "wait"
    """What to do while earlier saves use all staging memory."""
    timeout_s: float = 1800.0
    """Limit on the whole save, seconds."""
    pace_s: float = 0.0
    """Spread the upload over so many seconds, so that it slows training less; 0: at full speed.
    A save that the caller waits for is never slowed."""
    is_async: bool = True
    """Return when the state is staged, not when it is committed."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Stored in COMMIT."""
    run_id: str = ""
    """Stored in COMMIT."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """JSON for `Metadata.header` (layout, parents, attributes); that of rank 0 counts."""
    context: str = ""
    """What else must be equal for a plan to be used again (adapters, group)."""
    allow_pickle: bool = False
    """Store arbitrary objects among the small values."""
    check_replicas: bool = False
    """Refuse a state of which ranks hold unequal copies; else that of one rank is kept."""
    scan: bool = False
    """Count and name tensors with values that are not finite; they are saved all the same."""

    def __post_init__(self) -> None:
        """Refuse options that mean nothing.

        Raises:
            ValueError: a negative step, a timeout that is not positive, an unknown policy.
        """
        faults = []
        if type(self.step) is not int or self.step < 0:
            faults.append(f"`step` must be a whole number of at least 0, got {self.step!r}")
        if not self.timeout_s > 0:
            faults.append(f"`timeout_s` must be positive, got {self.timeout_s!r}")
        if not 0 <= self.pace_s < self.timeout_s:
            faults.append(f"`pace_s` must be at least 0 and below `timeout_s`, got {self.pace_s!r}")
        if self.snapshot not in ("copy", "lazy"):
            faults.append(f"`snapshot` must be `copy` or `lazy`, got {self.snapshot!r}")
        if self.inflight not in ("wait", "skip", "raise"):
            faults.append(f"`inflight` must be `wait`, `skip` or `raise`, got {self.inflight!r}")
        if faults:
            raise ValueError("; ".join(faults))

    def compared(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        names = (
            *("uri", "step", "overwrite", "plan_cache", "snapshot", "inflight", "is_async"),
            "check_replicas",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "tags": dict(sorted(self.tags.items())),
            "run_id": self.run_id,
        }
