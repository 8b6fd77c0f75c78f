"""Damage to bytes and to JSON, from small accidents to lies that are formed well."""

import copy
import struct

NUMBERS = (
    0, 1, -1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 0.5, -0.0, 1e308,
)  # fmt: skip
"""Numbers at which readers go wrong."""
TEXTS = (
    "", "..", "/", "../../etc/passwd", "a//b", "\x00", "\ud800", "é", "%2e%2e", "|", "__metadata__",
    "F32", "C128", "<f8", "|O", "model", "x" * 3000,
    "__import__('os').system('true')", "cos\nsystem",
)  # fmt: skip
VALUES = (None, True, False, [], {}, [[]], [0], {"": 0}, {"!pickle": 1}, {"!bytes": 3}, [1] * 70)


def damaged(rng, data, others):
    """Return `data` with one to four accidents; `others` are samples to mix in."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_ACCIDENTS)(rng, result, others)
    return bytes(result)


def _flip(rng, data, _others):
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng, data, _others):
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(rng, data, _others):
    form = rng.choice(("<B", "<H", "<I", "<Q", ">I"))
    size = struct.calcsize(form)
    if len(data) >= size:
        place = rng.randrange(len(data) - size + 1)
        number = int(rng.choice(NUMBERS)) % (1 << 8 * size)
        struct.pack_into(form, data, place, number)


def _digits(rng, data, _others):
    places = [place for place, byte in enumerate(data) if byte in b"0123456789"]
    if places:
        place = rng.choice(places)
        data[place : place + 1] = str(rng.choice(NUMBERS)).encode()


def _cut(rng, data, _others):
    del data[rng.randrange(len(data) + 1) :]


def _remove(rng, data, _others):
    place = rng.randrange(len(data) + 1)
    del data[place : place + rng.choice((1, 2, 4, 8, 64))]


def _insert(rng, data, _others):
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))


def _double(rng, data, _others):
    place = rng.randrange(len(data) + 1)
    part = data[place : place + rng.choice((1, 8, 64, 512))]
    data[place:place] = part * rng.choice((1, 1, 30))


def _splice(rng, data, others):
    other = rng.choice(others)
    place, start = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    size = rng.choice((4, 16, 256))
    data[place : place + size] = other[start : start + size]


def _append(rng, data, _others):
    data += rng.randbytes(rng.choice((1, 8, 100)))


def _nest(rng, data, _others):
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.choice((b"[", b'{"a":', b"(")) * rng.choice((10, 3000))


_ACCIDENTS = (
    _flip, _flip, _set, _set, _number, _number, _digits, _digits, _cut, _remove, _insert, _double,
    _splice, _append, _nest,
)  # fmt: skip


def lied(rng, value):
    """Return a copy of parsed JSON with one to three values replaced, dropped or doubled."""
    result = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        result = _lie(rng, result)
    return result


def _lie(rng, root):
    places = []
    waiting = [root] if isinstance(root, (dict, list)) else []
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            places.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    if not places or rng.random() < 0.02:
        return _value(rng, root)
    holder, key = rng.choice(places)
    choice = rng.random()
    if choice < 0.1:
        del holder[key]
    elif choice < 0.2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif choice < 0.2:
        holder[rng.choice(TEXTS)] = copy.deepcopy(holder[key])
    else:
        holder[key] = _value(rng, holder[key])
    return root


def _value(rng, old):
    choice = rng.random()
    if choice < 0.3 and type(old) is int:
        return old + rng.choice((-1, 1, 8, -8))
    if choice < 0.6:
        return rng.choice(NUMBERS)
    # A copy: later lies may change what is put in here.
    return rng.choice(TEXTS) if choice < 0.8 else copy.deepcopy(rng.choice(VALUES))
