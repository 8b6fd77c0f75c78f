"""Kill a shard of the rollout stage at random moments until it ends by itself; check what is left.

`python -m tests.integration.kill_rollout --rounds 20 --engine transformers vllm` prints a line for
each round, and what failed. Rounds alternate between whole responses and
windows; `--seed` repeats the moments. A shard is one process as a pipeline starts it, killed with
its whole process group, or by the death of one process that it has started.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from planish import store
from planish.engines import APART, ENGINES
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.rollouts import FinishReason, RolloutSet
from planish.store.file import TEMPORARY
from tests.integration import programs, runs
from tests.integration.kills import RENDEZVOUS, Held, make_scratch, parser, play_rounds
from tests.integration.programs import Program
from tests.processes import below, marked, marks, wait_until_none
from tests.unit.stages.rollout.stage_run import ROLLOUT, Run, after_iteration, write_template

SPACES = 100
"""Responses have at most about so many tokens, and about half as many in the mean."""
WHOLE = {
    "prompts_per_iteration": 64,
    "generation_prompts_factor": 0.5,
    "max_generation_rounds": 0,
    "max_staleness": 1,
}
WINDOWS = {"prompts_per_iteration": 96, "dynamic_sampling": False, "window_tokens": 60}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {**WHOLE, "max_response_tokens": 160},
    "windows": {**WINDOWS, "max_response_tokens": 160},
}
ROWS = {"transformers": 4, "vllm": 12}
"""Responses that an engine generates at once, few enough that it takes some seconds."""
ROW_STEPS = 1440
"""Tokens from one commit to the next."""
ENGINE_TABLES = {"vllm": {"name": "vllm", "cache_bytes": 16 << 20}}
LONGEST_SECONDS = 300.0
"""Of one attempt, however slow the machine."""
PAUSE_SECONDS = 0.2
"""Between two looks at what the processes of an attempt hold."""


@dataclass(frozen=True)
class Shard:
    """One shard of an iteration, on a root with all that it needs."""

    folder: Path
    """Holds the root, the log and all that the stage writes."""
    digest: str
    """Of the configuration."""
    number: int
    """Iteration."""
    policy_pin: str
    state_pin: str = ""
    is_forked: bool = False
    """It need not import torch, since it is a fork of a process that has; vLLM begins anew."""

    @property
    def root(self) -> str:
        """URI of the run."""
        return (self.folder / "root").as_uri()

    @property
    def scratch(self) -> Path:
        """Folder for temporary files of the stage."""
        return self.folder / "tmp"

    def copied(self, folder: Path) -> Shard:
        """Return the same shard on a copy of the root."""
        shutil.copytree(self.folder / "root", folder / "root")
        new = replace(self, folder=folder)
        pins = [pin.replace(self.root, new.root) for pin in (self.policy_pin, self.state_pin)]
        return replace(new, policy_pin=pins[0], state_pin=pins[1])

    def start(self) -> subprocess.Popen | Program:
        """Start the stage in a session of its own."""
        if not self.scratch.exists():
            make_scratch(self.scratch)
        options = {
            "root": self.root,
            "config-sha256": self.digest,
            "number": self.number,
            "offset": 0,
            "shard": 0,
            "num-shards": 1,
            "policy-pin": self.policy_pin,
            "state-pin": self.state_pin,
            "rollouts": self.folder / "out" / "rollouts",
            "metrics": self.folder / "out" / "metrics",
        }
        words = ["rollout", *(f"--{name}={value}" for name, value in options.items())]
        environment = {**marks(self.folder), **runs.environment(), "TMPDIR": str(self.scratch)}
        if self.is_forked:
            (log := self.folder / "log.txt").touch()
            return programs.start("planish.run", *words, log=log, environment=environment)
        with (self.folder / "log.txt").open("ab") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", "planish.run", *words],
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=runs.REPOSITORY,
                env=environment,
                start_new_session=True,
            )

    def log(self) -> str:
        """Return what all attempts have said."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def commits(self) -> dict[str, str]:
        """Return the names of the complete commits and the digests of their manifests."""
        prefix, suffix = layout.commits(self.root, self.number, 0) + "/", "/manifest.json"
        uris = [uri for uri in store.list_uris(prefix) if uri.endswith(suffix)]
        sets = [uri.removesuffix(suffix) for uri in uris]
        return {uri.removeprefix(prefix): read_manifest(uri).sha256 for uri in sets}

    def is_written(self) -> bool:
        """Tell whether the rollouts are there."""
        return store.exists(layout.rollouts(self.root, self.number, 0) + "/manifest.json")

    def read(self, uri: str) -> tuple[RolloutSet, dict[str, Any]]:
        """Return a set and the attributes of its manifest."""
        manifest = read_manifest(uri)
        return read_set(RolloutSet, uri, sha256=manifest.sha256), dict(manifest.attributes)


Key = tuple[str, int]
"""Prompt id and sample of a response; no prompt is drawn twice here."""


@dataclass(frozen=True, eq=False)
class Response:
    """What a set says of a response."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: FinishReason

    def begins(self, other: Response) -> bool:
        """Tell whether another response goes on where this one ends, or is equal."""
        size = len(self.tokens)
        has_ended = self.finish in (FinishReason.STOP, FinishReason.LENGTH)
        return (
            np.array_equal(self.tokens, other.tokens[:size])
            and np.array_equal(self.logprobs, other.logprobs[:size])
            and np.array_equal(self.versions, other.versions[:size])
            and (not has_ended or (self.finish == other.finish and size == len(other.tokens)))
        )


def responses(rollouts: RolloutSet) -> dict[Key, Response]:
    """Return each response of a set; fails where one is there twice."""
    found = {
        (rollouts.prompt_id[row], int(rollouts.sample_index[row])): Response(
            rollouts.response_tokens.row(row),
            rollouts.rollout_logprobs.row(row),
            rollouts.policy_version.row(row),
            FinishReason(int(rollouts.finish[row])),
        )
        for row in range(rollouts.num_rows)
    }
    assert len(found) == rollouts.num_rows, "a response is there twice"
    return found


class Round:
    """Attempts at one shard, and what they have left on the way."""

    def __init__(self, shard: Shard) -> None:
        """Bind the shard; nothing is started."""
        self.shard = shard
        self.counts: Counter[str] = Counter()
        self._held = Held()
        self._digests: dict[str, str] = {}
        self._committed: dict[Key, Response] = {}

    def attempt(
        self,
        seconds: float = LONGEST_SECONDS,
        strike: Callable[[list[int]], object] | None = None,
    ) -> int | None:
        """Let the stage run so long, then kill it; return the exit code of one that ended.

        Args:
            seconds: until the kill.
            strike: takes the processes that the stage has started and does harm to one of them;
                None kills all, the stage included.
        """
        process = self.shard.start()
        before = {*self.shard.scratch.iterdir()}
        code = self._watch(process, seconds)
        assert code is not None or seconds < LONGEST_SECONDS, "it hangs" + self.shard.log()[-3000:]
        if code is None:
            self.counts["kills"] += 1
            children = below(process.pid) if strike else []
            if strike and children:
                self.counts["kills of a child alone"] += 1
                strike(children)
                code = self._watch(process, LONGEST_SECONDS)
                assert code is not None, "it hangs without a child" + self.shard.log()[-3000:]
                code = None if code else 0
            else:
                runs.kill(process)
        wait_until_none(self.shard.folder, 30.0)
        assert not self._held.left(), self._held.left()
        left = [path.name for path in {*self.shard.scratch.iterdir()} - before]
        ours = [name for name in left if code is not None or not name.startswith(RENDEZVOUS)]
        assert not ours, f"{ours} are left in the temporary folder"
        self._check_commits()
        return code

    def _watch(self, process: subprocess.Popen, seconds: float) -> int | None:
        """Return the exit code of a process that ends in time, else None."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._held.look(marked(self.shard.folder))
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(PAUSE_SECONDS, left))
        return process.poll()

    def _check_commits(self) -> None:
        """Check that commits stay as they were until the rollouts are there."""
        commits = self.shard.commits()
        for name, digest in self._digests.items():
            assert commits.get(name, digest) == digest, f"commit {name} has changed"
            assert name in commits or self.shard.is_written(), f"commit {name} is lost"
        for name in sorted(commits.keys() - self._digests.keys()):
            uri = f"{layout.commits(self.shard.root, self.shard.number, 0)}/{name}"
            self._committed |= responses(self.shard.read(uri)[0])
        self._digests |= commits

    def check_end(self, undisturbed: Shard) -> None:
        """Check what the shard has written against what was committed, and its own rules."""
        shard, uri = self.shard, layout.rollouts(self.shard.root, self.shard.number, 0)
        rollouts, facts = shard.read(uri)
        found, sizes = responses(rollouts), Counter(rollouts.prompt_id)
        consumed, kind = facts["consumed"], "surplus"
        assert consumed == sorted(set(consumed)), "an ordinal is consumed twice"
        if "carry_sha256" in facts:
            kind = "carry"
            rule = undisturbed.read(layout.rollouts(undisturbed.root, shard.number, 0))
            assert found.keys() == responses(rule[0]).keys(), "other responses than undisturbed"
            names = ("consumed", "ordinals")
            assert all(facts[name] == rule[1][name] for name in names), "other ordinals"
        else:
            metrics = facts["metrics"]
            assert len(sizes) == metrics["num_groups"] == WHOLE["prompts_per_iteration"]
            assert consumed == list(range(int(metrics["num_generated_groups"]))), "ordinals"
            assert {*sizes.values()} == {ROLLOUT["group_size"]}, "samples are missing"
        beside: dict[Key, Response] = {}
        if facts[f"{kind}_sha256"]:
            others, _ = shard.read(getattr(layout, kind)(shard.root, shard.number, 0))
            beside = responses(others)
        for one in found.keys() & beside.keys():
            assert found[one].begins(beside[one]), f"{one} differs between two sets"
        final = {**beside, **found}
        committed = self._committed.keys() & final.keys()
        for one in committed:
            assert self._committed[one].begins(final[one]), f"{one} is not as it was committed"
        self.counts["committed responses in the sets"] += len(committed)
        self.check_leftovers()

    def check_leftovers(self) -> None:
        """Check that nothing is left but what the stage promises."""
        place = store.local_path(layout.commits(self.shard.root, self.shard.number, 0))
        assert not place.exists(), [str(path) for path in place.rglob("*")] + ["commits are left"]
        left = [str(path) for path in self.shard.folder.rglob(f"{TEMPORARY}*")]
        assert not left, left


@dataclass
class Undisturbed:
    """A shard that is ready, and what it gives when nobody kills it."""

    shard: Shard
    """Not begun; rounds run on copies."""
    done: Shard
    seconds: float
    """From the start of its process to the end."""
    digests: dict[str, str]
    """Of all sets below its root."""


def prepare(template: Path, folder: Path, engine: str, setting: str, rows: int) -> Undisturbed:
    """Make a root up to a shard; with windows that is the second iteration, where some go on."""
    (folder / "ready").mkdir(parents=True)
    changes = {"max_rows": rows, "commit_steps": ROW_STEPS // rows}
    table = ENGINE_TABLES.get(engine)
    tables = {"engine": table} if table else None
    run = Run(template, folder / "ready", tables=tables, **SETTINGS[setting], **changes)
    shard = Shard(run.folder, run.digest, 1, run.policy_pin, is_forked=engine == "transformers")
    if setting == "windows":
        assert Round(shard).attempt() == 0, shard.log()[-3000:]
        state_pin = after_iteration(run, 1, 1, spaces=SPACES)
        shard = replace(shard, number=2, policy_pin=run.policy_pin, state_pin=state_pin)
    done = shard.copied(folder / "undisturbed")
    began = time.monotonic()
    one = Round(done)
    assert one.attempt() == 0, done.log()[-3000:]
    seconds = time.monotonic() - began
    one.check_end(done)
    return Undisturbed(shard, done, seconds, runs.digests(done.root))


def kill_one(rng: random.Random, pids: Sequence[int]) -> None:
    """Kill one of some processes."""
    os.kill(rng.choice(pids), signal.SIGKILL)


def play(undisturbed: Undisturbed, one: Round, engine: str, kills: int, rng: random.Random) -> str:
    """Kill a shard at random moments, let it end, and check what it left."""
    code = None
    for _ in range(kills):
        moment = rng.uniform(0.0, 1.2 * undisturbed.seconds)
        alone = rng.random() < 1 / 3
        code = one.attempt(moment, partial(kill_one, rng) if alone else None)
        if code is not None:
            break
    if code is None:
        code = one.attempt()
    assert code == 0, f"exit code {code}: {one.shard.log()[-3000:]}"
    one.check_end(undisturbed.done)
    is_equal = runs.digests(one.shard.root) == undisturbed.digests
    assert is_equal or engine != "transformers", "digests differ from the undisturbed run"
    read = re.findall(r"resumed commits=(\d+) ", one.shard.log())
    return f"{dict(one.counts)}, commits read {read}, digests equal {is_equal}"


def sweep(
    engine: str, num_rounds: int, seed: int, folder: Path, *, kills: int = 4, rows: int = 0
) -> list[str]:
    """Play rounds with one engine; return what failed.

    Args:
        engine: one that is installed.
        num_rounds: settings take turns.
        seed: of the moments.
        folder: empty or absent.
        kills: at most so many in a round.
        rows: responses at once; 0 is the engine's number in `ROWS`.
    """
    template, rows = folder / "template", rows or ROWS[engine]
    template.mkdir(parents=True)
    write_template(template, num_prompts=400, spaces=SPACES)
    ready: dict[str, Undisturbed] = {}

    def play_round(number: int, place: Path, rng: random.Random) -> str:
        setting = [*SETTINGS][number % len(SETTINGS)]
        if setting not in ready:
            ready[setting] = prepare(template, folder / setting, engine, setting, rows)
        one = Round(ready[setting].shard.copied(place))
        return f"{setting} {play(ready[setting], one, engine, kills, rng)}"

    return play_rounds(engine, num_rounds, seed, folder, play_round)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play all rounds, print what was found, and return 1 if anything failed."""
    options = parser(__doc__)
    options.add_argument("--engine", nargs="+", default=["transformers"], choices=sorted(ENGINES))
    given = options.parse_args(arguments)
    if apart := [engine for engine in given.engine if engine in APART]:
        options.error(
            f"a shard of {apart[0]!r} is disturbed rank by rank: "
            f"`python -m tests.integration.kill_ranks --engine {apart[0]}`"
        )
    missing = [engine for engine in given.engine if not find_spec(engine)]
    if missing:
        options.exit(
            2,
            f"the engine must be installed here, got {missing[0]!r} which is not; `make engines` "
            "sets up .venv-engines with every engine\n",
        )
    failures = []
    for engine in given.engine:
        with tempfile.TemporaryDirectory() as folder:
            failures += sweep(engine, given.rounds, given.seed, Path(folder))
    print(f"seed {given.seed}, rounds with faults: {len(failures)}", *failures, sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
