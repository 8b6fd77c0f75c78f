"""A task of several iterations that failed for good is not begun again by the same run."""

import pytest

from planish.base.config import config_sha256
from planish.base.errors import (
    AccessRefused,
    ConfigError,
    PeerLost,
    RootInUse,
    SaveFailed,
    StoreUnavailable,
    VerifierFailure,
)
from planish.records import layout
from planish.run.stage import execute
from planish.stages.iterate import stage
from planish.store.documents import write_json

CONFIG = {"run": {"seed": 3}}
DIGEST = config_sha256(CONFIG)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "run-a")
    uri = tmp_path.as_uri()
    run = {"config": CONFIG, "config_sha256": DIGEST, "offset": 4, "num_shards": 2}
    write_json(layout.run_file(uri), run)
    return uri


def attempt(root, monkeypatch, end=None, part=None, number=1):
    """Run iterations 5 and 6; returns the exit code, and whether ranks were started.

    Args:
        end: what the ranks end with.
        part: stage, iteration and error of the part that fails before.
    """
    started = []

    def ranks(block, module):
        started.append(block.iteration)
        if part:
            name, iteration, error = part

            def work(context):
                raise error

            with pytest.raises(SystemExit):
                execute(
                    name, work, root=root, config_sha256=DIGEST, outputs={}, iteration=iteration
                )
        if end:
            raise end
        return '["policy", "state"]'

    monkeypatch.setattr(stage, "in_ranks", ranks)
    try:
        stage.run(root, DIGEST, number, 2, "policy", "")
    except SystemExit as left:
        return left.code, bool(started)
    return 0, bool(started)


FINAL = ConfigError("such a model can not be sharded")


@pytest.mark.parametrize(
    ("end", "part", "code"),
    [
        (FINAL, None, 2),
        (AccessRefused("no"), None, 2),
        # Another rank tells what became of it before the first one can.
        (SaveFailed("rank 0 is gone"), ("checkpoint", 5, FINAL), 2),
        (PeerLost("no answer"), ("reward", 6, VerifierFailure("all", is_final=True)), 2),
        (StoreUnavailable("busy"), ("train", 5, FINAL), 2),
        # What may pass is tried again.
        (SaveFailed("disk full"), None, 1),
        (PeerLost("no answer"), None, 75),
        (PeerLost("no answer"), ("reward", 5, VerifierFailure("slow")), 75),
        (RootInUse("somebody else"), None, 2),
    ],
)
def test_what_failed_for_good_ends_the_next_attempt_before_it_starts_ranks(
    root, monkeypatch, end, part, code
):
    assert attempt(root, monkeypatch, end, part) == (code, True)
    is_final = code == 2 and not isinstance(end, RootInUse)
    assert attempt(root, monkeypatch) == ((2, False) if is_final else (0, True))
    # Iterations behind it, and another submission, are not held back.
    assert attempt(root, monkeypatch, number=3) == (0, True)
    monkeypatch.setenv("RUN_ID", "run-b")
    assert attempt(root, monkeypatch) == (0, True)
