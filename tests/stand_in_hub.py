"""A model hub on this machine, as far as snapshot_download and create_commit ask one."""

import base64
import contextlib
import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub:
    """`models` maps names to folders; `downloads` counts each file that was sent.

    `pushed` has the files of each name that was pushed, `private` the names that not all may see,
    `commits` counts. `broken` is the status of every answer to a push; while `silent` is set there
    is none.
    """

    def __init__(self, models, *, gated=()):
        self.pushed, self.private, self.commits, self._objects = {}, set(), Counter(), {}
        self.broken, self.silent, self.tokens = 0, threading.Event(), set()
        self._spoken = threading.Event()  # at the end, nobody is kept waiting
        self.models = {name: Path(folder) for name, folder in models.items()}
        self.gated = set(gated)
        self.downloads = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._spoken.set()
        self._server.shutdown()
        self._server.server_close()

    def find(self, path):
        """(status, headers, body) of a request."""
        if (name := path.removeprefix("/api/models/")) in self.pushed:
            files = [{"rfilename": file} for file in self.pushed[name]]
            known = {"id": name, "sha": COMMIT, "private": name in self.private, "siblings": files}
            return 200, {}, json.dumps(known).encode()
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

    def take(self, path, body, token):
        """(status, answer) of what is sent on the way to a commit."""
        if not path.startswith("/lfs/"):  # of a storage that has its own signed addresses
            self.tokens.add(token)
        if self.silent.is_set():
            self._spoken.wait()
        if self.broken:
            return self.broken, {"error": "the stand-in is broken"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or 'me'}/{asked['name']}"
            is_new = name not in self.pushed
            self.pushed.setdefault(name, {})
            if is_new and asked.get("visibility") == "private":
                self.private.add(name)
            return 200 if is_new else 409, {"url": f"{self.endpoint}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            asked = [each["path"] for each in json.loads(body)["files"]]
            modes = {True: "lfs", False: "regular"}
            return 200, {"files": [
                {"path": each, "uploadMode": modes[each.endswith("s")], "shouldIgnore": False}
                for each in asked
            ]}  # fmt: skip
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [
                each | {"actions": {"upload": {"href": f"{self.endpoint}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]}  # fmt: skip
        if path.startswith("/lfs/"):
            self._objects[path.removeprefix("/lfs/")] = body
            return 200, {}
        name = path.removeprefix("/api/models/").removesuffix("/commit/main")
        self._commit(name, [json.loads(line) for line in body.splitlines()])
        return 200, {"commitUrl": f"{self.endpoint}/{name}/commit/{COMMIT}", "commitOid": COMMIT}

    def _commit(self, name, lines):
        files = dict(self.pushed[name])
        for each in lines:
            value = each["value"]
            if each["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif each["key"] == "lfsFile":
                files[value["path"]] = self._objects[value["oid"]]
            elif each["key"] == "deletedFile":
                del files[value["path"]]
        self.pushed[name] = files
        self.commits[name] += 1


def _etag(data):
    return hashlib.sha1(data).hexdigest()


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self._answer(with_body=False)

        def do_GET(self):
            self._answer(with_body=True)

        def do_POST(self):
            size = self.headers.get("Content-Length")
            body = self.rfile.read(int(size)) if size else b"".join(self._chunks())
            path = self.path.partition("?")[0]
            status, answer = hub.take(path, body, self.headers.get("Authorization"))
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(data)

        do_PUT = do_POST

        def _chunks(self):
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

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
