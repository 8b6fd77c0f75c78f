"""Reports: single JSON files of scalars, by train and evaluate; the pin of the best policy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError

from planish import store
from planish.base.config import document_faults
from planish.base.errors import ObjectChanged, ObjectExists, ObjectMissing, RecordError
from planish.records import layout
from planish.records.manifest import adapter, read_manifest
from planish.records.refs import is_pin
from planish.store.documents import write_json

_LIMIT_BYTES = 256 << 20
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _number(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


Scalars = dict[str, Annotated[float, BeforeValidator(_number)]]


@dataclass(frozen=True)
class UpdateReport:
    """Measurements of one iteration of training.

    Example:
        >>> report = UpdateReport({"loss": 0.5}, [{"grad_norm": 1.0}], {"iteration": 1})
        >>> parse_report(UpdateReport, report_bytes(report), "here") == report
        True
    """

    scalars: Scalars
    """Metric name to value over the whole iteration; NaN and infinities survive the file."""
    minibatches: list[Scalars] = field(default_factory=list)
    """One entry per optimizer step, in order."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """JSON values: iteration, step, config_sha256 ..."""
    schema: Literal["update/1"] = "update/1"


@dataclass(frozen=True)
class EvalReport:
    """Measurements of one evaluation of one policy.

    Example:
        >>> report = EvalReport({"accuracy": 0.5}, {"sums": {"accuracy": 0.5}}, {})
        >>> parse_report(EvalReport, report_bytes(report), "here") == report
        True
    """

    scalars: Scalars
    """Metric name to value over all prompts."""
    sources: dict[str, Scalars] = field(default_factory=dict)
    """Source of the prompts to its own scalars."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """JSON values: policy_version, seed, config_sha256, marks of all samples ..."""
    schema: Literal["eval/1"] = "eval/1"


def _is_pinned(pin: str) -> str:
    if not is_pin(pin):
        raise ValueError("must be a pinned URI")
    return pin


@dataclass(frozen=True)
class BestPolicy:
    """The policy of a run with the highest accuracy on the held-out prompts.

    Example:
        >>> BestPolicy("file:///r/policies/00004#sha256=" + "0" * 64, 4, 0.5, (0, 4, 8)).evaluated
        (0, 4, 8)
    """

    pin: Annotated[str, AfterValidator(_is_pinned)]
    """`<uri>#sha256=<digest>`."""
    policy_version: int
    """Version of that policy; among equal accuracies the earliest."""
    accuracy: float
    """avg@n over all held-out prompts."""
    evaluated: tuple[int, ...]
    """Policy versions whose evaluations were compared, ascending."""
    schema: Literal["best-policy/1"] = "best-policy/1"


DocumentT = TypeVar("DocumentT", UpdateReport, EvalReport, BestPolicy)


def report_bytes(report: UpdateReport | EvalReport) -> bytes:
    """Return the bytes on disk: sorted keys, non-finite numbers as text."""
    plain = ("schema", "attributes")
    raw = {part: value if part in plain else _encode(value) for part, value in vars(report).items()}
    return (json.dumps(raw, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def write_report(uri: str, report: UpdateReport | EvalReport) -> str:
    """Write a report as one object and return the sha256 of its bytes."""
    data = report_bytes(report)
    store.write(uri, data)
    return hashlib.sha256(data).hexdigest()


def read_report(cls: type[DocumentT], uri: str) -> DocumentT:
    """Read a report.

    Raises:
        ObjectMissing: no object there.
        RecordError: not a report of this schema.
    """
    return parse_report(cls, store.read(uri, 0, _LIMIT_BYTES), uri)


def parse_report(cls: type[DocumentT], data: bytes, name: str) -> DocumentT:
    """Parse the bytes of a report, trusting nothing in them.

    Raises:
        RecordError: not a report of this schema.
    """
    kind: Any = cls
    try:
        report: DocumentT = adapter(kind).validate_json(data, strict=True, extra="forbid")
    except ValidationError as error:
        raise RecordError(
            f"`{name}` must be of schema {cls.schema}: {document_faults(error)}"
        ) from None
    return report


def evaluation_names(config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the sets that a run measures policies on, "" for the held-out prompts.

    Example:
        >>> evaluation_names({"curate": {"evaluation_sets": [{"name": "gsm8k"}]}})
        ['', 'gsm8k']
    """
    return ["", *(one["name"] for one in config.get("curate", {}).get("evaluation_sets", ()))]


def evaluations(root: str) -> Iterator[tuple[str, int, str]]:
    """Yield test set ("" for held-out prompts), policy version and URI of each report of a run."""
    for uri in store.list_uris(f"{root}/evals/"):
        if place := layout.parse_evaluation(root, uri):
            yield *place, uri


def pin_best(root: str, like: EvalReport) -> BestPolicy | None:
    """Write the best policy of a run among those that were evaluated in the same way as `like`.

    The result depends on the reports alone, so the retry of a task writes the same bytes.

    Args:
        root: URI of the run.
        like: an evaluation; others count if they have the same prompts and conditions, and if
            their policy still lies under the root.

    Returns:
        None if no policy of this root was evaluated in this way; then nothing is written.
    """
    seen = store.tag(*store.open_store(layout.best_policy(root)))
    accuracies: dict[int, float] = {}
    pins: dict[int, str] = {}
    for name, version, uri in evaluations(root):
        if name:
            continue
        report = read_report(EvalReport, uri)
        parents = report.attributes.get("parents", {})
        is_alike = parents.get("prompts") == like.attributes["parents"]["prompts"]
        if not is_alike or report.attributes.get("conditions") != like.attributes["conditions"]:
            continue
        try:
            manifest = read_manifest(layout.policy(root, version))
        except ObjectMissing:
            continue
        if manifest.sha256 == parents["policy"]:
            accuracies[version] = report.scalars["accuracy"]
            pins[version] = manifest.ref(layout.policy(root, version)).pin()
    if not accuracies:
        return None
    version = max(accuracies, key=lambda version: (accuracies[version], -version))
    best = BestPolicy(pins[version], version, accuracies[version], tuple(sorted(accuracies)))
    try:
        write_json(layout.best_policy(root), vars(best), over=seen)
    except (ObjectChanged, ObjectExists):
        return pin_best(root, like)  # what has been written meanwhile may know of fewer reports
    return best


def read_best(root: str) -> BestPolicy:
    """Read the best policy of a run.

    Raises:
        ObjectMissing: no policy has been evaluated.
        RecordError: another document lies there.
    """
    return read_report(BestPolicy, layout.best_policy(root))
