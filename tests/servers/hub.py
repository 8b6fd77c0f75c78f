"""A small server that speaks the part of the hub's API that its own client uses.

Uploads go by the LFS protocol, so clients must run with `HF_HUB_DISABLE_XET=1`.
"""

import base64
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
        self.visibility: dict[str, str] = {}
        """Of repositories that were made here, by name."""
        self.commits: list[str] = []
        """Name of the repository of each commit."""
        self.refused: dict[str, int] = {}
        """Part of a path to the status that requests for it get."""
        self._blobs: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                while self.headers.get("Transfer-Encoding") == "chunked":
                    size = int(self.rfile.readline(), 16)
                    body += self.rfile.read(size)
                    self.rfile.readline()
                    if not size:
                        break
                hub.requests.append(f"{self.command} {self.path}")
                status, headers, data = hub.reply(self.command, self.path, self.headers, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", headers.get("X-Length", str(len(data))))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_POST = do_PUT = answer

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
        # Large files go to an address that is signed, as with the real one.
        if (
            method != "PUT"
            and self.token
            and headers.get("Authorization") != f"Bearer {self.token}"
        ):
            return 401, {}, b"{}"
        path = unquote(urlsplit(path).path)
        for part, status in self.refused.items():
            if part in path:
                return status, {}, b"{}"
        if written := self._write(method, path, body):
            return written
        api = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(\S+))?", path)
        resolve = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        kind, name = (api[1], api[2]) if api else ("", "")
        if resolve:
            kind, name = ("datasets" if resolve[1] else "models"), resolve[2]
        folder = self.folder / kind / name
        if not kind or not folder.is_dir():
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision = resolve[3] if resolve else (api[3] or "").partition("/")[2].partition("/")[0]
        if revision not in ("", "main", self.head(name)):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if resolve:
            return self._file(folder / resolve[4], headers, self.head(name))
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        what = (api[3] or "").partition("/")[0]
        if what in ("", "revision"):
            siblings = [
                {"rfilename": str(p.relative_to(folder)), "size": p.stat().st_size} for p in files
            ]
            facts = {"id": name, "sha": self.head(name), "siblings": siblings, "private": False}
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

    def head(self, name):
        """Return the commit that the branch `main` of a repository points to."""
        count = self.commits.count(name)
        return f"{count:040x}" if count else COMMIT

    def _write(self, method, path, body):
        """Answer a request of an upload; None for any other."""
        if method == "PUT":
            self._blobs[hashlib.sha256(body).hexdigest()] = body
            return self._json({})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            (self.folder / "models" / name).mkdir(parents=True)
            (self.folder / "models" / name / ".gitattributes").write_text("")
            self.visibility[name] = asked.get("visibility")
            return self._json({"url": f"{self.url}/{name}"})
        if batch := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [
                {**found, "actions": {"upload": {"href": f"{self.url}/lfs/{found['oid']}"}}}
                for found in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects, "for": batch[1]})
        upload = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if upload is None:
            return None
        folder = self.folder / "models" / upload[1]
        if upload[2] == "preupload":
            return self._json({"files": [self._mode(folder, f) for f in json.loads(body)["files"]]})
        lines = [json.loads(line) for line in body.splitlines()]
        if lines[0]["value"].get("parentCommit") != self.head(upload[1]):
            return 412, {}, b"{}"
        for line in lines[1:]:
            value = line["value"]
            is_large = line["key"] == "lfsFile"
            content = self._blobs[value["oid"]] if is_large else base64.b64decode(value["content"])
            (folder / value["path"]).write_bytes(content)
        self.commits.append(upload[1])
        url = f"{self.url}/{upload[1]}/commit/{self.head(upload[1])}"
        return self._json({"commitUrl": url, "commitOid": self.head(upload[1])})

    @staticmethod
    def _mode(folder, asked):
        """Return how a file is to be uploaded, and what the repository has of it."""
        path, is_large = folder / asked["path"], asked["path"].endswith(".safetensors")
        facts = {"path": asked["path"], "shouldIgnore": False}
        facts["uploadMode"] = "lfs" if is_large else "regular"
        if path.is_file():
            data = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            facts["oid"] = hashlib.sha256(data).hexdigest() if is_large else blob
        return facts

    @staticmethod
    def _file(path, headers, commit):
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        data = path.read_bytes()
        facts = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range") or "")
        if not span:
            return 200, facts, data
        first, last = int(span[1]), int(span[2] or len(data) - 1)
        part = data[first : last + 1]
        end = first + len(part) - 1
        return 206, {**facts, "Content-Range": f"bytes {first}-{end}/{len(data)}"}, part
