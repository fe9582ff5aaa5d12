"""Runs programs that the model writes in a jail: without network and files, within limits."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from async_grpo.environments.tools.function import FunctionTool
from async_grpo.verification.jailer import MEMORY_MIB, require_jail, run_program

MAX_SECONDS = 10.0
# The model reads the traceback of its program.
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


class PythonTool(FunctionTool):
    """See `base.Tool`: `run_python(code)`, which runs each program in a new jail.

    Raises `ConfigError` where programs cannot be confined; `call` raises `JailError` when nothing
    could be run.
    """

    def __init__(self, *, max_seconds: float = MAX_SECONDS) -> None:
        require_jail()
        super().__init__(self.run_python, is_idempotent=True)
        self._max_seconds = max_seconds
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jail")

    def run_python(self, code: str) -> str:
        """Runs a Python program, and gives what it prints. Nothing is kept between two programs."""
        result = run_program(
            SHOWN.format(code=code),
            b"",
            deadline=time.monotonic() + self._max_seconds,
            cpu_s=int(self._max_seconds) + 1,
        )
        ending = ENDINGS[result.ending].format(seconds=self._max_seconds)
        output = result.output.decode("utf-8", "replace")
        return "\n".join(text for text in (output, ending) if text) or "[nothing was printed]"
