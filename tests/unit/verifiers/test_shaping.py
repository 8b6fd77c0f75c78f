import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import ConfigError
from planish.verifiers.shaping import (
    check_overlong,
    equal_rows,
    overlong_penalty,
    rows_of_groups_with,
)


def test_penalty_has_the_published_values_at_the_published_limits():
    lengths = [0, 16384, 16385, 18432, 20479, 20480, 20481, 10**9]
    seen = overlong_penalty(lengths, max_tokens=20480, buffer_tokens=4096)
    assert seen.dtype == np.float32
    assert seen.tolist() == [0, 0, -0.000244140625, -0.5, -0.999755859375, -1, -1, -1]


def test_penalty_without_a_buffer_is_only_the_step_beyond_the_limit():
    seen = overlong_penalty([1, 63, 64, 65], max_tokens=64, buffer_tokens=0)
    assert seen.tolist() == [0, 0, 0, -1]


def test_penalty_is_scaled_by_the_factor_and_zero_is_never_negative_zero():
    seen = overlong_penalty([10, 64], max_tokens=64, buffer_tokens=16, factor=0.5)
    assert seen.tolist() == [0, -0.5]
    assert not np.signbit(seen[0])
    assert not np.signbit(overlong_penalty([99], max_tokens=9, buffer_tokens=3, factor=0.0)[0])


@pytest.mark.parametrize(("longest", "buffer"), [(0, 0), (16, 17), (16, -1), (-3, -4)])
def test_limits_that_define_no_penalty_are_refused(longest, buffer):
    with pytest.raises(ConfigError, match="overlong_buffer_tokens"):
        check_overlong(longest, buffer)


@given(st.integers(1, 500), st.data())
def test_penalty_never_rises_with_length_and_is_continuous(longest, data):
    buffer = data.draw(st.integers(1, longest))
    penalty = overlong_penalty(
        np.arange(longest + 3), max_tokens=longest, buffer_tokens=buffer
    ).astype(np.float64)
    steps = np.diff(penalty)
    assert (steps <= 0).all()
    assert ((penalty >= -1) & (penalty <= 0)).all()
    assert (np.abs(steps) <= 1 / buffer + 1e-6).all()


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=40))
def test_a_group_is_informative_iff_its_right_rows_are_some_but_not_all(rows):
    accuracy = [a for a, _ in rows]
    group = [g for _, g in rows]
    seen = ~equal_rows(accuracy, group)
    for index, number in enumerate(group):
        right = sum(a for a, g in rows if g == number)
        assert seen[index] == (0 < right < group.count(number))


def test_a_marked_row_marks_its_whole_group_only():
    rows = [False, True, False, False, False]
    group = [4, 4, 2, 2, 4]
    assert rows_of_groups_with(rows, group).tolist() == [True, True, False, False, True]
