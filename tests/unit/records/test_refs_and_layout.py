import inspect

import pytest

from planish.base.errors import ObjectMissing, RecordError
from planish.records import Ref, layout, parse_pin
from planish.store import parse_uri
from planish.store.documents import read_json, write_json

REF = Ref("policy/1", "s3://runs/a/policies/00001", "ab" * 32, {"policy_version": 1, "x": 0.5})


def test_a_ref_survives_json_and_its_pin_splits_again():
    assert Ref.from_json(REF.to_json()) == REF
    assert parse_pin(REF.pin()) == ("s3://runs/a/policies/00001", "ab" * 32)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "[" * 100_000,
        '{"schema": "policy/1"}',
    ],
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
