"""Feeds damaged files to every reader of checkpoints: `python -m tests.fuzz.checkpoint`.

A reader may return or raise its own error, nothing else; hold no more memory than its bound; and
neither import, execute, open nor connect to anything. What it returns must be usable.
"""

import argparse
import hashlib
import json
import random
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from planish.base.errors import CheckpointCorrupt, CheckpointError
from planish.checkpoint.commit.commit import Commit
from planish.checkpoint.commit.journal import JournalContent
from planish.checkpoint.format import metafile
from planish.checkpoint.format.safetensors_file import (
    NewEntry,
    header_bytes,
    parse_header,
    plan_header,
)
from planish.checkpoint.format.small_objects import decode_extra, encode_extra
from planish.checkpoint.plan.coverage import cover_faults
from tests.fuzz.mutations import damaged, lied
from tests.unit.checkpoint.format.metadata_samples import forged, row_of, small

WRITTEN_BY_1 = Path(__file__).parents[1] / "unit/checkpoint/format/written_by_1"
MAX_BYTES = 8 << 20
"""Bound that readers of metadata are given."""
SLACK_BYTES = 1 << 20
FACTOR = 64
"""A reader holds at most this many times its input, and the slack."""
FORBIDDEN = frozenset({
    "exec", "compile", "import", "open", "pickle.find_class", "marshal.loads", "ctypes.dlopen",
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect",
})  # fmt: skip
"""Audit events that no reader may cause."""

_watch: dict[str, list[str] | None] = {}


def _audit(event, arguments):
    events = _watch.get("events")
    if events is not None and event in FORBIDDEN:
        events.append(f"{event} {arguments!r:.80}")


def watch():
    """Begin to see what readers cause; Python has no way to end it before the process does."""
    if not _watch:
        _watch["events"] = None
        sys.addaudithook(_audit)


@dataclass(frozen=True)
class Target:
    """A reader and valid inputs of it."""

    read: Callable[[bytes], object]
    """Read and use; raises only `refusals`."""
    samples: list[bytes]
    lie: Callable[[random.Random, bytes], bytes]
    """Change what a sample says and keep its form."""
    refusals: tuple[type[Exception], ...]
    bound: Callable[[bytes], int]
    """Bytes that `read` may hold."""


def sealed(body):
    """Return metadata of format 1 with a right SHA-256."""
    return body + hashlib.sha256(body).digest()


def use_metadata(data):
    """Decode, and do what a load does with the tables."""
    meta = metafile.decode(data, max_bytes=MAX_BYTES)
    for tensor in range(len(meta.tensors)):
        assert (meta.shards.tensor[meta.shards_of(tensor)] == tensor).all()
    shards = meta.shards
    cover_faults(meta.tensors.shapes, shards.tensor, shards.offsets, shards.lengths)
    assert metafile.encode(metafile.decode(metafile.encode(meta))) == metafile.encode(meta)
    assert pa.total_allocated_bytes() < MAX_BYTES


def use_header(data):
    """Parse a safetensors header as a reader does: the length first."""
    size = len(data) + 64
    header = parse_header(data[: header_bytes(data[:8], size)], size)
    assert sum(entry.stop - entry.start for entry in header.entries.values()) <= size


def with_head(prefix, place):
    """Return how to lie in JSON behind `prefix` bytes, its size at `place` of them."""
    form = "<Q" if prefix == 8 else "<I"

    def lie(rng, data):
        (size,) = struct.unpack_from(form, data, place)
        raw = data[prefix : prefix + size]
        text = json.dumps(lied(rng, json.loads(raw))).encode()
        return data[:place] + struct.pack(form, len(text)) + text + data[prefix + size :]

    return lie


def lie_in_metadata(rng, data):
    """Change the only row of a file of format 2: its JSON, or what a column holds."""
    row = row_of(data)
    if rng.random() < 0.3:
        row["facts"] = json.dumps(lied(rng, json.loads(row["facts"])))
    else:
        name = rng.choice([name for name in row if name != "facts"])
        row[name] = lied(rng, row[name])
    try:
        return forged([row])
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return damaged(rng, data, [data])  # no column can say that


def lie_in_old_metadata(rng, data):
    """Change the head, or values of columns, of a file of format 1 and seal it again."""
    if rng.random() < 0.5:
        return sealed(with_head(16, 12)(rng, data[:-32]))
    (size,) = struct.unpack_from("<I", data, 12)
    body = bytearray(data[:-32])
    for _ in range(rng.choice((1, 1, 3))):
        body[rng.randrange(16 + size, len(body))] = rng.choice((0, 1, 2, 0x7F, 0xFF))
    return sealed(bytes(body))


def lie_in_json(rng, data):
    """Change a file that is nothing but JSON."""
    return json.dumps(lied(rng, json.loads(data))).encode()


def _header():
    entries = [NewEntry("w|0,0|2,4", "F32", (2, 4)), NewEntry("b|0|16", "BF16", (16,))]
    return plan_header(entries, notes={"format": "pt"})[0]


def targets():
    """Return every reader by name."""
    commit = Commit(
        "0" * 26, f"a-{'0' * 26}/meta/global.bin", 900, "0f" * 32, 9, 4096, 7,
        ("critic", "main"), 1.7e9, "run", {"a": "b"},
    )  # fmt: skip
    extra = {
        "step": 3, 0: (1.5, None), "rng": random.Random(0).getstate()[1][:9], "b": b"abc", "c": 1j,
        "a": np.arange(4), "s": np.float32(1), "!x": [float("nan")],
    }  # fmt: skip
    journal = JournalContent((f"a-{'0' * 26}/x",), ((f"a-{'0' * 26}/x", "id"),), "host", 3, 1.7e9)

    def bound(data):
        return FACTOR * len(data) + SLACK_BYTES

    corrupt = (CheckpointCorrupt,)
    meta = [metafile.encode(small(seed, plain=True)) for seed in range(4)]
    old = [path.read_bytes() for path in sorted(WRITTEN_BY_1.rglob("global.bin"))]
    read_extra = lambda data: decode_extra(data)  # noqa: E731
    read_journal = lambda data: JournalContent.decode(data, "0" * 26)  # noqa: E731
    return {
        "metadata": Target(use_metadata, meta, lie_in_metadata, corrupt, lambda _: MAX_BYTES),
        "metadata 1": Target(use_metadata, old, lie_in_old_metadata, corrupt, lambda _: MAX_BYTES),
        "commit": Target(Commit.decode, [commit.encode()], lie_in_json, corrupt, bound),
        "header": Target(use_header, [_header()], with_head(8, 0), corrupt, bound),
        "extra": Target(
            read_extra, [encode_extra(extra)], with_head(16, 12), (CheckpointError,), bound
        ),
        "journal": Target(read_journal, [journal.encode()], lie_in_json, (), bound),
    }


def case_of(rng, target, name):
    """Return one damaged input."""
    sample = rng.choice(target.samples)
    choice = rng.random()
    if choice < 0.45:
        return target.lie(rng, sample)
    if choice < 0.98:
        data = damaged(rng, sample, target.samples)
        # A right digest lets damage through to the parser behind it.
        return sealed(data[:-32]) if name == "metadata 1" and choice < 0.9 else data
    return rng.randbytes(rng.choice((0, 1, 16, 200)))


def fuzz(name, target, cases, seed):
    """Read damaged inputs; raise AssertionError with the input at the first wrong behaviour.

    Returns:
        Counts of cases, of those refused and of those read, seconds, and the most bytes held.
    """
    rng = random.Random(f"{seed} {name}")
    for sample in target.samples:  # whatever is imported late is imported here
        target.read(sample)
    refused, most, start = 0, 0, time.perf_counter()
    tracemalloc.start()
    try:
        for number in range(cases):
            data = case_of(rng, target, name)
            told = f"{name} case {number} of seed {seed}: {data[:300]!r}"
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            _watch["events"] = events = []
            try:
                target.read(data)
            except target.refusals:
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{type(error).__name__}: {error}; {told}") from error
            finally:
                _watch["events"] = None
            held = tracemalloc.get_traced_memory()[1] - before
            assert held <= target.bound(data), f"{held} bytes for {len(data)}; {told}"
            assert not events, f"{events}; {told}"
            most = max(most, held)
    finally:
        tracemalloc.stop()
    seconds = time.perf_counter() - start
    return {
        "target": name, "cases": cases, "refused": refused, "read": cases - refused,
        "seconds": round(seconds, 1), "most_bytes": most,
    }  # fmt: skip


def run(cases, *, seed=0, only=()):
    """Spread cases over all targets, most of them over metadata; return what each found."""
    watch()
    found = targets()
    shares = {"metadata": 4, "metadata 1": 3, "commit": 2, "header": 3, "extra": 2}
    picked = {name: shares.get(name, 1) for name in found if not only or name in only}
    whole_share = sum(picked.values())
    return [
        fuzz(name, found[name], -(-cases * share // whole_share), seed)
        for name, share in picked.items()
    ]


def main():
    """Run and print one line of JSON per target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", default=[], help="only this one")
    options = parser.parse_args()
    results = run(options.cases, seed=options.seed, only=options.target)
    for result in results:
        print(json.dumps(result))
    seconds = sum(result["seconds"] for result in results)
    print(f"{sum(result['cases'] for result in results)} cases, {seconds:.0f} s, no fault")


if __name__ == "__main__":
    main()
