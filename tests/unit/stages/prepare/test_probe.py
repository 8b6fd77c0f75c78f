"""What a store must do for a run, tried before anything is written for good."""

import pytest

from planish import store
from planish.base.errors import EXIT_CONFIG, AccessRefused, ConfigError, exit_code
from planish.stages.prepare import probe
from planish.stages.prepare.probe import probe_store


def test_a_good_store_passes_and_nothing_stays(store_root):
    probe_store(store_root)
    assert store.list_uris(store_root) == []


@pytest.mark.server
@pytest.mark.parametrize("action", ["PutObject", "ListBucket", "GetObject", "DeleteObject"])
def test_what_the_store_forbids_is_told_with_the_action(minio, s3_root, monkeypatch, action):
    for name, value in minio.user_without(action).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AccessRefused, match=f"must be allowed `s3:{action}`") as raised:
        probe_store(s3_root)
    assert exit_code(raised.value) == EXIT_CONFIG


class Careless:
    """A store that leaves out one of the things that are asked of it."""

    def __init__(self, inner, fault):
        self.inner, self.fault = inner, fault

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def put(self, key, data, **conditions):
        kept = {name: value for name, value in conditions.items() if name != self.fault}
        return self.inner.put(key, data, **kept)

    def folder(self, key):
        found = self.inner.folder(key)
        return found._replace(objects=[]) if self.fault == "list" else found

    def read(self, key):
        return b"1" if self.fault == "stale" else self.inner.read(key)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("if_none_match", "condition `If-None-Match`"),
        ("if_match", "condition `If-Match`"),
        ("list", "must list and give what was written"),
        ("stale", "must list and give what was written"),
    ],
)
def test_a_store_that_does_less_is_refused(tmp_path, monkeypatch, fault, words):
    def open_careless(uri):
        inner, key = store.open_store(uri)
        return Careless(inner, fault), key

    monkeypatch.setattr(probe, "open_store", open_careless)
    with pytest.raises(ConfigError, match=words) as raised:
        probe_store(f"file://{tmp_path}/run")
    assert exit_code(raised.value) == EXIT_CONFIG
    assert store.list_uris(f"file://{tmp_path}/run") == []
