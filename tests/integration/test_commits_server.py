"""Commits of a shard on a real server: they are read back in order, and nothing stays."""

import pytest

from planish import store
from planish.stages.rollout.commits import Commits
from tests.unit.stages.rollout.test_carry import group, slot

pytestmark = pytest.mark.server


def test_commits_are_read_back_in_order_and_nothing_stays(s3_root):
    uri = f"{s3_root}/iterations/00001/commits/00"
    given = {"parents": lambda: {"policy": "0" * 64}, "facts": {"seed": 3}}
    first = Commits(uri, **given)
    assert first.read().groups == {}
    first.write([group(4, slot(0, 2)), group(5, slot(0, 1))], steps=7, most_rows=2)
    first.write([group(5, slot(0, 3))], steps=14, most_rows=3)
    again = Commits(uri, **given)
    found = again.read()
    assert {k: g.num_tokens for k, g in found.groups.items()} == {4: 2, 5: 3}
    assert (found.steps, found.most_rows) == (14, 3)
    again.write([group(6, slot(0, 1))], steps=20, most_rows=3)
    assert sorted(Commits(uri, **given).read().groups) == [4, 5, 6]
    again.clear()
    assert store.list_uris(s3_root) == []
