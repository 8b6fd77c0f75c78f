"""The table of the paced pipeline says which targets were missed."""

from __future__ import annotations

from tests.benchmarks.disagg.law import summary


def table(errors: list[float], gain: float) -> dict:
    rows = {
        str(m): {"error": error, "law_over_one": 2.805 if m == 3 else 1.0, "over_one": gain}
        for m, error in enumerate(errors, 1)
    }
    return {"1": {"links": {"0.8": {"micro_batches": rows}}}}


def test_the_median_and_the_largest_error_and_the_gain_are_held_against_their_targets():
    found = summary(table([0.1, -0.05, 0.3, 0.02], 2.4))
    assert found["points"] == 4
    values = {name: (row["value"], row["met"]) for name, row in found["targets"].items()}
    assert list(values.values()) == [
        ((0.05 + 0.1) / 2, True),
        (0.3, False),
        (2.4, False),
    ]
    assert all(row["met"] for row in summary(table([0.1] * 4, 2.5))["targets"].values())
