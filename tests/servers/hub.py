"""A small server that speaks the part of the hub's API that its own client uses to read."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """Serves `<folder>/{models,datasets}/<owner>/<name>/...`; with a token, only to who has it."""

    def __init__(self, folder: Path, *, token: str = ""):
        self.folder, self.token = folder, token
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                hub.requests.append(f"{self.command} {self.path}")
                status, headers, data = hub.reply(self.command, self.path, self.headers, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", headers.get("X-Length", str(len(data))))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_POST = answer

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reply(self, method, path, headers, body):
        """Return (status, headers, bytes)."""
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {}, b"{}"
        path = unquote(urlsplit(path).path)
        api = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(\S+))?", path)
        resolve = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        kind, name = (api[1], api[2]) if api else ("", "")
        if resolve:
            kind, name = ("datasets" if resolve[1] else "models"), resolve[2]
        folder = self.folder / kind / name
        if not kind or not folder.is_dir():
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision = resolve[3] if resolve else (api[3] or "").partition("/")[2].partition("/")[0]
        if revision not in ("", "main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if resolve:
            return self._file(folder / resolve[4], headers)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        what = (api[3] or "").partition("/")[0]
        if what in ("", "revision"):
            siblings = [
                {"rfilename": str(p.relative_to(folder)), "size": p.stat().st_size} for p in files
            ]
            facts = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
            return self._json({**facts, "gated": False, "tags": [], "downloads": 0, "likes": 0})
        entries = [
            {
                "type": "file",
                "path": str(p.relative_to(folder)),
                "size": p.stat().st_size,
                "oid": hashlib.sha1(p.read_bytes()).hexdigest(),
            }
            for p in files
        ]
        if what == "tree":
            return self._json(entries)
        if what == "paths-info":
            asked = (
                json.loads(body)["paths"]
                if body[:1] == b"{"
                else re.findall(r"paths=([^&]+)", unquote(body.decode()))
            )
            return self._json([entry for entry in entries if entry["path"] in asked])
        return 404, {}, b"{}"

    @staticmethod
    def _json(value):
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    @staticmethod
    def _file(path, headers):
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        data = path.read_bytes()
        facts = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range") or "")
        if not span:
            return 200, facts, data
        first, last = int(span[1]), int(span[2] or len(data) - 1)
        part = data[first : last + 1]
        end = first + len(part) - 1
        return 206, {**facts, "Content-Range": f"bytes {first}-{end}/{len(data)}"}, part
