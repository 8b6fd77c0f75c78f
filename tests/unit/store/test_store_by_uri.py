"""What every store promises, checked on a folder and on a real S3 server."""

import hashlib
import threading

import pytest

from planish import store
from planish.base.errors import ObjectExists, ObjectMissing


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, None, b"0123456789"),
        (3, None, b"3456789"),
        (0, 4, b"0123"),
        (3, 4, b"3456"),
        (8, 100, b"89"),
        (10, None, b""),
        (10, 5, b""),
        (99, 1, b""),
        (2, 0, b""),
    ],
)
def test_a_ranged_read_returns_what_there_is_of_the_range(store_root, start, length, expected):
    store.write(f"{store_root}/x", b"0123456789")
    assert store.read(f"{store_root}/x", start, length) == expected


def test_an_absent_object_is_missing_for_every_read(store_root, tmp_path):
    uri = f"{store_root}/none"
    store.write(f"{store_root}/folder/x", b"")
    for attempt in (
        lambda: store.read(uri),
        lambda: store.read(uri, 1, 0),
        lambda: store.size(uri),
        lambda: store.read_file(uri, tmp_path / "copy"),
        lambda: store.read(f"{store_root}/folder"),
        lambda: store.size(f"{store_root}/folder"),
    ):
        with pytest.raises(ObjectMissing, match="must be an object"):
            attempt()
    assert not (tmp_path / "copy").exists()
    assert not store.exists(uri)
    assert not store.exists(f"{store_root}/folder")
    assert not store.exists(store_root)


def test_list_is_recursive_sorted_and_stays_in_its_folder(store_root):
    for name in ("a/2", "a/10", "a/deep/er/x", "ab/1", "a.txt"):
        store.create(f"{store_root}/{name}", name.encode())
    with pytest.raises(ObjectExists, match="must not exist yet"):
        store.create(f"{store_root}/a/2", b"second")
    assert (store.read(f"{store_root}/a/2"), store.size(f"{store_root}/a/2")) == (b"a/2", 3)
    expected = [f"{store_root}/a/{name}" for name in ("10", "2", "deep/er/x")]
    assert store.list_uris(f"{store_root}/a") == expected
    assert store.list_uris(f"{store_root}/a/") == expected
    assert len(store.list_uris(store_root)) == 5
    assert store.list_uris(f"{store_root}/nothing") == []
    assert store.list_uris(f"{store_root}/a/2") == []


@pytest.mark.parametrize("size", [0, 1, (16 << 20) + 1, 40 << 20])
def test_files_of_any_size_go_and_come_back_equal(store_root, tmp_path, size):
    block = bytes(range(251))
    data = (block * (size // len(block) + 1))[:size]
    (tmp_path / "source").write_bytes(data)
    store.write_file(f"{store_root}/big", tmp_path / "source")
    assert store.size(f"{store_root}/big") == size
    digest = store.read_file(f"{store_root}/big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert digest == hashlib.sha256(data).hexdigest()
    assert store.read(f"{store_root}/big", max(0, size - 3), 100) == data[-3:]


def test_ranges_of_a_file_are_read_at_the_same_time(store_root, tmp_path, monkeypatch):
    """Each of three ranges waits until all have been asked for."""
    opened, _ = store.open_store(f"{store_root}/big")
    together, get_into = threading.Barrier(3, timeout=60.0), type(opened).get_into

    def waiting(self, *words, **options):
        together.wait()
        get_into(self, *words, **options)

    store.write(f"{store_root}/big", bytes(3 * store.PART_BYTES))
    monkeypatch.setattr(type(opened), "get_into", waiting)
    store.read_file(f"{store_root}/big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(3 * store.PART_BYTES)
