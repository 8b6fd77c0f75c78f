import numpy as np
import pytest

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format.metafile import (
    ALGORITHMS,
    BLOCK,
    DEFAULT_CHECKSUM,
    block_crcs,
    check_blocks,
    joined_crc,
    widen,
)

DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK + 17, np.uint8)


@pytest.mark.parametrize("algorithm", ["crc32c", "crc32"])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 12345])
def test_the_checksum_of_the_whole_follows_from_those_of_its_blocks(algorithm, size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    whole = ALGORITHMS[algorithm](0, data) if size else 0
    assert joined_crc(block_crcs(data, algorithm), data, algorithm) == whole


def test_the_checksums_are_those_of_the_standards():
    # iSCSI (RFC 3720, B.4): 32 zeros and 32 ones.
    assert block_crcs(bytes(32), "crc32c").tolist() == [0x8A9136AA]
    assert block_crcs(b"\xff" * 32, "crc32c").tolist() == [0x62A8AB43]
    assert DEFAULT_CHECKSUM == "crc32c"


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 16])
def test_a_flipped_bit_is_found_in_its_block(place):
    crcs = block_crcs(DATA)
    damaged = DATA.copy()
    damaged[place] ^= 1
    with pytest.raises(CheckpointCorrupt, match=rf"block {place // BLOCK} of 4") as caught:
        check_blocks(damaged, crcs, file="data/a", algorithm=DEFAULT_CHECKSUM)
    assert (caught.value.file, caught.value.block) == ("data/a", place // BLOCK)
    check_blocks(DATA, crcs, file="data/a", algorithm=DEFAULT_CHECKSUM)


def test_a_part_of_a_file_is_checked_alone():
    crcs = block_crcs(DATA)
    start, stop = widen(BLOCK + 5, 2 * BLOCK + 1, len(DATA))
    assert (start, stop) == (BLOCK, 3 * BLOCK)
    check_blocks(DATA[start:stop], crcs, file="a", algorithm=DEFAULT_CHECKSUM, first=1)
    with pytest.raises(CheckpointCorrupt) as caught:
        check_blocks(DATA[start:stop], crcs, file="a", algorithm=DEFAULT_CHECKSUM, first=2)
    assert caught.value.block == 2


def test_bytes_without_a_checksum_and_unknown_checksums_are_refused():
    with pytest.raises(CheckpointCorrupt) as caught:
        check_blocks(DATA, block_crcs(DATA)[:2], file="a", algorithm=DEFAULT_CHECKSUM)
    assert caught.value.block == 2
    with pytest.raises(CheckpointCorrupt, match="`md5`"):
        check_blocks(DATA, block_crcs(DATA), file="a", algorithm="md5")
