"""One process of an agent: bounded in what it says, and ended with all that it has started."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from async_grpo.util.deadlines import AGENT_SAID_S

KEPT_BYTES = 1000  # of what an agent says, the last ones
# The shell becomes the agent. What it leaves beside it waits for the end of this process, which
# alone can write to the pipe, and ends the group: nobody else would, when this one is killed.
WATCHED = 'exec 3<&0; (read _ <&3; kill -KILL 0) & exec "$@" 3<&- <"/dev/fd/$0"'


async def run_process(
    command: Sequence[str], *, text: str, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Its exit code, and the end of what it said; `text` is its stdin."""
    (reads, writes), (lives, life) = os.pipe(), os.pipe()
    with (
        tempfile.TemporaryFile() as stdin,
        os.fdopen(reads, "rb", 0) as output,
        os.fdopen(life, "wb", 0),
    ):
        stdin.write(text.encode())
        stdin.flush()
        try:
            process = await asyncio.create_subprocess_exec(
                *("sh", "-c", WATCHED, str(stdin.fileno()), *command),
                stdin=lives,
                stdout=writes,
                stderr=writes,
                pass_fds=(stdin.fileno(),),
                env=dict(variables),
                start_new_session=True,
            )
        finally:
            os.close(writes)
            os.close(lives)
        said = Said()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: said, output)
        try:
            code = await process.wait()
        finally:
            # What it started in the background too, though it may have ended itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait({said.ended}, timeout=AGENT_SAID_S)
            transport.close()
        return code, said.text


class Said(asyncio.Protocol):
    """The end of a stream, however long it is."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept = b""

    def data_received(self, data: bytes) -> None:
        """More has come."""
        self._kept = (self._kept + data)[-KEPT_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        """Nothing more comes."""
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def text(self) -> str:
        """In one line."""
        return " ".join(self._kept.decode(errors="replace").split())
