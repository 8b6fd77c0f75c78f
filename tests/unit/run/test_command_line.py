"""`python -m planish.run STAGE`: one entry for all stages."""

import re

import pytest

from planish.run.__main__ import STAGES, main, stage_run


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_every_stage_of_the_table_can_be_called(stage):
    assert callable(stage_run(stage))


def test_the_help_of_a_stage_names_the_command_that_was_typed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["reward", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m planish.run reward [-h] --root ROOT")
    assert "--num-shards" in text


def test_the_help_without_a_stage_lists_the_stages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m planish.run [-h] STAGE ...")
    assert all(stage in text for stage in STAGES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rewards"], "a stage must be one of prepare, curate, sft, .*, got 'rewards'; did you"),
        ([], "the following arguments are required: STAGE"),
        (["reward"], "the following arguments are required: --root"),
        (["reward", "--root", "file:///r", "--number", "one"], "invalid int value: 'one'"),
    ],
)
def test_a_wrong_command_ends_with_2_and_says_what_is_wrong(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.search(words, capsys.readouterr().err)
