"""A shard that is stopped at any commit ends with the rollouts of one that was not."""

import pytest

from planish import store
from planish.base.errors import EngineError
from planish.engines.transformers.engine import TransformersEngine
from planish.records import layout
from planish.records.io import read_manifest
from planish.stages.rollout.commits import Commits
from planish.store.file import temporary_name

WHOLE = {"commit_steps": 3, "max_rows": 8}
WINDOWS = {"commit_steps": 1, "window_tokens": 3, "dynamic_sampling": False, "max_rows": 8}


class Killed(BaseException):
    """Ends a stage where nothing can catch it, as a kill does."""


@pytest.fixture
def count_tokens(monkeypatch):
    """How many tokens each engine has sampled, in the order of their starts."""
    counts = []
    advance, load = TransformersEngine._advance, TransformersEngine._load

    def loading(self, *args):
        counts.append(0)
        return load(self, *args)

    def counting(self):
        counts[-1] += len(self._batch)
        return advance(self)

    monkeypatch.setattr(TransformersEngine, "_load", loading)
    monkeypatch.setattr(TransformersEngine, "_advance", counting)
    return counts


def kill_after(number):
    """Kill the stage when it has made so many commits, until the patch is undone."""
    write = Commits.write
    made = []

    def dying(self, *args, **options):
        write(self, *args, **options)
        made.append(1)
        if len(made) == number:
            raise Killed

    patch = pytest.MonkeyPatch()
    patch.setattr(Commits, "write", dying)
    return patch


def commits(run, shard=0):
    prefix = layout.commits(run.root, 1, shard) + "/"
    uris = [uri for uri in store.list_uris(prefix) if uri.endswith("/manifest.json")]
    return sorted({uri.removeprefix(prefix).partition("/")[0] for uri in uris})


@pytest.mark.slow
@pytest.mark.parametrize("changes", [WHOLE, WINDOWS], ids=["whole", "windows"])
def test_a_kill_after_any_commit_changes_no_digest(new_run, count_tokens, changes):
    digest = new_run(**changes).call()[0].manifest_sha256
    for number in range(1, 50):
        run = new_run(**changes)
        count_tokens.clear()
        patch = kill_after(number)
        try:
            run.call()
        except Killed:
            pass
        else:
            break
        finally:
            patch.undo()
        assert len(commits(run)) == number
        assert run.call()[0].manifest_sha256 == digest
        assert store.list_uris(layout.commits(run.root, 1, 0)) == []
        assert count_tokens[0] > 0
        if number == 1:
            whole = sum(count_tokens)
        # Nothing that was committed is sampled again.
        assert sum(count_tokens) == whole
    assert number > 2


def test_an_engine_that_fails_leaves_what_was_committed(new_run, monkeypatch, caplog):
    digest = new_run(**WHOLE).call()[0].manifest_sha256
    run = new_run(**WHOLE)
    advance = TransformersEngine._advance
    steps = []

    def failing(self):
        steps.append(1)
        if len(steps) == 8:
            raise EngineError("the device is gone")
        return advance(self)

    monkeypatch.setattr(TransformersEngine, "_advance", failing)
    with pytest.raises(SystemExit):
        run.call()
    assert commits(run) == ["000000", "000001"]
    assert run.call()[0].manifest_sha256 == digest


def killed_run(new_run, number=2):
    run = new_run(**WHOLE)
    patch = kill_after(number)
    with pytest.raises(Killed):
        run.call()
    patch.undo()
    return run


def test_commits_of_other_inputs_are_dropped(new_run, caplog):
    run = killed_run(new_run)
    other = new_run(**WHOLE)
    uri = layout.commits(run.root, 1, 0)
    parents = read_manifest(f"{uri}/000000").parents
    facts = {"seed": 3, "config_sha256": run.digest}
    assert Commits(uri, parents=parents, facts=facts).read().groups
    assert not Commits(uri, parents=parents, facts=facts | {"seed": 4}).read().groups
    assert commits(run) == []
    caplog.clear()
    assert run.call()[0].manifest_sha256 == other.call()[0].manifest_sha256
    assert "resumed" not in caplog.text


def test_a_damaged_commit_and_what_follows_it_are_sampled_again(new_run, caplog):
    digest = new_run(**WHOLE).call()[0].manifest_sha256
    run = killed_run(new_run, 3)
    place = layout.commits(run.root, 1, 0) + "/000001/shard-00000.parquet"
    data = bytearray(store.read(place))
    data[len(data) // 2] ^= 0xFF
    store.write(place, bytes(data))
    assert run.call()[0].manifest_sha256 == digest
    assert "damaged commit=1" in caplog.text
    assert "resumed commits=1" in caplog.text


def test_nothing_of_the_commits_is_left_beside_the_rollouts(new_run):
    run = killed_run(new_run)
    folder = store.local_path(layout.commits(run.root, 1, 0))
    # A kill while a commit is written leaves a file that no later commit is written beside.
    torn = folder / "000009" / temporary_name()
    torn.parent.mkdir()
    torn.write_bytes(b"half")
    run.call()
    assert not folder.parent.exists()


def test_zero_steps_commit_whole_shards_only(new_run, monkeypatch):
    run = new_run(commit_steps=0, max_rows=8)
    monkeypatch.setattr(Commits, "write", lambda *_, **__: pytest.fail("a commit"))
    assert run.call()[0].attributes["num_rows"] == 24


def test_leftovers_of_a_shard_that_is_done_are_deleted(new_run, monkeypatch):
    run = new_run(**WHOLE)
    clear = Commits.clear
    monkeypatch.setattr(Commits, "clear", lambda self: None)
    ref = run.call()[0]
    assert commits(run)
    monkeypatch.setattr(Commits, "clear", clear)
    assert run.call()[0] == ref
    assert run.log()["already_done"] is True
    assert commits(run) == []
