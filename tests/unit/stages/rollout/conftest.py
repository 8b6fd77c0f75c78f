import pytest

from tests.unit.stages.rollout.stage_run import Run, write_template


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A root with prompts and a policy, copied for each test."""
    folder = tmp_path_factory.mktemp("template")
    write_template(folder)
    return folder


@pytest.fixture
def new_run(template, tmp_path):
    made = []

    def make(**changes):
        folder = tmp_path / f"run-{len(made)}"
        folder.mkdir()
        made.append(Run(template, folder, **changes))
        return made[-1]

    return make
