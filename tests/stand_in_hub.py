"""A model hub of one folder on this machine, as far as snapshot_download asks one."""

import contextlib
import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub:
    """`models` maps names to folders; `downloads` counts each file that was sent."""

    def __init__(self, models, *, gated=()):
        self.models = {name: Path(folder) for name, folder in models.items()}
        self.gated = set(gated)
        self.downloads = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def find(self, path):
        """(status, headers, body) of a request."""
        model = next((name for name in self.models if f"/{name}/" in path), None)
        if model is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        question, *rest = path.partition(f"/{model}/")[2].partition("?")[0].split("/", 2)
        if question != "tree" and rest[0] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = {
            str(file.relative_to(self.models[model])): file.read_bytes()
            for file in sorted(self.models[model].rglob("*"))
            if file.is_file()
        }
        if question == "revision":
            return 200, {}, json.dumps({"id": model, "sha": COMMIT}).encode()
        if question == "tree":
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
            return 200, {}, json.dumps(listed).encode()
        if model in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        data = files[rest[1]]
        return 200, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT}, data


def _etag(data):
    return hashlib.sha1(data).hexdigest()


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self._answer(with_body=False)

        def do_GET(self):
            self._answer(with_body=True)

        def _answer(self, *, with_body):
            status, headers, body = hub.find(self.path)
            if with_body and "/resolve/" in self.path and status == 200:
                hub.downloads[self.path.rpartition("/")[2]] += 1
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                with contextlib.suppress(BrokenPipeError):
                    self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler
