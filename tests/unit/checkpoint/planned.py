"""Plans carried out in memory by numpy: no engine, no store, no torch."""

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np

from planish.checkpoint.format.geometry import Box, flat_boxes, shift, whole
from planish.checkpoint.format.items import ITEM_BYTES, Columns, LocalItem, TensorSpec
from planish.checkpoint.plan.files import RankPlan
from planish.checkpoint.plan.reads import Pieces, RankPart, assemble

DTYPES = ("F64", "F32", "BF16", "U8", "C128")


@dataclass
class World:
    """What every rank holds, and the bytes of each whole tensor."""

    items: list[list[LocalItem]]
    truth: dict[tuple[str, str, str], np.ndarray]

    @property
    def columns(self) -> list[Columns]:
        return [Columns.from_items(items) for items in self.items]


def box_bytes(tensor: np.ndarray, box: Box) -> bytes:
    """Return the elements of a box of a tensor [..., itemsize] as row-major bytes."""
    place = tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
    return tensor[place].tobytes()


def item_bytes(world: World, item: LocalItem) -> bytes:
    tensor = world.truth[item.tensor.role, item.tensor.kind, item.tensor.fqn]
    return b"".join(box_bytes(tensor, box) for box in item.boxes)


def random_tensors(rng: random.Random, count: int, *, side: int = 7) -> list[TensorSpec]:
    specs = []
    for number in range(count):
        shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, side) for _ in range(4))
        shape = shape[: rng.randint(0, 4)]
        role, kind = rng.choice(["actor", "critic"]), rng.choice(["model", "optim"])
        specs.append(TensorSpec(role, kind, f"t{number}", rng.choice(DTYPES), shape))
    return specs


def random_world(
    rng: random.Random, ranks: int, specs: list[TensorSpec], truth: World | None = None
) -> World:
    """Deal pieces of tensors out to ranks at random; values are those of `truth` where given."""
    items: list[list[LocalItem]] = [[] for _ in range(ranks)]
    values = dict(truth.truth) if truth else {}
    for spec in specs:
        key = spec.role, spec.kind, spec.fqn
        if key not in values:
            size = (*spec.shape, ITEM_BYTES[spec.dtype])
            values[key] = np.frombuffer(rng.randbytes(int(np.prod(size))), np.uint8).reshape(size)
        pieces = random_tiling(rng, spec.shape) if values[key].size else [()]
        is_whole = rng.random() < 0.3
        for boxes in [(whole(spec.shape),)] if is_whole and values[key].size else pieces:
            # Those that hold the same are replicas.
            for rank in rng.sample(range(ranks), rng.choice([1, ranks, rng.randint(1, ranks)])):
                items[rank].append(LocalItem(spec, boxes))
    for held in items:
        rng.shuffle(held)
    return World(items, values)


def write(world: World, plan) -> dict[str, bytes]:
    """Carry out a save plan; every byte of a file must be written exactly once."""
    files = {}
    for rank, items in enumerate(world.items):
        for file in RankPlan.decode(plan.wire(rank), Columns.from_items(items)).files:
            data = bytearray(file.header)
            rows = zip(file.items, file.starts, file.stops, file.offsets, strict=True)
            for item, start, stop, offset in rows:
                assert len(data) == offset
                data += item_bytes(world, items[item])[start:stop]
            assert len(data) == file.size
            assert file.key not in files
            files[file.key] = bytes(data)
    return files


def fresh_targets(items: list[LocalItem]) -> list[list[np.ndarray]]:
    """Return [item][box] of zeros, [..., itemsize]."""
    return [
        [np.zeros((*box.lengths, ITEM_BYTES[item.tensor.dtype]), np.uint8) for box in item.boxes]
        for item in items
    ]


def read(metadata, files, shared, reads, worlds_items) -> list[list[list[np.ndarray]]]:
    """Carry out a load plan on all ranks; return [rank][item][box] of bytes."""
    parts = [RankPart.decode(shared.part(rank).encode()) for rank in range(len(reads))]
    plans = [assemble(metadata, part, mine) for part, mine in zip(parts, reads, strict=True)]
    targets = [fresh_targets(items) for items in worlds_items]
    buffers = [
        [
            files[metadata.files.keys[file]][start:stop]
            for file, start, stop in zip(*vars(plan.requests).values(), strict=True)
        ]
        for plan in plans
    ]
    for rank, plan in enumerate(plans):
        own = np.full(len(plan.copies), rank)
        for pieces, readers in ((plan.copies, own), (plan.asks, plan.readers)):
            # What the reader is told is enough to find the bytes.
            told = Pieces.from_asked(pieces.asked())
            for row, reader in enumerate(readers):
                value = strided(buffers[reader][told.request[row]], told, row)
                assert value.nbytes == pieces.nbytes[row]
                place(targets[rank], pieces, row, value)
    return targets


def strided(buffer: bytes, pieces, row: int) -> np.ndarray:
    """Return a piece of a request, [..., itemsize]."""
    return np.ndarray(
        (*pieces.lengths[row], int(pieces.itemsize[row])),
        np.uint8,
        buffer,
        int(pieces.source[row]),
        (*pieces.strides[row], 1),
    )


def place(targets, pieces, row: int, value: np.ndarray) -> None:
    target = targets[pieces.item[row]][pieces.box[row]]
    dims = target.ndim - 1
    start, extent = pieces.target[row][:dims], pieces.lengths[row][:dims]
    where = tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))
    target[where] = value.reshape((*extent, value.shape[-1]))


def random_shape(rng):
    """Return 0 to 4 dimensions of 1 to 7."""
    return tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 4)))


def grid(rng, box):
    """Cut a box by planes through all of it: tensor-parallel meshes."""
    sides = []
    for offset, length in zip(*box, strict=True):
        cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(rng.randint(0, 3)))})
        sides.append([(offset + a, b - a) for a, b in itertools.pairwise(cuts)])
    found = [((), ())]
    for side in sides:
        found = [((*o, a), (*ls, n)) for o, ls in found for a, n in side]
    return [(Box(*pair),) for pair in found]


def flat(rng, box):
    """Cut the row-major elements of a box into slices: ZeRO; one tuple of boxes per slice."""
    volume = box.volume
    cuts = sorted({0, volume, *(rng.randint(0, volume) for _ in range(rng.randint(0, 5)))})
    return [
        tuple(shift(piece, box.offsets) for piece in flat_boxes(box.lengths, a, b))
        for a, b in itertools.pairwise(cuts)
    ]


def guillotine(rng, box, depth=3):
    """Cut a box in two again and again, each time elsewhere."""
    wide = [dim for dim, length in enumerate(box.lengths) if length > 1]
    if not wide or depth == 0:
        return [(box,)]
    dim = rng.choice(wide)
    at = rng.randint(1, box.lengths[dim] - 1)
    low = Box(box.offsets, (*box.lengths[:dim], at, *box.lengths[dim + 1 :]))
    high = Box(
        (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :]),
        (*box.lengths[:dim], box.lengths[dim] - at, *box.lengths[dim + 1 :]),
    )
    return guillotine(rng, low, depth - 1) + guillotine(rng, high, depth - 1)


def pinwheel(rng, box):
    """Cut a box so that no straight plane separates the pieces; needs two dimensions of 3."""
    if len(box.lengths) < 2 or min(box.lengths[:2]) < 3:
        return guillotine(rng, box)
    (top, left), (high, wide) = box.offsets[:2], box.lengths[:2]
    a, b = sorted(rng.sample(range(1, high), 2))
    c, d = sorted(rng.sample(range(1, wide), 2))
    rest = box.offsets[2:], box.lengths[2:]
    sides = [
        ((0, 0), (a, d)), ((0, d), (b, wide - d)), ((b, c), (high - b, wide - c)),
        ((a, 0), (high - a, c)), ((a, c), (b - a, d - c)),
    ]  # fmt: skip
    return [
        (Box((top + o[0], left + o[1], *rest[0]), (*lengths, *rest[1])),) for o, lengths in sides
    ]


def hybrid(rng, box):
    """Cut into a grid, and flat slices inside of each part: ZeRO under tensor parallelism."""
    return [piece for (part,) in grid(rng, box) for piece in flat(rng, part)]


KINDS = (grid, flat, guillotine, pinwheel, hybrid)


def random_tiling(rng, shape):
    """Return what each rank holds: tuples of boxes in the order of their bytes."""
    assert math.prod(shape) > 0
    pieces = rng.choice(KINDS)(rng, whole(shape))
    rng.shuffle(pieces)
    return pieces
