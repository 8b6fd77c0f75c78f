"""Answers of a model hub, given by a server on this machine."""

import pytest

from planish.base.errors import ConfigError
from planish.models.pretrained import find_folder
from tests.servers.scripted_http import Reply, ScriptedServer


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that answers every request with its `answer`."""
    from huggingface_hub import constants

    server = ScriptedServer(lambda _: Reply(404))
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (404, "RepoNotFound", "there is no such model, or it is private"),
        (401, "", "it answered with HTTP status 401: log in"),
        (404, "RevisionNotFound", "the revision 'v9' does not exist there"),
        (403, "GatedRepo", "accept its licence on the hub"),
        (400, "", "the hub can not be reached or failed, and the cache has no copy"),
    ],
)
def test_each_refusal_of_the_hub_has_its_own_remedy(hub, status, code, remedy):
    hub.answer = lambda _: Reply(status, headers={"X-Error-Code": code} if code else {})
    with pytest.raises(ConfigError, match="must be a model that the hub gives") as caught:
        find_folder("someone/model", revision="v9")
    assert "'someone/model'" in str(caught.value)
    assert remedy in str(caught.value)


def test_name_that_only_looks_like_a_hub_id_is_refused(hub):
    with pytest.raises(ConfigError, match="not a hub id"):
        find_folder("some--one/model")
