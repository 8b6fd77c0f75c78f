"""What each pipeline of ours must consist of, for the lint and for those who start runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from components.images import OPTIONAL_STAGES, RESHARD_STAGES, STAGE_IMAGES

PARAMETERS: dict[str, str] = {
    "root": "STRING",
    "preset": "STRING",
    "config": "STRING",
    "overrides": "STRING",
    "model": "STRING",
    "dataset": "STRING",
    "seed": "NUMBER_INTEGER",
    "resume_from": "STRING",
    "chain_index": "NUMBER_INTEGER",
    "max_runs": "NUMBER_INTEGER",
    "allow_config_change": "BOOLEAN",
    "assume_autoscaling": "BOOLEAN",
    "store_secret": "STRING",
}
"""Public parameters of `post-train` and their types; at most fifteen fit a form people read."""

RESHARD_PARAMETERS: dict[str, str] = {
    "root": "STRING",
    "source": "STRING",
    "layout": "STRING",
    "target": "STRING",
    "parts": "STRING",
    "role": "STRING",
    "policy": "STRING",
    "retain_folder": "STRING",
    "keep_last": "NUMBER_INTEGER",
    "keep_every": "NUMBER_INTEGER",
    "store_secret": "STRING",
}
"""The same of `reshard`."""


@dataclass(frozen=True)
class Expected:
    """One pipeline."""

    stages: frozenset[str]
    """Stages that its pods are labelled with, all of them present."""
    first_task: str
    """Task that all others but the exit task come after; never retried."""
    exit_task: str
    """Task that runs whatever the others do; never retried."""
    parameters: Mapping[str, str]
    """Public parameters and their types."""


PIPELINES: dict[str, Expected] = {
    "post-train": Expected(
        frozenset({*STAGE_IMAGES} - {*RESHARD_STAGES, *OPTIONAL_STAGES}),
        "prepare",
        "report",
        PARAMETERS,
    ),
    "reshard": Expected(
        frozenset(RESHARD_STAGES), "reshard-prepare", "checkpoint-retain", RESHARD_PARAMETERS
    ),
}
"""By the name that a pipeline is compiled with."""
