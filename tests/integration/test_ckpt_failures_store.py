"""Saves and loads by real ranks while the store or the way to it fails."""

import contextlib
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.ckpt_failures import Site
from tests.integration.waiting import wait_for
from tests.servers.http_proxy import HttpProxy, Rule
from tests.servers.run_minio import server_of_few_mib

pytestmark = pytest.mark.server

DATA = r"/data/.*\.safetensors$"


def kinds_of(ends):
    return [end[0] for end in ends]


SAVE_FAULTS = [
    Rule("reset", kind="part"),
    Rule("reset middle", kind="part", times=2),
    Rule("corrupt request", kind="part", times=2),
    Rule("corrupt request", kind="put", path="global.bin$"),
    Rule("silent", kind="part", seconds=3),
    Rule("silent", kind="complete", path="COMMIT$", seconds=3),
    Rule("slow request", kind="part"),
    Rule("truncate", kind="list"),
    Rule("truncate", kind="get", path="global.bin$"),
    Rule("503", kind="part", times=5),
    Rule("500", kind="complete", times=3),
    Rule("500 after", kind="complete", path="COMMIT$"),
    Rule("lost", kind="complete", path="COMMIT$"),
    Rule("lost", kind="complete", path=DATA, times=2),
    Rule("lost", kind="put", path="journal"),
    Rule("500 after", kind="create", path="COMMIT$"),
    Rule("500 after", kind="create", path=DATA, times=2),
    Rule("lost", kind="create", path=DATA),
]


@pytest.mark.slow
def test_saves_outlive_whatever_passes(site):
    steps = [(f"step-{number}", number, {}) for number in range(len(SAVE_FAULTS))]
    ranks, told = site.start(
        "train", root=f"{site.uri}/run", steps=steps, paced=True, read_seconds=1.0
    )
    ranks.go()
    for number, rule in enumerate(SAVE_FAULTS):
        ends = site.pace(ranks, number, [rule])
        assert set(site.proxy.suffered()) == {rule.fault}, rule
        assert kinds_of(ends) == ["done", "done"], (rule, ends)
    site.finish(ranks, told)
    # One by one, each bit: nothing was damaged on its way, nothing committed twice.
    assert site.visible() == {f"step-{n}": n for n in range(len(SAVE_FAULTS))}
    site.gc()
    site.check_disk()


LOAD_FAULTS = [
    Rule("reset", kind="get", times=2),
    Rule("truncate", kind="get", path=DATA, times=2),
    Rule("silent", kind="get", path=DATA, seconds=3),
    Rule("slow", kind="get", path=DATA),
    Rule("corrupt", kind="get", path=DATA, times=1),
    Rule("503", kind="get", times=4),
]


def test_loads_outlive_whatever_passes_and_find_what_does_not(site):
    site.save("step-1", 7)
    always = [
        (Rule("corrupt", kind="get", path=DATA, times=0), "CheckpointCorrupt", "safetensors"),
        (Rule("corrupt", kind="get", path="global.bin", times=0), "CheckpointCorrupt", "global"),
        (Rule("corrupt", kind="get", path="COMMIT", times=0), "CheckpointCorrupt", "COMMIT"),
        (Rule("corrupt", kind="get", path="extra", times=0), "CheckpointCorrupt", "extra"),
        (Rule("corrupt", kind="get", path="loader", times=0), "CheckpointCorrupt", "loader"),
    ]
    places = [site.path("step-1")] * (len(LOAD_FAULTS) + len(always) + 1)
    ranks, _ = site.start("read", places=places, paced=True, read_seconds=1.0)
    ranks.go()
    for number, rule in enumerate(LOAD_FAULTS):
        ends = site.pace(ranks, number, [rule])
        assert set(site.proxy.suffered()) == {rule.fault}, rule
        assert [end[:2] for end in ends] == [["done", 7]] * 2, (rule, ends)
    for number, (rule, kind, file) in enumerate(always, len(LOAD_FAULTS)):
        ends = site.pace(ranks, number, [rule])
        assert kinds_of(ends) == [kind] * 2, (rule, ends)
        assert all(file in end[2] for end in ends), ends
    assert [end[:2] for end in site.pace(ranks, len(places) - 1)] == [["done", 7]] * 2
    site.finish(ranks)


@pytest.mark.slow
def test_a_black_hole_fails_the_save_within_its_time_and_the_next_succeeds(site):
    site.save("step-1", 1)
    steps = [("step-2", 2, {"timeout_s": 4.0}), ("step-2", 3, {})]
    ranks, told = site.start("train", root=f"{site.uri}/run", steps=steps, paced=True)
    ranks.go()
    ends = site.pace(ranks, 0, [Rule("silent", at=8, times=0, seconds=60)])
    assert kinds_of(ends) == ["SaveFailed"] * 2
    # Beside the limit of 4 s: uploads are given 10 s to stop, the cleaning 10 s.
    assert all(end[3] < 30 for end in ends), ends
    assert site.visible() == {"step-1": 1}
    assert kinds_of(site.pace(ranks, 1)) == ["done"] * 2
    site.finish(ranks, told)
    site.gc()
    assert site.visible() == {"step-1": 1, "step-2": 3}
    site.check_disk()


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 9, 14, 27, 29])
def test_a_server_killed_in_a_save_leaves_it_done_or_undone(site, at):
    site.save("step-1", 1)
    ranks, told = site.start(uri=site.path("step-2"), seed=2)
    site.proxy.log.clear()
    site.proxy.rules = [Rule("delay", at=at, seconds=0.3)]
    ranks.go()
    wait_for(site.proxy.suffered, 20.0, "the request")
    site.server.kill()
    site.server.start()
    ends = [one.value for one in site.finish(ranks, told)]
    expected = {"step-1": 1} | ({"step-2": 2} if ends[0][0] == "done" else {})
    assert ends[0][0] == ends[1][0], ends
    assert ends[0][0] in ("done", "SaveFailed"), ends
    assert site.visible() == expected
    site.save("step-2", 3, overwrite=True)
    site.gc()
    assert site.visible() == {"step-1": 1, "step-2": 3}
    site.check_disk()


@pytest.mark.parametrize("at", [2, 5])
def test_a_server_killed_in_a_load_delays_it(site, at):
    site.save("step-1", 1)
    ranks, _ = site.start("read", places=[site.path("step-1")])
    site.proxy.rules = [Rule("delay", at=at, seconds=0.3)]
    ranks.go()
    wait_for(site.proxy.suffered, 20.0, "the request")
    site.server.kill()
    site.server.start()
    ends = [one.value for one in site.finish(ranks)]
    assert [end[0][:2] for end in ends] == [["done", 1]] * 2, ends


@pytest.fixture
def small_site(tmp_path, monkeypatch, forks):
    """A site whose server has a disk of 64 MiB."""
    with server_of_few_mib(tmp_path, 64) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("small")
        with HttpProxy(server.endpoint) as proxy:
            yield Site(server, "s3://small", proxy, forks, tmp_path / "ranks")


def test_a_full_disk_fails_the_save_on_all_ranks_and_room_makes_the_next_succeed(small_site):
    site, disk = small_site, small_site.server.data.parent
    site.save("step-1", 1)
    room = disk / "ballast"
    free = int(subprocess.check_output(["df", "--output=avail", "-B1", disk]).split()[-1])
    room.write_bytes(bytes(max(0, free - (8 << 20))))
    steps = [("step-2", 2, {}), *[("step-2", 3, {})] * 40]
    ranks, _ = site.start("train", root=f"{site.uri}/run", steps=steps, paced=True)
    ranks.go()
    ends = site.pace(ranks, 0)
    assert kinds_of(ends) == ["SaveFailed"] * 2, ends
    assert all("the server is full" in end[1] and end[3] < 30 for end in ends), ends
    assert site.visible() == {"step-1": 1}
    room.unlink()
    for number in range(1, len(steps)):  # the server looks at its disk now and then only
        ends = site.pace(ranks, number)
        if kinds_of(ends) == ["done"] * 2:
            break
        assert all("the server is full" in end[1] for end in ends), ends
        time.sleep(0.25)
    assert kinds_of(ends) == ["done"] * 2, ends
    ranks.kill()
    site.gc()
    assert site.visible() == {"step-1": 1, "step-2": 3}
    site.check_disk()


@contextlib.contextmanager
def admin(server):
    """The administration of a server; its connections are closed at the end."""
    import urllib3
    from minio import MinioAdmin
    from minio.credentials import StaticProvider

    with urllib3.PoolManager() as pool:
        provider = StaticProvider(server.access_key, server.secret_key)
        yield MinioAdmin(
            endpoint=server.endpoint, credentials=provider, secure=False, http_client=pool
        )


@pytest.fixture
def manager(site):
    with admin(site.server) as found:
        yield found


@pytest.mark.parametrize("processes", [False, True])
def test_credentials_revoked_in_a_save_and_then_rotated(site, manager, monkeypatch, processes):
    manager.user_add("trainer", "first-secret-0001")
    manager.policy_set("readwrite", user="trainer")
    site.save("step-1", 1)
    first = {"MINIO_ACCESS_KEY": "trainer", "MINIO_SECRET_KEY": "first-secret-0001"}
    steps = [("step-2", 2, {}), ("step-2", 3, {}), ("step-2", 4, {})]
    monkeypatch.setattr(site.server, "access_key", "trainer")
    monkeypatch.setattr(site.server, "secret_key", "first-secret-0001")
    ranks, told = site.start(
        "train", root=f"{site.uri}/run", steps=steps, paced=True, processes=processes
    )
    ranks.go()

    def revoke_in_time():
        wait_for(site.proxy.suffered, 30.0, "the first part or object")
        manager.user_disable("trainer")

    with ThreadPoolExecutor(1) as pool:
        revoked = pool.submit(revoke_in_time)
        ends = site.pace(ranks, 0, [Rule("delay", path=DATA, seconds=1.0)], **first)
        revoked.result(timeout=30)
    assert kinds_of(ends) == ["SaveFailed"] * 2, ends
    assert all("MINIO_SECRET_KEY" in end[1] and end[3] < 20 for end in ends), ends
    assert not any("first-secret" in end[1] for end in ends)
    manager.user_add("trainer", "second-secret-02")
    manager.user_enable("trainer")
    assert kinds_of(site.pace(ranks, 1)) == ["SaveFailed"] * 2  # still the old secret
    assert site.visible() == {"step-1": 1}
    ends = site.pace(ranks, 2, MINIO_SECRET_KEY="second-secret-02")
    assert kinds_of(ends) == ["done"] * 2, ends
    site.finish(ranks, told)
    site.gc()
    assert site.visible() == {"step-1": 1, "step-2": 4}
    site.check_disk()
