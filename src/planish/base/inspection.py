"""The result of opening data and model before a run: facts, faults and warnings."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Inspection:
    """The readers of data and model fill it; `prepare` prints and judges it."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    """(what, value) for people; values are Markdown."""
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    prompts: list[list[dict[str, str]]] = field(default_factory=list)
    """Messages of some prompts, as the policy will see them."""
    model_config: dict[str, object] = field(default_factory=dict)
    """Content of the model's config.json; empty for a model that is built."""
    vocabulary: dict[str, int] = field(default_factory=dict)
    """Tokens of the model's tokenizer and their ids; empty for a model that is built."""
