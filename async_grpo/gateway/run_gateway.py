"""The gateway of a run (`--gateway`): the policy behind OpenAI's protocol, while it is trained.

consumes:     requests over HTTP
produces:     the policy's answers, with the weights of that moment
waits for:    the controller, which leases the least-loaded engine for each turn
unblocked by: the turn's end, a client that disconnects, or the end of the run at its controller

An actor on rank 0's node. A turn whose engine is lost is sampled again by another one; when the
controller is lost, requests are refused until the run continues at the next controller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER, WHO, ControllerClient, RunClient, call, work
from async_grpo.config.command_options import TOKEN_VARIABLE
from async_grpo.config.roles import GENERATION
from async_grpo.config.run_options import PlaceOptions
from async_grpo.gateway.app import Server, in_background, listening, make_app
from async_grpo.gateway.session import TurnRequest, model_sessions
from async_grpo.gateway.wire import Refused
from async_grpo.types import GenerationRequest, SamplingContract, Turn
from async_grpo.util import deadlines
from async_grpo.util.errors import LeaseLost, ProcessLostError
from async_grpo.util.waiting import ask_again

if TYPE_CHECKING:
    from async_grpo.cluster.handles import GatewayHandle

logger = logging.getLogger(__name__)
ADDRESS_FILE = "gateway.env"
MAX_TURNS_AT_A_TIME = 16  # the others wait here, so that training keeps the engines
# So small that no lease of training waits for it, and enough to prefer one of two equal engines. A
# power of 2, so that loads return to exactly 0.
COST = 2.0**-10  # sequences
NO_RUN = "the run has ended at its controller, or goes on at another one: ask again in a moment"


class Gateway:
    """Wrap with `ray.remote(max_concurrency=...)`; clients send their requests over HTTP only."""

    def __init__(
        self,
        model: str,
        renderer: str,
        sampling: SamplingContract,
        *,
        incarnation: int,
        address: tuple[str, int],
        token: str,
        max_model_len: int,
    ) -> None:
        """`max_model_len`: the tokens that every engine takes; `address`: host and port."""
        engines = Engines(incarnation)
        make_policy = partial(RunPolicy, engines, sampling, max_model_len=max_model_len)
        sessions = model_sessions(model, renderer, make_policy, token=token)
        self._server = Server(make_app(sessions), host=address[0], port=address[1])
        self._serving = in_background(self._server)

    async def url(self) -> str:
        """The address at which it listens."""
        return self._server.url


class RunPolicy:
    """See `Sampler`: the policy of a run, for one session."""

    name = ""
    decides_sampling = False

    def __init__(self, engines: Engines, sampling: SamplingContract, *, max_model_len: int) -> None:
        self._engines = engines
        self._sampling = sampling
        self._worker_id = ""  # of the latest turn, which is cached by that worker's engine
        self.max_model_len = max_model_len

    async def sample(self, request: TurnRequest) -> AsyncIterator[Turn]:
        """See `Sampler`; one whole turn, by default at most as long as the run's outputs."""
        longest = min(self._sampling.max_tokens, self.max_model_len - len(request.prompt_ids))
        wanted = request.for_engine(stop_ids=self._sampling.stop_token_ids, longest=longest)
        turn = await self._engines.turn(wanted, prefer=self._worker_id or None)
        self._worker_id = turn.worker_id
        yield turn


class Engines:
    """The engines of a run, to which its controller forwards requests."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._client: RunClient | None = None
        self._places = asyncio.Semaphore(MAX_TURNS_AT_A_TIME)

    async def turn(self, request: GenerationRequest, *, prefer: str | None) -> Turn:
        """One turn; where its engine is lost, another engine samples it.

        Raises `Refused` while the run has no controller, and the last engine's error.
        """
        async with self._places:
            return await ask_again(
                lambda: self._asked(request, prefer),
                lost=LeaseLost,
                warn=partial(logger.warning, "a turn of the gateway is sampled again: %s"),
            )

    async def _asked(self, request: GenerationRequest, prefer: str | None) -> Turn:
        try:
            self._client = client = self._client or await self._find_run()
            answer = client.controller.ask.remote(
                client.run, GENERATION, "generate", request, cost=COST, prefer=prefer
            )
            # No timeout: the controller ends a lease that stalls, and with it this call.
            return (await work(answer, timeout_s=None, who=WHO))[0]
        except ProcessLostError as error:
            self._client = None
            raise Refused(NO_RUN, status=503) from error

    async def _find_run(self) -> RunClient:
        cluster = Cluster()
        controller = cluster.find_actor(CONTROLLER)
        if controller is not None:
            asked = controller.current_run.remote()
            run = await call(asked, timeout_s=deadlines.STATUS_S, who=WHO)
            if run is not None and run.incarnation == self._incarnation:
                return RunClient(cluster, controller, run)
        raise ProcessLostError(NO_RUN)


def free_address(places: PlaceOptions) -> tuple[str, int] | None:
    """Host and port of `--gateway`, None without it; port 0 becomes one that is free now.

    Raises `ConfigError` for an address that cannot be listened at.
    """
    if not places.gateway:
        return None
    host, port = places.gateway_place
    with listening(host, port) as found:
        return host, found.getsockname()[1]


def start_gateway(
    plan: BatcherPlan, client: ControllerClient, address: tuple[str, int]
) -> GatewayHandle:
    """Start the actor, which ends with this process, and write its address and token to a file."""
    config = plan.config
    engines = client.answer(deadlines.ANSWER_S, client.controller.members, GENERATION)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    # Ray restarts it at the same address; clients have to open their sessions again.
    actor = client.cluster.actor(Gateway, max_concurrency=1000, max_restarts=-1)
    gateway: GatewayHandle = actor.remote(
        config.places.model_name_or_path,
        config.data.renderer,
        plan.sampling,
        incarnation=plan.incarnation,
        address=address,
        token=token,
        max_model_len=min(info.max_model_len for info in engines),
    )
    ready, seconds = gateway.url.remote(), deadlines.GATEWAY_READY_S
    url = client.cluster.wait(ready, timeout_s=seconds, who="the gateway")
    file = Path(config.recording.output_dir, ADDRESS_FILE)
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(f"OPENAI_BASE_URL={url}/v1\nOPENAI_API_KEY={token}\n")
    logger.info("the policy is served at %s/v1; the token lies in %s", url, file)
    return gateway
