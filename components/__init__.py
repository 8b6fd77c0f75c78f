"""Typed Kubeflow interface of every stage; the program itself is the package `planish`."""

from components.checkpoint import checkpoint
from components.curate import curate
from components.evaluate import evaluate
from components.next_run import next_run
from components.prepare import prepare
from components.report import report
from components.reward import reward
from components.rollout import rollout
from components.sft import sft
from components.train import train

__all__ = [
    "checkpoint",
    "curate",
    "evaluate",
    "next_run",
    "prepare",
    "report",
    "reward",
    "rollout",
    "sft",
    "train",
]
