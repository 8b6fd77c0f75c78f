from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from planish.stages.report.webhook import post


@contextmanager
def server(status, headers=()):
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_):
            pass

    listener = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}/hook", seen
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def test_one_post_of_json_is_sent():
    with server(200) as (url, seen):
        assert post(url, {"state": "FAILED", "iterations": 3})
    assert seen == [("/hook", "application/json", {"state": "FAILED", "iterations": 3})]


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusal_is_a_warning(status, caplog):
    with server(status) as (url, seen):
        assert not post(url, {})
    assert len(seen) == 1
    assert "webhook not sent error=HTTPError" in caplog.text


def test_a_redirect_is_not_followed():
    with server(200) as (goal, reached), server(307, [("Location", goal)]) as (url, seen):
        assert not post(url, {})
    assert (len(seen), len(reached)) == (1, 0)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://host/x", "http://", "http://[bad", "no url", "https:///x"]
)
def test_other_addresses_are_refused(url, caplog):
    assert not post(url, {})
    assert "webhook not sent" in caplog.text


@pytest.mark.parametrize("url", ["s3cret:token", "ftp://s3cret/x", "https://[s3cret"])
def test_no_part_of_an_address_that_cannot_be_is_logged(url, caplog):
    assert not post(url, {})
    assert "s3cret" not in caplog.text


def test_an_empty_address_sends_nothing(caplog):
    assert not post("", {})
    assert caplog.text == ""


def test_the_address_with_its_secret_is_not_logged(caplog):
    caplog.set_level("INFO")
    with server(200) as (url, _):
        post(f"{url}?token=s3cret", {})
        post("http://127.0.0.1:1/s3cret", {})
    assert "s3cret" not in caplog.text
