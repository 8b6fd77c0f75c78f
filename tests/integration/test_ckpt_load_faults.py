"""What goes wrong on one rank of a load is raised by all, soon, and leaves nothing behind."""

import dataclasses
import signal
import time

import pytest

from planish.checkpoint.format.items import Collected
from planish.checkpoint.loading.agree import LoadOptions
from planish.checkpoint.loading.load import load_state, open_on_all
from planish.checkpoint.loading.reader import open_state
from planish.store import open_store
from tests.integration.ckpt_forks import run_ranks
from tests.integration.test_ckpt_load import boxes_for, joined, raw_of, target, weights
from tests.integration.waiting import wait_for
from tests.stores.faulty import FaultyStore
from tests.unit.checkpoint import damage
from tests.unit.checkpoint.written import write_checkpoint

NAME = "tests.integration.test_ckpt_load_faults"


def scenario(rank, size, folder, cases):
    """Load with one rank at fault, case by case; returns what was raised and how long it took."""
    control = joined(range(size))
    return [one_load(rank, size, control, **case) for case in cases]


def one_load(rank, size, control, place, victim=-1, fault="", change="", timeout=60.0):
    items = [target(s, boxes_for("replicated", s, rank, size)) for s in weights()]
    options = {"timeout_s": timeout}
    storage, _ = open_store(place.partition("#")[0])

    def decide(number, kind, key):
        if kind != "get" or "/data/" not in key:
            return ""
        if fault == "hang":
            time.sleep(10 * timeout)
        return fault

    if rank == victim:
        storage = FaultyStore(storage, decide)
        if change == "shape":
            spec = dataclasses.replace(items[0].tensor, shape=(3, 3))
            items[0] = target(spec, boxes_for("replicated", spec, 0, 1))
        if change == "options":
            options["strict"] = False
    opened = open_on_all(place, control, storage=storage)
    began = time.monotonic()
    found = {"error": "", "text": "", "block": None, "modified": None, "ranks": []}
    try:
        load_state(opened, {"main": Collected(items)}, control, LoadOptions(**options))
    except Exception as error:
        found = {
            "error": type(error).__name__,
            "text": str(error),
            "block": getattr(error, "block", None),
            "modified": getattr(error, "target_modified", None),
            "ranks": sorted(error.per_rank),
        }
    found["seconds"] = time.monotonic() - began
    found["touched"] = any(bool(raw_of(item).any()) for item in items)
    return found


def write(folder):
    return write_checkpoint(f"file://{folder}/step-1", weights(), extra=False, num_ranks=2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return, by case, what each of three ranks reports."""
    folder = tmp_path_factory.mktemp("faults")
    whole, flipped, lacking = (write(folder / name) for name in ("whole", "flipped", "lacking"))
    damage.flip(flipped, open_state(flipped).metadata.files.keys[0], 3 << 20)
    damage.remove(lacking, open_state(lacking).metadata.files.keys[-1])
    cases = {
        "store": {"place": whole, "victim": 2, "fault": "fail"},
        "flipped": {"place": flipped},
        "shape": {"place": whole, "victim": 1, "change": "shape"},
        "options": {"place": whole, "victim": 1, "change": "options"},
        "lacking": {"place": lacking},
        "none": {"place": whole},
    }
    found = run_ranks(
        f"{NAME}:scenario", 3, folder / "ranks", timeout=300.0, cases=list(cases.values())
    )
    return {case: [one[n] for one in found] for n, case in enumerate(cases)}


@pytest.fixture
def place(tmp_path):
    return write(tmp_path)


@pytest.mark.parametrize(
    ("case", "error", "text", "ranks", "is_untouched"),
    [
        ("store", "StoreUnavailable", "rank 2: ", [2], False),
        ("flipped", "CheckpointCorrupt", "/00000-0.safetensors", None, False),
        ("shape", "ShapeMismatch", "got [700, 512] (on rank 1)", [1], True),
        ("options", "PlanMismatch", "the same arguments", None, True),
        ("lacking", "CheckpointIncomplete", "is missing", None, True),
        ("none", "", "", None, False),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_by_all(
    outcomes, case, error, text, ranks, is_untouched
):
    found = outcomes[case]
    assert {one["error"] for one in found} == {error}, found
    assert all(text in one["text"] for one in found), found
    assert all(one["modified"] or not one["touched"] or not error for one in found)
    assert max(one["seconds"] for one in found) < 45
    assert ranks is None or [one["ranks"] for one in found] == [ranks] * 3
    assert {one["block"] for one in found} == ({3} if case == "flipped" else {None})
    if is_untouched or not error:
        assert [one["touched"] for one in found] == [not error] * 3


@pytest.mark.slow
def test_a_rank_that_is_killed_is_missed_soon_by_all_others(forks, tmp_path, place):
    cases = [{"place": place, "victim": 1, "fault": "kill"}]
    ended = forks.start(f"{NAME}:scenario", 3, tmp_path, cases=cases).wait(240.0)
    assert ended[1].code == -signal.SIGKILL
    found = [ended[0].value[0], ended[2].value[0]]
    assert all(one["error"] in ("PlanMismatch", "PeerLost") for one in found), found
    assert all("rank 1" in one["text"] for one in found), found
    assert max(one["seconds"] for one in found) < 45


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_at_the_time_limit(forks, tmp_path, place):
    cases = [{"place": place, "victim": 2, "fault": "hang", "timeout": 8.0}]
    ranks = forks.start(f"{NAME}:scenario", 3, tmp_path, cases=cases)
    paths = [ranks.folder / f"result-{rank}.json" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() for path in paths), 240.0, "the end of two ranks")
    ranks.kill()
    found = [outcome.value[0] for outcome in ranks.wait()[:2]]
    assert all(one["error"] in ("PlanMismatch", "PeerLost") for one in found), found
    assert max(one["seconds"] for one in found) < 45
