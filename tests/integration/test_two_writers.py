"""Two writers of one place on a real server: one is paused before each request, the other runs."""

import itertools
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from planish import store
from planish.base.errors import PlanishError
from planish.checkpoint import train_state
from planish.checkpoint.commit import catalog
from planish.checkpoint.commit.journal import new_attempt
from planish.checkpoint.convert import export_hf
from planish.checkpoint.ranks.control import Control
from planish.records import EvalReport, layout, write_files
from planish.records.files import fetch_files
from planish.records.reports import pin_best, read_best, read_report, write_report
from planish.run import lock
from planish.stages.rollout.commits import Commits
from tests.servers.http_proxy import HttpProxy, Rule
from tests.unit.stages.export.test_publish import build_root

pytestmark = pytest.mark.server
LOOKED = 6
"""Requests after which retention has read what it removes."""


def said(act, root):
    """Return what an action returns, or its error as text."""
    try:
        return act(root)
    except PlanishError as error:
        return f"error {type(error).__name__}: {error}"


def is_good(answer):
    return not str(answer).startswith("error ")


def save(root, number=0, step=3):
    state = {"model": {"w": torch.full((3,), float(number))}}
    uri = f"{root}/states/step-{step:08d}"
    ref = train_state.save(uri, state, parents={}, attributes={"step": step})
    return ref.manifest_sha256


def states(root):
    return store.open_store(f"{root}/states")


def whole(root):
    """Load every state below a root; return the value of each step."""
    opened, key = states(root)
    found = {}
    for entry in catalog.list_checkpoints(opened, key):
        held = {"model": {"w": torch.zeros(3)}}
        uri = opened.uri(entry.path)
        pin = f"{uri}#sha256={train_state.read_manifest(uri).sha256}"
        train_state.load(pin, held)
        found[entry.step] = held["model"]["w"][0].item()
    return found


def remove(root, number=0, step=3):
    opened, key = states(root)
    catalog.delete(opened, f"{key}/step-{step:08d}")


def retained(root):
    save(root, 0, 2)
    return save(root, 0, 3)


def leftovers(root):
    opened, key = states(root)
    for step in (3, 4):
        opened.put(f"{key}/step-{step:08d}/a-{new_attempt()}/data/x", b"x")
    return save(root)


def write_set(root, number=0, count=3):
    files = {f"f{n}": f"{number} {n}".encode() for n in range(count)}
    uri = f"{root}/set"
    return write_files(uri, "policy/1", files, parents={}, attributes={"n": number}).manifest_sha256


def export(root, number=0, count=3):
    """Export as the first and only of several ranks does."""
    uri = f"{root}/set"

    def write(plan):
        folder = Path(tempfile.mkdtemp())
        for name in plan:
            (folder / name).write_text(f"{number} {name}")
        return {name: folder / name for name in plan}, {}

    def publish(files, _checksums):
        return write_files(uri, "policy/1", files, parents={}, attributes={"n": number})

    plan = {f"f{n}": {} for n in range(count)}
    return export_hf._in_ranks(Control.single(), uri, plan, write, publish).manifest_sha256


def one_set(root, first, second, request):
    """What stands is whole and of the second, whom nobody disturbed."""
    assert is_good(second), second
    folder = fetch_files(f"{root}/set", sha256=first if request == 1 else second)
    assert len({path.read_text()[0] for path in folder.glob("f*")}) == 1
    assert not is_good(first) or request == 1


def newest(root, first, second, request):
    assert train_state.latest(root).manifest_sha256 in {first, second}
    assert is_good(second), second
    assert whole(root)[3] in {1.0, 2.0}


def second_stands(root, first, second, request, *, looked=1, step=3):
    assert is_good(second), second
    opened, key = states(root)
    catalog.gc(opened, key, grace_s=0.0)
    if request > looked:
        assert whole(root)[step] == 2.0
    else:
        whole(root)


def evaluate(root, version):
    """Evaluate one more policy, better than all, and pin the best."""
    report = read_report(EvalReport, f"{layout.evaluation(root, 4)}/report.json")
    facts = {"policy_version": version, "config_sha256": "c" * 64}
    files = {"config.json": b"{}"}
    ref = write_files(layout.policy(root, version), "policy/1", files, parents={}, attributes=facts)
    report.attributes["parents"]["policy"] = ref.manifest_sha256
    report.scalars["accuracy"] = 0.9
    write_report(f"{layout.evaluation(root, version)}/report.json", report)
    return pin_best(root, report).policy_version


def pin(root):
    report = read_report(EvalReport, f"{layout.evaluation(root, 4)}/report.json")
    return pin_best(root, report).policy_version


def best_is_12(root, first, second, request):
    assert second == 12
    assert read_best(root).policy_version == 12


def holder(name):
    return lock.Holder("cluster", run_id=name)


def hold(root, name="before"):
    return lock.acquire(root, holder(name), alive=lambda _: False).generation


def beat(root):
    return lock.beat(root, holder("before"))


def one_holds(root, first, second, request):
    held = lock.read_lock(root).holder.run_id
    assert sum(map(is_good, (first, second))) == 1 or request == 1
    assert held == ("second" if is_good(second) else "first") or request == 1


def second_holds(root, first, second, request):
    assert lock.read_lock(root).holder == holder("second")


def commits(root, seed):
    return Commits(f"{root}/commits", parents={}, facts={"seed": seed})


def commit(root, seed=0):
    made = commits(root, seed)
    made.read()
    made.write([], steps=7, most_rows=1)


def read_commits(root):
    return commits(root, 2).read().steps


def commit_stands(root, first, second, request):
    assert commits(root, 2).read().steps == 7


def collect(root):
    catalog.gc(*states(root), grace_s=0.0)


def removed(root):
    save(root)
    remove(root)


def keep_one(root):
    catalog.retain(*states(root), keep_last=1)


second_save = partial(save, number=2)
KINDS = {
    "states": (save, partial(save, number=1), second_save, newest),
    "a state that is removed": (save, remove, second_save, second_stands),
    "the place of a removed state": (removed, partial(save, number=1), second_save, newest),
    "retention": (retained, keep_one, partial(save, number=2, step=2),
                  partial(second_stands, looked=LOOKED, step=2)),
    "a collection": (leftovers, collect, second_save, second_stands),
    "a collection after a removal": (removed, collect, second_save, second_stands),
    "sets": (write_set, partial(write_set, number=1), partial(write_set, number=2), one_set),
    "a smaller set": (write_set, partial(write_set, number=1, count=2),
                      partial(write_set, number=2, count=4), one_set),
    "exports": (export, partial(export, number=1), partial(export, number=2), one_set),
    "a larger export": (export, partial(export, number=1, count=4),
                        partial(export, number=2, count=2), one_set),
    "the best policy": (build_root, pin, partial(evaluate, version=12), best_is_12),
    "a lock": (hold, partial(hold, name="first"), partial(hold, name="second"), one_holds),
    "a heartbeat": (hold, beat, partial(hold, name="second"), second_holds),
    "samples of a shard": (commit, read_commits, partial(commit, seed=2), commit_stands),
}  # fmt: skip
"""What is there before, what both do, and what holds when both have ended."""


@pytest.fixture(scope="module")
def other(minio_server):
    """A process of its own for the second writer, who speaks to the server directly."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in minio_server.environment.items():
            patch.setenv(name, value)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(said, str, "").result()
            yield lambda act, root: pool.submit(said, act, root).result()


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_paused_before_a_request_harms_nobody(kind, minio, s3_root, other, monkeypatch):
    before, first, second, holds = KINDS[kind]
    with HttpProxy(minio.endpoint) as proxy:
        for request in itertools.count(1):
            root = f"{s3_root}/{request}"
            other(before, root)
            answers = []
            act = partial(lambda root, answers: answers.append(other(second, root)), root, answers)
            pause = Rule("act", at=request, act=act)
            proxy.rules = [pause]
            monkeypatch.setenv("MINIO_ENDPOINT", proxy.endpoint)
            answer = said(first, root)
            monkeypatch.setenv("MINIO_ENDPOINT", minio.endpoint)
            if not answers:
                break
            seen = next(seen for seen in proxy.log if seen.rule is pause)
            told = f"{kind}, request {request}: {seen.kind} {seen.path}"
            try:
                holds(root, answer, answers[0], request)
            except (AssertionError, PlanishError) as error:
                error.add_note(f"{told}; first {answer}, second {answers[0]}")
                raise
    assert request > 2
