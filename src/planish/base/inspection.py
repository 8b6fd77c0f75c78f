"""Facts, faults and warnings that a check of data and model finds before a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Inspection:
    """Facts about data and model. Their readers fill it; `prepare` prints it."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    """(topic, value) for people; values are Markdown."""
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    prompts: list[list[dict[str, str]]] = field(default_factory=list)
    """Messages of some prompts, as the policy sees them."""
    model_config: dict[str, object] = field(default_factory=dict)
    """Content of the model's config.json; empty for a model built from scratch."""
    vocabulary: dict[str, int] = field(default_factory=dict)
    """Map from token to id in the model's tokenizer; empty for a model built from scratch."""
