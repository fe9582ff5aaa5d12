"""A page in headless Chromium, driven through its debugging protocol."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

import aiohttp

PROGRAM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--remote-debugging-port=0", "--window-size=1400,900", "about:blank",
)  # fmt: skip
START_S, READY_S = 60.0, 60.0


class Tab:
    """Open on one page; what it asked of the network, and what went wrong, is remembered."""

    def __init__(self, socket):
        self._socket = socket
        self._number = 0
        self.requests, self.problems, self.ready_s = [], [], 0.0

    async def open(self, url):
        """Return once the page says that it is ready."""
        for room in ("Runtime", "Network", "Page"):
            await self._call(f"{room}.enable")
        started = time.monotonic()
        await self._call("Page.navigate", url=url)
        while await self.run("return document.documentElement?.dataset.state") != "ready":
            assert time.monotonic() - started < READY_S, self.problems
            await asyncio.sleep(0.02)
        self.ready_s = time.monotonic() - started

    async def run(self, body):
        """What an asynchronous function of this body returns in the page."""
        answer = await self._call(
            "Runtime.evaluate",
            expression=f"(async () => {{{body}}})()", awaitPromise=True, returnByValue=True,
        )  # fmt: skip
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def press(self, key):
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            await self._call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def _call(self, method, **parameters):
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == self._number:
                return message["result"]
            self._hear(message["method"], message["params"])

    def _hear(self, method, told):
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
            self.problems.append(told)


def visit(path, scene):
    """What `scene(tab)` returns, with the page at `path` open from its file, or at an address."""
    url = path if str(path).startswith("http:") else f"file://{path}"

    async def story():
        with browser() as port:
            async with aiohttp.ClientSession() as session:
                tabs = await (await session.get(f"http://127.0.0.1:{port}/json")).json()
                address = next(tab for tab in tabs if tab["type"] == "page")
                socket = session.ws_connect(address["webSocketDebuggerUrl"], max_msg_size=0)
                async with socket as connected:
                    tab = Tab(connected)
                    await tab.open(url)
                    return await scene(tab)

    return asyncio.run(story())


@contextlib.contextmanager
def browser():
    """The port of a new browser, which is ended with all of its processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [PROGRAM, f"--user-data-dir={profile}", *FLAGS],
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            for line in process.stderr:
                if found := re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line):
                    break
            yield found[1]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(START_S)
