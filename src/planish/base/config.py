"""Configuration: loads, merges and checks TOML presets, files and dotted overrides.

The class of a section lies beside the code that it configures; this module knows only the paths of
the classes. It reads no environment variable and converts no types.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from importlib import resources
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from planish.base.errors import ConfigError

SECTIONS: dict[str, str] = {
    "run": "planish.base.config:RunConfig",
    "model": "planish.models.config:ModelConfig",
    "curate": "planish.stages.curate.config:CurateConfig",
    "sft": "planish.stages.sft.config:SftConfig",
    "engine": "planish.engines.config:EngineConfig",
    "rollout": "planish.stages.rollout.config:RolloutConfig",
    "reward": "planish.stages.reward.config:RewardConfig",
    "algorithm": "planish.algorithms:algorithm_config",
    "train": "planish.stages.train.config:TrainConfig",
    "critic": "planish.stages.train.config:CriticConfig",
    "evaluate": "planish.stages.evaluate.config:EvaluateConfig",
}
"""Section name to `module:class`, or to `module:function` that returns a class for the raw
table."""

LENGTHS = ("evaluate", "reward")
"""Sections in which `max_response_tokens` defaults to the value in `rollout`."""

CHECK = "planish.stages.prepare.checks:check_config"
"""`module:function` that returns the faults across sections that no `Needs` can state."""

PLACED: dict[str, str] = {"train": "planish.stages.train.config:DEFAULT_PLACEMENT"}
"""Map from section name to the `module:name` of those settings that only place the computation on
machines."""

GONE: dict[str, dict[str, Any]] = {
    "curate": {
        "chain_log_mean": 1.6,
        "chain_log_std": 0.6,
        "chain_max_operands": 23,
        "countdown_numbers": 3,
        "near_duplicate_min_words": 12,
    },
    "sft": {
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "min_start": 0.15,
        "max_start": 0.45,
        "enforce_start_band": False,
    },
    "train": {"alarm_after_skipped": 3, "commit_steps": 0},
}
"""Settings of earlier releases, with their constant values; digests still include them."""

_MAX_DEPTH = 16
"""Maximum depth of nested tables and lists; settings need three."""


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""Number from 0 to 1."""


class Wanted(Enum):
    """Wanted values of a setting that are no list."""

    IN_USE = "any but the default"
    SAME = "the value of the setting that has the need"
    ANY = "any"


class Needs(NamedTuple):
    """Another setting with which alone a setting works; it stands beside the field, in `setting`.

    Wanted values are one value, a tuple of several, or a `Wanted`.

    Example:
        >>> Needs("train.packing", True, "ranks share rows that lie end to end").values
        True
    """

    path: str
    """The other setting, `section.key`."""
    values: Any = Wanted.IN_USE
    """Wanted values of the other setting."""
    why: str = ""
    """Reason or remedy, at the end of the message."""
    when: Any = Wanted.IN_USE
    """Values of the own setting that need it."""
    beside: Mapping[str, Any] = {}
    """Further settings, and the values with which alone it is needed."""


def setting(default: Any, *needs: Needs, quiet: str = "", **limits: Any) -> Any:
    """Return a pydantic field with what it needs.

    `quiet` names settings, separated by spaces: while all of them have their defaults, a dump
    leaves this setting out, so that runs without it keep their digest.
    """
    extra: dict[str, Any] = {"needs": needs, "quiet": quiet}
    return Field(default, json_schema_extra=extra, **limits)


class Section(BaseModel):
    """Base class of every section: frozen and strict, without unknown keys and infinite numbers.

    TOML has no null, so the text `none` stands for None in every number or table that may be
    None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        fields = cls.model_fields.items()
        kinds = {key: (field.annotation, *get_args(field.annotation)) for key, field in fields}
        off = {key for key, each in kinds.items() if NoneType in each}
        return {
            key: None if value == "none" and key in off else value for key, value in raw.items()
        }

    @classmethod
    def declared(cls, name: str, key: Literal["needs", "quiet"]) -> Any:
        """Return the `needs` or `quiet` of a setting; empty where it has none."""
        extra: Any = cls.model_fields[name].json_schema_extra or {}
        return extra.get(key, ())

    def uses(self, name: str) -> bool:
        """Return whether a setting is in use: it has another value than its default."""
        field = type(self).model_fields[name]
        return bool(getattr(self, name) != field.get_default(call_default_factory=True))

    def _off(self) -> list[str]:
        """Return the settings to leave out of a dump, so that runs without them keep their
        digest.
        """
        return [
            name
            for name in type(self).model_fields
            if (quiet := self.declared(name, "quiet")) and not any(map(self.uses, quiet.split()))
        ]

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table: dict[str, Any] = handler(self)
        off = self._off()
        return {name: value for name, value in table.items() if name not in off}


SectionT = TypeVar("SectionT", bound=Section)


class RunConfig(Section):
    """Settings of the whole run."""

    seed: int = Field(0, ge=0, lt=2**53)
    """Seed of every random choice; 0 <= seed < 2**53 (KFP carries numbers as doubles)."""


def _resolve(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def section_class(section: str, raw: Mapping[str, Any]) -> type[Section]:
    """Return the class of `section`; for some sections it depends on the table `raw`."""
    if section not in SECTIONS:
        told = f"a configuration section must be one of {sorted(SECTIONS)}, got {section!r}"
        raise ConfigError(f"{told}{_elsewhere(raw) or nearest(section, SECTIONS)}")
    _check_table(section, raw)
    owner: type[Section] | Callable[[Mapping[str, Any]], type[Section]]
    owner = _resolve(SECTIONS[section])
    return owner if isinstance(owner, type) else owner(raw)


def _check_table(section: str, raw: object) -> None:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"`{section}` must be a table of settings, got {raw!r:.200}")


_THEIRS = {
    "algorithm.aggregation": "loss_agg_mode loss_type",
    "algorithm.clip_high": "clip_ratio_high epsilon_high",
    "algorithm.clip_low": "clip_ratio clip_ratio_low cliprange epsilon",
    "algorithm.dual_clip": "clip_ratio_c delta",
    "algorithm.kl_coefficient": "beta kl_coef kl_loss_coef use_kl_in_reward use_kl_loss",
    "algorithm.lambda_policy": "lam",
    "algorithm.name": "adv_estimator importance_sampling_level",
    "algorithm.overlong_filtering": "mask_truncated_completions",
    "algorithm.std": "norm_adv_by_std_in_grpo scale_rewards",
    "algorithm.value_clip_low": "cliprange_value",
    "curate.dataset": "dataset_name train_files",
    "curate.evaluation_dataset": "val_files",
    "curate.prompt_prefix": "system_prompt",
    "engine.memory_share": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "engine.tensor_parallel": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "evaluate.every": "eval_steps test_freq",
    "model.lora_rank": "lora_r",
    "model.path": "model_name_or_path",
    "model.stop_strings": "stop stop_words",
    "model.template_variables": "chat_template_kwargs",
    "reward.functions": "reward_funcs reward_weights",
    "reward.overlong_buffer_tokens": "overlong_buffer",
    "rollout.dynamic_sampling": "filter_groups",
    "rollout.generation_prompts_factor": "gen_batch_size",
    "rollout.group_size": "n num_generations rollout_n",
    "rollout.max_generation_rounds": "max_num_gen_batches",
    "rollout.max_prompt_tokens": "max_prompt_length",
    "rollout.max_response_tokens": "max_completion_length max_new_tokens max_response_length",
    "rollout.prompts_per_iteration": "generation_batch_size train_batch_size",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "train.activation_checkpointing": "enable_gradient_checkpointing gradient_checkpointing",
    "train.compute_dtype": "bf16",
    "train.grad_clip": "clip_grad max_grad_norm",
    "train.learning_rate": "lr",
    "train.num_nodes": "nnodes",
    "train.num_passes": "num_iterations ppo_epochs",
    "train.num_processes": "n_gpus_per_node",
    "train.offload": "optimizer_offload param_offload",
    "train.reference_policy": "ref_model",
    "train.rollouts_per_minibatch": "gradient_accumulation_steps ppo_mini_batch_size",
    "train.tokens_per_microbatch": "per_device_train_batch_size ppo_max_token_len_per_gpu",
    "train.warmup_iterations": "lr_scheduler_type lr_warmup_steps warmup_ratio warmup_steps",
}
"""Map from setting to the names that verl and TRL give it."""
ELSEWHERE = {word: key for key, words in _THEIRS.items() for word in words.split()}
"""Map from name in verl or TRL to the setting here."""


def _elsewhere(table: object) -> str:
    """Return "; did you mean `...`?" if the table has a name of verl or TRL; else ""."""
    if not isinstance(table, Mapping):
        return ""
    for key, value in table.items():
        if hint := _elsewhere(value):
            return hint
        if key in ELSEWHERE:
            return f"; did you mean `{ELSEWHERE[key]}`?"
    return ""


def nearest(key: str, valid: Iterable[str]) -> str:
    """Return "; did you mean `...`?" with the valid name most like `key`; "" if none is close."""
    close = difflib.get_close_matches(key, list(valid), n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else ""


def parse_section(cls: type[SectionT], raw: Mapping[str, Any], *, section: str) -> SectionT:
    """Validate one raw table as `cls`.

    Raises:
        ConfigError: every fault, each with its key, the value seen and the nearest valid key.
    """
    _check_table(section, raw)
    try:
        parsed = cls.model_validate(dict(raw))
    except ValidationError as error:
        faults = [_fault(section, item, cls) for item in error.errors()]
        raise ConfigError("; ".join(faults)) from None
    if faults := need_faults({section: parsed}):
        raise ConfigError("; ".join(faults))
    return parsed


def toml_value(value: Any) -> str:
    """Return the value of a setting as TOML, tables inline.

    Example:
        >>> toml_value([{"name": "mine", "weight": 0.5}]), toml_value(None)
        ('[{"name" = "mine", "weight" = 0.5}]', '"none"')
    """
    shown = "none" if value is None else value
    text = json.dumps(shown, ensure_ascii=False, separators=(", ", " = "), default=str)
    # JSON allows this control character in a string, TOML does not.
    return text.replace("\x7f", "\\u007f")


def need_faults(sections: Mapping[str, Section]) -> list[str]:
    """Return a fault for each setting that lacks what it needs of these sections.

    A fault names the setting to change, its values that work, the value seen and the reason.
    """
    owners = {
        f"{section}.{name}": (settings, name)
        for section, settings in sections.items()
        for name in type(settings).model_fields
    }
    values = {path: getattr(*owner) for path, owner in owners.items()}

    def fits(path: str, wanted: Any, own: Any = None) -> bool:
        if wanted is Wanted.IN_USE:
            settings, name = owners[path]
            return settings.uses(name)
        return wanted is Wanted.ANY or values[path] in _options(wanted, own)

    faults = []
    for path, (settings, name) in owners.items():
        for need in settings.declared(name, "needs"):
            causes = {path: need.when, **need.beside}
            if not {need.path, *causes} <= owners.keys():
                continue
            if all(map(fits, causes, causes.values())) and not fits(
                need.path, need.values, values[path]
            ):
                seen = toml_value(values[need.path])
                must = f"not be {seen}"
                if need.values is not Wanted.IN_USE:
                    options = _options(need.values, values[path])
                    must = f"be {' or '.join(map(toml_value, options))}"
                others = " and ".join(
                    f"`{cause}` = {toml_value(values[cause])}" for cause in causes
                )
                why = need.why or f"change it, or leave out `{path}`"
                faults.append(f"`{need.path}` must {must} with {others}, got {seen}; {why}")
    return faults


def _options(wanted: Any, own: Any) -> tuple[Any, ...]:
    if wanted is Wanted.SAME:
        return (own,)
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _fault(section: str, item: Any, cls: type[BaseModel]) -> str:
    path = ".".join([*filter(None, [section]), *map(str, item["loc"])])
    value = f"{item.get('input')!r:.200}"
    if item["type"] == "extra_forbidden":
        for part in item["loc"][:-1]:
            # For a list of tables, the location also has the index.
            if isinstance(part, str):
                kind: Any = cls.model_fields[part].annotation
                cls = next(iter(get_args(kind)), kind)
        key = str(item["loc"][-1])
        hint = (
            _elsewhere({key: item["input"]})
            or nearest(key, cls.model_fields)
            or f"; valid keys are {sorted(cls.model_fields)}"
        )
        return f"`{path}` is not a known key, got {value}{hint}"
    if item["type"] == "value_error":
        return f"{path and f'`{path}`: '}{item['ctx']['error']}"
    return f"`{path}`: {item['msg']}, got {value}"


def document_faults(error: ValidationError) -> str:
    """Return the first faults of a document, each with the value seen."""
    faults = []
    for item in error.errors()[:8]:
        text = item["msg"].removeprefix("Value error, ")
        place = ".".join(map(str, item["loc"]))
        # The message of a rule over the whole document has the value itself.
        seen = "" if item["type"] == "value_error" and not place else f", got {item['input']!r:.80}"
        faults.append(f"{f'`{place}`: ' if place else ''}{text}{seen}")
    return "; ".join(faults)


def parse_toml(text: str | bytes, *, name: str) -> dict[str, dict[str, Any]]:
    """Parse TOML that has tables only."""
    tables = load_toml(text, name=name)
    for key, value in tables.items():
        if not isinstance(value, dict):
            raise ConfigError(
                f"`{name}` must hold tables only, got `{key} = {value!r:.200}` outside a table"
            )
    return tables


def load_toml(text: str | bytes, *, name: str) -> dict[str, Any]:
    """Parse TOML without its byte order mark; refuse values that a later step cannot store."""
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        return _loads(decoded.removeprefix("\ufeff"), name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{name}` must be valid TOML in UTF-8: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of this machine."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{path}` must be a readable TOML file, got {error}") from None
    return load_toml(data, name=str(path))


def _loads(text: str, name: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        # tomllib raises these for integers of thousands of digits and for endless brackets.
        raise ConfigError(f"`{name}` must be TOML of usual size, got {error}") from None
    check_limits(tables, name)
    return tables


def check_limits(settings: Mapping[str, Any], name: str) -> None:
    """Refuse values that a later step cannot store, compare or print."""
    level: list[Any] = [settings]
    for _ in range(_MAX_DEPTH):
        tables = [value.values() for value in level if isinstance(value, dict)]
        lists = [value for value in level if isinstance(value, list)]
        level = [item for items in (*tables, *lists) for item in items]
        if any(type(item) is int and not -(2**63) <= item < 2**63 for item in level):
            raise ConfigError(f"`{name}` must hold integers of at most 64 bits, got a longer one")
    if level:
        raise ConfigError(f"`{name}` must be nested at most {_MAX_DEPTH} deep, got more")


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package, sorted."""
    folder = resources.files("planish.base") / "presets"
    return sorted(p.name[: -len(".toml")] for p in folder.iterdir() if p.name.endswith(".toml"))


def load_preset(name: str) -> dict[str, dict[str, Any]]:
    """Return the raw tables of a shipped preset."""
    names = preset_names()
    if name not in names:
        raise ConfigError(f"a preset must be one of {names}, got {name!r}{nearest(name, names)}")
    text = (resources.files("planish.base") / "presets" / f"{name}.toml").read_text("utf-8")
    return parse_toml(text, name=f"preset {name}")


def parse_override(text: str) -> tuple[str, str, Any]:
    """Split `section.key=value`; the value is TOML, or else a plain string.

    In a plain string a backslash and `n` mean a new line; a TOML string in single quotes keeps
    both characters.

    Example:
        >>> parse_override("train.learning_rate=1e-6")
        ('train', 'learning_rate', 1e-06)
    """
    path, equals, value = text.strip().removeprefix("--").partition("=")
    section, dot, key = path.partition(".")
    if not (equals and dot and key and key.count(".") < _MAX_DEPTH):
        raise ConfigError(f"an override must read `section.key=value`, got {text!r:.200}")
    if text != text.encode(errors="ignore").decode():
        raise ConfigError(f"an override must be valid Unicode, got {text!r:.200}")
    try:
        tables = _loads(f"v = {value}", path)
    except tomllib.TOMLDecodeError:
        return section, key, value.replace(r"\n", "\n")
    # Several keys: the value was a text of several lines that looks like TOML.
    return section, key, tables["v"] if len(tables) == 1 else value


def merge(
    *layers: Mapping[str, Mapping[str, Any]], overrides: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Merge raw tables key by key: later layers win, and overrides win over all layers.

    An override of `a.b.c` reaches into nested tables.
    """
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, table in layer.items():
            merged.setdefault(section, {}).update(table)
    for text in overrides:
        section, key, value = parse_override(text)
        target = merged.setdefault(section, {})
        *path, last = key.split(".")
        for part in path:
            above = target.get(part, {})
            if not isinstance(above, Mapping):
                raise ConfigError(
                    f"an override must name a setting, got {text!r:.200} below `{part}`, which "
                    f"is {above!r:.200} and no table"
                )
            nested = dict(above)
            target[part] = nested
            target = nested
        target[last] = value
    return merged


def resolve_config(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Validate every section and the checks across sections; return JSON values with defaults.

    Raises:
        ConfigError: every fault of every section in one message.
    """
    faults: list[str] = []
    resolved: dict[str, dict[str, Any]] = {}
    parsed: dict[str, Section] = {}
    rollout = raw.get("rollout", {})
    longest = rollout.get("max_response_tokens") if isinstance(rollout, Mapping) else None
    for section in sorted({*SECTIONS, *raw}):
        table = raw.get(section, {})
        if section in LENGTHS and longest is not None and isinstance(table, Mapping):
            table = {"max_response_tokens": longest, **table}
        try:
            parsed[section] = parse_section(section_class(section, table), table, section=section)
            resolved[section] = parsed[section].model_dump(mode="json")
        except ConfigError as error:
            faults.append(str(error))
    if not faults:
        faults = [*need_faults(parsed), *_resolve(CHECK)(SimpleNamespace(**parsed))]
    if faults:
        raise ConfigError("; ".join(faults))
    return resolved


def parse_settings(resolved: Mapping[str, Mapping[str, Any]]) -> SimpleNamespace:
    """Return the sections of a resolved configuration by name, each as its class."""
    return SimpleNamespace(
        **{
            section: parse_section(section_class(section, table), table, section=section)
            for section, table in resolved.items()
        }
    )


def unplaced(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which all settings of `PLACED` have their defaults.

    Two configurations with equal results belong to one run, which may go on with other machines.

    Example:
        >>> unplaced({"train": {"num_nodes": 4, "tensor_parallel": 2, "grad_clip": 1.0}})
        {'train': {'num_nodes': 0, 'grad_clip': 1.0}}
    """
    result = dict(resolved)
    for section, reference in PLACED.items():
        table = resolved.get(section)
        if isinstance(table, Mapping):
            # A setting that a dump leaves out has no default here.
            defaults = _resolve(reference)
            merged = {name: defaults.get(name, value) for name, value in table.items()}
            result[section] = {
                name: value
                for name, value in merged.items()
                if name not in defaults or value is not None
            }
    return result


def config_sha256(resolved: Mapping[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of a configuration after `unplaced`, with `GONE`
    added.
    """
    table = unplaced(resolved)
    for section in GONE.keys() & table.keys():
        table[section] = {**GONE[section], **table[section]}
    try:
        canonical = json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ConfigError(f"a configuration must be finite, got {error}") from None
    return hashlib.sha256(canonical.encode()).hexdigest()
