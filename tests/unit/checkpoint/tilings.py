"""Random legal tilings of a tensor, as ranks would hold it."""

import itertools
import math

from planish.checkpoint.format.geometry import Box, flat_boxes, shift, whole


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
