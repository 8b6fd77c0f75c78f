"""Read rows of JSONL and Parquet files and of Hugging Face data sets, without interpretation.

Every fault names its line or row. Bad rows are left out only if `skip_bad` is set.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import itertools
import json
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError, StoreUnavailable
from planish.base.telemetry import redact
from planish.records.files import hash_file
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.problem import CurationLedger, Drop, add_drop
from planish.store.hub import HUB_TIMEOUT_SECONDS, hub_fault, passes
from planish.store.sources import Source, fetch_file, parse_source

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 << 20
"""Longest line of a JSONL file; a worked solution of a million characters fits."""
MAX_PACKED_RATIO = 100
"""Largest allowed ratio of unpacked to packed size of a gzip file; text has 3 to 20."""
MIN_UNPACKED_BYTES = 64 << 20
"""Unpacked size that any gzip file may have."""
KINDS = (
    "a data set is JSONL (one object a line, gzip may pack it), Parquet, or a data set of the hub; "
    "no JSON array and no CSV"
)


@dataclass(frozen=True)
class DataRow:
    """One row of a data set."""

    fields: dict[str, Any]
    origin: str
    """`line 12` or `row 12`, from 1."""


@dataclass(frozen=True)
class DataTable:
    """All rows of a data set, in its order."""

    rows: list[DataRow]
    sha256: str
    """Digest of the file, or of the canonical rows of a hub data set."""


class BadRow(ValueError):
    """Error for a row that cannot be read; the message gives the reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def read_data(
    config: CurateConfig,
    ledger: CurationLedger,
    *,
    key: str = "curate.dataset",
    label: str = "",
) -> DataTable:
    """Read the data set of a configuration, and record bad rows in `ledger`.

    `label` is a prefix of the ledger entry's name; `key` names the address setting in messages.

    Raises:
        ConfigError: no such data set, no rows, or a bad row; the message names the line.
        StoreUnavailable: the store does not answer.
    """
    name, path, items = open_data(config, key=key)
    rows: list[DataRow] = []
    bad: list[Drop] = []
    shown: dict[str, list[Drop]] = {}
    for item in items:
        if isinstance(item, DataRow):
            rows.append(item)
        elif config.skip_bad:
            add_drop(bad, item, shown)
        else:
            origin, _, fault = item.example.partition(": ")
            raise ConfigError(
                f"{origin} of `{name}` must be readable, got: {fault}; "
                f"{'' if rows else f'{KINDS}; '}mend it, or "
                "leave such rows out with `curate.skip_bad = true`"
            )
    check_rows(name, rows, bad)
    ledger.record(f"{label}rows of the data set", "rows", rows, bad)
    if path is not None:
        return DataTable(rows, hash_file(path)[1])
    canonical = "\n".join(json.dumps(row.fields, sort_keys=True, default=str) for row in rows)
    return DataTable(rows, hashlib.sha256(canonical.encode("ascii")).hexdigest())


def check_rows(name: str, rows: Sequence[DataRow], bad: Sequence[Drop]) -> None:
    """Refuse a data set without any readable row."""
    if not rows:
        raise ConfigError(
            f"`{name}` must hold at least one readable row, got {len(bad)} bad rows and no other"
            + (f", the first at {bad[0].example}; {KINDS}" if bad else "; it is empty")
            + ": check `curate.dataset`"
        )


def open_data(
    config: CurateConfig, *, key: str, most_of_hub: int | None = None
) -> tuple[str, Path | None, Iterator[DataRow | Drop]]:
    """Fetch the data set that a configuration names as `dataset`.

    A file is Parquet if its name or first bytes show that, else JSONL, plain or in gzip.
    `most_of_hub` limits the rows of a hub data set, which are then fetched as the caller iterates.

    Returns:
        Name, path (None if it is no file), and rows; a bad row is a Drop.
    """
    source = parse_source(config.dataset, key=key)
    if source.kind == "hub" and not source.file:
        options = {"config": config.hub_config, "split": config.hub_split, "key": key}
        options |= {"revision": config.hub_revision}
        rows = read_hub(source, **options, streaming=most_of_hub is not None)
        return source.place, None, _rows(itertools.islice(rows, most_of_hub), "row")
    path = fetch_file(source, key=key)
    with path.open("rb") as file:
        is_parquet = path.suffix == ".parquet" or file.read(4) == b"PAR1"
    if is_parquet:
        return path.name, path, _rows(_parquet_rows(path), "row")
    return path.name, path, _rows(bounded_lines(path), "line")


def _rows(items: Iterable[Any], unit: str) -> Iterator[DataRow | Drop]:
    for number, item in enumerate(items, 1):
        if isinstance(item, bytes) and not item.strip():
            continue
        origin = f"{unit} {number}"
        try:
            yield DataRow(_fields(item), origin)
        except BadRow as error:
            yield Drop(error.reason, f"{origin}: {error}")


def bounded_lines(path: Path) -> Iterator[bytes | BadRow]:
    """Yield the lines of a plain or gzip file; a line over `MAX_LINE_BYTES` is a bad row.

    One read loads at most `MAX_LINE_BYTES` + 1 bytes.

    Raises:
        ConfigError: the file is damaged, or unpacks to more than `MAX_PACKED_RATIO` allows.
    """
    num_bytes, name = path.stat().st_size, path.name
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    limit = max(MIN_UNPACKED_BYTES, MAX_PACKED_RATIO * num_bytes) if packed else num_bytes
    seen = 0
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                line = line if seen else line.removeprefix(codecs.BOM_UTF8)
                seen += len(line)
                too_long = len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")
                rest = line if too_long else b""
                while rest and not rest.endswith(b"\n") and seen <= limit:
                    rest = stream.readline(MAX_LINE_BYTES)
                    seen += len(rest)
                if seen > limit:
                    raise ConfigError(
                        f"`{name}` must unpack to at most {limit} bytes, {MAX_PACKED_RATIO} times "
                        f"its {num_bytes}, got more; give the unpacked file if it is meant"
                    )
                if too_long:
                    yield BadRow("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
                else:
                    yield line.removesuffix(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"`{name}` must be a whole gzip file, got: {error}; pack or copy it again"
        ) from None


def _fields(item: Any) -> dict[str, Any]:
    """Return the columns of a row; raises BadRow, also for text that UTF-8 cannot encode."""
    if isinstance(item, BadRow):
        raise item
    try:
        row = json.loads(item.decode("utf-8")) if isinstance(item, bytes) else item
    except UnicodeDecodeError as error:
        byte = item[error.start]
        raise BadRow("not_utf8", f"not UTF-8 at byte {error.start} (0x{byte:02x})") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("not_json", f"not JSON: {error}") from None
    if not isinstance(row, Mapping):
        raise BadRow("not_an_object", f"a row must be an object, got {row!r:.80}")
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise BadRow("not_utf8", f"text that is no valid Unicode: {error}") from None
    return dict(row)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    from planish.records.parquet import read_batches

    try:
        for batch in read_batches(path, name=path.name):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; check `curate.dataset`") from None


def read_hub(
    source: Source,
    *,
    config: str,
    split: str,
    revision: str,
    key: str = "curate.dataset",
    streaming: bool = False,
) -> Iterable[Any]:
    """Return the rows of a Hugging Face data set; never run code of the data set.

    `streaming` fetches rows as the caller iterates, and needs the network even for cached data.

    Raises:
        ConfigError: offline and not cached, unknown, private, or without that split.
        StoreUnavailable: the hub cannot be reached, or fails temporarily.
    """
    try:
        import datasets
        import huggingface_hub
        from huggingface_hub.errors import OfflineModeIsEnabled
    except ImportError as error:
        raise ConfigError(
            f"`{key}` = {source.place!r} needs the extra `planish[curate]` ({error})"
        ) from None
    revision = source.revision or revision
    offline = False
    try:
        # A request with a short time limit comes first: offline, the library retries for minutes.
        huggingface_hub.HfApi().dataset_info(
            source.place, revision=revision or None, timeout=HUB_TIMEOUT_SECONDS
        )
    except OfflineModeIsEnabled:
        logger.info("hub offline mode dataset=%s", source.place)
        offline, streaming = True, False
    except Exception as error:
        raise hub_fault(error, key=key, place=source.place, revision=revision) from None
    try:
        rows: Iterable[Any] = datasets.load_dataset(
            source.place,
            config or None,
            split=split,
            revision=revision or None,
            streaming=streaming,
        )
        # A stream raises its errors at the first row.
        first = next(iter(rows), None)
    except Exception as error:
        # The library raises errors of half a dozen packages; each means that there are no rows.
        if offline:
            raise hub_fault(error, key=key, place=source.place, revision=revision) from None
        reason = redact(str(error)).strip().partition("\n")[0][:300]
        kind = StoreUnavailable if passes(error) else ConfigError
        raise kind(
            f"`{key}` must be a data set that the hub gives, got {source.place!r} (split "
            f"{split!r}), {type(error).__name__}: {reason}; check `hub_config` and "
            "`hub_split`, or give the path of a .jsonl or .parquet file"
        ) from None
    return rows if first is not None else []


def field_of(fields: Mapping[str, Any], dotted: str) -> Any:
    """Return a nested field by dotted name, or None."""
    value: Any = fields
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def as_answer(value: Any) -> str | None:
    """Return a ground truth as text: stripped text, a number in digits, or None.

    A float that 15 digits do not reproduce gives None: it stands for another number, such as 1/3.
    """
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    # Python refuses to print integers of more than 4300 digits.
    if not (math.isfinite(value) if isinstance(value, float | Decimal) else abs(value) < 10**1000):
        return None
    if value == int(value):
        return str(int(value))
    text = str(value) if isinstance(value, Decimal) else f"{value:.15g}"
    if isinstance(value, float) and float(text) != value:
        return None
    return f"{Decimal(text):f}"
