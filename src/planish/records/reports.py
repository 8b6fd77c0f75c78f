"""Reports: single JSON files of scalars, by train and evaluate; the pin of the best policy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from planish import store
from planish.base.errors import ObjectMissing, RecordError
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.records.refs import is_pin
from planish.store.documents import read_json, write_json

_LIMIT_BYTES = 256 << 20
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Scalars = dict[str, float]


@dataclass(frozen=True)
class UpdateReport:
    """What one iteration of training measured.

    Example:
        >>> report = UpdateReport({"loss": 0.5}, [{"grad_norm": 1.0}], {"iteration": 1})
        >>> parse_report(UpdateReport, report_bytes(report), "here") == report
        True
    """

    SCHEMA: ClassVar[str] = "update/1"
    PARTS: ClassVar[tuple[str, ...]] = ("scalars", "minibatches", "attributes")

    scalars: Scalars
    """Metric name to value over the whole iteration; NaN and infinities survive the file."""
    minibatches: list[Scalars] = field(default_factory=list)
    """One entry per optimizer step, in order."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """JSON values: iteration, step, config_sha256 ..."""


@dataclass(frozen=True)
class EvalReport:
    """What one evaluation of one policy measured.

    Example:
        >>> report = EvalReport({"accuracy": 0.5}, {"sums": {"accuracy": 0.5}}, {})
        >>> parse_report(EvalReport, report_bytes(report), "here") == report
        True
    """

    SCHEMA: ClassVar[str] = "eval/1"
    PARTS: ClassVar[tuple[str, ...]] = ("scalars", "sources", "attributes")

    scalars: Scalars
    """Metric name to value over all prompts."""
    sources: dict[str, Scalars] = field(default_factory=dict)
    """Source of the prompts to its own scalars."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """JSON values: policy_version, seed, config_sha256, marks of all samples ..."""


ReportT = TypeVar("ReportT", UpdateReport, EvalReport)


@dataclass(frozen=True)
class BestPolicy:
    """Which policy of a run has the highest accuracy on the held-out prompts.

    Example:
        >>> BestPolicy("file:///r/policies/00004#sha256=" + "0" * 64, 4, 0.5, (0, 4, 8)).evaluated
        (0, 4, 8)
    """

    SCHEMA: ClassVar[str] = "best-policy/1"

    pin: str
    """`<uri>#sha256=<digest>`."""
    policy_version: int
    """Of equal accuracies the earlier version."""
    accuracy: float
    """avg@n over all held-out prompts."""
    evaluated: tuple[int, ...]
    """Versions that were compared, in order."""


def report_bytes(report: UpdateReport | EvalReport) -> bytes:
    """Return the bytes on disk: sorted keys, non-finite numbers as text.

    Raises:
        RecordError: a value is not a number, or an attribute is not JSON.
    """
    raw: dict[str, Any] = {"schema": report.SCHEMA, "attributes": report.attributes}
    for part in report.PARTS[:2]:
        raw[part] = _encode(getattr(report, part), part)
    try:
        text = json.dumps(raw, sort_keys=True, indent=2, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(
            f"attributes of a report must be finite JSON values, "
            f"got {report.attributes!r:.300} ({error})"
        ) from None
    return (text + "\n").encode("ascii")


def _encode(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _encode(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item, f"{place}[{n}]") for n, item in enumerate(value)]
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RecordError(f"`{place}` of a report must be a number, got {value!r:.80}") from None
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def write_report(uri: str, report: UpdateReport | EvalReport) -> str:
    """Write a report as one object and return the sha256 of its bytes."""
    data = report_bytes(report)
    store.write(uri, data)
    return hashlib.sha256(data).hexdigest()


def read_report(cls: type[ReportT], uri: str, *, sha256: str | None = None) -> ReportT:
    """Read a report.

    Raises:
        ObjectMissing: no object there.
        RecordError: not a report of this schema, or its digest is not `sha256`.
    """
    data = store.read(uri, 0, _LIMIT_BYTES)
    seen = hashlib.sha256(data).hexdigest()
    if sha256 is not None and seen != sha256:
        raise RecordError(
            f"`{uri}` must have the sha256 {sha256}, got {seen}; it was written again"
        )
    return parse_report(cls, data, uri)


def parse_report(cls: type[ReportT], data: bytes, name: str) -> ReportT:
    """Parse the bytes of a report, trusting nothing in them.

    Raises:
        RecordError: not a report of this schema.
    """
    try:
        raw: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"`{name}` must be JSON, got {data[:80]!r} ({error})") from None
    if not isinstance(raw, dict) or raw.get("schema") != cls.SCHEMA:
        seen = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise RecordError(f"`{name}` must be a report of schema {cls.SCHEMA}, got {seen!r:.80}")
    empty: UpdateReport | EvalReport = cls({})
    part = empty.PARTS[1]
    if raw.keys() != {"schema", *empty.PARTS}:
        raise RecordError(
            f"`{name}` must have the fields {sorted(['schema', *empty.PARTS])}, "
            f"got {sorted(raw)!s:.200}"
        )
    details = raw[part]
    if not isinstance(raw["attributes"], dict) or type(details) is not type(getattr(empty, part)):
        raise RecordError(f"`{name}`: `attributes` or `{part}` has the wrong type")
    if isinstance(details, list):
        decoded: Any = [_scalars(item, name) for item in details]
    else:
        decoded = {key: _scalars(item, name) for key, item in details.items()}
    return cls(_scalars(raw["scalars"], name), decoded, raw["attributes"])


def _scalars(raw: Any, name: str) -> Scalars:
    if not isinstance(raw, dict):
        raise RecordError(f"`{name}`: scalars must be an object, got {raw!r:.80}")
    scalars = {}
    for key, value in raw.items():
        number = _NON_FINITE.get(value, value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise RecordError(f"`{name}`: `{key}` must be a number, got {value!r:.80}")
        scalars[key] = float(number)
    return scalars


def evaluation_names(config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the sets that a run measures policies on, "" for the held-out prompts.

    Example:
        >>> evaluation_names({"curate": {"evaluation_sets": [{"name": "gsm8k"}]}})
        ['', 'gsm8k']
    """
    return ["", *(one["name"] for one in config.get("curate", {}).get("evaluation_sets", ()))]


def pin_best(root: str, like: EvalReport) -> BestPolicy | None:
    """Write which policy of a run is the best of those that were evaluated like `like`.

    It follows from the reports alone: a task that is tried again writes the same bytes.

    Args:
        root: URI of the run.
        like: others count when they have its prompts and conditions, and when the policy that they
            measured still lies under the root.

    Returns:
        None, and nothing is written, where no policy of this root was evaluated so.
    """
    accuracies: dict[int, float] = {}
    pins: dict[int, str] = {}
    for uri in store.list_uris(f"{root}/evals/"):
        name, version = layout.parse_evaluation(root, uri) or ("", -1)
        if name or version < 0:
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
    write_json(layout.best_policy(root), {"schema": BestPolicy.SCHEMA, **vars(best)})
    return best


def read_best(root: str) -> BestPolicy:
    """Read which policy of a run is the best.

    Raises:
        ObjectMissing: no policy has been evaluated.
        RecordError: another document lies there.
    """
    uri = layout.best_policy(root)
    raw: Any = read_json(uri)
    if not isinstance(raw, dict) or raw.get("schema") != BestPolicy.SCHEMA:
        raise RecordError(f"`{uri}` must be of schema {BestPolicy.SCHEMA}, got {raw!r:.200}")
    names = ("pin", "policy_version", "accuracy", "evaluated")
    pin, version, accuracy, evaluated = map(raw.get, names)
    versions = [version, *evaluated] if isinstance(evaluated, list) else []
    are_numbers = bool(versions) and all(type(number) is int for number in versions)
    is_pinned = isinstance(pin, str) and is_pin(pin)
    if not are_numbers or not is_pinned or type(accuracy) is not float:
        raise RecordError(f"`{uri}` must name a policy by its pin, got {raw!r:.200}")
    return BestPolicy(str(pin), versions[0], accuracy, tuple(versions[1:]))
