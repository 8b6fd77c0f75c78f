"""Fixtures of the contract suites."""

import functools
import sys
from types import SimpleNamespace

import pytest
import yaml

from tests.stacks import stacks_without_sources

__all__ = ["stacks_without_sources"]


@pytest.fixture(scope="session")
def quick_kfp():
    """Let kfp write YAML by libyaml, and name a caller without reading its source.

    It takes a third of the time; the test of other processes compares with kfp as it is.
    """
    from kfp.compiler import pipeline_spec_builder
    from kfp.dsl import pipeline_task

    dump = functools.partial(yaml.dump_all, Dumper=yaml.CDumper)

    def stack():
        return [None, (None, None, None, sys._getframe(2).f_code.co_name)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline_spec_builder, "yaml", SimpleNamespace(**{**vars(yaml), "dump_all": dump})
        )
        patch.setattr(pipeline_task, "inspect", SimpleNamespace(stack=stack))
        yield
