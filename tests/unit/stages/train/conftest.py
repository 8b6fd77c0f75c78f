import pytest

from tests.unit.stages.train.runs import start_run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A root with a policy and run.json, shared by all tests that leave them as they are."""
    return start_run(f"file://{tmp_path_factory.mktemp('tiny')}/root")
