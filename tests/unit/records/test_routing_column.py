"""The column of experts: a set may have it or lack it, and then nothing of it is to be seen."""

import hashlib
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from planish.records import RolloutSet, read_set, write_set
from planish.show.command import show
from tests.unit.records.samples import file_of, random_rollouts, routed

LAYERS, CHOICES = 3, 2
PYARROW = "26.0.1"
FILE_SHA256 = "4ac6abe598ca31a9dca510fc96332b70802fcebb28a39362e5f9f812a5ebbd71"
"""Of the file of `random_rollouts()` when rollout sets had no optional column, and what wrote it.
"""


def written(folder, rollouts):
    uri = f"file://{folder}"
    write_set(uri, rollouts, parents={}, attributes={})
    return uri


@pytest.mark.parametrize(("dtype", "high"), [(np.int8, 120), (np.int16, 500)])
def test_experts_are_read_as_they_were_written(tmp_path, dtype, high):
    rollouts = routed(dtype=dtype, high=high)
    found = read_set(RolloutSet, written(tmp_path, rollouts))
    assert found == rollouts
    assert found.routing.values.dtype == dtype
    assert found.routing_of(3).shape == (int(rollouts.num_tokens()[3]), LAYERS, CHOICES)
    assert (found.routing_of(3)[-1] == -1).all()


def test_a_set_without_experts_has_the_bytes_that_it_had_before_the_column():
    plain = random_rollouts()
    schema = pq.ParquetFile(pa.BufferReader(file_of(plain))).schema_arrow
    assert schema.names == [c.name for c in RolloutSet.COLUMNS if not c.optional]
    if pa.__version__ == PYARROW:
        assert hashlib.sha256(file_of(plain)).hexdigest() == FILE_SHA256


def test_a_set_without_experts_opens_and_one_with_them_opens_without(tmp_path):
    plain = random_rollouts()
    found = read_set(RolloutSet, written(tmp_path / "plain", plain))
    assert found == plain
    assert (found.routing, found.routing_of(0)) == (None, None)
    uri = written(tmp_path / "routed", routed())
    assert read_set(RolloutSet, uri, with_optional=False) == plain
    assert routed() != plain


def test_rows_and_groups_take_their_experts_along():
    rollouts = routed()
    rows = rollouts.take_rows([2, 5, 11])
    for place, row in enumerate([2, 5, 11]):
        assert (rows.routing_of(place) == rollouts.routing_of(row)).all()
    groups = rollouts.take_groups([3, 1])
    groups.validate()
    assert (groups.routing_of(0) == rollouts.routing_of(12)).all()
    assert rollouts.take_groups(range(5)) == rollouts


def test_sets_with_and_without_experts_join_with_unknown_ones():
    one, other = routed(0), random_rollouts(1)
    joined = RolloutSet.concat([other, RolloutSet.empty(), one])
    joined.validate()
    assert joined.num_rows == 40
    assert (joined.routing_of(7) == -1).all()
    assert joined.routing_of(7).shape[1:] == (LAYERS, CHOICES)
    assert (joined.routing_of(25) == one.routing_of(5)).all()
    assert RolloutSet.concat([other, RolloutSet.empty()]).routing is None
    assert RolloutSet.concat([RolloutSet.empty(), one]) == one


def test_experts_take_about_their_entropy_on_disk():
    rollouts = routed(groups=64, group_size=8, high=8)
    extra = len(file_of(rollouts)) - len(file_of(random_rollouts(groups=64, group_size=8)))
    # Three bits for each choice of one expert in eight.
    assert extra < 0.55 * len(rollouts.routing.values)


def test_show_names_the_column_only_where_it_is(tmp_path):
    for name, rollouts in (("plain", random_rollouts()), ("routed", routed())):
        out = io.StringIO()
        show(written(tmp_path / name, rollouts), Console(file=out, width=200), rows=1)
        assert ("list<int8|int16>" in out.getvalue()) == (name == "routed")
