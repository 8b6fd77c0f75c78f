import pytest

from planish.base.config import (
    Section,
    config_sha256,
    load_preset,
    merge,
    parse_override,
    parse_section,
    parse_toml,
    preset_names,
    resolve_config,
    section_class,
    unplaced,
)
from planish.base.errors import ConfigError
from planish.stages.train.config import DEFAULT_PLACEMENT, TrainConfig


class Toy(Section):
    size: int = 1
    """Size."""
    rate: float = 0.5
    """Rate."""


def test_nothing_is_coerced_and_all_faults_are_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_section(Toy, {"size": "3", "rate": "x"}, section="toy")
    assert "`toy.size`" in str(caught.value)
    assert "`toy.rate`" in str(caught.value)
    assert "'3'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("--train.name=abc", "abc"),
        ("train.flag=false", False),
        ("train.names=['a', 'b']", ["a", "b"]),
        (r"train.name=\nThink first.\n", "\nThink first.\n"),
        (r'train.name="\nThink"', "\nThink"),
        (r"train.name='\neq'", r"\neq"),
    ],
)
def test_overrides_are_toml_values_or_text(text: str, value: object) -> None:
    assert parse_override(text)[2] == value


def test_later_layers_and_overrides_win_key_by_key() -> None:
    merged = merge({"a": {"x": 1, "y": 1}}, {"a": {"y": 2}}, overrides=["a.z.deep=3"])
    assert merged == {"a": {"x": 1, "y": 2, "z": {"deep": 3}}}


def test_toml_outside_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="tables only"):
        parse_toml("x = 1", name="f")
    with pytest.raises(ConfigError, match="valid TOML"):
        parse_toml("x = = 1", name="f")


def test_an_unknown_section_or_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean `train`"):
        section_class("trian", {})
    with pytest.raises(ConfigError, match="did you mean `dapo-tiny`"):
        load_preset("dapo-tini")


def test_every_preset_resolves_and_has_a_stable_digest() -> None:
    digests = set()
    for name in preset_names():
        resolved = resolve_config(load_preset(name))
        assert resolve_config(resolved) == resolved
        digests.add(config_sha256(resolved))
    assert len(digests) == len(preset_names()) >= 4


def test_faults_of_all_sections_come_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config({"run": {"sed": 1}, "train": {"lerning_rate": 1.0}})
    assert "`run.sed`" in str(caught.value)
    assert "`train.lerning_rate`" in str(caught.value)


def test_where_a_run_is_computed_is_not_part_of_its_digest() -> None:
    defaults = resolve_config({"train": {}})
    assert unplaced(defaults) == defaults
    moved = {"trainer": "megatron", "tensor_parallel": 2, "num_processes": 4, "queue": "team"}
    assert config_sha256(resolve_config({"train": moved})) == config_sha256(defaults)
    assert {*moved} < {*DEFAULT_PLACEMENT} < {*TrainConfig.model_fields}
    other = {**moved, "learning_rate": 1e-3}
    assert config_sha256(resolve_config({"train": other})) != config_sha256(defaults)
