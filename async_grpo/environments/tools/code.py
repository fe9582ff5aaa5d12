"""Programs of the model's, run in the jail of generated code: no network, no files, bounded."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from async_grpo.environments.chat.messages import ToolSpec
from async_grpo.environments.tools.function import FunctionTool
from async_grpo.verification.jailer import MEMORY_MIB, require_jail, run_program

MAX_SECONDS = 10.0
# What a program raises is something that its author reads.
SHOWN = """\
import sys, traceback
sys.stderr = sys.stdout
try:
    exec(compile({code!r}, "program", "exec"), {{"__name__": "__main__"}})
except Exception:
    traceback.print_exc(limit=-4)
    sys.exit(1)
"""
ENDINGS = {
    "ended": "",
    "failed": "[the program failed]",
    "too slow": "[the program was stopped after {seconds:g} seconds]",
    "too large": f"[the program was stopped: it held more than {MEMORY_MIB} MiB]",
}


class PythonTool:
    """See `base.Tool`: `run_python(code)`, each program in a jail of its own.

    Raises `ConfigError` where programs cannot be confined.
    """

    is_idempotent = True  # nothing is kept between two programs

    def __init__(self, *, max_seconds: float = MAX_SECONDS) -> None:
        require_jail()
        self._max_seconds = max_seconds
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jail")
        self._run_python = FunctionTool(self.run_python)
        self.spec: ToolSpec = self._run_python.spec

    async def call(self, arguments: Mapping[str, object]) -> str:
        """See `Tool`; `JailError` when nothing could be run."""
        return await self._run_python.call(arguments)

    async def run_python(self, code: str) -> str:
        """Runs a Python program, and gives what it prints. Nothing is kept between two programs."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ran, code)

    def _ran(self, code: str) -> str:
        result = run_program(
            SHOWN.format(code=code),
            b"",
            deadline=time.monotonic() + self._max_seconds,
            cpu_s=int(self._max_seconds) + 1,
        )
        ending = ENDINGS[result.ending].format(seconds=self._max_seconds)
        output = result.output.decode("utf-8", "replace")
        return "\n".join(text for text in (output, ending) if text) or "[nothing was printed]"
