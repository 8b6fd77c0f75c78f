"""Settings for a model from scratch meet a trained one, and an engine without its package."""

import pytest

from planish.base.config import parse_settings
from planish.run.stage import LOCAL_RUN
from planish.stages.prepare.settings import build_config
from planish.stages.prepare.trained import package_faults, trained_warnings


def configured(preset, *overrides, model=""):
    tables = build_config(
        preset=preset, config="", overrides=" ".join(overrides), model=model, dataset="", seed=-1
    )
    return parse_settings(tables)


@pytest.mark.parametrize(
    ("preset", "overrides", "named"),
    [
        ("dapo-small", [], []),
        ("grpo-small", [], []),
        ("dapo-tiny", [], ["`train.learning_rate` should be at most 0.0001"]),
        ("dapo-tiny", ["model.lora_rank=8"], []),
        ("dapo-small", ["train.learning_rate=2e-4"], ["got 0.0002: 2e-5 suits"]),
        ("dapo-small", ["algorithm.correction=bypass"], ["take 'token_truncate'"]),
        (
            "dapo-small",
            ["algorithm.correction=bypass", "train.compute_dtype=float32", "model.dtype=float32"],
            [],
        ),
        ("dapo-small", ["curate.gsm8k_as=steps"], ["`curate.gsm8k_as` should be 'problems'"]),
    ],
)
def test_what_spoils_a_trained_model_is_named_with_what_to_set(preset, overrides, named):
    found = trained_warnings(configured(preset, *overrides, model="some/model"))
    assert len(found) == len(named)
    assert all(text in line for text, line in zip(named, found, strict=True))


def test_a_model_from_scratch_has_no_such_warning():
    assert trained_warnings(configured("dapo-tiny", "algorithm.correction=bypass")) == []


def test_a_local_run_names_the_command_that_installs_its_engine(monkeypatch):
    monkeypatch.setattr("planish.base.parallel.find_spec", lambda name: None)
    # The image of a pod that prepares has no engine.
    monkeypatch.delenv(LOCAL_RUN, raising=False)
    assert package_faults(configured("dapo-tiny", "engine.name=vllm")) == ()
    monkeypatch.setenv(LOCAL_RUN, "1")
    (fault,) = package_faults(configured("dapo-tiny", "engine.name=vllm"))
    assert "`engine.name` = 'vllm' must find the package 'vllm'" in fault
    assert "`make engines`" in fault
    (fault,) = package_faults(configured("dapo-tiny"))
    assert "`pip install 'planish[train]'` installs it" in fault
    monkeypatch.undo()
    monkeypatch.setenv(LOCAL_RUN, "1")
    assert package_faults(configured("dapo-tiny")) == ()
