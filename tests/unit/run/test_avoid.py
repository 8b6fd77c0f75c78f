"""Nodes that are avoided: named once, read in order, kept away from by one term."""

import pytest

from planish import store
from planish.base.errors import ConfigError
from planish.records import layout
from planish.run.avoid import AvoidedNode, avoid, avoided, is_node_name

ROOTS = ("file_root", pytest.param("s3_root", marks=pytest.mark.server))


@pytest.fixture(params=ROOTS)
def root(request):
    return request.getfixturevalue(request.param)


def test_the_first_who_names_a_node_counts(root):
    assert avoided(root) == []
    first = AvoidedNode("node-3", "monitor_check", "run-a", 4, 200.0)
    assert avoid(root, first)
    assert not avoid(root, AvoidedNode("node-3", "monitor_check", "run-b", 5, 300.0))
    assert avoid(root, AvoidedNode("node-1", "operator", seconds=100.0))
    assert avoided(root) == [AvoidedNode("node-1", "operator", seconds=100.0), first]


@pytest.mark.parametrize("name", ["", "a/b", "10.0.0.7:9100", "Node", "-a", "a" * 64, "a\n"])
def test_what_is_no_node_is_refused(file_root, name):
    assert not is_node_name(name)
    with pytest.raises(ConfigError, match="a node must be named like the label"):
        avoid(file_root, AvoidedNode(name, "operator"))
    assert avoided(file_root) == []


def test_what_is_no_mark_of_a_node_is_told_and_ignored(file_root, caplog):
    avoid(file_root, AvoidedNode("node-1", "operator"))
    for name, data in (("x", b"no JSON"), ("y", b"[]"), ("z", b'{"name": 3}')):
        store.write(layout.avoided_node(file_root, name), data)
    assert [node.name for node in avoided(file_root)] == ["node-1"]
    assert caplog.text.count("ignored, no mark of a node") == 3
