import hashlib
import json
import math

import pytest

from planish import store
from planish.base.errors import RecordError
from planish.records import EvalReport, UpdateReport, read_report, write_report
from planish.records.reports import parse_report

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
    assert read_report(type(report), uri, sha256=digest) == report
    with pytest.raises(RecordError, match="must have the sha256"):
        read_report(type(report), uri, sha256="0" * 64)


def test_not_a_number_survives_as_valid_json(file_root):
    write_report(f"{file_root}/x", UpdateReport({"kl": math.nan}))
    raw = json.loads(store.read(f"{file_root}/x"), parse_constant=pytest.fail)
    assert raw["scalars"] == {"kl": "NaN"}
    assert math.isnan(read_report(UpdateReport, f"{file_root}/x").scalars["kl"])


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (UpdateReport({"loss": "high"}), "`scalars.loss` of a report must be a number, got 'high'"),
        (UpdateReport({}, [{"a": None}]), r"`minibatches\[0\].a` of a report must be a number"),
        (UpdateReport({}, [], {"x": math.nan}), "finite JSON values"),
        (EvalReport({}, {}, {"x": object()}), "finite JSON values"),
    ],
)
def test_values_that_no_report_can_hold_are_refused(file_root, report, words):
    with pytest.raises(RecordError, match=words):
        write_report(f"{file_root}/x", report)


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
