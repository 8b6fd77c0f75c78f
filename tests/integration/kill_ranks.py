"""Kill or stop ranks at random moments while they serve requests and while a shard samples.

`python -m tests.integration.kill_ranks --rounds 20 --engine disagg vllm_disagg` prints a row for
each round, and for each engine its counts as JSON. Rounds alternate between the requests of an
engine and a shard of the rollout stage; `--seed` repeats the moments. What is hit is an attention
rank or an expert rank, by SIGKILL, or by SIGSTOP with a SIGCONT some seconds later, before or after
the others give it up.

Requests must give the tokens of the plain model, as many as they have. A shard must consume the
prompts of an undisturbed one, lose and double nothing, keep what it has committed, and end with
the same responses, number for number: tokens, log-probabilities, versions and ends. With
`vllm_disagg` it takes the likeliest token, whose log-probability is then 0, and keeps every group:
vLLM's noise begins anew when a response goes on, so that draws would differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from planish.base.errors import EngineError
from planish.engines import APART
from planish.engines.config import DEAD_S, EngineConfig
from planish.engines.disagg.engine import DisaggEngine
from planish.engines.requests import ModelRef, Output, Request
from planish.models.policy import Policy
from planish.records import layout
from planish.records.rollouts import FinishReason
from planish.store.processes import process_start
from tests.integration import kill_rollout, runs
from tests.integration.kill_rollout import RENDEZVOUS, Held, Round, Undisturbed, responses
from tests.processes import below, marked, marks, wait_until_none
from tests.unit.engines.disagg.instances import moe_policy
from tests.unit.engines.tiny import qwen3_policy, request, start
from tests.unit.stages.rollout.stage_run import easy_policy, write_template

NUM_ATTENTION = 2
NUM_EXPERT = 2
ROWS = 8
"""Requests that an engine serves at once; the others wait."""
NUM_REQUESTS = 12
NUM_TOKENS = {"disagg": 120, "vllm_disagg": 60}
"""Of each request."""
STAGE = {
    "prompts_per_iteration": 16,
    "generation_prompts_factor": 0.5,
    "max_generation_rounds": 0,
    "max_staleness": 1,
    "max_response_tokens": 160,
    "keep_routing": True,
}
GREEDY = {"top_k": 1, "dynamic_sampling": False}
"""Of a shard whose engine has a noise of its own; equal responses make no group that trains."""
SHORT_S, LONG_S = (0.5, DEAD_S / 3), (1.2 * DEAD_S, 1.6 * DEAD_S)
"""Seconds of a stop that nobody may notice, and of one after which a busy rank is given up."""
BOUND_S = DEAD_S + 60.0
"""From a signal to the last output of a request, however slow the machine."""
START_S = 600.0
"""Of a start that fails: ranks may take two minutes to be there, and two to connect."""


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


def engine_table(engine: str) -> dict[str, Any]:
    """Return the settings of an engine with all ranks."""
    own = {"micro_batches": 2} if engine == "disagg" else {"cache_bytes": 16 << 20}
    return {"name": engine, "attention_ranks": NUM_ATTENTION, "expert_ranks": NUM_EXPERT, **own}


@contextmanager
def own_place(folder: Path) -> Iterator[Path]:
    """Let this process and its children be found by a folder, and use one for temporary files."""
    scratch = folder / "tmp"
    kill_rollout.make_scratch(scratch)
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
    policy: Policy
    requests: list[Request]
    expected: dict[str, Output]
    start_s: float
    """From nothing to an engine that is ready."""
    work_s: float
    """From there to the last output."""

    @classmethod
    def of(cls, engine: str, folder: Path, *, rehearse: bool = True) -> Service:
        """Return one, after a run without any disturbance, which tells how long it takes."""
        if engine == "disagg":
            policy, sampling = moe_policy("Qwen3Moe"), {}
        else:  # vLLM knows no float64 on the CPU, and has a noise of its own
            sizes = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 32}
            policy, sampling = qwen3_policy(**sizes), {"temperature": 0.0}
        number = NUM_TOKENS[engine]
        requests = [request(row, number, **sampling) for row in range(NUM_REQUESTS)]
        expected = {output.request_id: output for output in start(policy).generate(requests)}
        service = cls(engine, policy, requests, expected, start_s=5.0, work_s=2.0)
        if not rehearse:
            return service
        found = service.play(Disturbance(1e6, False, "expert", 0, 0.0), folder / "undisturbed")
        assert found == f"all {NUM_REQUESTS} right", found
        return service

    def play(self, disturbance: Disturbance, folder: Path) -> str:
        """Serve all requests while a rank is hit; check each output, and return what was seen."""
        held = Held(kill_rollout.shared_memory())
        with own_place(folder) as scratch:
            wait = {"timeout_s": 240.0} if self.engine == "vllm_disagg" else {}
            config = EngineConfig(**engine_table(self.engine))
            engine = DisaggEngine(max_rows=ROWS, config=config, **wait)
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
            waited = time.monotonic() - (disturbance.landed or time.monotonic())
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


# A shard of the stage.


def stage_settings(engine: str) -> dict[str, Any]:
    """Return the settings of the stage for an engine."""
    return STAGE if engine == "disagg" else {**STAGE, **GREEDY}


def prepare_stage(engine: str, folder: Path) -> Undisturbed:
    """Make a shard, and what it gives when nothing happens."""
    policy = easy_policy(kill_rollout.SPACES, num_experts=4)
    if engine == "disagg":
        # Sums over other rows then round to the same float32 numbers in the records.
        policy.model.double()
    template = folder / "template"
    template.mkdir(parents=True)
    write_template(template, num_prompts=400, policy=policy)
    with (
        patch.dict(kill_rollout.ENGINE_TABLES, {engine: engine_table(engine)}),
        patch.dict(kill_rollout.SETTINGS, {"ranks": stage_settings(engine)}),
        patch.dict(kill_rollout.WHOLE, STAGE),
    ):
        return kill_rollout.prepare(template, folder / "stage", engine, "ranks", 12)


def play_stage(ready: Undisturbed, disturbance: Disturbance, folder: Path, engine: str) -> str:
    """Let a shard sample while a rank is hit, and again if it fails; check what it wrote."""
    folder.mkdir()
    one = Round(ready.shard.copied(folder))
    since = "" if disturbance.is_early else "started engine="
    code, seen = one.attempt(disturbance.moment, strike=disturbance, since=since), "goes on"
    if code is None:
        assert not disturbance.is_short, (
            f"a stop of {disturbance.rest} s fails the stage {one.shard.log()}"
        )
        code = one.attempt()
        resumed = one.resumed()
        seen = f"fails, the retry reads {sum(tokens for _, tokens in resumed)} tokens and ends"
    assert code == 0, f"exit code {code}: {one.shard.log()[-3000:]}"
    with patch.dict(kill_rollout.WHOLE, STAGE):
        one.check_end(ready.done)
    sets, prompts = [], []
    for shard in (one.shard, ready.done):
        rollouts, facts = shard.read(layout.rollouts(shard.root, shard.number, 0))
        sets.append(responses(rollouts))
        tokens = [rollouts.prompt_tokens.row(n).tolist() for n in range(rollouts.num_groups)]
        prompts.append((facts["consumed"], tokens))
        routing = [rollouts.routing_of(row) for row in range(rollouts.num_rows)]
        assert all((known[:-1] >= 0).all() for known in routing), "experts of tokens are missing"
    assert prompts[0] == prompts[1], "other prompts than undisturbed"
    found, wanted = sets
    assert found.keys() == wanted.keys(), "other responses than undisturbed"
    for key, response in wanted.items():
        same = response.begins(found[key]) and found[key].begins(response)
        assert same, f"{key} is not as undisturbed"
    is_equal = runs.digests(one.shard.root) == ready.digests
    # Requests that were asked again leave their steps in the metrics of the manifest.
    may_differ = engine != "disagg" or "failed request=" in one.shard.log()
    assert is_equal or may_differ, "digests differ"
    return seen + (", equal digests" if is_equal else ", equal records")


def sweep(
    engine: str,
    num_rounds: int,
    seed: int,
    folder: Path,
    *,
    parts: Sequence[str] = ("requests", "stage"),
    rehearse: bool = True,
) -> dict[str, Any]:
    """Play rounds with one engine; return the counts and what failed.

    Args:
        engine: `disagg` or `vllm_disagg`.
        num_rounds: parts take turns.
        seed: of the disturbances.
        folder: empty or absent.
        parts: what the ranks do meanwhile.
        rehearse: see how long undisturbed requests take; else some seconds are taken for it.
    """
    began = time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    service = ready = None
    if "requests" in parts:
        service = Service.of(engine, folder / "service", rehearse=rehearse)
    if "stage" in parts:
        ready = prepare_stage(engine, folder)
    for number in range(num_rounds):
        part = parts[number % len(parts)]
        rng = random.Random(f"{seed} {engine} {number}")
        place = folder / f"round-{number}"
        try:
            if part == "requests":
                disturbance = Disturbance.draw(rng, service.start_s, service.work_s)
                seen = service.play(disturbance, place)
            else:
                start_s = ready.seconds - ready.sample_seconds
                disturbance = Disturbance.draw(rng, start_s, ready.sample_seconds)
                seen = play_stage(ready, disturbance, place, engine)
        except AssertionError as error:
            seen = f"WRONG: {error}"
            failures.append(f"round {number} {disturbance}: {error}")
        counts[f"{part}: {'not hit' if not disturbance.landed else disturbance.role}"] += 1
        counts[f"{part}: {'; '.join(word for word in OUTCOMES if word in seen)}"] += 1
        shutil.rmtree(place, ignore_errors=True)
        seconds = time.monotonic() - began
        print(
            f"{seconds:6.0f} s  {engine}  {number:3}  {part:8}  {disturbance}  {seen}", flush=True
        )
    return {
        "engine": engine,
        "seed": seed,
        "rounds": num_rounds,
        "failed": len(failures),
        "seconds": round(time.monotonic() - began),
        "counts": dict(sorted(counts.items())),
        "failures": failures,
    }


OUTCOMES = (
    *("WRONG", "start fails", "engine failed", "then all right", f"all {NUM_REQUESTS} right"),
    *("goes on", "retry", "equal digests", "equal records"),
)
"""Words of what was seen that are counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play all rounds, print what was found, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="for each engine")
    parser.add_argument(
        "--engine", nargs="+", choices=sorted(APART), help="default: all that are here"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args(arguments)
    has_vllm = find_spec("vllm") is not None
    engines = given.engine or (sorted(APART) if has_vllm else ["disagg"])
    if "vllm_disagg" in engines and not has_vllm:
        parser.exit(
            2,
            "vLLM must be installed here for 'vllm_disagg'; `make engines` sets up .venv-engines "
            "with it\n",
        )
    # What an engine says of a lost rank stands in the table.
    logging.getLogger("planish").setLevel(logging.CRITICAL)
    failed = 0
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            told = sweep(engine, given.rounds, given.seed, Path(folder))
        print(json.dumps(told, indent=1), flush=True)
        failed += told["failed"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
