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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

from async_grpo.telemetry.alarms import ALARMS_FILE
from async_grpo.telemetry.sample_dump import dump_files, held_out_file, steps_file
from async_grpo.util import deadlines
from async_grpo.util.errors import DataError
from async_grpo.util.run_folder import METRICS_FILE
from async_grpo.viewing.page import build
from async_grpo.viewing.page.cells import Columns, Words, detail, key_of
from async_grpo.viewing.page.dump import Choice, Dump, Key, Line, Tail, TrainedTokens, sample_of

BESIDE = (METRICS_FILE, ALARMS_FILE)
HOST, FOUND, NOT_FOUND, NOT_NOW = "127.0.0.1", 200, 404, 503
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}  # it is a secret


class Followed:
    """The samples of a run so far. Threads of the server ask, one at a time."""

    def __init__(
        self, run: Path, *, max_samples: int, max_bytes: float, find_tokenizer: build.FindTokenizer
    ) -> None:
        """Of more samples or bytes of lines, half are left out, and again half of the rest."""
        self._run, self._max_samples, self._max_bytes = run, max_samples, max_bytes
        self._find_tokenizer = find_tokenizer
        self._words: Words | None = None
        self._lock, self._choice = threading.Lock(), Choice()
        self._generation = self._changes = 0
        self._state: tuple[object, ...] = ()  # of all that was read
        self._lines: list[tuple[BinaryIO, int, bool]] = []  # file, start, is held out
        self._begin()

    def part(self, name: str) -> bytes | None:
        """`""` (the page), `version`, `header`, `columns-G-N`, `block-G-K`; None: there is none.

        G is the header's generation: when lines were taken back, all are read again as another.
        """
        kind, *numbers = name.split("-")
        with self._lock:
            find = {"version": self._version, "header": self._header}.get(kind)
            if not name:
                return "".join(build.skeleton(self._dump.name, connect="'self'")).encode()
            if find and not numbers:
                return find()
            numbered = {"columns": self._numbers, "block": self._block}.get(kind)
            if not numbered or len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
                return None
            generation, number = map(int, numbers)
            return numbered(number) if generation == self._generation else None

    def _begin(self) -> None:
        """Forget all: nothing was read, or the run has taken lines back."""
        self._generation += bool(self._lines)
        self._dump = Dump(self._run, may_be_empty=True)
        self._dump.close()  # its files are read by tails
        paths = self._dump.path, held_out_file(self._dump.path)
        self._tails = [Tail(partial(dump_files, path)) for path in paths]
        self._trained = TrainedTokens(self._dump, self._choice)
        self._columns, self._lines, self._starts = Columns(), [], list[int]()
        self._places: dict[Key, int] = {}  # {sample that was trained: its number}
        self._num_found, self._num_bytes, self._block_bytes = 0, 0, build.BLOCK_BYTES
        self._steps: list[Line] = []

    def _version(self) -> bytes:
        """Read what was written since, and name the state."""
        if not self._lines or any(tail.is_replaced() for tail in self._tails):
            self._begin()
        self._read_on()
        while self._columns.num_samples > self._max_samples or self._num_bytes > self._max_bytes:
            self._choice = Choice(self._choice.share / 2)
            self._begin()
            self._read_on()
        files = (steps_file(self._dump.path), *map(self._dump.folder.joinpath, BESIDE))
        sizes = (file.stat().st_size if file.exists() else 0 for file in files)
        if (state := (self._generation, self._num_found, *sizes)) != self._state:
            self._state, self._changes = state, self._changes + 1
            self._steps, places = build.steps_of(self._dump, self._choice)
            for key in places.keys() & self._places.keys():
                for name, value in places[key].items():
                    self._columns.values[name][self._places[key]] = value
        return f"{self._generation}.{self._changes}".encode()

    def _read_on(self) -> None:
        for is_held_out, tail in enumerate(self._tails):
            for file, start, raw in tail.lines():
                self._num_found += 1
                line = sample_of(raw, self._choice, is_held_out=bool(is_held_out))
                if line is not None and self._add(line):
                    self._lines.append((file, start, bool(is_held_out)))
                    self._num_bytes += len(raw)
                    self._block_bytes += len(raw)

    def _add(self, line: Line) -> bool:
        """Whether it is a sample."""
        try:
            key, step = key_of(line), build.step_of(line, self._dump.config)
            self._columns.add(line, {"step": step}, self._dump.config)
        except build.NOT_OURS as error:
            self._dump.broken(f"{type(error).__name__}: {error}")
            return False
        if self._block_bytes >= build.BLOCK_BYTES:
            self._starts.append(len(self._lines))
            self._block_bytes = 0
        if "set" not in line:
            self._places[key] = len(self._lines)
        return True

    def _header(self) -> bytes:
        told = self._dump, self._columns, self._steps, self._num_found, self._starts
        own = {"generation": self._generation, "heads": self._columns.heads}
        return build.as_json(build.header_of(*told) | own)

    def _numbers(self, num_samples: int) -> bytes:
        """The columns of the first samples: those of a header, whatever came since."""
        return b"".join(each[:num_samples].tobytes() for each in self._columns.values.values())

    def _block(self, number: int) -> bytes | None:
        if number >= len(self._starts):
            return None
        self._trained.read_on()
        ends = [*self._starts, len(self._lines)]
        return build.as_json([self._detail(i) for i in range(ends[number], ends[number + 1])])

    def _detail(self, number: int) -> Line:
        file, start, is_held_out = self._lines[number]
        file.seek(start)
        line = sample_of(file.readline(), Choice(), is_held_out=is_held_out) or {}
        if self._words is None and "output_token_ids" in line:
            model = str(self._dump.config.get("model_name_or_path", ""))
            self._words = Words(self._find_tokenizer(model))
        try:
            return detail(line, trained=partial(self._trained.of, key_of(line)), words=self._words)
        except build.NOT_OURS as error:
            return {"reason": f"its line cannot be shown: {error}", "spans": []}


class PageServer(ThreadingHTTPServer):
    """Serves a followed run at `address`. Raises `OSError` where the port is taken."""

    daemon_threads = True

    def __init__(self, followed: Followed, *, port: int) -> None:
        """`port`: 0 for any that is free."""
        self.followed, self.secret = followed, secrets.token_urlsafe(16)
        super().__init__((HOST, port), _PageRequest)
        self.address = f"http://{HOST}:{self.server_port}/{self.secret}/"

    def answer(self, path: str) -> tuple[int, bytes]:
        """Status and content; what has no secret, or no such part, is not found."""
        _, secret, *names = path.split("/")
        if not hmac.compare_digest(secret.encode(), self.secret.encode()) or len(names) != 1:
            return NOT_FOUND, b""
        try:
            content = self.followed.part(names[0])
        except (OSError, DataError) as error:
            return NOT_NOW, str(error).encode()
        return (NOT_FOUND, b"") if content is None else (FOUND, content)


class _PageRequest(BaseHTTPRequestHandler):
    server: PageServer
    timeout = deadlines.ANSWER_S

    def do_GET(self) -> None:
        status, content = self.server.answer(self.path)
        kind = "text/html" if self.path.endswith("/") else "application/octet-stream"
        own = {"Content-Type": kind, "Content-Length": str(len(content))}
        with suppress(ConnectionError):  # the reader has gone on
            self.send_response(status)
            for name, value in (HEADERS | own).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        logging.getLogger(__name__).debug(format, *args)
