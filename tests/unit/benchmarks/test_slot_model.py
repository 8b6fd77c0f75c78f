"""The model of utilisation against figures of 200 batches of 512 responses up to 24,576 tokens."""

from __future__ import annotations

import numpy as np
import pytest

from planish.base.errors import ConfigError
from tests.benchmarks.studies.slot_model import (
    capped,
    constant,
    log_normal,
    main,
    mixture,
    observed,
    parse_lengths,
    successive,
    synchronous,
    uniform,
)

LOG_NORMAL = capped(log_normal(7.6, 1.0), 24576)
TAIL = mixture(2000, 0.9, 24576, 0.1)
UNIFORM = uniform(1, 24576)


def shares(lengths, *windows, num_slots=512):
    whole = synchronous(lengths, num_slots=num_slots).share
    return whole, [successive(lengths, num_slots=num_slots, window_tokens=w).share for w in windows]


def test_a_log_normal_tail_fills_an_eighth_of_the_slots_and_windows_two_to_four_times_that():
    whole, (long, short) = shares(LOG_NORMAL, 8192, 4096)
    assert whole == pytest.approx(0.132, abs=0.003)
    assert long == pytest.approx(0.359, abs=0.004)
    assert short == pytest.approx(0.572, abs=0.004)
    assert long / whole == pytest.approx(2.7, abs=0.06)
    assert short / whole == pytest.approx(4.3, abs=0.1)


@pytest.mark.parametrize(
    ("lengths", "gains"), [(TAIL, (2.5, 4.0)), (UNIFORM, (1.5, 1.7)), (constant(2000), (1.0, 1.0))]
)
def test_gains_of_other_distributions(lengths, gains):
    whole, found = shares(lengths, 8192, 4096)
    for share, gain in zip(found, gains, strict=True):
        assert share / whole == pytest.approx(gain, abs=0.02)


def test_equal_lengths_leave_nothing_to_gain_even_with_windows_that_cut_them():
    whole, (cut,) = shares(constant(2048), 256)
    assert (whole, cut) == (1.0, 1.0)


@pytest.mark.parametrize("window", [300, 1000, 4096])
def test_windows_reach_the_share_that_renewal_theory_gives(window):
    # a response of x tokens holds its slot for ceil(x / W) windows
    drawn = LOG_NORMAL(np.random.default_rng(5), 400_000)
    expected = drawn.mean() / (window * np.ceil(drawn / window).mean())
    found = successive(LOG_NORMAL, num_slots=512, window_tokens=window, num_batches=400)
    assert found.share == pytest.approx(expected, rel=0.02)


def test_a_window_for_the_longest_response_is_synchronous():
    whole = synchronous(TAIL, num_slots=64, num_batches=50)
    cut = successive(TAIL, num_slots=64, window_tokens=24576, num_batches=50)
    assert cut == whole


def test_two_slots_by_hand():
    drawn = iter([[5, 2], [4], [3], [9, 9]])

    def lengths(_generator, num):
        row = next(drawn) if num else []
        assert len(row) == num
        return np.array(row, dtype=np.int64)

    # 5 2 | 2 4 | 3 1 -> 3, 2 | 2, 3 | 3, 1
    found = successive(lengths, num_slots=2, window_tokens=3, num_batches=3)
    assert (found.num_tokens, found.decode_iterations) == (3 + 2 + 2 + 3 + 3 + 1, 9)
    assert found.share == 14 / 18


def test_equal_seeds_give_equal_numbers_and_observed_lengths_come_from_the_run():
    options = {"num_slots": 32, "window_tokens": 64, "num_batches": 20}
    lengths = observed([10, 50, 200])
    assert successive(lengths, **options) == successive(lengths, **options)
    assert set(lengths(np.random.default_rng(0), 100).tolist()) == {10, 50, 200}


@pytest.mark.parametrize(
    ("text", "drawn"),
    [("constant:7", {7}), ("mixture:3,1,9,1", {3, 9}), ("uniform:2,3", {2, 3})],
)
def test_distributions_are_read_from_text(text, drawn):
    assert set(parse_lengths(text)(np.random.default_rng(0), 50).tolist()) == drawn


@pytest.mark.parametrize(
    "text", ["", "normal:1,2", "lognormal:1", "mixture:1,2,3", "uniform:a,b", "constant:-1",
             "constant:nan", "lognormal"],
)  # fmt: skip
def test_nonsense_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="such as `lognormal"):
        parse_lengths(text)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        successive(TAIL, num_slots=2, window_tokens=0)


def test_the_command_prints_one_line_per_window(capsys):
    asked = ["--lengths", "mixture:20,0.9,240,0.1", "--cap", "240", "--slots", "64"]
    assert main([*asked, "--windows", "80,40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["window", "whole", "80", "40"]
    assert lines[2].endswith("x")
    with pytest.raises(SystemExit) as caught:
        main(["--lengths", "normal:3"])
    assert caught.value.code == 2
