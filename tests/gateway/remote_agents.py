"""An agent served over HTTP by the standard library, and what it asks the policy."""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chat(asked, text="2+3?", **more):
    """What an agent does: a request to the policy; its answer's text, or the refusal's code."""
    body = {"model": asked["model"], "messages": [{"role": "user", "content": text}], **more}
    headers = {"Authorization": f"Bearer {asked['api_key']}", "Content-Type": "application/json"}
    url = f"{asked['base_url']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["code"]


@contextlib.contextmanager
def served(act):
    """An agent; `act`: from what it is sent to its answer, or to (status, answer)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found = act(asked)
            if found is None:  # it dies
                self.connection.close()
                return
            status, reply = found if isinstance(found, tuple) else (200, found)
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"agent:http://127.0.0.1:{server.server_port}/run"
        server.shutdown()
