from __future__ import annotations

import pytest

from planish.stages.report.words import number, one_line, percent, seconds, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.123"),
        (48.0, "48"),
        (23.456, "23.46"),
        (2.5e9, "2.5 G"),
        (-2.1e-7, "-2.1e-7"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_a_number_has_about_three_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "50 %"), (0.0234, "2.3 %"), (0.0, "0 %"), (0.00042, "0.042 %"), (1.0, "100 %")],
)
def test_a_fraction_is_written_as_per_cent(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (0.42, "0.42 s"),
        (12.3, "12 s"),
        (59.6, "1 min"),
        (185.0, "3 min 5 s"),
        (7800.0, "2 h 10 min"),
        (7200.0, "2 h"),
        (-1.0, "-1.0"),
    ],
)
def test_a_duration_uses_the_units_of_its_size(value, text):
    assert seconds(value) == text


def test_control_and_direction_characters_become_visible():
    assert visible("a\x00b\u202ec\u200bd\te\nf") == "a\u2400b\\u202ec\\u200bd\te\nf"


def test_long_text_is_cut_and_says_by_how_much():
    assert visible("x" * 2100, limit=100) == "x" * 100 + " ... (2,000 more characters)"


def test_one_line_joins_lines():
    assert one_line("a\n\n  b\tc") == "a b c"
