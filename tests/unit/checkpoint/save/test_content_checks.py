"""Looks at values before a save: what they find, and that a save goes on as it should."""

import logging

import pytest
import torch

from planish.base import telemetry
from planish.checkpoint import api
from planish.checkpoint.adapters.base import collect
from planish.checkpoint.save.agree import checksums, count_nonfinite, unequal


def items(**tensors):
    return collect("main", {"model": tensors}, "plain", for_load=False).items


def test_one_bit_changes_one_checksum_and_strides_change_none():
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    other = base.clone()
    other[2, 1] = torch.nextafter(other[2, 1], torch.tensor(9e9))
    a = checksums(items(w=base, v=base))
    b = checksums(items(w=other, v=base.t().contiguous().t()))
    assert [part for part in a if a[part] != b[part]] == [next(iter(a))]
    assert len(a) == 2


def test_every_dtype_has_a_checksum():
    kinds = (torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn)
    found = checksums(items(**{str(k): torch.ones(3, dtype=torch.float32).to(k) for k in kinds}))
    assert len(found) == len(kinds)


def test_parts_that_one_rank_holds_alone_are_no_replicas():
    assert unequal([{'["main", "model", "a", [[0, 2]]]': "x"}, {}]) == []


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_values_that_are_not_finite_are_named_counted_and_saved(kind, caplog, tmp_path):
    bad = torch.tensor([1.0, float("nan")]).to(kind)
    state = {"model": {"good": torch.ones(2), "bad": bad, "count": torch.tensor(3)}}
    before = nonfinite()
    with caplog.at_level(logging.WARNING):
        api.save(f"{tmp_path}/1", state, async_=False, scan=True)
    assert nonfinite() - before == 1
    assert any("nonfinite_tensors count=1 first=bad" in text for text in caplog.messages)
    target = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    api.load(f"{tmp_path}/1", target)
    assert bool(torch.isnan(target["model"]["bad"].float()[1]))


def test_nothing_is_looked_at_unless_asked_for(tmp_path, caplog):
    before = nonfinite()
    state = {"model": {"bad": torch.tensor([float("inf")])}}
    api.save(f"{tmp_path}/1", state, async_=False)
    assert nonfinite() == before
    assert count_nonfinite(items(bad=torch.tensor([float("inf")]))) == ["bad"]


def nonfinite():
    lines = telemetry.metrics_text().splitlines()
    name = "planish_checkpoint_nonfinite_total"
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))
