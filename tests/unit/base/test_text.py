from __future__ import annotations

from planish.base.text import bytes_text, printable, rate_text, seconds_text


def test_sizes_have_binary_units():
    assert [bytes_text(n) for n in (0, 1023, 1024, 5 << 20, 3 << 30, 2 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 GiB", "2.0 TiB",
    ]  # fmt: skip


def test_text_becomes_one_short_line_of_printable_characters():
    assert printable("a\x00\n\u202eb\u6f22", limit=60) == "a\\x00\\n\\u202eb\u6f22"
    assert printable("x" * 9, limit=8) == "xxxxx..."
    assert printable("x" * 8, limit=8) == "x" * 8


def test_durations_have_three_digits_where_they_mean_something():
    assert [seconds_text(s) for s in (0.0004, 0.05, 0.25, 9.0, 61.3)] == [
        "0.4 ms", "50 ms", "0.25 s", "9.00 s", "61 s",
    ]  # fmt: skip


def test_nothing_moved_has_no_rate():
    assert (rate_text(1024, 0.5), rate_text(0, 1.0), rate_text(5, 0.0)) == ("2.0 KiB/s", "", "")
