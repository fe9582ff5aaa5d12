"""The gateway of a model without a run: `async-grpo serve`.

consumes:     requests over HTTP
produces:     the model's answers
waits for:    the engine, which decodes all requests together
unblocked by: the end of a turn, a client that disconnects, or a signal
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from async_grpo.config.command_options import TOKEN_VARIABLE, ServeConfig, worker_options
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.environments.chat.find import find_renderer
from async_grpo.gateway.app import Server, make_app
from async_grpo.gateway.session import Limits, TurnRequest, model_sessions
from async_grpo.model.model_folder import ModelFacts, check_model_folder
from async_grpo.rollout.generation_worker import worker_environment
from async_grpo.types import Turn
from async_grpo.util.errors import UnfitModel, WorkerError

if TYPE_CHECKING:
    from async_grpo.rollout.local_engines import ServedEngine

logger = logging.getLogger(__name__)
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}
ENGINE_LOOK_INTERVAL_S = 1.0


class EngineSampler:
    """See `Sampler`: an engine that this process has started."""

    decides_sampling = False

    def __init__(self, engine: ServedEngine, facts: ModelFacts, *, name: str) -> None:
        self._engine = engine
        self._stop_ids = facts.stop_token_ids
        self.name = name
        self.max_model_len = engine.max_model_len

    def sample(self, request: TurnRequest) -> AsyncIterator[Turn]:
        """See `Sampler`."""
        longest = self.max_model_len - len(request.prompt_ids)
        return self._engine.pieces(request.for_engine(stop_ids=self._stop_ids, longest=longest))


def serve(model: str, config: ServeConfig, *, name: str, say: Callable[[str], object]) -> None:
    """Serve until a signal; `model` is a folder, `name` is how clients call it.

    Raises:
        ConfigError: the address cannot be listened at, or there is no such renderer.
        UnfitModel: the model cannot be served.
        WorkerError: the engine died.
    """
    facts = check_model_folder(model)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    try:
        find_renderer(model, config.renderer)
    except UnfitModel as error:
        if config.renderer != "auto":
            raise
        logger.warning("chats are refused, completions are served: %s", error)

    limits = Limits(sessions=config.max_sessions, requests=config.max_requests)
    sessions = model_sessions(model, config.renderer, lambda: sampler, token=token, limits=limits)
    # Before the engine's start, so that a port in use is an error at once.
    server = Server(make_app(sessions), host=config.host, port=config.port)
    engine = _engine(model, config)
    sampler = EngineSampler(engine, facts, name=name)

    async def listen() -> None:
        watch = asyncio.create_task(_stop_when_dead(engine, server), name="watch-engine")
        say(f"serving {name}: OPENAI_BASE_URL={server.url}/v1 OPENAI_API_KEY={token}")
        try:
            await server.serve()
        finally:
            watch.cancel()

    try:
        asyncio.run(listen())
        if engine.is_dead:
            raise WorkerError("the engine died: see what it said above, and start again")
    finally:
        engine.close()


def _engine(model: str, config: ServeConfig) -> ServedEngine:
    from async_grpo.devices.current import seen_devices  # torch reads what is set below later

    os.environ.update(worker_environment(on_cpu=not seen_devices().devices) | QUIET)
    from async_grpo.rollout.local_engines import ServedEngine

    return ServedEngine(WorkerConfig(model_path=model, **worker_options(config)))


async def _stop_when_dead(engine: ServedEngine, server: Server) -> None:
    while True:
        await asyncio.sleep(ENGINE_LOOK_INTERVAL_S)
        if engine.is_dead:
            server.stop()
