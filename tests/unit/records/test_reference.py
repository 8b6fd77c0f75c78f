import pytest

from planish.base.errors import ConfigError
from planish.records import layout
from planish.records.io import write_files
from planish.records.reference import KEY, find_reference


def a_policy(root, version, schema="policy/1"):
    uri = layout.policy(root, version)
    return write_files(uri, schema, {"p": b"%d" % version}, parents={}, attributes={}).pin()


def state_of(root):
    return f"{layout.state(root, 8)}#sha256={'0' * 64}"


def test_the_first_iteration_takes_the_policy_that_training_begins_with(file_root):
    first = a_policy(file_root, 0)
    assert find_reference("", policy_pin=first, state_pin="", info={}) == first


def test_later_iterations_take_the_one_that_their_train_state_names(file_root):
    first, later = a_policy(file_root, 0), a_policy(file_root, 3)
    info = {KEY: first.removeprefix(f"{file_root}/")}
    found = find_reference("", policy_pin=later, state_pin=state_of(file_root), info=info)
    assert found == first


def test_a_fork_finds_what_the_other_root_began_with_and_so_does_its_own_fork(file_root):
    first = a_policy(file_root, 0)
    info = {KEY: first.removeprefix(f"{file_root}/")}
    fork = f"{file_root}/fork"
    later = a_policy(fork, 2)
    # The fork's first state is that of the other root; its own states name the whole pin.
    assert find_reference("", policy_pin=later, state_pin=state_of(file_root), info=info) == first
    own = {KEY: first}
    assert find_reference("", policy_pin=later, state_pin=state_of(fork), info=own) == first


def test_a_pinned_policy_wins(file_root):
    first, other = a_policy(file_root, 0), a_policy(file_root, 5)
    info = {KEY: first.removeprefix(f"{file_root}/")}
    for state_pin in ("", state_of(file_root)):
        assert find_reference(other, policy_pin=first, state_pin=state_pin, info=info) == other


def test_a_training_that_began_without_a_penalty_must_pin_its_reference(file_root):
    first = a_policy(file_root, 0)
    with pytest.raises(ConfigError, match=r"must name the reference .* got None .*penalty: pin"):
        find_reference("", policy_pin=first, state_pin=state_of(file_root), info={})


def test_a_policy_that_is_gone_or_was_written_again_is_refused(file_root):
    first = a_policy(file_root, 0)
    gone = first.replace("/00000#", "/00009#")
    other = f"{first[:-64]}{'0' * 64}"
    for pin, words in ((gone, "has no `manifest.json`"), (other, "must have the sha256")):
        for pinned, policy_pin in ((pin, first), ("", pin)):
            with pytest.raises(ConfigError, match=rf"{words}.*restore it, or pin the policy"):
                find_reference(pinned, policy_pin=policy_pin, state_pin="", info={})


def test_a_set_that_is_no_policy_is_refused(file_root):
    pin = a_policy(file_root, 0, schema="prompts/1")
    with pytest.raises(ConfigError, match="must be a policy/1, got prompts/1"):
        find_reference(pin, policy_pin="", state_pin="", info={})
