"""Files of frames: npz with arrays, or CSV and Parquet with one row for each sample.

    ts,machine,metric,value          long form of CSV and Parquet, rows in any order
    npz: ts [T], machines [N], and one array [T, N] for each metric

Samples of the long form are aligned to whole seconds, as in `align`.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planish.base.config import nearest
from planish.base.errors import ConfigError, RecordError
from planish.minder.detect.frame import COARSEST_SECONDS, F64, Frame, Samples, align
from planish.minder.detect.metrics_table import METRICS, is_column
from planish.records.schema import limit_bytes

LONG_COLUMNS = ("ts", "machine", "metric", "value")
ENDINGS = (".npz", ".csv", ".parquet")

_MAX_SECONDS = 32 * 86_400
"""Longest trace in seconds; in a longer one a timestamp is broken."""
_LAST_SECOND = 1e11
"""Largest timestamp in seconds (year 5000); a larger timestamp is in milliseconds or finer."""
_log = logging.getLogger(__name__)


def read_frame(path: Path) -> Frame:
    """Read a trace; unknown metrics are left out with a warning.

    Raises:
        ConfigError: there is no such file, or it has another ending.
        RecordError: the file is damaged, lacks a column or array, or has no known metric.
    """
    if path.suffix not in ENDINGS:
        raise ConfigError(f"a trace must be a file that ends in {ENDINGS}, got `{path}`")
    if not path.is_file():
        raise ConfigError(f"a trace must be there, got no file `{path}`")
    frame = _read_npz(path) if path.suffix == ".npz" else _read_long(path)
    if not frame.values or not frame.num_seconds or not frame.num_machines:
        raise RecordError(f"`{path}` must hold samples of known metrics, got none")
    return frame


def write_frame(path: Path, frame: Frame) -> None:
    """Write a trace; the long form has only real samples."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"a trace must be a file that ends in {ENDINGS}, got `{path}`")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        values = {
            name: np.where(frame.mask[name], array, np.float32(np.nan))
            for name, array in frame.values.items()
        }
        arrays = {"ts": frame.ts, "machines": np.array(frame.machines), **values}
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        return
    ts = frame.ts.astype(np.float64)
    samples: dict[str, dict[str, tuple[F64, F64]]] = {}
    for metric, array in frame.values.items():
        samples[metric] = {}
        for i, name in enumerate(frame.machines):
            real = frame.mask[metric][:, i]
            samples[metric][name] = (ts[real], array[real, i].astype(np.float64))
    write_samples(path, samples)


def write_samples(path: Path, samples: Samples) -> None:
    """Write samples in long form as they are; equal times and disorder are kept."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    parts = []
    for metric, series in samples.items():
        for machine, (ts, values) in series.items():
            count = len(ts)
            names = [pa.repeat(pa.scalar(text), count) for text in (machine, metric)]
            parts.append(pa.table([pa.array(ts), *names, pa.array(values)], LONG_COLUMNS))
    table = pa.concat_tables(parts)
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path, compression="zstd")


def _read_npz(path: Path) -> Frame:
    limit = limit_bytes(path.stat().st_size)
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
        if total > limit:
            raise RecordError(f"`{path}` must decode to at most {limit} bytes, got {total}")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except RecordError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RecordError(f"`{path}` must be an npz file of plain arrays, got {error}") from None
    try:
        ts, machines = arrays.pop("ts").astype(np.float64), arrays.pop("machines").astype(str)
        values = {
            name: array.astype(np.float64)
            for name, array in arrays.items()
            if _is_known(path, name)
        }
    except (KeyError, ValueError) as error:
        raise RecordError(
            f"`{path}` must hold the arrays `ts`, `machines` and one for each metric, got {error}"
        ) from None
    shape = (len(ts), len(machines))
    if ts.ndim != 1 or machines.ndim != 1 or any(a.shape != shape for a in values.values()):
        raise RecordError(
            f"every metric in `{path}` must have the shape {shape} of `ts` and `machines`, got "
            f"{ {name: array.shape for name, array in values.items()} }"
        )
    samples = {
        name: {str(m): (ts, array[:, i]) for i, m in enumerate(machines)}
        for name, array in values.items()
    }
    return _aligned(path, machines.tolist(), samples)


def _read_long(path: Path) -> Frame:
    import pyarrow as pa
    from pyarrow import csv

    from planish.records.parquet import read_batches

    try:
        if path.suffix == ".csv":
            table = csv.read_csv(path)
        else:
            table = pa.Table.from_batches(list(read_batches(path, name=str(path))))
            table = table.unify_dictionaries()
        ts, *texts, value = (table.column(name) for name in LONG_COLUMNS)
        is_date = pa.types.is_timestamp(ts.type)
        seconds = ts.cast(pa.timestamp("us")).cast(pa.int64()) if is_date else ts
        seconds = seconds.cast(pa.float64()).to_numpy() / (1e6 if is_date else 1.0)
        values = value.cast(pa.float64()).to_numpy()
        texts = [text.cast(pa.string()).fill_null("").combine_chunks() for text in texts]
    except RecordError:
        raise
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise RecordError(
            f"`{path}` must be a readable table with the columns {LONG_COLUMNS}, `ts` and `value` "
            f"as numbers, the others as text, got {error}"
        ) from None
    # After sorting, rows of one metric and machine are adjacent, in their original order.
    machine, metric = (text.dictionary_encode() for text in texts)
    machines, metrics = machine.dictionary.to_pylist(), metric.dictionary.to_pylist()
    place = metric.indices.to_numpy().astype(np.int64) * len(machines) + machine.indices.to_numpy()
    order = np.argsort(place, kind="stable")
    ends = np.searchsorted(place[order], np.arange(1, len(metrics) * len(machines)))
    rows = np.split(order, ends)
    samples = {
        name: {
            node: (seconds[mine], values[mine])
            for j, node in enumerate(machines)
            if len(mine := rows[i * len(machines) + j])
        }
        for i, name in sorted(enumerate(metrics), key=lambda each: each[1])
        if _is_known(path, name)
    }
    return _aligned(path, machines, samples)


def _aligned(path: Path, machines: Sequence[str], samples: Samples) -> Frame:
    stamps = [ts[np.isfinite(ts)] for series in samples.values() for ts, _ in series.values()]
    every = np.concatenate(stamps) if stamps else np.zeros(0)
    if not len(every):
        raise RecordError(f"`{path}` must hold samples of known metrics, got none")
    if every.min() > _LAST_SECOND:
        raise RecordError(
            f"`ts` in `{path}` must be unix seconds, got {every.min():.0f} and later; divide "
            "milliseconds by 1,000"
        )
    spacings = [
        float(np.median(np.diff(np.unique(ts))))
        for series in samples.values()
        for ts, _ in series.values()
        if len(np.unique(ts)) > 2
    ]
    spacing = float(np.median(spacings)) if spacings else 0.0
    if spacing > COARSEST_SECONDS:
        raise RecordError(
            f"samples in `{path}` must be at most {COARSEST_SECONDS:.0f} s apart, got "
            f"{spacing:,.0f} in the median; `ts` is in seconds"
        )
    start, end = int(np.floor(every.min() + 0.5)), int(np.floor(every.max() + 0.5)) + 1
    if end - start > _MAX_SECONDS:
        raise RecordError(
            f"`ts` in `{path}` must be seconds of one trace of at most {_MAX_SECONDS:,} s, got "
            f"{start} to {end}"
        )
    return align(path.stem, start, end, machines, samples)


def _is_known(path: Path, name: str) -> bool:
    if is_column(name):
        return True
    hint = nearest(name, METRICS)
    _log.warning("`%s` in `%s` is not a known metric%s: left out", name, path, hint)
    return False
