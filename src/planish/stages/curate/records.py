"""Read rows of JSONL and Parquet files and of Hugging Face data sets; nothing is interpreted here.

Every fault names its line or row. Bad rows are left out only when the caller says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError
from planish.records.files import hash_file
from planish.stages.curate.problem import CurationLedger, Drop

logger = logging.getLogger(__name__)

HUB_TIMEOUT_SECONDS = 20.0
"""Limit of the first question to the hub: offline machines get their error after it."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class DataRow:
    """One row of a data set."""

    fields: dict[str, Any]
    """As parsed from JSON or Parquet."""
    origin: str
    """`line 12` or `row 12`, from 1."""


@dataclass(frozen=True)
class DataTable:
    """All rows of a data set."""

    rows: list[DataRow]
    """In the order of the file."""
    sha256: str
    """Digest of the file, or of the canonical rows of a hub data set."""


class BadRow(ValueError):
    """One row cannot be read; the message says why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def read_table(
    dataset: str,
    *,
    skip_bad: bool,
    ledger: CurationLedger,
    hub: Callable[[str], Iterable[Any]],
    label: str = "",
) -> DataTable:
    """Read a data set by path or hub id.

    Args:
        dataset: path of a `.jsonl` or `.parquet` file, or a hub id.
        skip_bad: leave out unreadable rows and count them in the ledger.
        ledger: gets one filter.
        hub: returns the rows of a hub id.
        label: put before the name of that filter.

    Raises:
        ConfigError: no such data set, no rows, or a bad row; names the line.
    """
    path = Path(dataset)
    if path.is_file():
        if path.suffix == ".parquet":
            rows, bad = _parse(_parquet_rows(path), "row", path.name, skip_bad)
        else:
            with path.open("rb") as file:
                lines = (line.removesuffix(b"\n") for line in file)
                rows, bad = _parse(lines, "line", path.name, skip_bad)
        digest = hash_file(path)[1]
    elif path.exists() or path.suffix in (".jsonl", ".json", ".parquet") or path.is_absolute():
        raise ConfigError(
            f"`curate.dataset` must be a .jsonl or .parquet file or a hub id, got {dataset!r}, "
            "which is no file; relative paths start at the working directory of the process"
        )
    elif not _HUB_ID.fullmatch(dataset):
        raise ConfigError(
            f"`curate.dataset` must be an existing file or a hub id `owner/name`, got {dataset!r}"
        )
    else:
        rows, bad = _parse(hub(dataset), "row", dataset, skip_bad)
        canonical = "\n".join(json.dumps(row.fields, sort_keys=True, default=str) for row in rows)
        digest = hashlib.sha256(canonical.encode("ascii")).hexdigest()
    ledger.record(f"{label}rows of the data set", "rows", len(rows) + len(bad), len(rows), bad)
    return DataTable(rows, digest)


def _parse(
    items: Iterable[Any], unit: str, name: str, skip_bad: bool
) -> tuple[list[DataRow], list[Drop]]:
    rows: list[DataRow] = []
    drops: list[Drop] = []
    ids: dict[str, str] = {}
    for number, item in enumerate(items, 1):
        origin = f"{unit} {number}"
        try:
            fields = _json_line(item) if isinstance(item, bytes) else _plain(item)
            if fields.get("id") is not None:
                key = str(fields["id"])
                if key in ids:
                    detail = f"the id {key!r:.80} stands in {ids[key]} already"
                    raise BadRow("duplicate_id", detail)
                ids[key] = origin
            rows.append(DataRow(fields, origin))
        except BadRow as error:
            if not skip_bad:
                raise ConfigError(
                    f"{origin} of `{name}` must be readable, got: {error}; mend it, or leave such "
                    "rows out with `curate.skip_bad = true`"
                ) from None
            drops.append(Drop(error.reason, f"{origin}: {error}"))
    if not rows:
        raise ConfigError(
            f"`{name}` must hold at least one readable row, got {len(drops)} bad rows and no "
            "other; check `curate.dataset`"
        )
    return rows, drops


def _json_line(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(
            "not_utf8", f"not UTF-8 at byte {error.start} (0x{line[error.start]:02x})"
        ) from None
    if not text.strip():
        raise BadRow("empty_line", "an empty line")
    try:
        return _plain(json.loads(text))
    except BadRow:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRow("not_json", f"not JSON: {error}") from None


def _plain(value: Any) -> dict[str, Any]:
    """Check that a row is an object whose text can be written as UTF-8."""
    if not isinstance(value, Mapping):
        raise BadRow("not_an_object", f"a row must be an object, got {value!r:.80}")
    fields = {str(key): item for key, item in value.items()}
    try:
        json.dumps(fields, ensure_ascii=False, default=str).encode("utf-8")
    except (UnicodeEncodeError, ValueError, RecursionError) as error:
        raise BadRow("not_utf8", f"text that is no valid Unicode: {error}") from None
    return fields


def _parquet_rows(path: Path) -> Iterable[Any]:
    import pyarrow as pa

    from planish.records.parquet import read_batches

    try:
        for batch in read_batches(path, size=path.stat().st_size, name=path.name):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"`{path.name}` must be a Parquet file, got: {error}; check `curate.dataset`"
        ) from None


def read_hub(dataset: str, *, config: str, split: str, revision: str) -> Iterable[Any]:
    """Return the rows of a Hugging Face data set; never runs code of the data set.

    Raises:
        ConfigError: offline and not cached, unknown, private, or without that split.
    """
    try:
        import datasets
        import huggingface_hub
        from huggingface_hub.errors import OfflineModeIsEnabled
    except ImportError as error:
        raise ConfigError(
            f"`curate.dataset` = {dataset!r} needs the extra `planish[curate]` ({error})"
        ) from None
    try:
        try:
            # One question with a short limit first: the library retries for minutes when offline.
            huggingface_hub.HfApi().dataset_info(
                dataset, revision=revision or None, timeout=HUB_TIMEOUT_SECONDS
            )
        except OfflineModeIsEnabled:
            logger.info("hub offline mode dataset=%s", dataset)
        rows: Iterable[Any] = datasets.load_dataset(
            dataset, config or None, split=split, revision=revision or None
        )
    except Exception as error:
        # The library raises errors of half a dozen packages; each means that there are no rows.
        reason = str(error).strip().partition("\n")[0][:300]
        raise ConfigError(
            f"the hub data set {dataset!r} (split {split!r}) must be reachable, got "
            f"{type(error).__name__}: {reason}; on a machine without internet give "
            "`curate.dataset` the path of a .jsonl or .parquet file"
        ) from None
    return rows


def field_of(fields: Mapping[str, Any], dotted: str) -> Any:
    """Return a nested field by dotted name, or None."""
    value: Any = fields
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def as_answer(value: Any) -> str | None:
    """Return a ground truth as text: text as it is, whole numbers in digits, else None."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        return None
    # Python refuses to print integers of more than 4300 digits.
    return str(int(value)) if abs(value) < 10**1000 else None
