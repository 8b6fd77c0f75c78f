"""One job, call after call: what the service does, and what a replay of a recorded trace does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planish.minder.config import MinderConfig
from planish.minder.detect import Detector, Job, Models
from planish.minder.frame import Frame
from planish.minder.result import Result


class JobMonitor:
    """Joins detector, baseline, warm-up, idle rule and the coming and going of machines."""

    def __init__(
        self, job: str, models: Models, config: MinderConfig, *, detector: Detector | None = None
    ) -> None:
        """Begin with nothing known of the job; another detector takes the default one's place."""
        self.job, self.config = job, config
        self._models = models
        self._detector = detector or Detector(models, config)

    def call(
        self, frame: Frame, *, started: int = 0, stages: Mapping[str, str] | None = None
    ) -> Result:
        """Look at the job.

        Args:
            frame: until now, of all machines that the job has now; at least the last
                `service.window_seconds`, where there are so many.
            started: unix seconds of the last start of the job; 0 when not known.
            stages: machine to pipeline stage.
        """
        return self._detector.call(frame, Job(stages=dict(stages or {}), started=started))

    def to_json(self) -> dict[str, Any]:
        """Return what a restarted service needs."""
        return {"job": self.job}

    @classmethod
    def from_json(
        cls, state: Mapping[str, Any], models: Models, config: MinderConfig
    ) -> JobMonitor:
        """Go on from what `to_json` gave."""
        return cls(str(state["job"]), models, config)
