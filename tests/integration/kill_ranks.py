"""Kill or stop ranks at random moments while they serve requests.

`python -m tests.integration.kill_ranks --rounds 20 --engine disagg vllm_disagg` prints a row for
each round, and what failed; `--seed` repeats the moments.
What is hit is an attention rank or an expert rank, by SIGKILL, or by SIGSTOP with a SIGCONT some
seconds later, before or after the others give it up. Requests must give the tokens of the plain
model, as many as they have.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from planish.base.errors import EngineError
from planish.engines import APART
from planish.engines.config import DEAD_S, EngineConfig
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.requests import ModelRef, Output, Request
from planish.models.policy import Policy
from planish.records.rollouts import FinishReason
from planish.store.processes import process_start
from tests.integration.kills import RENDEZVOUS, Held, make_scratch, parser, play_rounds
from tests.processes import below, marked, marks, wait_until_none
from tests.unit.engines.disagg.instances import moe_policy
from tests.unit.engines.tiny import qwen3_policy, request, start

NUM_ATTENTION = 2
NUM_EXPERT = 2
ROWS = 8
"""Requests that an engine serves at once; the others wait."""
NUM_REQUESTS = 12
TRANSPORTS = ("sockets", "nixl")
NUM_TOKENS = {"disagg": 120, "vllm_disagg": 60}
"""Of each request."""
SHORT_S, LONG_S = (0.5, DEAD_S / 3), (1.2 * DEAD_S, 1.6 * DEAD_S)
"""Seconds of a stop that nobody may notice, and of one after which a busy rank is given up."""
BOUND_S = DEAD_S + 60.0
"""From a signal to the last output of a request, however slow the machine."""
WAIT_S = 240.0
"""In place of `engine.rank_timeout_seconds`: on a machine full of others a rank imports its
packages for two minutes."""
START_S = 600.0
"""Of a start that fails."""


@dataclass
class Disturbance:
    """One signal to one rank."""

    moment: float
    """Seconds after the start, of the ranks or of the work that they do."""
    is_early: bool
    """It counts from the start of the ranks."""
    role: str
    number: int
    """Among the ranks of its role."""
    rest: float
    """Seconds from SIGSTOP to SIGCONT; 0 is SIGKILL."""
    landed: float = 0.0
    """Monotonic seconds; 0 while it has not landed."""

    @classmethod
    def draw(cls, rng: random.Random, start_s: float, work_s: float) -> Disturbance:
        """Return one at any moment of a start (one in four) or of the work after it."""
        is_early = rng.random() < 1 / 4
        moment = rng.uniform(0.0, start_s if is_early else work_s)
        rest = rng.choice([0.0, 0.0, rng.uniform(*SHORT_S), rng.uniform(*LONG_S)])
        role = rng.choice(["attention", "expert"])
        number = rng.randrange(NUM_ATTENTION if role == "attention" else NUM_EXPERT)
        return cls(moment, is_early, role, number, rest)

    @property
    def rank(self) -> int:
        """Its number among all ranks."""
        return self.number + (NUM_ATTENTION if self.role == "expert" else 0)

    @property
    def is_short(self) -> bool:
        """Tell whether nobody may notice it."""
        return 0 < self.rest < DEAD_S

    def __str__(self) -> str:
        how = f"SIGSTOP {self.rest:4.1f} s" if self.rest else "SIGKILL"
        when = f"{self.moment:5.2f} s of the {'start' if self.is_early else 'work'}"
        return f"{self.role:9} {self.number}  {how:14}  after {when}"

    def __call__(self, children: Sequence[int] = ()) -> None:
        """Give the signal; does nothing where the rank has not begun."""
        ranks = sorted(filter(is_rank, children or below(os.getpid())), key=process_start)
        if self.rank >= len(ranks):
            return
        pid = ranks[self.rank]
        self.landed = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if self.rest else signal.SIGKILL)
        if self.rest:
            timer = threading.Timer(self.rest, self._go_on, [pid, process_start(pid)])
            timer.daemon = True
            timer.start()

    @staticmethod
    def _go_on(pid: int, started: int) -> None:
        with suppress(ProcessLookupError):
            if process_start(pid) == started:
                os.kill(pid, signal.SIGCONT)


def is_rank(pid: int) -> bool:
    """Tell whether a process is a rank of an engine."""
    with suppress(OSError):
        return b"planish.engines.disagg.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def engine_table(engine: str, transport: str) -> dict[str, Any]:
    """Return the settings of an engine with all ranks."""
    own = {"micro_batches": 2} if engine == "disagg" else {"cache_bytes": 16 << 20}
    ranks = {"attention_ranks": NUM_ATTENTION, "expert_ranks": NUM_EXPERT}
    return {"name": engine, "transport": transport, **ranks, **own}


@contextmanager
def own_place(folder: Path) -> Iterator[Path]:
    """Let this process and its children be found by a folder, and use one for temporary files."""
    scratch = folder / "tmp"
    make_scratch(scratch)
    with (
        patch.dict(os.environ, {**marks(folder), "TMPDIR": str(scratch)}),
        patch.object(tempfile, "tempdir", str(scratch)),
    ):
        yield scratch


# Requests of an engine.


@dataclass
class Service:
    """What an engine is asked, and what it answers when nothing happens."""

    engine: str
    transport: str
    policy: Policy
    requests: list[Request]
    expected: dict[str, Output]
    start_s: float
    """From nothing to an engine that is ready."""
    work_s: float
    """From there to the last output."""

    @classmethod
    def of(cls, engine: str, transport: str, folder: Path, *, rehearse: bool = True) -> Service:
        """Return one, after a run without any disturbance, which tells how long it takes."""
        if engine == "disagg":
            policy, sampling = moe_policy("Qwen3Moe"), {}
        else:  # vLLM knows no float64 on the CPU, and has a noise of its own
            sizes = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 32}
            policy, sampling = qwen3_policy(**sizes), {"temperature": 0.0}
        number = NUM_TOKENS[engine]
        requests = [request(row, number, **sampling) for row in range(NUM_REQUESTS)]
        expected = {output.request_id: output for output in start(policy).generate(requests)}
        service = cls(engine, transport, policy, requests, expected, start_s=5.0, work_s=2.0)
        if not rehearse:
            return service
        found = service.play(Disturbance(1e6, False, "expert", 0, 0.0), folder / "undisturbed")
        assert found == f"all {NUM_REQUESTS} right", found
        return service

    def play(self, disturbance: Disturbance, folder: Path) -> str:
        """Serve all requests while a rank is hit; check each output, and return what was seen."""
        held = Held()
        with own_place(folder) as scratch:
            config = EngineConfig(**engine_table(self.engine, self.transport))
            engine = DisaggEngine(max_rows=ROWS, config=config, timeout_s=WAIT_S)
            timer = threading.Timer(disturbance.moment, disturbance)
            timer.daemon = True
            if disturbance.is_early:
                timer.start()
            try:
                seen = self._serve(engine, disturbance, timer, folder, held)
            finally:
                timer.cancel()
                engine.close()
            wait_until_none(folder, 10.0)
            names = [p.name for p in scratch.iterdir() if not p.is_symlink()]
            left = [name for name in names if not name.startswith(RENDEZVOUS)]
        assert not left, f"{left} are left in the temporary folder"
        assert not held.left(), f"{held.left()} are left"
        return seen

    def _serve(
        self,
        engine: DisaggEngine,
        disturbance: Disturbance,
        timer: threading.Timer,
        folder: Path,
        held: Held,
    ) -> str:
        fault, began = "", time.monotonic()
        try:
            engine.start(ModelRef(policy=self.policy))
        except EngineError as error:
            fault = str(error)
        if fault:
            assert disturbance.landed, fault
            assert not disturbance.is_short, fault
            assert f"rank {disturbance.rank}" in fault, fault
            assert time.monotonic() - began < START_S, "a start must end in time"
            return "the start fails"
        self.start_s, began = time.monotonic() - began, time.monotonic()
        if not disturbance.is_early:
            timer.start()
        engine.submit(self.requests)
        outputs: dict[str, Output] = {}
        while len(outputs) < len(self.requests):
            outputs.update((output.request_id, output) for output in engine.poll(0.2))
            held.look(marked(folder))
            now = time.monotonic()
            # A disturbance of the start waits for its end as well.
            waited = now - max(began, disturbance.landed or now)
            assert waited < BOUND_S, f"{len(outputs)} outputs {waited:.0f} s after the disturbance"
        if not disturbance.landed:
            self.work_s = time.monotonic() - began
        failed = [one for one in self.requests if outputs[one.request_id].error]
        num_tokens = sum(outputs[one.request_id].num_tokens for one in failed)
        self._check(outputs, disturbance)
        has_failed = engine.state == "failed"
        assert not (disturbance.is_short and failed), (
            f"a stop of {disturbance.rest} s fails {len(failed)}"
        )
        assert has_failed <= (disturbance.role == "expert"), "an attention rank takes all with it"
        if disturbance.role == "attention":
            most = ROWS // NUM_ATTENTION
            assert len(failed) <= most, f"{len(failed)} requests of {most} rows fail"
        if not has_failed:
            # The others serve what was lost; a rank may be missed only now.
            for _ in range(2):
                try:
                    outputs = {o.request_id: o for o in engine.generate(self.requests)}
                except EngineError:
                    has_failed = True
                    break
                self._check(outputs, disturbance)
                if not any(output.error for output in outputs.values()):
                    break
            else:
                raise AssertionError("requests still fail although an attention rank is left")
            may_fail = disturbance.role == "expert" and not disturbance.is_short
            assert may_fail or not has_failed, "the engine fails without a reason"
        right = len(self.requests) - len(failed)
        told = f"{right} right, {len(failed)} failed with {num_tokens} tokens, "
        told += "engine failed" if has_failed else "then all right"
        return told if failed or has_failed else f"all {right} right"

    def _check(self, outputs: dict[str, Output], disturbance: Disturbance) -> None:
        """Check that outputs are right as far as they go, and say whose fault it is."""
        for name, output in outputs.items():
            wanted = self.expected[name]
            assert output.num_tokens == len(output.logprobs) == len(output.versions)
            assert output.token_ids == wanted.token_ids[: output.num_tokens], f"{name}: tokens"
            if output.error:
                assert disturbance.landed, output.error
                assert output.finish_reason is FinishReason.ABORT
                assert f"rank {disturbance.rank}" in output.error, output.error
            else:
                assert output.num_tokens == wanted.num_tokens, f"{name} ends early"


def sweep(
    engine: str,
    transport: str,
    num_rounds: int,
    seed: int,
    folder: Path,
    *,
    rehearse: bool = True,
) -> list[str]:
    """Play rounds with one engine over one transport in an empty folder; return what failed.

    With `rehearse` it sees how long undisturbed requests take; else some seconds are taken for it.
    """
    service = Service.of(engine, transport, folder / "service", rehearse=rehearse)

    def play_round(number: int, place: Path, rng: random.Random) -> str:
        disturbance = Disturbance.draw(rng, service.start_s, service.work_s)
        try:
            return f"{disturbance}  {service.play(disturbance, place)}"
        except AssertionError as error:
            raise AssertionError(f"{disturbance}: {error}") from error

    return play_rounds(f"{engine} {transport}", num_rounds, seed, folder, play_round)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play all rounds, print what was found, and return 1 if anything failed."""
    options = parser(__doc__)
    options.add_argument("--engine", nargs="+", choices=sorted(APART), help="default: all here")
    options.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    given = options.parse_args(arguments)
    engines = given.engine or (sorted(APART) if find_spec("vllm") else ["disagg"])
    # What an engine says of a lost rank stands in the table.
    logging.getLogger("planish").setLevel(logging.CRITICAL)
    failures = []
    for engine, transport in product(engines, given.transport):
        with tempfile.TemporaryDirectory() as folder:
            failures += sweep(engine, transport, given.rounds, given.seed, Path(folder))
    print(f"seed {given.seed}, rounds with faults: {len(failures)}", *failures, sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
