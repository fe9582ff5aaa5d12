"""The engine's process, forked from its worker's before that joins Ray: both have imported vLLM.

vLLM would spawn it later, to import the same again. A process with threads is not to be forked, and
what is Ray's not to be inherited: so `begin` is what Ray runs its worker in, and comes before both.

consumes      what vLLM would start a process with: a function and its arguments
produces      vLLM's own process, at once
waits for     its worker, which sends these
unblocked by  them; the worker's end
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import runpy
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType

from async_grpo.util.imports import without_collection

logger = logging.getLogger(__name__)
Run = Callable[..., object]
Arguments = Mapping[str, object]


class EarlyProcess:
    """One process, for the first that vLLM asks for; there is no work for a second."""

    def __init__(self) -> None:
        """Fork this process, which must have one thread."""
        fork = multiprocessing.get_context("fork")
        there, self._here = fork.Pipe(duplex=False)
        self._process: ForkProcess | None = fork.Process(
            target=_work, args=(self._here, there), name="EngineCore"
        )
        self._process.start()
        there.close()

    def give_to(self, utils: ModuleType) -> None:
        """Have vLLM's next engine run in it; `utils`: its module that makes the process."""
        usual = utils.get_mp_context
        vars(utils)["get_mp_context"] = lambda: _Context(usual(), self._take)

    def _take(self, target: Run, name: str, kwargs: Arguments) -> ForkProcess | None:
        """The process, whose start sends it what it is to run; None: it cannot be used."""
        process, self._process = self._process, None
        if process is None or kwargs.get("tensor_queue") is not None:
            return None  # the latter is inherited at a process's beginning only
        process.name = name

        def start() -> None:
            # vLLM and this worker have set variables since.
            self._here.send((dict(os.environ), target, kwargs))
            self._here.close()

        process.start = start  # type: ignore[method-assign]
        return process


class _Context:
    """The way to make processes that vLLM has chosen, but for one process."""

    def __init__(
        self, usual: SpawnContext, take: Callable[[Run, str, Arguments], ForkProcess | None]
    ) -> None:
        self._usual = usual
        self._take = take

    def Process(self, *, target: Run, name: str, kwargs: Arguments) -> ForkProcess | SpawnProcess:
        early = self._take(target, name, kwargs)
        return early or self._usual.Process(target=target, name=name, kwargs=kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._usual, name)


def _work(others: Connection, pipe: Connection) -> None:
    others.close()  # the worker's end, or its end would not be seen
    try:
        environment, target, arguments = pipe.recv()
    except EOFError:  # the worker has ended, or has found that it cannot work
        return
    pipe.close()
    with suppress(ImportError):  # optional, for vLLM too
        import setproctitle

        setproctitle.getproctitle()  # it no longer finds the title's memory after what follows
    os.environ.update(environment)
    target(**arguments)


# In a worker that was started by `program`:
begun: EarlyProcess | None = None
import_s = 0.0


def program() -> str:
    """The command that Ray starts a worker's process with, in place of Python (`py_executable`)."""
    # The package need not be installed: Ray's workers find it later, by their driver's path.
    place = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({place!r}); import {__name__} as early; early.begin()"
    return shlex.join((sys.executable, "-P", "-c", code))


def begin() -> None:
    """Import vLLM, fork the engine's process, and be the program that Ray has asked for."""
    global begun, import_s
    began = time.monotonic()
    try:
        with without_collection():
            import vllm.v1.worker.cpu_worker  # noqa: F401

            import async_grpo.rollout.engine  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # the worker meets it again, and says it
        logger.warning("vLLM cannot be imported: %s", error)
    else:
        if len(os.listdir("/proc/self/task")) == 1:
            gc.freeze()  # collections leave the shared memory of these objects unwritten
            begun = EarlyProcess()
    import_s = time.monotonic() - began
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
