"""What is measured of store and network, when, and what a load makes of it."""

from __future__ import annotations

import json
import time

import pytest

from planish.checkpoint.load import rates as load_rates
from planish.checkpoint.load.load import load_state, open_on_all
from planish.checkpoint.load.rates import Order, Rates, choose_sharing
from planish.checkpoint.load.reader import open_state
from planish.checkpoint.plan.coalesce import Costs
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.storage import open_storage
from planish.checkpoint.storage.faulty import FaultyStorage
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.written import tiny_model, write_checkpoint

FAST, SLOW = Rates(2e-3, 1e9, 2e9), Rates(2e-3, 1e9, 5e8)


@pytest.mark.parametrize(
    ("redundancy", "replication", "hosts", "in_memory", "rates", "expected"),
    [
        ("auto", 4.0, [0, 0, 1, 1], False, FAST, "all"),
        ("auto", 4.0, [0, 0, 1, 1], False, SLOW, "machine"),
        ("auto", 4.0, [0, 1, 2, 3], False, SLOW, "none"),
        ("auto", 4.0, [0, 0, 0, 0], False, SLOW, "all"),
        ("auto", 4.0, [0, 0, 0, 0], False, None, "all"),
        ("auto", 4.0, [0, 0, 1, 1], False, None, "all"),
        ("auto", 4.0, [0, 0, 1, 1], False, Rates(2e-3, 1e9), "all"),
        ("auto", 1.0, [0, 0, 0, 0], False, FAST, "none"),
        ("auto", 4.0, [0, 0, 0, 0], True, FAST, "none"),
        ("off", 4.0, [0, 0, 0, 0], False, FAST, "none"),
    ],
)
def test_bytes_are_exchanged_where_that_is_faster(
    redundancy, replication, hosts, in_memory, rates, expected
):
    found = choose_sharing(redundancy, replication, hosts, in_memory=in_memory, rates=rates)
    assert found == expected


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (Rates(5e-3, 8e8), Costs(5e-3, 2e8)),
        (Rates(1e-9, 1.0), Costs(1e-4, 1e7)),
        (Rates(9.0, 1e15), Costs(2e-2, 4e9)),
    ],
)
def test_measured_costs_stay_within_bounds(rates, expected):
    assert rates.costs() == expected


class SlowStorage(FaultyStorage):
    """A store whose every request takes a while, and twice as long beyond a small size."""

    def get_into(self, key, offset, target, **options):
        time.sleep(0.02 if len(target) <= load_rates.SMALL_BYTES else 0.04)
        return super().get_into(key, offset, target, **options)


@pytest.fixture
def opened(file_root):
    place = write_checkpoint(f"{file_root}/run/step-1", tiny_model(), extra=False)
    storage = SlowStorage(open_storage(place.partition("#")[0])[0], lambda *_: "")
    return open_state(place, storage)


def test_a_slow_store_is_measured_as_slow(opened):
    call = Control.single()
    data = load_rates.measure(opened, call, Order(0, (0,), ""))
    load_rates.keep_rates(opened, call, [data, b""])
    rates = load_rates.kept_rates(opened, call)
    assert 0.02 <= rates.request_s < 0.5
    assert rates.store_bytes_per_s > 0
    assert rates.store_bytes_per_s <= 4 * opened.metadata.files.sizes[0] / 0.04
    assert rates.fabric_bytes_per_s == 0
    # Another run's folder may lie in another store.
    other = open_state(write_checkpoint(damage.fresh(), tiny_model(), extra=False))
    assert load_rates.kept_rates(other, call) is None


def test_a_store_that_fails_leaves_the_rates_unknown(opened):
    opened.storage = FaultyStorage(opened.storage, lambda *_: "fail")
    call = Control.single()
    data = load_rates.measure(opened, call, Order(0, (0,), ""))
    assert json.loads(data)["store_bytes_per_s"] == 0
    load_rates.keep_rates(opened, call, [data])
    assert load_rates.kept_rates(opened, call) is None


def test_the_median_of_the_machines_counts(opened):
    call = Control.single()
    told = [Rates(k * 1e-3, k * 1e8, k * 1e9) for k in (1, 2, 30)]
    data = [json.dumps(vars(one)).encode() for one in told]
    load_rates.keep_rates(opened, call, [*data, b""])
    assert load_rates.kept_rates(opened, call) == told[1]


def test_only_large_loads_are_measured_for_and_only_once(opened):
    call, large = Control.single(), load_rates.MEASURE_BYTES
    files = range(len(opened.metadata.files.sizes))

    def order(num_bytes, network=True):
        return load_rates.order_for(opened, call, files, num_bytes, network=network)

    assert order(large - 1) is None
    found = order(large)
    sizes = opened.metadata.files.sizes
    assert sizes[found.file] == max(sizes)
    assert (found.members, found.tag) == ((0,), "")
    assert Order.decode(found.encode()) == found
    assert Order.decode(b"") is None
    load_rates.keep_rates(opened, call, [json.dumps(vars(Rates(1e-3, 1e8))).encode()])
    assert order(large) is None
    # Now on several machines: the network has not been measured yet.
    call.hosts = tuple(range(20))
    assert order(large, network=False) is None
    assert len(order(large).members) == load_rates.MACHINES
    assert len(order(large).tag) == 16


def test_a_load_plans_with_what_was_measured(opened, monkeypatch):
    monkeypatch.setattr(load_rates, "MEASURE_BYTES", 0)
    control = Control.single()
    place = opened.pin
    for _ in range(2):
        items = damage.zeros_for(open_state(place))
        loaded = load_state(open_on_all(place, control), damage.collected(items), control)
        damage.assert_holds(items, tiny_model())
        assert loaded.sharing == "none"
        assert loaded.replication == 1.0
        # What measuring has read is not counted.
        assert loaded.bytes_from_store == sum(opened.metadata.files.sizes)
        assert loaded.rates == load_rates.kept_rates(opened, control)
        assert loaded.rates.store_bytes_per_s > 0
