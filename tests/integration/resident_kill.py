"""Kill a task of several iterations again and again; what it leaves must be as if nobody had.

`python -m tests.integration.resident_kill --rounds 30` prints a line for each round and exits 1
where a record differs from those of tasks apart, or a process, shared memory, an upload or a commit
is left. The run lies on a MinIO. In a round, at two random requests to it, the whole task is
killed, or one of its processes, or the server, which comes back 20 s later; `--seed` repeats the
requests.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planish import store
from planish.base.config import config_sha256
from planish.checkpoint import api
from planish.records import layout
from planish.records.manifest import MANIFEST, read_manifest
from planish.run.stage import read_run
from tests.integration.resident_equal import QUICK, WAYS, records, run
from tests.processes import below, marked, marks, shared_memory_of, wait_until_none
from tests.servers.http_proxy import HttpProxy
from tests.servers.minio_files import open_uploads
from tests.servers.run_minio import Minio

KEPT = ("run.json", "prompts/", "policies/00000/")
"""What a root has before the first iteration."""
VICTIMS = ("task", "process", "store")
STORE_SECONDS = 20.0


def copy_start(source: Path, root: str) -> None:
    """Copy what a run has made before its first iteration."""
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        if path.is_file() and name.startswith(KEPT):
            store.write(f"{root}/{name}", path.read_bytes())


def command(root: str, iterations: int) -> list[str]:
    """Return the command of one task with all iterations."""
    policy = layout.policy(root, 0)
    digest = config_sha256(read_run(root)["config"])
    line = [sys.executable, "-m", "planish.run", "iterate", "--root", root]
    line += ["--config-sha256", digest, "--number", "1", "--count", str(iterations)]
    return [*line, "--state-pin", "", "--policy-pin", read_manifest(policy).ref(policy).pin()]


@dataclass
class Site:
    """A server, the proxy that counts requests to it, and the run that nobody disturbs."""

    server: Minio
    proxy: HttpProxy
    apart: Path
    iterations: int
    num_requests: int = 0
    """Of an undisturbed task."""

    def begin(self, folder: Path, root: str) -> subprocess.Popen[bytes]:
        """Start the task of all iterations on a root, and count requests from 0."""
        line = command(root, self.iterations)
        environment = marks(folder) | self.server.environment
        environment |= {"MINIO_ENDPOINT": self.proxy.endpoint}
        del environment["MINIO_RETRY_SECONDS"]
        self.proxy.counts.clear()
        with (folder / "log").open("ab") as out:
            return subprocess.Popen(line, env=environment, stdout=out, stderr=out)

    def wanted(self) -> dict[str, bytes]:
        """Return the records of the iterations, without the evaluations at the end."""
        found = records(self.apart)
        return {name: data for name, data in found.items() if not name.startswith("evals/")}


@contextlib.contextmanager
def site_of(
    folder: Path, preset: str, settings: Sequence[str], iterations: int, size: int = 0
) -> Iterator[Site]:
    """Start a server, and run a preset on files, for the length of a block.

    That run is of tasks apart, or of tasks of `size` iterations.
    """
    server = Minio(folder / "minio" / "data")
    server.start()
    os.environ.update(server.environment)
    server.make_bucket("kill")
    apart = folder / "apart"
    run(apart, preset, iterations, (*QUICK, *settings), "--resident", str(size))
    try:
        with HttpProxy(server.endpoint) as proxy:
            yield Site(server, proxy, apart, iterations)
    finally:
        server.kill()


def count_requests(site: Site, folder: Path) -> None:
    """Run the task once undisturbed."""
    copy_start(site.apart, "s3://kill/whole")
    task = site.begin(folder, "s3://kill/whole")
    if task.wait():
        raise SystemExit((folder / "log").read_text(errors="replace")[-4000:])
    site.num_requests = site.proxy.total()


def kill_all(folder: Path) -> None:
    """Kill every process of a round."""
    for pid in marked(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until_none(folder, 60.0)


def kill(site: Site, task: subprocess.Popen[bytes], victim: str, draw: random.Random) -> None:
    """Kill what a round is to lose."""
    if victim == "store":
        site.server.kill()
        time.sleep(STORE_SECONDS)
        site.server.start()
        return
    chosen = draw.choice([task.pid, *below(task.pid)])
    with contextlib.suppress(ProcessLookupError):
        os.kill(chosen, signal.SIGKILL)


def killed_round(
    site: Site, folder: Path, victims: Sequence[str], draw: random.Random
) -> tuple[list[str], list[str]]:
    """Lose the victims one after the other; return what was done, and what is wrong afterwards."""
    root, told, shared, code = f"s3://kill/{folder.name}", list[str](), set[str](), -1
    copy_start(site.apart, root)
    left = list(victims)
    for _ in range(8):
        task = site.begin(folder, root)
        while left and task.poll() is None:
            at = draw.randint(1, max(2, site.num_requests // len(victims)))
            goal = site.proxy.total() + at
            while task.poll() is None and site.proxy.total() < goal:
                time.sleep(0.002)
            if task.poll() is None:
                shared |= shared_memory_of(marked(folder))
                victim = left.pop(0)
                told.append(f"{victim} at {site.proxy.total()}")
                if victim == "task":
                    kill_all(folder)
                else:
                    kill(site, task, victim, draw)
        code = task.wait()
        # What the death of one process leaves ends with its pod.
        kill_all(folder)
        if code == 0:
            break
    told.append(f"ended with {code}")
    if code:
        return told, [(folder / "log").read_text(errors="replace")[-3000:]]
    wanted = site.wanted()
    kept = [uri for uri in store.list_uris(f"{root}/") if uri.endswith((MANIFEST, "update.json"))]
    found = {uri.removeprefix(f"{root}/"): store.read(uri) for uri in kept}
    faults = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    faults += sorted(name for name in shared if Path(name).exists())
    # What killed saves have left is cleared an hour later, or by hand.
    api.gc(f"{root}/states", grace_s=0.0)
    faults += open_uploads(site.server.data)
    places = [f"{root}/iterations/{n:05d}/" for n in range(1, site.iterations + 1)]
    faults += [
        uri
        for place in places
        for uri in store.list_uris(place)
        if uri.removeprefix(place).startswith(("commits", "steps"))
    ]
    return told, faults


def main(argv: Sequence[str]) -> int:
    """Run the rounds; 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="dapo-tiny")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--ways", default="one rank,two ranks")
    options = parser.parse_args(argv)
    draw, bad = random.Random(options.seed), 0
    for way in options.ways.split(","):
        with (
            tempfile.TemporaryDirectory() as name,
            site_of(Path(name), options.preset, WAYS[way], options.iterations) as site,
        ):
            folder = Path(name)
            count_requests(site, folder)
            print(f"{way}: {site.num_requests} requests undisturbed", flush=True)
            for number in range(options.rounds):
                place = folder / f"round-{number}"
                place.mkdir()
                victims = (VICTIMS[number % 3], draw.choice(VICTIMS))
                told, faults = killed_round(site, place, victims, draw)
                print(f"{way} round {number}: {', '.join(told)}: {faults or 'right'}", flush=True)
                bad += bool(faults)
    print(f"rounds with faults: {bad}")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
