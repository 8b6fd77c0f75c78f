"""The JSON of the run parameter `chain`: read, changed, refused."""

import pytest

from planish.base.errors import ConfigError
from planish.run.chain import Chain, parse_chain, with_settings


def test_empty_text_is_a_single_new_run():
    assert parse_chain("") == Chain(index=0, runs=1) == parse_chain("{}")


def test_settings_are_replaced_and_the_others_kept():
    text = with_settings('{"runs": 3, "resume_from": "s3://b/r"}', index=2)
    assert parse_chain(text) == Chain(index=2, runs=3, resume_from="s3://b/r")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be a JSON object"),
        ("[]", r"must be a JSON object .*, got '\[\]'"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"run": 3}', "did you mean `runs`"),
        ('{"runs": 0}', "`chain.runs`"),
        ('{"runs": "3"}', "valid integer"),
        ('{"index": -2}', "`chain.index`"),
        ('{"index": 1e400}', "`chain.index`"),
    ],
)
def test_what_cannot_be_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_chain(text)
    with pytest.raises(ConfigError, match=words):
        with_settings(text, allow_config_change=True)
