"""What every back end promises, checked on memory, a folder, a wrapper and a real S3 server."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from planish import store
from planish.base.errors import (
    AccessRefused,
    ConfigError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreError,
    StoreUnavailable,
)
from planish.store import SINGLE_PUT_BYTES, open_store, upload
from planish.store import file as file_module
from planish.store.file import TEMPORARY
from tests.stores.faulty import FaultyStore
from tests.stores.memory import MemoryStore
from tests.thin import examples

MIB = 1 << 20


@pytest.fixture(params=["mem", "faulty", "file", pytest.param("s3", marks=pytest.mark.server)])
def place(request, tmp_path):
    """A storage and the key of an empty folder in it."""
    if request.param == "s3":
        storage, _ = open_store(request.getfixturevalue("s3_root"))
        return storage, "run"
    if request.param == "file":
        return open_store(str(tmp_path / "run"))
    memory = MemoryStore()
    return (memory if request.param == "mem" else FaultyStore(memory)), "run"


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).bytes(size)


def read(storage, key, offset, size, **options):
    target = bytearray(size)
    storage.get_into(key, offset, memoryview(target), **options)
    return bytes(target)


def test_what_is_put_is_read_back_whole_and_in_ranges(place):
    storage, root = place
    data = random_bytes(3 * MIB + 17)
    etag = storage.put(f"{root}/a b/c+d/ü.bin", memoryview(bytearray(data)))
    assert storage.get(f"{root}/a b/c+d/ü.bin", 4 * MIB) == (data, etag)
    for offset, size in [(0, 1), (MIB - 1, 2), (3 * MIB, 17), (0, 3 * MIB + 17), (5, 0)]:
        assert read(storage, f"{root}/a b/c+d/ü.bin", offset, size) == data[offset : offset + size]


def test_head_tells_size_tag_and_a_recent_time(place):
    storage, root = place
    etag = storage.put(f"{root}/x", b"12345")
    found = storage.head(f"{root}/x")
    assert (found.key, found.size, found.etag) == (f"{root}/x", 5, etag)
    assert abs(found.modified - storage.now()) < 120


def test_what_is_absent_is_missing(place):
    storage, root = place
    for act in (
        lambda: storage.head(f"{root}/no"),
        lambda: storage.get(f"{root}/no", 9),
        lambda: read(storage, f"{root}/no", 0, 3),
        lambda: read(storage, f"{root}/no", 0, 0),
        lambda: storage.put(f"{root}/no", b"x", if_match='"0123"'),
    ):
        with pytest.raises(ObjectMissing, match="run/no"):
            act()
    storage.delete([f"{root}/no", f"{root}/neither/this"])
    assert list(storage.list(root)) == []


def test_a_read_beyond_the_end_and_one_over_the_limit_are_refused(place):
    storage, root = place
    storage.put(f"{root}/x", b"12345")
    for offset, size in [(3, 3), (5, 1), (9, 1)]:
        with pytest.raises(StoreError, match="bytes"):
            read(storage, f"{root}/x", offset, size)
    with pytest.raises(ObjectTooLarge, match="at most 4 bytes"):
        storage.get(f"{root}/x", 4)
    assert storage.get(f"{root}/x", 5)[0] == b"12345"
    assert not storage.retries


def test_a_conditional_update_takes_the_named_version_only(place):
    storage, root = place
    first = storage.put(f"{root}/x", b"first")
    second = storage.put(f"{root}/x", b"second", if_match=first)
    assert second != first
    with pytest.raises(ObjectChanged):
        storage.put(f"{root}/x", b"third", if_match=first)
    assert storage.get(f"{root}/x", 9) == (b"second", second)
    assert read(storage, f"{root}/x", 0, 6, etag=second) == b"second"
    for size in (0, 6):
        with pytest.raises(ObjectChanged):
            read(storage, f"{root}/x", 0, size, etag=first)


def race(act):
    """Call `act(number)` in 16 threads at once; return the numbers of those that succeeded."""
    barrier = threading.Barrier(16)

    def run(number):
        barrier.wait(timeout=120)
        try:
            act(number)
        except (ObjectExists, ObjectChanged):
            return None
        return number

    with ThreadPoolExecutor(16) as pool:
        return [number for number in pool.map(run, range(16)) if number is not None]


def test_one_of_sixteen_writers_creates_an_object_and_one_replaces_it(place):
    storage, root = place
    for turn in range(3):
        key = f"{root}/{turn}"
        won = race(lambda n, key=key: storage.put(key, b"new %d" % n, if_none_match=True))
        assert len(won) == 1
        data, etag = storage.get(key, 9)
        assert data == b"new %d" % won[0]
        swapped = race(
            lambda n, key=key, etag=etag: storage.put(key, b"swap %d" % n, if_match=etag)
        )
        assert len(swapped) == 1
        assert storage.get(key, 9)[0] == b"swap %d" % swapped[0]


def test_parts_written_in_any_order_by_threads_make_one_object(place):
    storage, root = place
    data = random_bytes(40 * MIB + 5)
    writer = storage.open_multipart(f"{root}/big", len(data))
    size = writer.part_bytes
    assert size == 16 * MIB
    with ThreadPoolExecutor(3) as pool:
        list(
            pool.map(
                lambda n: writer.write(n, memoryview(data)[(n - 1) * size : n * size]), (3, 1, 2)
            )
        )
    with pytest.raises(ObjectMissing):
        storage.head(f"{root}/big")
    assert list(storage.list(root)) == []
    etag = writer.complete(if_none_match=True)
    assert storage.get(f"{root}/big", len(data)) == (data, etag)
    assert read(storage, f"{root}/big", 16 * MIB - 3, 6) == data[16 * MIB - 3 : 16 * MIB + 3]


def test_completion_on_a_condition_swaps_exactly_the_named_version(place):
    storage, root = place
    first = storage.put(f"{root}/x", b"first")
    writers = [storage.open_multipart(f"{root}/x", 3) for _ in range(2)]
    for writer in writers:
        writer.write(1, b"new")
    second = writers[0].complete(if_match=first)
    with pytest.raises(ObjectChanged):
        writers[1].complete(if_match=first)
    assert storage.get(f"{root}/x", 9) == (b"new", second)
    writers[1].abort()
    storage.delete([f"{root}/x"])
    late = storage.open_multipart(f"{root}/x", 3)
    late.write(1, b"old")
    with pytest.raises(ObjectMissing):
        late.complete(if_match=second)
    late.abort()


def test_an_upload_that_anybody_aborted_can_not_be_completed(place):
    storage, root = place
    writer = storage.open_multipart(f"{root}/x", 3)
    writer.write(1, b"abc")
    assert [found.upload_id for found in storage.open_uploads(f"{root}/x")] == [writer.upload_id]
    assert abs(storage.open_uploads(f"{root}/x")[0].started - storage.now()) < 120
    assert storage.open_uploads(f"{root}/xy") == []
    storage.abort_upload(f"{root}/x", writer.upload_id)
    storage.abort_upload(f"{root}/x", writer.upload_id)
    with pytest.raises(ObjectMissing):
        writer.complete(if_none_match=True)
    writer.abort()
    assert list(storage.list(root)) == []
    assert storage.open_uploads(f"{root}/x") == []


def test_listings_are_sorted_complete_and_of_the_folder_only(place):
    storage, root = place
    names = ["b/2", "b/10", "b-/1", "a/x/y/z", "a b/c", "ä", "Z", "b+c%20/d", "a&<b>"]
    for name in names:
        storage.put(f"{root}/{name}", name.encode())
    storage.put(f"{root}-beside/x", b"")
    found = list(storage.list(root))
    assert [stat.key for stat in found] == sorted(f"{root}/{name}" for name in names)
    assert [stat.size for stat in found] == [len(n.encode()) for n in sorted(names)]
    direct = storage.folder(root)
    assert [stat.key for stat in direct.objects] == [f"{root}/{n}" for n in ("Z", "a&<b>", "ä")]
    folders = ["a", "a b", "b", "b+c%20", "b-"]
    assert direct.folders == [f"{root}/{name}" for name in folders]
    assert storage.folder(f"{root}/none") == ([], [])
    storage.delete(f"{root}/{name}" for name in names)
    assert list(storage.list(root)) == []


@pytest.mark.slow
def test_more_keys_than_a_page_holds_are_listed_and_removed(place):
    storage, root = place
    keys = [f"{root}/{number:05d}" for number in range(examples(10_010) + 1)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: storage.put(key, key[-1:].encode()), keys))
    assert [stat.key for stat in storage.list(root)] == keys
    assert len(storage.folder(root).objects) == len(keys)
    storage.delete(keys)
    assert list(storage.list(root)) == []


def test_readers_beside_a_writer_see_whole_versions_only(place):
    storage, root = place
    versions = [bytes([number]) * 200_000 for number in range(8)]
    storage.put(f"{root}/x", versions[0])
    stop = threading.Event()

    def look():
        seen = set()
        while not stop.is_set():
            data = storage.get(f"{root}/x", 200_000)[0]
            assert data in versions
            seen.add(data[0])
        return seen

    with ThreadPoolExecutor(2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        for version in versions * 3:
            storage.put(f"{root}/x", version)
        stop.set()
        assert all(future.result(timeout=120) for future in looking)


@pytest.mark.parametrize("size", [0, 1, SINGLE_PUT_BYTES - 1, SINGLE_PUT_BYTES, 16 * MIB + 1])
def test_upload_writes_any_size(place, size):
    storage, root = place
    data = random_bytes(size)
    upload(storage, f"{root}/x", data)
    assert storage.get(f"{root}/x", size)[0] == data


def test_an_upload_that_fails_leaves_nothing(place):
    storage, root = place
    broken = FaultyStore(storage, lambda n, kind, key: "fail" if kind == "part" else "")
    with pytest.raises(StoreError, match="fails on purpose"):
        upload(broken, f"{root}/x", bytes(9 * MIB))
    assert storage.open_uploads(f"{root}/x") == []
    assert list(storage.list(root)) == []


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "a/../b", "./a", "a/..", "a\n", "x" * 1025]
)
def test_a_key_that_could_leave_its_place_is_refused(place, key):
    storage, _ = place
    with pytest.raises(ConfigError):
        storage.put(key, b"")
    with pytest.raises(ConfigError):
        storage.get(key, 1)


def test_tidy_leaves_no_folder_and_harms_no_object(place, tmp_path):
    storage, root = place
    storage.put(f"{root}/a/b/x", b"1")
    storage.put(f"{root}/c", b"2")
    storage.delete([f"{root}/a/b/x"])
    storage.tidy(f"{root}/a")
    assert [stat.key for stat in storage.list(root)] == [f"{root}/c"]
    assert not (tmp_path / "run" / "a").exists()
    storage.delete([f"{root}/c"])
    storage.tidy(f"{root}/a")
    assert not (tmp_path / "run").exists()


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
        lambda: store.read_file(uri, tmp_path / "copy"),
        lambda: store.read(f"{store_root}/folder"),
    ):
        with pytest.raises(ObjectMissing, match="must be an object"):
            attempt()
    assert not (tmp_path / "copy").exists()
    assert not store.exists(uri)
    assert not store.exists(f"{store_root}/folder")
    assert not store.exists(store_root)


def written(opened, key, data):
    opened.put(key, data)


def created(opened, key, data):
    opened.put(key, data, if_none_match=True)


def written_in_parts(opened, key, data):
    parts = opened.open_multipart(key, len(data))
    parts.write(1, data)
    parts.complete(if_none_match=True)


@pytest.mark.parametrize("write", [written, created, written_in_parts])
def test_an_object_is_removed_if_it_is_the_one(store_root, write, tmp_path):
    opened, folder = store.open_store(f"{store_root}/a")
    key, uri = f"{folder}/x", f"{store_root}/a/x"
    old = opened.put(key, b"old")
    opened.put(f"{folder}/y", b"")
    new = opened.put(key, b"new")
    assert not opened.delete_exact(key, old)
    assert opened.read(key) == b"new"
    assert opened.delete_exact(key, new)
    assert not opened.delete_exact(key, new)
    for read in (opened.head, opened.read, lambda key: opened.get(key, 99),
                 lambda key: opened.get_into(key, 0, memoryview(bytearray(1)))):  # fmt: skip
        with pytest.raises(ObjectMissing):
            read(key)
    with pytest.raises((ObjectChanged, ObjectMissing)):
        opened.put(key, b"late", if_match=new)
    assert (store.tag(opened, key), store.exists(uri)) == ("", False)
    assert [*map(len, opened.folder(folder))] == [1, 0]
    assert store.list_uris(f"{store_root}/a") == [f"{store_root}/a/y"]
    write(opened, key, b"again")
    assert opened.read(key) == b"again"
    with pytest.raises(ObjectExists):
        opened.put(key, b"late", if_none_match=True)
    assert opened.delete_exact(key, opened.head(key).etag)
    opened.delete([f"{folder}/y"])
    opened.tidy(folder)
    assert store.list_uris(store_root) == []


def test_list_is_recursive_sorted_and_stays_in_its_folder(store_root):
    for name in ("a/2", "a/10", "a/deep/er/x", "ab/1", "a.txt"):
        store.create(f"{store_root}/{name}", name.encode())
    with pytest.raises(ObjectExists, match="must not exist yet"):
        store.create(f"{store_root}/a/2", b"second")
    assert store.read(f"{store_root}/a/2") == b"a/2"
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


def test_a_killed_writer_leaves_the_old_object_and_nothing_in_listings(file_root):
    store.write(f"{file_root}/x", b"old")
    code = (
        "import os\nfrom planish import store\n"
        "os.replace = lambda *_: os._exit(9)\n"
        f"store.write({file_root + '/x'!r}, b'new')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert store.read(f"{file_root}/x") == b"old"
    assert store.list_uris(file_root) == [f"{file_root}/x"]
    assert len(list(Path(file_root[7:]).iterdir())) == 2


def test_a_path_through_a_file_is_refused_with_the_remedy(file_root):
    store.write(f"{file_root}/x", b"")
    with pytest.raises(StoreError, match="part of its path is a file"):
        store.write(f"{file_root}/x/y", b"")
    assert not store.exists(f"{file_root}/x/y")
    assert store.list_uris(f"{file_root}/x") == []


def test_writing_in_place_of_a_folder_is_refused(file_root):
    store.write(f"{file_root}/a/x", b"")
    with pytest.raises(StoreError, match="must not be a folder"):
        store.write(f"{file_root}/a", b"")
    with pytest.raises(ObjectExists):
        store.create(f"{file_root}/a", b"")


@pytest.mark.parametrize(
    ("number", "expected", "words"),
    [
        (errno.EACCES, AccessRefused, "mend the permissions"),
        (errno.EROFS, AccessRefused, "Read-only file system"),
        (errno.ESTALE, StoreUnavailable, "can not be reached now"),
        (errno.ENOSPC, StoreError, "No space left on device"),
    ],
)
def test_errors_of_the_operating_system_say_which_object_and_why(
    file_root, monkeypatch, number, expected, words
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_module.os, "replace", fail)
    with pytest.raises(expected, match=words) as raised:
        store.write(f"{file_root}/x", b"data")
    assert f"{file_root}/x" in str(raised.value)
    assert list(Path(file_root[7:]).iterdir()) == []


def die_in(call, uri, work):
    """Let another process do `work` with a file store and die without warning in `os.<call>`."""
    code = (
        "import errno, os\nfrom planish import store\n"
        "def no_links(*_):\n    raise OSError(errno.ENOTSUP, 'no links here')\n"
        "os.link = no_links\n"
        f"os.{call} = lambda *_: os._exit(9)\n"
        f"store.{work}({uri!r}, b'new')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9


def left(folder):
    return sorted(path for path in Path(folder[7:]).iterdir() if path.name.startswith(TEMPORARY))


@pytest.fixture
def sweeping(monkeypatch):
    """Every write looks for what dead writers left."""
    monkeypatch.setattr(file_module, "SWEEP_SECONDS", 0.0)


def test_many_writes_look_once_for_what_dead_writers_left(file_root, monkeypatch):
    store.write(f"{file_root}/x", b"")
    path = Path(file_root[7:]) / f"{TEMPORARY}0123456789abcdef"
    path.touch()
    os.utime(path, (0.0, 0.0))
    store.write(f"{file_root}/y", b"")
    assert path.exists()
    clock = time.monotonic() + file_module.SWEEP_SECONDS
    monkeypatch.setattr(file_module.time, "monotonic", lambda: clock)
    store.write(f"{file_root}/y", b"")
    assert not path.exists()


@pytest.mark.parametrize("work", ["write", "create"])
def test_what_a_dead_writer_left_goes_with_the_next_write_beside_it(file_root, work):
    die_in("replace", f"{file_root}/x", work)
    assert len(left(file_root)) == 1
    assert not store.exists(f"{file_root}/x"), "a name without content would be taken for ever"
    store.write(f"{file_root}/y", b"")
    assert left(file_root) == []


@pytest.mark.usefixtures("sweeping")
def test_what_a_live_writer_writes_stays(file_root):
    script = (
        "from planish.store.file import temporary_name\n"
        f"open({file_root[7:]!r} + '/' + temporary_name(), 'wb')\nprint(flush=True)\ninput()\n"
    )
    store.write(f"{file_root}/x", b"")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as writer:
        writer.stdout.readline()
        store.write(f"{file_root}/y", b"")
        assert len(left(file_root)) == 1
        writer.kill()
    store.write(f"{file_root}/z", b"")
    assert left(file_root) == []


@pytest.mark.parametrize("name", ["-01234567.7.99-0123456789abcdef", "0123456789abcdef"])
@pytest.mark.usefixtures("sweeping")
def test_what_a_writer_of_another_machine_left_goes_after_a_day(file_root, name):
    store.write(f"{file_root}/x", b"")
    path = Path(file_root[7:]) / f"{TEMPORARY}{name}"
    for age_seconds, stays in ((86_000, True), (87_000, False)):
        path.touch()
        os.utime(path, (time.time() - age_seconds,) * 2)
        store.write(f"{file_root}/x", b"")
        assert path.exists() == stays


def test_create_works_where_the_file_system_has_no_hard_links(file_root, monkeypatch):
    def no_links(*_):
        raise OSError(errno.ENOTSUP, "no links here")

    monkeypatch.setattr(file_module.os, "link", no_links)
    store.create(f"{file_root}/x", b"1")
    assert store.read(f"{file_root}/x") == b"1"
    with pytest.raises(ObjectExists):
        store.create(f"{file_root}/x", b"2")
    assert store.read(f"{file_root}/x") == b"1"


def test_a_folder_is_made_again_that_goes_while_the_one_below_it_is_made(tmp_path, monkeypatch):
    storage = file_module.FileStore(tmp_path)
    sync, calls = os.fsync, []

    def tidying(descriptor):
        sync(descriptor)
        calls.append(descriptor)
        if len(calls) == 1:
            storage.tidy("a/other")
            assert not (tmp_path / "a").exists()

    monkeypatch.setattr(os, "fsync", tidying)
    storage.put("a/b/x", b"new")
    assert storage.read("a/b/x") == b"new"
