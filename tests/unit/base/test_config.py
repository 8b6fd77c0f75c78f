import contextlib
import json
import math
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planish.algorithms import ALGORITHMS
from planish.base.config import (
    ELSEWHERE,
    SECTIONS,
    Section,
    config_sha256,
    load_preset,
    merge,
    parse_override,
    parse_section,
    parse_toml,
    read_toml,
    resolve_config,
    section_class,
    unplaced,
)
from planish.base.errors import ConfigError
from planish.minder.detect.config import MinderConfig, minder_config
from planish.minder.service.config import service_settings
from planish.stages.prepare.settings import build_config
from planish.stages.train.config import DEFAULT_PLACEMENT, TrainConfig
from tests.thin import examples


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


def test_an_unknown_section_or_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean `train`"):
        section_class("trian", {})
    with pytest.raises(ConfigError, match="did you mean `dapo-tiny`"):
        load_preset("dapo-tini")


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


CLASSES = {name: section_class(name, {}) for name in sorted(SECTIONS)} | {
    f"algorithm.{name}": section_class("algorithm", {"name": name}) for name in ALGORITHMS
}
FLOATS = [
    (section, name)
    for section, cls in CLASSES.items()
    for name, field in cls.model_fields.items()
    if "float" in str(field.annotation)
]
KEYS = [f"{section}.{name}" for section in SECTIONS for name in CLASSES[section].model_fields]


def resolved(*overrides):
    return resolve_config(merge(load_preset("dapo-tiny"), overrides=overrides))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_setting_is_infinite_or_nan(value):
    assert len(FLOATS) > 60
    for section, name in FLOATS:
        with pytest.raises(ConfigError, match=f"`{section}.{name}`"):
            parse_section(CLASSES[section], {name: value}, section=section)
    for section, field in MinderConfig.model_fields.items():
        for name, inner in getattr(field.annotation, "model_fields", {}).items():
            if "float" in str(inner.annotation):
                table = {"gpu_power_draw": value} if name in ("floors", "role_limits") else value
                with pytest.raises(ConfigError, match="finite number"):
                    minder_config({section: {name: table}})


def test_a_setting_that_may_be_none_is_switched_off_by_none():
    off = resolved("train.grad_clip=none", "sft.grad_clip='none'", "algorithm.dual_clip=none")
    assert (off["train"]["grad_clip"], off["sft"]["grad_clip"]) == (None, None)
    assert off["algorithm"]["dual_clip"] is None
    windows = merge(load_preset("tppo-tiny"), overrides=["algorithm.dual_clip=none"])
    assert resolve_config(windows)["algorithm"]["dual_clip"] is None
    assert minder_config({"detect": {"kappa": "none"}}).detect.kappa is None
    with pytest.raises(ConfigError, match=r"`train\.learning_rate`.*got 'none'"):
        resolved("train.learning_rate=none")
    # A text stays a text.
    assert resolved("model.chat_template=none")["model"]["chat_template"] == "none"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.group_size.x=1", "below `group_size`"),
        ("algorithm.name.x=1", "below `name`"),
        ("evaluate.pass_at.0=1", "below `pass_at`"),
        ("train.num_passes=" + "9" * 5000, "TOML of usual size"),
        ("train.num_passes=0x" + "f" * 5000, "at most 64 bits"),
        ("train.num_passes=9223372036854775808", "at most 64 bits"),
        ("algorithm.name=[1]", "`algorithm.name` must be one of"),
        ("algorithm.name={a=1}", "`algorithm.name` must be one of"),
        ("evaluate.pass_at=" + "[" * 5000 + "]" * 5000, "TOML of usual size"),
        ("evaluate.pass_at=" + "[" * 100 + "]" * 100, "nested at most 16"),
        ("train." + "x." * 5000 + "x=1", "section.key=value"),
        ("train.learning_rate='\x00'", "`train.learning_rate`"),
        ("model.path=\udcff", "valid Unicode"),
        *((text, "section.key=value") for text in ("train=1", "=1", "train.x", "")),
        ("run.seed=1.5", "`run.seed`"),
        ("run.sed=1", "did you mean `seed`"),
        *(
            (f"train.grad_clip={text}", "`train.grad_clip`: Input should be a finite number")
            for text in ("inf", "-inf", "nan", "1e999", f"1{'0' * 400}.0")
        ),
    ],
)
def test_an_override_of_a_strange_shape_is_refused(override, words):
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")) as raised:
        resolved(override)
    assert len(str(raised.value)) < 2000


def test_lines_after_the_value_of_an_override_are_part_of_it():
    assert parse_override("model.chat_template=1\nb = 2")[2] == "1\nb = 2"


MARK = "\ufeff"
"""What some editors of Windows begin a file with."""


@pytest.mark.parametrize(
    "text", [f"{MARK}[run]\nseed = 3", f"{MARK}\r\n[run]\r\nseed=3", f"{MARK}# run\nrun.seed=3"]
)
def test_a_byte_order_mark_is_no_part_of_a_file(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode())
    table = {"run": {"seed": 3}}
    assert parse_toml(text, name="f") == parse_toml(text.encode(), name="f") == table
    assert read_toml(path) == table
    built = build_config(preset="", config=str(path), overrides="", model="", dataset="", seed=-1)
    assert built["run"] == table["run"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nx = " + "[" * 5000, "be .*TOML"),
        ("[a]\nx = " + "9" * 5000, "be .*TOML"),
        (b"\xff", "be .*TOML"),
        ("x = 1", "hold tables only"),
        *(
            (text, "be valid TOML")
            for text in ("x = = 1", f"{MARK}{MARK}a = 1", f"a = 1\n{MARK}b = 2")
        ),
    ],
)
def test_a_strange_file_is_refused(text, words):
    with pytest.raises(ConfigError, match=f"`f` must {words}"):
        parse_toml(text, name="f")


def test_a_config_place_that_can_not_be_is_refused():
    with pytest.raises(ConfigError, match="must be the URI or path of a TOML file"):
        build_config(preset="", config="a\0b", overrides="", model="", dataset="", seed=-1)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["none", "dapo", "auto", "all"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def toml_of(value):
    """Nearly TOML: numbers, lists and texts are the same as in JSON."""
    return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(KEYS) | st.text(alphabet="abx.=[]'\" \n", max_size=12),
            st.sampled_from(["", ".x", ".x.y", "."]),
            VALUES.map(toml_of) | st.text(max_size=20),
        ).map(lambda parts: f"{parts[0]}{parts[1]}={parts[2]}"),
        max_size=3,
    )
)
@example(["algorithm.name=[1]"])
@example(["rollout.group_size.x=1"])
def test_overrides_of_any_shape_resolve_or_are_refused(overrides):
    try:
        config = resolved(*overrides)
    except ConfigError:
        return
    # What is accepted survives run.json unchanged.
    again = json.loads(json.dumps(config, allow_nan=False))
    assert config_sha256(resolve_config(again)) == config_sha256(config)


@given(st.dictionaries(st.sampled_from(sorted(SECTIONS)) | st.text(max_size=5), VALUES, max_size=3))
@example({"train": 5, "algorithm": [1]})
@example({"algorithm": {"name": {}}})
def test_tables_of_any_shape_resolve_or_are_refused(tables):
    with contextlib.suppress(ConfigError):
        resolve_config(tables)


@given(
    st.dictionaries(
        st.sampled_from(["prometheus", "detect", "metrics", "jobs", "server", "profile", "act"]),
        VALUES,
        max_size=3,
    )
)
@example({"profile": [1]})
def test_tables_of_the_monitor_of_any_shape_are_read_or_refused(tables):
    with contextlib.suppress(ConfigError):
        service_settings({"prometheus": {"url": "http://p:9090"}} | tables)


@pytest.mark.parametrize(("word", "path"), sorted(ELSEWHERE.items()))
def test_a_word_of_verl_or_trl_is_answered_with_a_setting_that_there_is(word, path):
    section, _, name = path.partition(".")
    is_critics = name in ("lambda_policy", "value_clip_low")
    table = {"name": "vapo" if is_critics else "dapo"} if section == "algorithm" else {}
    known = section_class(section, table).model_fields
    assert name in known
    with pytest.raises(ConfigError, match=f"did you mean `{path}`"):
        parse_section(section_class("run", {}), {word: 1}, section="run")


@pytest.mark.parametrize(
    ("section", "raw", "setting"),
    [
        ("train", {"num_iterations": 2}, "train.num_passes"),
        ("train", {"max_grad_norm": 1}, "train.grad_clip"),
        ("train", {"temperature": 1}, "rollout.temperature"),
        ("train", {"per_device_train_batch_size": 1}, "train.tokens_per_microbatch"),
        ("rollout", {"system_prompt": "x"}, "curate.prompt_prefix"),
        ("rollout", {"vllm_gpu_memory_utilization": 0.5}, "engine.memory_share"),
        ("rollout", {"rollout": {"n": 8}}, "rollout.group_size"),
        ("algorithm", {"scale_rewards": False}, "algorithm.std"),
        ("algorithm", {"loss_type": "dr_grpo"}, "algorithm.aggregation"),
        ("actor_rollout_ref", {"rollout": {"n": 8}}, "rollout.group_size"),
        ("actor_rollout_ref", {"actor": {"optim": {"lr": 1}}}, "train.learning_rate"),
        ("data", {"max_prompt_length": 3}, "rollout.max_prompt_tokens"),
        ("trian", {"grad_clip": 1}, "train"),
        ("train", {"lerning_rate": 1}, "learning_rate"),
    ],
)
def test_a_word_of_another_program_is_answered_with_the_setting(section, raw, setting):
    with pytest.raises(ConfigError, match=re.escape(f"; did you mean `{setting}`?")):
        parse_section(section_class(section, raw), raw, section=section)
