"""A training job in forked ranks, where a test asks for what they compute.

The stage starts its ranks under torchrun, and each of them imports for seconds.
"""

import tempfile

from planish.base.parallel import Ranks
from planish.models.library import load_transformers
from planish.stages.train.ranks.job import TrainJob, read_job, write_job
from planish.stages.train.ranks.worker import train_iteration
from planish.stages.train.stage import train
from tests.integration.ckpt_forks import run_ranks


def preload():
    """Import what takes long before ranks are forked."""
    load_transformers()


def train_rank(rank, size, folder, *, pin):
    """Be one rank of a job; returns the pin of the new state."""
    return train_iteration(read_job(pin, TrainJob), Ranks(rank, size)).state.pin()


def train_job(job: TrainJob) -> str:
    """Do a job in as many ranks as it asks for; returns the pin of the new state."""
    size = job.config["train"]["num_processes"]
    if size == 1:
        return str(train(job).values["state_pin"])
    with tempfile.TemporaryDirectory() as folder:
        pins = run_ranks(f"{__name__}:train_rank", size, folder, pin=write_job(job))
    assert pins == pins[:1] * size
    return pins[0]
