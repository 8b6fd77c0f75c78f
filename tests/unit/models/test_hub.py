"""Answers of a model hub, given by a server on this machine."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from planish.base.errors import ConfigError
from planish.models.pretrained import find_folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that answers every request with the status and error code in `answer`."""
    answer = {"status": 404, "code": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answer["status"])
            if answer["code"]:
                self.send_header("X-Error-Code", answer["code"])
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield answer
    server.shutdown()
    server.server_close()
    thread.join()


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
    hub.update(status=status, code=code)
    with pytest.raises(ConfigError, match="must be a model that the hub gives") as caught:
        find_folder("someone/model", revision="v9")
    assert "'someone/model'" in str(caught.value)
    assert remedy in str(caught.value)


def test_name_that_only_looks_like_a_hub_id_is_refused(hub):
    with pytest.raises(ConfigError, match="not a hub id"):
        find_folder("some--one/model")
