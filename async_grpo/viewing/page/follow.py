"""A run that goes on as a page that reloads its data, served to browsers of this machine alone.

consumes:     what the run appends to its dump, steps, metrics and alarms; requests of the page
produces:     the page, then the same header, columns and blocks that `build.py` writes into one
waits for:    requests: nothing is read between them
unblocked by: the page, which asks for the version every few seconds

Texts stay where they are: a block is read from the dump when it is asked for, with what ranks have
written of its tokens by then. Whoever knows the address may read the run, so it holds a secret.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

from async_grpo.telemetry.alarms import ALARMS_FILE
from async_grpo.telemetry.sample_dump import dump_files, held_out_file, steps_file
from async_grpo.util import deadlines
from async_grpo.util.errors import DataError
from async_grpo.util.run_folder import METRICS_FILE
from async_grpo.viewing.page.build import (
    BLOCK_BYTES,
    NOT_OURS,
    FindTokenizer,
    as_json,
    header_of,
    skeleton,
    step_of,
    steps_of,
)
from async_grpo.viewing.page.cells import Columns, Words, detail, key_of
from async_grpo.viewing.page.dump import Choice, Dump, Key, Tail, TrainedTokens, sample_of

logger = logging.getLogger(__name__)
HOST = "127.0.0.1"


class Followed:
    """The samples of a run so far. Threads of the server ask, one at a time."""

    def __init__(
        self, run: Path, *, max_samples: int, max_bytes: float, find_tokenizer: FindTokenizer
    ) -> None:
        """Of more samples or bytes of lines, half are left out, and again half of the rest."""
        self._run, self._max_samples, self._max_bytes = run, max_samples, max_bytes
        self._find_tokenizer = find_tokenizer
        self._lock = threading.Lock()
        self._choice = Choice()
        self._generation = self._changes = 0
        self._lines: list[tuple[BinaryIO, int, bool]] = []  # file, start, is held out
        self._words: Words | None = None
        self._state: tuple[object, ...] = ()  # of all that was read
        self._begin()

    def part(self, name: str) -> bytes | None:
        """`""` (the page), `version`, `header`, `columns-G-N`, `block-G-K`; None: there is none.

        G is the header's generation: when lines were taken back, all are read again as another.
        """
        kind, *numbers = name.split("-")
        with self._lock:
            if not kind:
                start, end = skeleton(self._dump.folder.absolute().name, connect="'self'")
                return (start + end).encode()
            if kind in ("version", "header") and not numbers:
                return self._version() if kind == "version" else self._header()
            if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
                return None
            generation, number = map(int, numbers)
            find = {"columns": self._numbers, "block": self._block}.get(kind)
            return find(number) if find and generation == self._generation else None

    def _begin(self) -> None:
        """Forget all: nothing was read, or the run has taken lines back."""
        self._generation += bool(self._lines)
        self._dump = Dump(self._run, may_be_empty=True)
        self._dump.close()  # its files are read by tails
        held_out = held_out_file(self._dump.path)
        self._tails = [
            (Tail(partial(dump_files, self._dump.path)), False),
            (Tail(partial(dump_files, held_out)), True),
        ]
        self._trained = TrainedTokens(self._dump, self._choice)
        self._columns, self._lines, self._starts = Columns(), [], list[int]()
        self._places: dict[Key, int] = {}  # {sample that was trained: its number}
        self._num_found, self._num_bytes, self._block_bytes = 0, 0, BLOCK_BYTES
        self._steps: list[dict[str, object]] = []

    def _version(self) -> bytes:
        """Read what was written since, and name the state."""
        if not self._lines or any(tail.is_replaced() for tail, _ in self._tails):
            self._begin()
        self._read_on()
        while self._columns.num_samples > self._max_samples or self._num_bytes > self._max_bytes:
            self._choice = Choice(self._choice.share / 2)
            self._begin()
            self._read_on()
        folder = self._dump.folder
        files = (steps_file(self._dump.path), folder / METRICS_FILE, folder / ALARMS_FILE)
        state = (self._generation, self._num_found, *map(_state_of, files))
        if state != self._state:
            self._state = state
            self._changes += 1
            self._place()
        return f"{self._generation}.{self._changes}".encode()

    def _read_on(self) -> None:
        for tail, is_held_out in self._tails:
            for file, start, raw in tail.lines():
                self._num_found += 1
                line = sample_of(raw, self._choice, is_held_out=is_held_out)
                if line is None:
                    continue
                try:
                    key = key_of(line)
                    self._columns.add(
                        line, {"step": step_of(line, self._dump.config)}, self._dump.config
                    )
                except NOT_OURS as error:
                    self._dump.broken(f"{type(error).__name__}: {error}")
                    continue
                if self._block_bytes >= BLOCK_BYTES:
                    self._starts.append(len(self._lines))
                    self._block_bytes = 0
                if not is_held_out:
                    self._places[key] = len(self._lines)
                self._lines.append((file, start, is_held_out))
                self._num_bytes += len(raw)
                self._block_bytes += len(raw)

    def _place(self) -> None:
        """Say of samples in which round of which step they were trained."""
        self._steps, places = steps_of(self._dump, self._choice)
        for key, place in places.items():
            if key in self._places:
                self._columns.place(self._places[key], place)

    def _header(self) -> bytes:
        header = header_of(
            self._dump, self._columns, steps=self._steps, num_found=self._num_found,
            blocks=self._starts,
        )  # fmt: skip
        own = {"generation": self._generation, "heads": self._columns.heads}
        return as_json(header | own)

    def _numbers(self, num_samples: int) -> bytes:
        """The columns of the first samples: those of a header, whatever came since."""
        return b"".join(each[:num_samples].tobytes() for each in self._columns.values.values())

    def _block(self, number: int) -> bytes | None:
        if number >= len(self._starts):
            return None
        self._trained.read_on()
        ends = [*self._starts, len(self._lines)]
        return as_json([self._detail(i) for i in range(ends[number], ends[number + 1])])

    def _detail(self, number: int) -> dict[str, object]:
        file, start, is_held_out = self._lines[number]
        file.seek(start)
        line = sample_of(file.readline(), Choice(), is_held_out=is_held_out) or {}
        if self._words is None and "output_token_ids" in line:
            model = str(self._dump.config.get("model_name_or_path", ""))
            self._words = Words(self._find_tokenizer(model))
        try:
            return detail(line, trained=partial(self._trained.of, key_of(line)), words=self._words)
        except NOT_OURS as error:
            return {"reason": f"its line cannot be shown: {error}", "spans": []}


def _state_of(file: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = file.stat()
        return found.st_ino, found.st_size
    return None


class PageServer(ThreadingHTTPServer):
    """Serves a followed run at `address`. Raises `OSError` where the port is taken."""

    daemon_threads = True

    def __init__(self, followed: Followed, *, port: int) -> None:
        """`port`: 0 for any that is free."""
        self.followed = followed
        self.secret = secrets.token_urlsafe(16)
        super().__init__((HOST, port), _PageRequest)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.secret}/"


class _PageRequest(BaseHTTPRequestHandler):
    """One request of a browser; what has no secret, or no such part, is not found."""

    server: PageServer
    timeout = deadlines.ANSWER_S

    def do_GET(self) -> None:
        _, secret, *names = f"{self.path}/".split("/")
        content, status = b"", HTTPStatus.NOT_FOUND
        if hmac.compare_digest(secret.encode(), self.server.secret.encode()) and len(names) == 2:
            try:
                if (found := self.server.followed.part(names[0])) is not None:
                    content, status = found, HTTPStatus.OK
            except (OSError, DataError) as error:
                content, status = str(error).encode(), HTTPStatus.SERVICE_UNAVAILABLE
        with suppress(ConnectionError):  # the reader has gone on
            self.send_response(status)
            is_page = status is HTTPStatus.OK and not names[0]
            self.send_header("Content-Type", "text/html" if is_page else "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            for name, value in SAFE.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


SAFE = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # which would tell the secret
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
