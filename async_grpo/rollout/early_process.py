"""The engine's process, begun before there is work for it: it imports vLLM while its worker does.

vLLM would spawn it once the worker has imported all, to import the same again.

consumes      what vLLM would start a process with: a function and its arguments
produces      vLLM's own process, at once
waits for     its worker, which sends these
unblocked by  them; the worker's end
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType

from async_grpo.util.imports import without_collection

Run = Callable[..., object]
Arguments = Mapping[str, object]


def import_vllm() -> None:
    """Import what an engine's process will need."""
    with without_collection():
        import vllm.v1.worker.cpu_worker  # noqa: F401

        import async_grpo.rollout.engine  # noqa: F401


class EarlyProcess:
    """One process, for the first that vLLM asks for; there is no work for a second."""

    def __init__(self, prepare: Callable[[], None] = import_vllm) -> None:
        """`prepare` is what it does meanwhile."""
        spawn = multiprocessing.get_context("spawn")
        there, self._here = spawn.Pipe(duplex=False)
        self._process: SpawnProcess | None = spawn.Process(
            target=_work, args=(prepare, there), name="EngineCore"
        )
        self._process.start()
        there.close()

    def give_to(self, utils: ModuleType) -> None:
        """Have vLLM's next engine run in it; `utils`: its module that makes the process."""
        usual = utils.get_mp_context
        vars(utils)["get_mp_context"] = lambda: _Context(usual(), self._take)

    def _take(self, target: Run, name: str, kwargs: Arguments) -> SpawnProcess | None:
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
        self, usual: SpawnContext, take: Callable[[Run, str, Arguments], SpawnProcess | None]
    ) -> None:
        self._usual = usual
        self._take = take

    def Process(self, *, target: Run, name: str, kwargs: Arguments) -> SpawnProcess:
        early = self._take(target, name, kwargs)
        return early or self._usual.Process(target=target, name=name, kwargs=kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._usual, name)


def _work(prepare: Callable[[], None], pipe: Connection) -> None:
    prepare()
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
