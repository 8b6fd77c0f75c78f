"""Starts the training processes of one machine under torchrun and brings their result home."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

from planish.base import errors, telemetry
from planish.base.errors import PeerLost, PlanishError
from planish.stages.train.job import JobResult, TrainJob

logger = logging.getLogger(__name__)


def command(num_processes: int, job: Path, result: Path) -> list[str]:
    """Return the command line; torchrun picks a free port by itself."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_processes),
        "-m",
        "planish.stages.train.worker",
        str(job),
        str(result),
    ]


def launch(job: TrainJob) -> JobResult:
    """Run a job in `train.num_processes` processes.

    Raises:
        PlanishError: the error of the first rank that told one.
        PeerLost: a process ended without telling why.
    """
    with tempfile.TemporaryDirectory(prefix="planish-train-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(job.to_json(), "utf-8")
        result = folder / "result.json"
        line = command(job.train.num_processes, folder / "job.json", result)
        # Only the ranks get ahead; this process waits for them.
        telemetry.forget("planish_stage_progress_timestamp_seconds")
        logger.info("launching processes=%d", job.train.num_processes)
        code = _run(line)
        fault = result.with_suffix(".error")
        if fault.exists():
            raise _rebuild(json.loads(fault.read_text("utf-8")))
        if code != 0 or not result.exists():
            raise PeerLost(
                f"every training process must end with code 0, got {code} from torchrun; its "
                "output above names the rank: a lost machine or too little memory is the usual "
                "cause, run the stage again"
            )
        return JobResult.from_json(result.read_text("utf-8"))


def _run(line: list[str]) -> int:
    """Return the exit code of torchrun; when this process must stop, its ranks stop first."""
    with subprocess.Popen(line) as process:
        try:
            return process.wait()
        except BaseException:
            # Each rank has a session of its own: only torchrun, if it is asked, ends them.
            process.terminate()
            raise


def _rebuild(fault: dict[str, str]) -> PlanishError:
    kind = getattr(errors, fault["error"], PlanishError)
    found: PlanishError = kind(fault["message"])
    return found
