"""Feeds damaged files to every reader of checkpoints: `python -m tests.fuzz.checkpoint`.

A reader may return or raise its own error, nothing else; hold no more memory than its bound; and
neither import, execute, open nor connect to anything. What it returns must be usable.
"""

import argparse
import copy
import hashlib
import json
import random
import struct
import sys
import tracemalloc
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
from tests.unit.checkpoint.format.metadata_samples import forged, row_of, small

WRITTEN_BY_1 = Path(__file__).parents[1] / "unit/checkpoint/format/written_by_1"
MAX_BYTES = 8 << 20
"""Bound that readers of metadata are given."""
SLACK_BYTES, FACTOR = 1 << 20, 64
"""Any other reader holds at most so many times its input, and the slack."""
FORBIDDEN = frozenset({
    "exec", "compile", "import", "open", "pickle.find_class", "marshal.loads", "ctypes.dlopen",
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect",
})  # fmt: skip
"""Audit events that no reader may cause."""
NUMBERS = (
    0, 1, -1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 0.5, -0.0, 1e308,
)  # fmt: skip
"""Numbers at which readers go wrong."""
VALUES = (
    "", "..", "/", "../../etc/passwd", "a//b", "\x00", "\ud800", "\u00e9", "%2e%2e", "|", "F32",
    "C128", "<f8", "|O", "model", "__metadata__", "x" * 3000, "__import__('os').system('true')",
    None, True, False, [], {}, [[]], [0], {"": 0}, {"!pickle": 1}, {"!bytes": 3}, [1] * 70,
)  # fmt: skip
SHARES = {"metadata": 4, "metadata 1": 3, "commit": 2, "header": 3, "extra": 2, "journal": 1}
"""Reader to its share of the cases."""
_seen = {"events": None}


def damaged(rng, data, others):
    """Return `data` with one to four accidents; `others` are samples to mix in."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(result) + 1)
        size = rng.choice((1, 2, 4, 8, 64, 512))
        rest = result[place : place + size]
        number = int(rng.choice(NUMBERS)) % (1 << 64)
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        digits = (at for at in range(place, len(result)) if result[at] in b"0123456789")
        digit = next(digits, place)
        at, old, new = rng.choice(
            [
                (place, rest[:1], bytes([(rest or b"0")[0] ^ 1 << rng.randrange(8)])),
                (place, rest[:1], rng.choice((b"\0", b"\x01", b"\x7f", b"\x80", b"\xff"))),
                (place, rest[:8], struct.pack("<Q", number)[: len(rest)]),
                (place, rest[:4], struct.pack(">Q", number)[4:]),
                (digit, result[digit : digit + 1], str(rng.choice(NUMBERS)).encode()),
                (place, result[place:], b""),
                (place, rest, b""),
                (place, b"", rng.randbytes(size)),
                (place, b"", bytes(rest) * rng.choice((1, 30))),
                (place, rest, other[start : start + size]),
                (place, b"", rng.choice((b"[", b'{"a":', b"(")) * rng.choice((10, 3000))),
            ]
        )
        result[at : at + len(old)] = new
    return bytes(result)


def lied(rng, value):
    """Return a copy of parsed JSON with one to three values replaced, dropped or doubled."""
    root = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places, waiting = [], [root]
        while waiting:
            holder = waiting.pop()
            if isinstance(holder, (dict, list)):
                keys = [*holder] if isinstance(holder, dict) else range(len(holder))
                places += [(holder, key) for key in keys]
                waiting += [holder[key] for key in keys]
        if not places or rng.random() < 0.02:
            root = copy.deepcopy(rng.choice(VALUES))
            continue
        holder, key = rng.choice(places)
        choice = rng.random()
        if choice < 0.1:
            del holder[key]
        elif choice < 0.2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif choice < 0.2:
            holder[rng.choice(VALUES[:18])] = copy.deepcopy(holder[key])
        elif choice < 0.4 and type(holder[key]) is int:
            holder[key] += rng.choice((-1, 1, 8, -8))
        else:
            # A copy: later lies may change what is put in here.
            holder[key] = copy.deepcopy(rng.choice(rng.choice((NUMBERS, VALUES))))
    return root


def sealed(body):
    """Return metadata of format 1 with a right SHA-256."""
    return body + hashlib.sha256(body).digest()


def use_metadata(data):
    """Decode, and do what a load does with the tables."""
    meta = metafile.decode(data, max_bytes=MAX_BYTES)
    for tensor in range(len(meta.tensors)):
        assert (meta.shards.tensor[meta.shards_of(tensor)] == tensor).all()
    shards = meta.shards
    tensors = meta.tensors
    cover_faults(tensors.shapes, shards.tensor, shards.offsets, shards.lengths, tensors.dims)
    assert metafile.encode(metafile.decode(metafile.encode(meta))) == metafile.encode(meta)
    assert pa.total_allocated_bytes() < MAX_BYTES


def use_header(data):
    """Parse a safetensors header as a reader does: the length first."""
    size = len(data) + 64
    header = parse_header(data[: header_bytes(data[:8], size)], size)
    assert sum(entry.stop - entry.start for entry in header.values()) <= size


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


def targets():
    """Return by name a reader, valid inputs of it, a way to lie in them, and what it may raise."""
    commit = Commit(
        "0" * 26, f"a-{'0' * 26}/meta/global.bin", 900, "0f" * 32, 9, 4096, 7,
        ("critic", "main"), 1.7e9, "run", {"a": "b"},
    )  # fmt: skip
    extra = {
        "step": 3, 0: (1.5, None), "rng": random.Random(0).getstate()[1][:9], "b": b"abc", "c": 1j,
        "a": np.arange(4), "s": np.float32(1), "!x": [float("nan")],
    }  # fmt: skip
    journal = JournalContent((f"a-{'0' * 26}/x",), ((f"a-{'0' * 26}/x", "id"),), "host", 3, 1.7e9)
    entries = [NewEntry("w|0,0|2,4", "F32", (2, 4)), NewEntry("b|0|16", "BF16", (16,))]
    header, _ = plan_header(entries, notes={"format": "pt"})
    meta = [metafile.encode(small(seed, plain=True)) for seed in range(4)]
    old = [path.read_bytes() for path in sorted(WRITTEN_BY_1.rglob("global.bin"))]
    read_journal = lambda data: JournalContent.decode(data, "0" * 26)  # noqa: E731
    return {
        "metadata": (use_metadata, meta, lie_in_metadata, CheckpointCorrupt),
        "metadata 1": (use_metadata, old, lie_in_old_metadata, CheckpointCorrupt),
        "commit": (Commit.decode, [commit.encode()], lie_in_json, CheckpointCorrupt),
        "header": (use_header, [header], with_head(8, 0), CheckpointCorrupt),
        "extra": (decode_extra, [encode_extra(extra)], with_head(16, 12), CheckpointError),
        "journal": (read_journal, [journal.encode()], lie_in_json, ()),
    }


def case_of(rng, name, samples, lie):
    """Return one damaged input."""
    sample, choice = rng.choice(samples), rng.random()
    if choice < 0.45:
        return lie(rng, sample)
    if choice < 0.98:
        data = damaged(rng, sample, samples)
        # A right digest lets damage through to the parser behind it.
        return sealed(data[:-32]) if name == "metadata 1" and choice < 0.9 else data
    return rng.randbytes(rng.choice((0, 1, 16, 200)))


def fuzz(name, cases, seed):
    """Read damaged inputs; raise AssertionError with the input at the first wrong behaviour."""
    read, samples, lie, refusals = targets()[name]
    rng = random.Random(f"{seed} {name}")
    for sample in samples:  # whatever is imported late is imported here
        read(sample)
    refused, most = 0, 0
    for number in range(cases):
        data = case_of(rng, name, samples, lie)
        told = f"{name} case {number} of seed {seed}: {data[:300]!r}"
        tracemalloc.start()
        _seen["events"] = events = []
        try:
            read(data)
        except refusals:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}; {told}") from error
        finally:
            _seen["events"] = None
            held = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        bound = MAX_BYTES if "metadata" in name else FACTOR * len(data) + SLACK_BYTES
        assert held <= bound, f"{held} bytes for {len(data)}; {told}"
        assert not events, f"{events}; {told}"
        most = max(most, held)
    return {"target": name, "cases": cases, "refused": refused, "most_bytes": most}


def _audit(event, arguments):
    events = _seen["events"]
    if events is not None and event in FORBIDDEN:
        events.append(f"{event} {arguments!r:.80}")


def main():
    """Run and print one line of JSON per target; the audit hook stays until the process ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=SHARES, help="only this one")
    options = parser.parse_args()
    sys.addaudithook(_audit)
    names = options.target or [*SHARES]
    whole = sum(SHARES[name] for name in names)
    for name in names:
        print(json.dumps(fuzz(name, -(-options.cases * SHARES[name] // whole), options.seed)))


if __name__ == "__main__":
    main()
