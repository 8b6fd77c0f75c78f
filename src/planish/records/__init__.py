"""Records that cross a process boundary: numpy and pyarrow, no torch."""

from planish.records.io import (
    Manifest,
    fetch_files,
    finished,
    read_manifest,
    read_set,
    write_files,
    write_set,
)
from planish.records.prompts import PromptSet, TraceSet, prompt_id
from planish.records.ragged import Ragged
from planish.records.refs import Ref, parse_pin
from planish.records.reports import EvalReport, UpdateReport, read_report, write_report
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.records.values import ValueSet
from planish.records.waiting import WaitingSet

__all__ = [
    "EvalReport",
    "FinishReason",
    "Manifest",
    "PromptSet",
    "Ragged",
    "Ref",
    "RewardSet",
    "RolloutSet",
    "TraceSet",
    "UpdateReport",
    "ValueSet",
    "WaitingSet",
    "fetch_files",
    "finished",
    "parse_pin",
    "prompt_id",
    "read_manifest",
    "read_report",
    "read_set",
    "write_files",
    "write_report",
    "write_set",
]
