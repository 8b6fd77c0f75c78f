"""A Kubeflow Pipelines API on loopback that writes down requests and answers with its models.

Each request body must fit the model that kfp's own client package has for it: unknown fields and
wrong types are answered by 400, as the real server does.
"""

import datetime
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import kfp_server_api

PREFIX = "/apis/v2beta1"
MODELS = {
    "runs": kfp_server_api.V2beta1Run,
    "recurringruns": kfp_server_api.V2beta1RecurringRun,
    "experiments": kfp_server_api.V2beta1Experiment,
    "pipelines": kfp_server_api.V2beta1Pipeline,
    "pipelines/upload_version": kfp_server_api.V2beta1PipelineVersion,
}
IDS = {
    "runs": "run_id",
    "recurringruns": "recurring_run_id",
    "experiments": "experiment_id",
    "pipelines": "pipeline_id",
    "pipelines/upload_version": "pipeline_version_id",
}


def check(value, kind):
    """Raise where JSON does not fit a type of kfp's generated client."""
    # A 64-bit integer is text in the models; the server reads it as a number too.
    scalars = {"str": (str, int), "int": int, "bool": bool, "float": float, "datetime": str}
    if kind in scalars:
        if not isinstance(value, scalars[kind]):
            raise TypeError(f"{value!r} is no {kind}")
    elif kind.startswith("list["):
        for item in value:
            check(item, kind[5:-1])
    elif kind.startswith("dict("):
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no {kind}")
    elif kind != "object":
        model = getattr(kfp_server_api, kind)
        known = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
        if not known:
            return
        for key, item in value.items():
            if key not in known:
                raise TypeError(f"{kind} has no field {key!r}")
            if item is not None:
                check(item, known[key])


class Server:
    """Starts on a free port; `requests` has (method, path, query, body), `headers` the last."""

    def __init__(self):
        self.requests = []
        self.headers = {}
        self.objects = {kind: {} for kind in MODELS}
        self.states = ["SUCCEEDED"]
        self.is_multi_user = False
        self.tokens = set()
        self.files = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                owner._get(self)

            def do_POST(self):
                owner._post(self)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def posted(self, kind):
        return [
            body
            for method, path, _, body in self.requests
            if method == "POST" and path == f"{PREFIX}/{kind}"
        ]

    def add_run(self, **facts):
        run = {"run_id": uuid.uuid4().hex, "created_at": "2026-01-01T00:00:00Z", **facts}
        self.objects["runs"][run["run_id"]] = run
        return run

    def _answer(self, handler, code, document):
        data = json.dumps(document).encode()
        handler.send_response(code)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _get(self, handler):
        url = urlparse(handler.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.requests.append(("GET", url.path, query, None))
        self.tokens.add(handler.headers.get("Authorization"))
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        # What the API server of Kubernetes hands on comes without its own part of the path.
        parts = url.path.rpartition("/proxy")[2].removeprefix(PREFIX).strip("/").split("/")
        if parts[0] == "healthz":
            return self._answer(handler, 200, {"multi_user": self.is_multi_user})
        found = self.objects.get(parts[0], {})
        name = parts[0]
        if parts[-1] == "versions":
            versions = self.objects["pipelines/upload_version"].items()
            found = {key: one for key, one in versions if one["pipeline_id"] == parts[1]}
            parts, name = parts[:1], "pipeline_versions"
        if len(parts) == 1:
            wanted = [
                predicate["stringValue"]
                for predicate in json.loads(query.get("filter", "{}")).get("predicates", [])
            ]
            items = [o for o in found.values() if not wanted or o["display_name"] in wanted]
            return self._answer(handler, 200, {name: items, "total_size": len(items)})
        if parts[1] not in found:
            return self._answer(handler, 404, {"error": "not found"})
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        document = {**found[parts[1]]}
        if parts[0] == "runs":
            document.setdefault("state", state)
        return self._answer(handler, 200, document)

    def _post(self, handler):
        length = int(handler.headers.get("Content-Length") or 0)
        data = handler.rfile.read(length) or b"{}"
        path, query = urlparse(handler.path).path, parse_qs(urlparse(handler.path).query)
        if path.endswith("/upload_version"):
            head, content = data.split(b"\r\n\r\n", 1)
            self.files.append(content[: content.rindex(b"\r\n--")].decode())
            assert b'name="uploadfile"' in head
            body = {"display_name": query["name"][0], "pipeline_id": query["pipelineid"][0]}
            body |= {"description": query["description"][0]}
        else:
            body = json.loads(data)
        self.requests.append(("POST", path, {}, body))
        kind = path.removeprefix(PREFIX).strip("/")
        if kind not in MODELS:
            return self._answer(handler, 200, {})
        try:
            check(body, MODELS[kind].__name__)
        except TypeError as error:
            return self._answer(handler, 400, {"error": str(error)})
        now = datetime.datetime.now(datetime.UTC).isoformat()
        document = {**body, IDS[kind]: uuid.uuid4().hex, "created_at": now}
        self.objects[kind][document[IDS[kind]]] = document
        return self._answer(handler, 200, document)
