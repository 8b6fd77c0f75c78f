"""`planish show` prints documents of any shape, or ends with one of our errors."""

import contextlib
import io
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from planish import store
from planish.base.errors import ObjectMissing, PlanishError, RecordError
from planish.records import layout
from planish.show.command import show
from planish.store.documents import read_json
from tests.thin import examples

DEEP = "[" * 900 + "]" * 900
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("config", "schema", "scalars", "attributes", "minibatches", "stage", "iteration")
            )
            | st.text(max_size=6),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
PLACES = (
    layout.run_file(""),
    layout.stage_log("", "train", 1, 0),
    "/prompts/manifest.json",
    "/evals/00001/report.json",
    "/other.json",
)


def show_all(root):
    for place in (root, *(f"{root}{name}" for name in PLACES)):
        with contextlib.suppress(PlanishError):
            show(place, Console(file=io.StringIO(), width=4000), rows=1)


@pytest.mark.slow
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(VALUES, min_size=len(PLACES), max_size=len(PLACES)))
@example([{"schema": []}] * len(PLACES))
def test_documents_of_any_shape_are_shown_or_refused(file_root, documents):
    for place, document in zip(PLACES, documents, strict=True):
        store.write(f"{file_root}{place}", json.dumps(document).encode())
    show_all(file_root)


@pytest.mark.parametrize("schema", ["update/1", "prompts/1"])
@pytest.mark.parametrize(
    "value", [DEEP, "9" * 4000, "NaN", "1e999", '"\\ud800"', '{"a": ' + DEEP + "}"]
)
def test_documents_of_strange_values_are_shown_or_refused(file_root, schema, value):
    names = ("config", "scalars", "attributes")
    fields = ", ".join(f'"{name}": {value}' for name in names)
    for place in PLACES:
        data = f'{{"schema": "{schema}", {fields}}}'.encode()
        store.write(f"{file_root}{place}", data)
    show_all(file_root)


def test_a_document_has_a_limit(file_root):
    store.write(f"{file_root}/x.json", b" " * (65 << 20))
    with pytest.raises(RecordError, match="at most 67108864 bytes"):
        read_json(f"{file_root}/x.json")


@pytest.mark.parametrize("place", ["file:///dev/zero", "/dev/null"])
def test_a_device_is_no_document(place):
    with pytest.raises(ObjectMissing, match="nothing is there"):
        show(place, Console(file=io.StringIO()), rows=1)
