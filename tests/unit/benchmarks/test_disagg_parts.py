"""The benchmark of the parts of `disagg` ends with 1 where a target is missed."""

from __future__ import annotations

import pytest

from tests.benchmarks import bench_disagg
from tests.benchmarks.disagg import law, m2n, replicas
from tests.unit.benchmarks.test_disagg_law import table


@pytest.mark.parametrize(("missed", "code"), [("", 0), ("law", 1), ("m2n", 1), ("replicas", 1)])
def test_one_missed_part_is_enough(missed, code, monkeypatch):
    for module in (law, m2n, replicas):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "run", lambda name=name, **_: name != missed)
    parts = [word for part in bench_disagg.PARTS for word in ("--part", part)]
    assert bench_disagg.main(parts) == code


@pytest.mark.parametrize(("gain", "is_met"), [(2.5, True), (2.4, False)])
def test_the_law_tells_whether_its_targets_are_met(gain, is_met, monkeypatch, tmp_path):
    one = next(iter(table([0.1] * 4, gain)["1"]["links"].values()))
    monkeypatch.setattr(law, "RESULTS", tmp_path)
    monkeypatch.setattr(law, "RATIOS", {"1": law.RATIOS["1"]})
    monkeypatch.setattr(law, "require_idle_machine", lambda: 0.0)
    for name in ("show", "draw", "write_result"):
        monkeypatch.setattr(law, name, lambda *_, **__: None)
    monkeypatch.setattr(law, "sweep", lambda *_, **__: one)
    assert law.run(dry=False) is is_met
