"""Nodes that are avoided: named once, read in order, kept away from by one term."""

from __future__ import annotations

import pytest

from planish import store
from planish.base.errors import ConfigError
from planish.records import layout
from planish.run.avoid import AvoidedNode, avoid, avoided, is_node_name, node_affinity

ROOTS = ("file_root", pytest.param("s3_root", marks=pytest.mark.server))


@pytest.fixture(params=ROOTS)
def root(request):
    return request.getfixturevalue(request.param)


def test_the_affinity_is_one_term_with_one_requirement():
    assert node_affinity([]) == {}
    assert node_affinity(["node-3", "node-1"]) == {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {
                    "matchExpressions": [
                        {
                            "key": "kubernetes.io/hostname",
                            "operator": "NotIn",
                            "values": ["node-1", "node-3"],
                        }
                    ]
                }
            ]
        }
    }


def test_the_first_who_names_a_node_counts(root):
    assert avoided(root) == []
    first = AvoidedNode("node-3", "monitor_check", "run-a", 4, 200.0)
    assert avoid(root, first)
    assert not avoid(root, AvoidedNode("node-3", "monitor_check", "run-b", 5, 300.0))
    assert avoid(root, AvoidedNode("node-1", "operator", seconds=100.0))
    assert avoided(root) == [AvoidedNode("node-1", "operator", seconds=100.0), first]


def test_the_time_is_now_unless_it_is_given(file_root):
    avoid(file_root, AvoidedNode("node-3", "operator"))
    assert avoided(file_root)[0].seconds > 1.7e9


@pytest.mark.parametrize("name", ["", "a/b", "10.0.0.7:9100", "Node", "-a", "a" * 64, "a\n"])
def test_what_is_no_node_is_refused(file_root, name):
    assert not is_node_name(name)
    with pytest.raises(ConfigError, match="a node must be named like the label"):
        avoid(file_root, AvoidedNode(name, "operator"))
    assert avoided(file_root) == []


@pytest.mark.parametrize(
    "text",
    ["no json", "[]", "{}", '{"name": "a|b", "named_by": "", "run_id": ""}', '{"name": "x"}'],
)
def test_a_damaged_object_names_nobody(file_root, text, caplog):
    store.write(layout.avoided_node(file_root, "node-9"), text.encode())
    avoid(file_root, AvoidedNode("node-3", "operator"))
    assert [node.name for node in avoided(file_root)] == ["node-3"]
    assert "not an avoided node" in caplog.text
