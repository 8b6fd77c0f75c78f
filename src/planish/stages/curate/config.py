"""Settings of the curate stage."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from planish.base.config import Fraction, Needs, Section, nearest, setting
from planish.base.parallel import DeviceName
from planish.store.sources import parse_source

Task = Literal["column-arithmetic", "short-sums"]

MAPPED = ("prompt", "answer", "system", "verifier", "trace", "source")
"""Parts of a row whose column `dataset_map` may name."""

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Instruction of the prompts for which scores of these sets are usually published."""

KNOWN_SETS: dict[str, dict[str, str]] = {
    "aime-2024": {
        "dataset": "HuggingFaceH4/aime_2024",
        "hub_split": "train",
        "verifier": "integer",
        "prompt_suffix": BOXED,
    },
    "aime-2025": {"dataset": "math-ai/aime25", "verifier": "integer", "prompt_suffix": BOXED},
    "math-500": {
        "dataset": "HuggingFaceH4/MATH-500",
        "dataset_map": "source=subject",
        "verifier": "math",
        "prompt_suffix": BOXED,
    },
    "gsm8k": {
        "dataset": "openai/gsm8k",
        "hub_config": "main",
        "verifier": "integer",
        "prompt_suffix": BOXED,
    },
}
"""Evaluation sets known by name, with their published copies on the hub."""

SET_KEY = "curate.evaluation_sets.dataset"
"""Name, in messages, of the setting with the address of an evaluation set."""

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ENDINGS = re.compile(r"(\.jsonl|\.json|\.parquet|\.gz)+$")


def parse_map(text: str) -> dict[str, str]:
    """Read `dataset_map`.

    Example:
        >>> parse_map("prompt=question, answer=reward_model.truth")
        {'prompt': 'question', 'answer': 'reward_model.truth'}

    Raises:
        ValueError: `text` has another form, or a name that is not in `MAPPED`.
    """
    columns: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, column = (word.strip() for word in part.partition("="))
        if not (equals and column) or name not in MAPPED or name in columns:
            raise ValueError(
                f"`dataset_map` must read name=column,... with each of {', '.join(MAPPED)} at most "
                f"once, got {part!r}{nearest(name, MAPPED) if name not in MAPPED else ''}"
            )
        columns[name] = column
    return columns


def _checked_map(text: str) -> str:
    parse_map(text)
    return text


ColumnMap = Annotated[str, AfterValidator(_checked_map)]


def set_table(text: str) -> dict[str, str]:
    """Return the table of an evaluation set from its known name or the address of its data.

    Example:
        >>> set_table("mine.jsonl"), set_table("gsm8k")["dataset"]
        ({'name': 'mine', 'dataset': 'mine.jsonl'}, 'openai/gsm8k')

    Raises:
        ConfigError: `text` is no address.
    """
    if text in KNOWN_SETS:
        return {"name": text, **KNOWN_SETS[text]}
    source = parse_source(text, key=SET_KEY)
    last = PurePosixPath((source.file or source.place).partition("?")[0]).name.lower()
    name = re.sub(r"[^a-z0-9._-]+", "-", _ENDINGS.sub("", last)).lstrip("-._")
    return {"name": name if name[:1].isalpha() else f"set-{name}", "dataset": text}


class EvaluationSet(Section):
    """Problems to measure policies on; a text in place of the table is a known name or an
    address.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9._-]{0,63}$")
    """What its scores are called; the other settings of a known name need not be given. Made of
    the address where there is none."""
    dataset: str
    """Where the problems are, in the forms of `curate.dataset`."""
    hub_config: str = ""
    """Configuration name of a hub data set; empty: its only one."""
    hub_split: str = "test"
    """Split of a hub data set."""
    hub_revision: str = ""
    """Commit or tag of a hub data set whose address names none; empty: the newest."""
    dataset_map: ColumnMap = ""
    """Columns that have other names than the usual ones, as in `curate.dataset_map`."""
    verifier: str = "auto"
    """Verifier of rows that name none, as in `curate.verifier`."""
    prompt_prefix: str = ""
    """Put before problems that are plain text and are verified as `integer` or `math`."""
    prompt_suffix: str = ""
    """Put after such problems; both empty: prefix and suffix of `curate`."""

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, raw: Any) -> Any:
        table, word = ({}, raw) if isinstance(raw, str) else (raw, None)
        if isinstance(table, dict) and table:
            name, address = table.get("name"), table.get("dataset")
            word = name if address is None or name in list(KNOWN_SETS) else address
        return set_table(word) | table if isinstance(word, str) else raw

    @field_validator("dataset")
    @classmethod
    def _is_data_set(cls, text: str) -> str:
        source = parse_source(text, key=SET_KEY)
        if source.kind == "hub" and "/" not in source.place:
            raise ValueError(
                f"an evaluation set must be one of {', '.join(KNOWN_SETS)}, a file, or `owner/name`"
                f" on the hub, got {text!r}{nearest(text, KNOWN_SETS)}"
            )
        return text


class CurateConfig(Section):
    """Where prompts come from and which of them are kept."""

    dataset: str = ""
    """JSONL or Parquet file, or data set of the hub: a path, `owner/name`,
    `hf://owner/name[/file][@revision]`, `s3://bucket/key` or `https://...#sha256=<digest>`; empty:
    generate `task`."""
    evaluation_dataset: str = setting(
        "", Needs("curate.dataset", why="name the training problems too")
    )
    """Held-out problems, in the same forms; empty: hold out a part of `dataset`."""
    evaluation_sets: list[EvaluationSet] = setting([], quiet="evaluation_sets")
    """Sets that policies are measured on besides the held-out problems, each by itself; no problem
    of theirs is trained on. Names (`aime-2024`, `aime-2025`, `math-500`, `gsm8k`), addresses, or
    tables as below."""
    task: Task = "column-arithmetic"
    """Generated task, used while `dataset` is empty."""
    num_prompts: int = Field(4096, ge=1, le=1_000_000)
    """Training prompts of a generated task; small tasks may have fewer different ones."""
    evaluation_size: PositiveInt = 512
    """Most held-out prompts; further ones of `dataset` are trained on."""
    evaluation_fraction: float = Field(0.125, gt=0.0, lt=1.0)
    """Part of all prompts that is held out, by hash of operands or words; one at least."""
    num_traces: int | None = Field(None, ge=0)
    """Most worked traces for the cold start, chosen by hash; None: one for each training prompt."""
    trace_mistakes: Fraction = 0.0
    """Part of the worked traces that are made here in which one digit is wrong, as solutions that
    were scraped hold mistakes: the cold start learns them, reinforcement learning can unlearn
    them. Traces of a data set stay as they are."""
    max_operand_digits: int = Field(4, ge=1, le=9)
    """Longest operand of column arithmetic."""
    hub_config: str = ""
    """Configuration name of a hub data set; empty: its only one."""
    hub_split: str = "train"
    """Split of a hub data set."""
    hub_revision: str = ""
    """Commit or tag of a hub data set whose address names none; empty: the newest."""
    gsm8k_as: Literal["problems", "steps"] = "problems"
    """What becomes of a file in GSM8K's form: its word problems, or every `<<...>>` step of their
    solutions as a column-arithmetic prompt."""
    dataset_map: ColumnMap = ""
    """Columns that have other names than the usual ones, `prompt=question,answer=label`; dotted for
    nested ones. Empty: the first usual name that is there."""
    verifier: str = "auto"
    """Verifier of rows that name none; `auto`: `integer` for integers, else `math`."""
    answer_pattern: str = ""
    """Pattern that rows with the verifier `regex` are held to, `{answer}` in it standing for their
    ground truth as plain text; empty: their ground truth is the pattern."""
    prompt_prefix: str = (
        "Work through the problem below step by step. Write the final answer on a line of its own, "
        "in the form `Answer: <answer>`.\n\n"
    )
    """Put before problems that are plain text and are verified as `integer` or `math`."""
    prompt_suffix: str = "\n\nDo not forget the last line: `Answer: <answer>`."
    """Put after such problems."""
    to_integers: bool = False
    """Rewrite problems whose answer is a fraction or a + b*sqrt(c) so that the answer is an
    integer; others are rejected. DAPO, arXiv 2503.14476, section 3.5."""
    rewriter: str = setting(
        "", Needs("curate.to_integers", True, "it rewrites what the rules reject")
    )
    """`module:callable` that rewrites what the rules reject; empty: off."""
    max_prompt_chars: PositiveInt = 8192
    """Longer prompts are dropped; in characters of all messages together."""
    near_duplicate_threshold: float = Field(0.8, gt=0.0, le=1.0)
    """Jaccard similarity of word triples from which two problems count as one; 1: only equal."""
    contamination_ngram: int = Field(13, ge=2)
    """Training problems that share so many words in a row with a held-out problem are dropped;
    instructions that one problem in two hundred begins, ends or is built with do not count."""
    pass_rate_policy: str = ""
    """Pinned URI of a reference policy that measures pass rates; empty: off."""
    pass_rate_samples: PositiveInt = 8
    """Responses to each prompt."""
    pass_rate_max_tokens: PositiveInt = 1024
    """Longest of these responses, in tokens."""
    pass_rate_max_rows: PositiveInt = 256
    """Of these responses, those that the engine generates at once."""
    pass_rate_device: DeviceName = "auto"
    """Where the reference policy lives; `auto` takes an accelerator where there is one."""
    pass_rate_min: Fraction = 0.0
    """Training prompts below this pass rate are dropped."""
    pass_rate_max: Fraction = 1.0
    """Training prompts above this pass rate are dropped."""
    reward_columns: list[str] = setting([], quiet="reward_columns")
    """Columns of the data set that reward functions of your own get as `**columns`; those that they
    name as parameters need no mention."""
    skip_bad: bool = False
    """Leave out rows that cannot be read and count them, where the default is to stop."""
    workers: int = Field(1, ge=1, le=64)
    """Processes for similarity signatures; the result does not depend on it."""

    @field_validator("dataset", "evaluation_dataset")
    @classmethod
    def _is_address(cls, text: str) -> str:
        if text:
            parse_source(text, key="curate.dataset")
        return text

    @model_validator(mode="after")
    def _check(self) -> CurateConfig:
        faults = []
        if self.pass_rate_min > self.pass_rate_max:
            faults.append(
                "`pass_rate_min` must not exceed `pass_rate_max`, got "
                f"{self.pass_rate_min!r} > {self.pass_rate_max!r}"
            )
        if self.rewriter and not _REFERENCE.fullmatch(self.rewriter):
            faults.append(f"`rewriter` must read `module:callable`, got {self.rewriter!r}")
        names = [chosen.name for chosen in self.evaluation_sets]
        if len(set(names)) < len(names):
            faults.append(f"`evaluation_sets` must have different names, got {names}")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def of_held_out(self) -> CurateConfig:
        """Return the settings for reading `evaluation_dataset`."""
        return self.model_copy(update={"dataset": self.evaluation_dataset})

    def of_set(self, chosen: EvaluationSet) -> CurateConfig:
        """Return the settings for reading an evaluation set: its own, else those of `curate`."""
        own = chosen.model_dump(exclude={"name"})
        if not (chosen.prompt_prefix or chosen.prompt_suffix):
            del own["prompt_prefix"], own["prompt_suffix"]
        return self.model_copy(update={**own, "gsm8k_as": "problems"})
