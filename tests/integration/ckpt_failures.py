"""States, ranks and checks of the failure tests; and the sweep that kills at every request.

`python -m tests.integration.ckpt_failures --every 1` kills each victim at every k-th request of a
save, before and after the server has done it, and prints a line per save and the counts.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.commit import read_commit
from planish.checkpoint.loading.reader import open_state
from planish.checkpoint.watch.monitor import TIMINGS
from planish.store import open_store
from planish.store.processes import process_start
from tests.integration.ckpt_forks import Forks, write_json
from tests.integration.ckpt_seeds import COLUMNS, load_seed
from tests.integration.waiting import wait_for
from tests.servers.http_proxy import HttpProxy, Rule
from tests.servers.minio_files import objects, open_uploads
from tests.servers.run_minio import Minio

SCENARIOS = "tests.integration.ckpt_seeds"


class Site:
    """A bucket of a server, reached directly by the test and through a proxy by the ranks."""

    def __init__(self, server, uri, proxy, forks, folder):
        self.server, self.uri, self.proxy, self.forks = server, uri, proxy, forks
        self.folder, self.bucket = Path(folder), uri.removeprefix("s3://")
        self.storage = open_store(uri)[0]
        self._others = open_uploads(server.data)

    @property
    def environment(self):
        """What makes ranks go through the proxy."""
        return {**self.server.environment, "MINIO_ENDPOINT": self.proxy.endpoint}

    def path(self, name):
        return f"{self.uri}/run/{name}"

    def start(self, scenario="save_once", size=2, *, direct=False, **arguments):
        """Start ranks and wait until they are ready; returns them and what they told."""
        ranks = self.forks.start(
            f"{SCENARIOS}:{scenario}",
            size,
            self.folder,
            environment=self.server.environment if direct else self.environment,
            **arguments,
        )
        return ranks, ranks.ready()

    def finish(self, ranks, told=(), timeout=150.0):
        """Let ranks go and return their outcomes, once their uploaders have ended too."""
        ranks.go()
        outcomes = ranks.wait(timeout)
        pids = [one["uploader"] for one in told if one.get("uploader")]
        wait_for(lambda: not any(map(process_start, pids)), 30.0, "the end of the uploaders")
        return outcomes

    def pace(self, ranks, number, rules=(), **environment):
        """Have ranks do their next thing under rules of the proxy; returns how it ended on each."""
        self.proxy.log.clear()
        self.proxy.rules = list(rules)
        write_json(ranks.folder / f"step-{number}.json", environment)
        paths = [ranks.folder / f"ended-{rank}-{number}.json" for rank in range(len(ranks.pids))]

        def all_ended():
            return all(path.exists() for path in paths) or not ranks.running()

        wait_for(all_ended, 150.0, "the end of a step")
        self.proxy.rules = []
        assert all(path.exists() for path in paths), ranks.logs()
        return [json.loads(path.read_text()) for path in paths]

    def save(self, name, seed, size=2, **arguments):
        """Save by new ranks without a proxy; fails unless every rank has."""
        ranks, told = self.start(
            size=size, direct=True, uri=self.path(name), seed=seed, **arguments
        )
        outcomes = self.finish(ranks, told)
        assert [one.value and one.value[0] for one in outcomes] == ["done"] * size, outcomes
        return outcomes[0].value[1]

    def visible(self):
        """Load all that is committed; returns name -> seed."""
        found = catalog.list_checkpoints(self.storage, "run")
        seeds = {one.path.rpartition("/")[2]: load_seed(one.uri) for one in found}
        assert all(one.step == seeds[one.path.rpartition("/")[2]] for one in found)
        return seeds

    def remove(self, name):
        catalog.delete(self.storage, f"run/{name}")

    def gc(self, grace_s=0.0):
        return catalog.gc(self.storage, "run", grace_s=grace_s)

    def check_disk(self):
        """Check that the server's disk has what commits name, and nothing that they do not."""
        needed, allowed = set(), {"run/LATEST"}
        for entry in catalog.list_checkpoints(self.storage, "run"):
            opened = open_state(entry.uri)
            needed |= {f"{entry.path}/COMMIT", f"{entry.path}/{entry.commit.meta_key}"}
            needed |= {opened.key(row) for row in range(len(opened.metadata.files))}
            allowed.add(opened.folder_key(TIMINGS))
        keys = set(objects(self.server.data, self.bucket))
        assert needed <= keys, sorted(needed - keys)
        assert keys <= needed | allowed, sorted(keys - needed - allowed)

        def left():
            return [one for one in open_uploads(self.server.data) if one not in self._others]

        # The server answers an abort before the last folder is gone.
        wait_for(lambda: not left(), 10.0, "the end of all uploads")

    def is_committed(self, name, attempt=""):
        commit = read_commit(self.storage, f"run/{name}")
        return commit is not None and (not attempt or commit.attempt == attempt)


@contextlib.contextmanager
def site_of_its_own(folder):
    """A server, a proxy and a forking process for the length of a block."""
    server = Minio(Path(folder) / "minio" / "data")
    server.start()
    os.environ.update(server.environment)
    server.make_bucket("sweep")
    try:
        with HttpProxy(server.endpoint) as proxy, Forks() as forks:
            yield Site(server, "s3://sweep", proxy, forks, Path(folder) / "ranks")
    finally:
        server.kill()


VICTIMS = ("coordinator", "worker", "all", "uploader")
KINDS = ("new", "overwrite")
FAULTS = ("kill after", "kill")


def kill_at(site, at, victim, kind, fault, held):
    """Kill a victim at a request of a save over or beside `step-1`, and check what is left.

    Returns:
        The request that was hit, None if the save had ended before; and what step 1 holds now.
    """
    name, new = ("step-2", "step-1")[kind == "overwrite"], held + 1
    size = {"columns": COLUMNS * (2 if victim == "uploader" else 1)}
    ranks, told = site.start(
        uri=site.path(name),
        seed=new,
        processes=victim == "uploader",
        overwrite=kind == "overwrite",
        **size,
    )
    pids = {"coordinator": ranks.pids[0], "worker": ranks.pids[1], "all": ranks.group}
    site.proxy.log.clear()
    site.proxy.rules = [Rule(fault, at=at, pid=pids.get(victim, told[at % 2]["uploader"]))]
    outcomes = site.finish(ranks, told)
    hit = next((f"{seen.kind} {seen.path}" for seen in site.proxy.log if seen.fault), "")
    site.proxy.rules = []
    seen = check_left(site, outcomes, name, held, new, **size)
    assert hit or name in seen, outcomes
    if kind == "new":
        site.remove(name)
        return hit, held
    return hit, new + 1


def check_left(site, outcomes, name, held, new, **size):
    """Check what a save of `new` to `name` has left that found `step-1` with `held`; restart it.

    Returns:
        What was visible: either the old or the new state, complete, and as the ranks were told.
    """
    assert all(one.code in (0, -9) and not one.error for one in outcomes), outcomes
    ends = [one.value for one in outcomes if one.value]
    old, both = {"step-1": held}, {"step-1": held, name: new}
    seen = site.visible()
    assert seen in (old, both), (seen, ends)
    assert all((end[0] == "done") == (seen == both) for end in ends), (seen, ends)
    assert all(end[0] in ("done", "SaveFailed", "PlanMismatch", "PeerLost") for end in ends), ends
    site.gc()
    site.save(name, new + 1, overwrite=True, **size)
    site.gc()
    assert site.visible() == {**seen, name: new + 1}
    site.check_disk()
    return seen


def sweep(site, *, every, victims=VICTIMS, kinds=KINDS, faults=FAULTS, start=1, limit=1000):
    """Kill each victim at every k-th request of a save; yield what was done and what failed."""
    held = 0
    for victim, kind, fault in itertools.product(victims, kinds, faults):
        for at in range(start, limit, every):
            wrong = ""
            try:
                if not held:
                    site.storage.delete([stat.key for stat in site.storage.list("")])
                    site.save("step-1", 1, columns=COLUMNS * (1 + (victim == "uploader")))
                    held = 1
                hit, held = kill_at(site, at, victim, kind, fault, held)
            except AssertionError as error:
                hit, held, wrong = "failed", 0, str(error)
            if not hit:
                break
            yield victim, kind, fault, at, hit, wrong


def main():
    """Sweep on a server of its own and print what was done; exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="kill at every k-th request")
    parser.add_argument("--start", type=int, default=1, help="first request")
    parser.add_argument("--victims", nargs="+", default=VICTIMS, choices=VICTIMS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    arguments = vars(parser.parse_args())
    began, counts, stages, failed = time.monotonic(), Counter(), Counter(), 0
    with tempfile.TemporaryDirectory() as folder, site_of_its_own(folder) as site:
        for *case, at, hit, wrong in sweep(site, **arguments):
            counts[" ".join(case)] += 1
            stages[stage_of(hit)] += 1
            failed += bool(wrong)
            print(f"{time.monotonic() - began:7.1f} s", *case, f"{at}: {hit} {wrong}", flush=True)
    seconds = round(time.monotonic() - began)
    told = {"cases": sum(counts.values()), "failed": failed, "seconds": seconds}
    print(json.dumps({**told, "by": counts, "stages": stages}, indent=1))
    sys.exit(failed > 0)


def stage_of(hit):
    """Return kind of request and name of the object without what differs between saves."""
    return re.sub(r"/[^ ]*/(a-\w+/)?|[0-9]{5}-[0-9]+\.", "/", hit)


if __name__ == "__main__":
    main()
