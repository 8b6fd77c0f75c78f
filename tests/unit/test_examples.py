"""Every example in the documentation of a module holds, and none is left out."""

import builtins
import doctest
import importlib
import logging
import os
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def examples():
    """Return how many examples the text of each module holds, by the module's name."""
    found = {}
    for top, folder in (("src", "planish"), (".", "components"), (".", "pipelines")):
        for path in sorted((REPOSITORY / top / folder).rglob("*.py")):
            if number := len(re.findall(r"^\s*>>>", path.read_text("utf-8"), re.MULTILINE)):
                parts = path.relative_to(REPOSITORY / top).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = number
    assert found  # else nothing would be tested
    return found


@pytest.mark.parametrize(("name", "written"), examples().items())
def test_the_examples_of_a_module_hold(name, written, tmp_path, monkeypatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "_", None, raising=False)  # the last value an example gave
    before = dict(os.environ), list(logging.root.handlers), logging.root.level
    results = doctest.testmod(module)
    assert (results.failed, results.attempted) == (0, written)
    assert (dict(os.environ), list(logging.root.handlers), logging.root.level) == before
    assert (os.getcwd(), os.listdir(tmp_path)) == (str(tmp_path), [])
