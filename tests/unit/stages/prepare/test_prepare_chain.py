"""Which iterations a run does."""

import pytest

from planish.base.errors import ConfigError
from planish.records import layout
from planish.records.io import write_files
from planish.stages.prepare.chain import Link, count_links, find_link, read_link, record_link


def finish(root, version):
    """Write a policy of a version, as the last stage of its iteration does."""
    uri = layout.policy(root, version)
    write_files(uri, "policy/1", {"a": b"x"}, parents={}, attributes={"policy_version": version})


def take(root, index, iterations):
    link = find_link(root, index, iterations)
    record_link(root, link)
    return link


def test_the_same_run_again_keeps_its_offset(file_root):
    take(file_root, 0, 2)
    finish(file_root, 2)
    assert take(file_root, 1, 3) == Link(1, 2, 3)
    finish(file_root, 4)
    assert take(file_root, 1, 3) == Link(1, 2, 3)
    assert count_links(file_root) == 2


def test_a_run_needs_the_one_before_to_be_finished(file_root):
    take(file_root, 0, 2)
    finish(file_root, 1)
    with pytest.raises(ConfigError, match=r"run 0 .* must be finished .* last iteration 2"):
        find_link(file_root, 1, 2)


def test_minus_one_resumes_the_unfinished_run_and_then_adds_one(file_root):
    assert take(file_root, -1, 2) == Link(0, 0, 2)
    assert take(file_root, -1, 2) == Link(0, 0, 2)
    finish(file_root, 2)
    assert take(file_root, -1, 2) == Link(1, 2, 2)
    finish(file_root, 4)
    assert take(file_root, -1, 5) == Link(2, 4, 5)


def test_the_newest_run_may_be_made_longer_or_shorter(file_root):
    take(file_root, 0, 2)
    finish(file_root, 2)
    assert take(file_root, 0, 4) == Link(0, 0, 4)
    assert read_link(file_root, 0).num_iterations == 4


def test_a_run_that_others_build_on_keeps_its_length(file_root):
    take(file_root, 0, 2)
    finish(file_root, 2)
    take(file_root, 1, 2)
    assert find_link(file_root, 0, 2) == Link(0, 0, 2)
    with pytest.raises(ConfigError, match=r"must stay 2, got 3"):
        find_link(file_root, 0, 3)


@pytest.mark.parametrize(
    ("index", "iterations", "words"),
    [(1, 2, "at most 0"), (-2, 2, "-1 or more"), (0, 0, "at least 1")],
)
def test_impossible_places_are_refused(file_root, index, iterations, words):
    with pytest.raises(ConfigError, match=words):
        find_link(file_root, index, iterations)
