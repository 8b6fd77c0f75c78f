import hashlib
import inspect
import json
import math
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish import store
from planish.base.errors import ConfigError, ObjectMissing, RecordError
from planish.records import (
    EvalReport,
    Ref,
    UpdateReport,
    layout,
    parse_pin,
    read_report,
    write_report,
)
from planish.records.io import write_files
from planish.records.reference import KEY, find_reference
from planish.records.reports import parse_report
from planish.records.stream import (
    StreamState,
    advance,
    assign,
    fresh_cursor,
    parse_cursor,
    parse_data,
    position,
    state_root,
)
from planish.store import parse_uri
from planish.store.documents import read_json, write_json

UPDATE = UpdateReport(
    {"loss": 0.1, "grad_norm": math.inf, "kl": -math.inf},
    [{"loss": 1 / 3}, {}],
    {"iteration": 3, "skipped": [1]},
)
EVAL = EvalReport({"accuracy": 0.25}, {"sums": {"accuracy": 0.5}}, {"policy_version": 2})


@pytest.mark.parametrize("report", [UPDATE, EVAL])
def test_a_report_comes_back_bit_equal_under_its_digest(store_root, report):
    uri = f"{store_root}/report.json"
    digest = write_report(uri, report)
    data = store.read(uri)
    assert hashlib.sha256(data).hexdigest() == digest
    assert read_report(type(report), uri) == report


def test_not_a_number_survives_as_valid_json(file_root):
    write_report(f"{file_root}/x", UpdateReport({"kl": math.nan}))
    raw = json.loads(store.read(f"{file_root}/x"), parse_constant=pytest.fail)
    assert raw["scalars"] == {"kl": "NaN"}
    assert math.isnan(read_report(UpdateReport, f"{file_root}/x").scalars["kl"])


UPDATE_RAW = {"schema": "update/1", "scalars": {}, "minibatches": [], "attributes": {}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "eval/1"}, "`schema`: Input should be 'update/1', got 'eval/1"),
        ({"more": 1}, "`more`: Unexpected"),
        ({"attributes": []}, "`attributes`: Input should be an object"),
        ({"minibatches": {}}, "`minibatches`: Input should be a valid array"),
        ({"minibatches": [3]}, r"`minibatches\.0`: Input should be an object, got 3"),
        ({"scalars": {"a": "big"}}, r"`scalars\.a`: Input should be a valid number, got 'big'"),
        ({"scalars": {"a": True}}, r"`scalars\.a`: Input should be a valid number, got True"),
    ],
)  # fmt: skip
def test_a_report_of_another_shape_is_refused(change, words):
    with pytest.raises(RecordError, match=words):
        parse_report(UpdateReport, json.dumps({**UPDATE_RAW, **change}).encode(), "x")


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff", b"3", b"null"])
def test_hostile_bytes_are_refused(data):
    with pytest.raises(RecordError):
        parse_report(EvalReport, data, "x")


REF = Ref("policy/1", "s3://runs/a/policies/00001", "ab" * 32, {"policy_version": 1, "x": 0.5})


def test_a_ref_survives_json_and_its_pin_splits_again():
    assert Ref.from_json(REF.to_json()) == REF
    assert parse_pin(REF.pin()) == ("s3://runs/a/policies/00001", "ab" * 32)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"schema": "policy/1"}']
)
def test_what_is_no_ref_is_refused(text):
    with pytest.raises(RecordError) as raised:
        Ref.from_json(text)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    "pin",
    [
        "",
        "s3://runs/a",
        "s3://runs/a#sha256=",
        "s3://runs/a#sha256=" + "A" * 64,
        "#sha256=" + "a" * 64,
    ],
)
def test_what_is_no_pin_is_refused(pin):
    with pytest.raises(RecordError, match="a pinned URI must read") as raised:
        parse_pin(pin)
    assert repr(pin) in str(raised.value)


def places():
    """Return every place of a run, by the function that spells it."""
    values = {"str": "train", "int": 3}
    for name, function in inspect.getmembers(layout, inspect.isfunction):
        if name.startswith("parse_"):
            continue
        parameters = list(inspect.signature(function).parameters.values())[1:]
        yield name, function("s3://runs/a", *(values[str(p.annotation)] for p in parameters))


def test_places_of_a_run_lie_below_its_root_and_differ():
    found = dict(places())
    assert all(parse_uri(uri).key.startswith("a/") for uri in found.values())
    assert len(set(found.values())) == len(found)
    assert found["rollouts"] == "s3://runs/a/iterations/00003/rollouts/03"
    assert found["state"] == "s3://runs/a/states/step-00000003"


def test_small_documents_are_canonical_json(store_root):
    write_json(f"{store_root}/x.json", {"b": 1, "a": [None]})
    assert read_json(f"{store_root}/x.json") == {"a": [None], "b": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(f"{store_root}/x.json", float("nan"))
    assert read_json(f"{store_root}/x.json") == {"a": [None], "b": 1}
    with pytest.raises(ObjectMissing):
        read_json(f"{store_root}/none.json")


def test_pending_ordinals_come_first():
    cursor = {"next": 9, "pending": [2, 5, 7]}
    assert list(islice(assign(cursor, 0, 2), 4)) == [2, 7, 10, 12]
    assert list(islice(assign(cursor, 1, 2), 4)) == [5, 9, 11, 13]


def test_advance_worked_by_hand():
    # drawn 0..7 by two shards; 3 and 6 were surplus
    cursor = advance(fresh_cursor(), [0, 2, 4, 1, 5, 7])
    assert cursor == {"next": 8, "pending": [3, 6]}
    assert advance(cursor, []) == cursor
    assert advance(cursor, [3, 10]) == {"next": 11, "pending": [6, 8, 9]}


@pytest.mark.parametrize(("again", "named"), [([4, 4], [4]), ([5], [5]), ([0, 3], [0])])
def test_advance_refuses_an_ordinal_that_is_consumed(again, named):
    with pytest.raises(RecordError, match=f"consumed once, got ordinals \\[{named[0]}\\] again"):
        advance({"next": 6, "pending": [3, 4]}, again)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2**30)), min_size=1, max_size=8),
)
def test_no_ordinal_is_lost_or_consumed_twice(num_shards, iterations):
    cursor, consumed = fresh_cursor(), []
    for drawn, mask in iterations:
        taken = []
        for shard in range(num_shards):
            ordinals = list(islice(assign(cursor, shard, num_shards), drawn))
            taken += [k for bit, k in enumerate(ordinals) if mask >> (bit * 3 + shard) & 1]
        cursor = advance(cursor, taken)
        consumed += taken
        assert parse_cursor(cursor) == cursor
    assert len(set(consumed)) == len(consumed)
    assert sorted([*consumed, *cursor["pending"]]) == list(range(cursor["next"]))


@given(st.integers(1, 40), st.integers(0, 2**53 - 1), st.integers(0, 1000))
def test_each_epoch_visits_each_prompt_once(num_prompts, seed, epoch):
    ordinals = range(epoch * num_prompts, (epoch + 1) * num_prompts)
    assert sorted(position(k, num_prompts, seed) for k in ordinals) == list(range(num_prompts))


def test_the_order_of_an_epoch_stays_as_it_is():
    assert [position(k, 8, 0) for k in range(8)] == [2, 4, 3, 6, 5, 0, 1, 7]


def test_an_empty_prompt_set_is_refused():
    with pytest.raises(RecordError, match="at least one prompt, got 0; the filters"):
        position(0, 0, 0)


@pytest.mark.parametrize(
    "raw",
    [None, [], {}, {"next": 3}, {"next": "3", "pending": []}, {"next": True, "pending": []},
     {"next": 3, "pending": 1}, {"next": 3, "pending": [3]}, {"next": 3, "pending": [1, 0]},
     {"next": 3, "pending": [1, 1]}, {"next": 3, "pending": [-1]}, {"next": -1, "pending": []},
     {"next": 3, "pending": [], "more": 1}],
)  # fmt: skip
def test_a_damaged_cursor_is_refused(raw):
    with pytest.raises(RecordError, match=r"must be \{next, pending\}"):
        parse_cursor(raw)


def test_data_of_a_state_is_the_cursor_and_pins_below_the_root():
    cursor = {"next": 4, "pending": [2]}
    pin = f"iterations/00003/surplus/00#sha256={'0' * 64}"
    assert parse_data(cursor) == StreamState(cursor)
    assert parse_data({**cursor, "surplus": [pin]}) == StreamState(cursor, [pin])
    whole = StreamState(cursor, [pin], [pin, pin], pin, pin)
    assert parse_data(whole.to_data()) == whole
    assert StreamState(cursor).to_data() == cursor
    for name in ("surplus", "carry"):
        for bad in ("x", [1], ["iterations/00003/surplus/00"], {}):
            with pytest.raises(RecordError, match=r"must hold pins|pinned URI"):
                parse_data({**cursor, name: bad})
    for name in ("values", "waiting"):
        for bad in ([pin], 3, "iterations/00003/values"):
            with pytest.raises(RecordError, match=r"must hold pins|pinned URI"):
                parse_data({**cursor, name: bad})
    for bad in (None, {"next": 4}, {**cursor, "other": []}):
        with pytest.raises(RecordError, match="prompt cursor"):
            parse_data(bad)


def test_the_pins_of_a_state_are_relative_to_the_root_that_wrote_it():
    for root in ("file:///runs/a", "s3://runs/states/a", "file:///r/states/step-1"):
        pin = f"{layout.state(root, 12)}#sha256={'0' * 64}"
        assert state_root(pin) == root


def a_policy(root, version, schema="policy/1"):
    uri = layout.policy(root, version)
    return write_files(uri, schema, {"p": b"%d" % version}, parents={}, attributes={}).pin()


def state_of(root):
    return f"{layout.state(root, 8)}#sha256={'0' * 64}"


def test_the_first_iteration_takes_the_policy_that_training_begins_with(file_root):
    first = a_policy(file_root, 0)
    assert find_reference("", policy_pin=first, state_pin="", info={}) == first


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
