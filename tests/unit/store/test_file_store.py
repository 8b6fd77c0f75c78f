import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planish import store
from planish.base.errors import AccessRefused, ObjectExists, StoreError, StoreUnavailable
from planish.store import file as file_module
from planish.store.file import TEMPORARY


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
