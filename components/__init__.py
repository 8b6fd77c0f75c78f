"""Typed Kubeflow interface of every stage; the program itself is the package `planish`."""

from components.checkpoint import checkpoint
from components.curate import curate
from components.evaluate import evaluate
from components.iterate import iterate
from components.monitor_check import monitor_check
from components.next_run import next_run
from components.prepare import prepare
from components.report import report
from components.reshard import reshard
from components.reward import reward
from components.rollout import rollout
from components.sft import sft
from components.train import train

__all__ = [
    "checkpoint",
    "curate",
    "evaluate",
    "iterate",
    "monitor_check",
    "next_run",
    "prepare",
    "report",
    "reshard",
    "reward",
    "rollout",
    "sft",
    "train",
]
