"""The gateway of a run (`--gateway`): the policy behind OpenAI's protocol, while it is trained.

consumes:     requests over HTTP
produces:     what the policy answers, with the weights of that moment
waits for:    the controller, which leases the least-loaded engine for each turn
unblocked by: the turn's end, a client that goes, or the end of the run there

An actor of rank 0's node. Turns that an engine has lost are sampled again by another one; when the
controller is lost, requests are refused until the run goes on at the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER, WHO, ControllerClient, RunClient, call, work
from async_grpo.config.command_options import TOKEN_VARIABLE
from async_grpo.config.roles import GENERATION
from async_grpo.config.run_options import PlaceOptions
from async_grpo.environments.chat.find import find_renderer, find_tokenizer
from async_grpo.environments.chat.messages import Dialogue, ToolSpec
from async_grpo.gateway.app import Server, in_background, listening, make_app
from async_grpo.gateway.sampler import Ask, Refused
from async_grpo.gateway.session import Session, Sessions
from async_grpo.types import GenerationRequest, SamplingContract, Turn
from async_grpo.util import deadlines
from async_grpo.util.errors import LeaseLost, ProcessLostError
from async_grpo.util.waiting import ask_again

if TYPE_CHECKING:
    from async_grpo.cluster.handles import GatewayHandle

logger = logging.getLogger(__name__)
ADDRESS_FILE = "gateway.env"
MAX_TURNS_AT_A_TIME = 16  # the others wait here: training keeps the engines
# So small that no lease of training waits for it, and enough to tell equal engines apart. Binary:
# loads must become 0 again.
COST = 2.0**-10  # sequences
NO_RUN = "the run has ended at its controller, or goes on at another one: ask again in a moment"


class Gateway:
    """Wrap with `ray.remote(max_concurrency=...)`; clients come over HTTP alone."""

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
        """`max_model_len`: of every engine, in tokens."""
        tokenizer = find_tokenizer(model)  # seconds, before anybody asks
        engines = Engines(incarnation)

        async def make_dialogue(tools: Sequence[ToolSpec]) -> Dialogue:
            return Dialogue(find_renderer(model, renderer), tools=tools)

        def make_session() -> Session:
            policy = RunPolicy(engines, sampling, max_model_len=max_model_len)
            return Session(policy, tokenizer=tokenizer, make_dialogue=make_dialogue)

        app = make_app(Sessions(token=token, make_session=make_session))
        self._server = Server(app, host=address[0], port=address[1])
        self._serving = in_background(self._server)

    async def url(self) -> str:
        """Where it listens."""
        return self._server.url


class RunPolicy:
    """See `Sampler`: the policy of a run, for one session."""

    name = ""
    decides_sampling = False

    def __init__(self, engines: Engines, sampling: SamplingContract, *, max_model_len: int) -> None:
        self._engines = engines
        self._sampling = sampling
        self._worker_id = ""  # of the latest turn, whose engine holds its prefix
        self.max_model_len = max_model_len

    async def sample(self, ask: Ask) -> AsyncIterator[Turn]:
        """See `Sampler`; whole, and no longer than the run's outputs unless it says so."""
        longest = min(self._sampling.max_tokens, self.max_model_len - len(ask.prompt_ids))
        request = ask.request(stop_ids=self._sampling.stop_token_ids, longest=longest)
        turn = await self._engines.turn(request, prefer=self._worker_id or None)
        self._worker_id = turn.worker_id
        yield turn


class Engines:
    """Those of a run, asked through its controller."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._client: RunClient | None = None
        self._places = asyncio.Semaphore(MAX_TURNS_AT_A_TIME)

    async def turn(self, request: GenerationRequest, *, prefer: str | None) -> Turn:
        """One turn, of another engine where the first was lost.

        Raises `Refused` while the run has no controller, and what the last engine raised.
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
            # The controller ends what stalls, and with it this call.
            turns: tuple[Turn, ...] = await work(answer, timeout_s=None, who=WHO)
            return turns[0]
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
    """Of `--gateway`, if it is given, with a port that is free now; raises `ConfigError`."""
    if not places.gateway:
        return None
    host, port = places.gateway_place
    with listening(host, port) as found:
        return host, found.getsockname()[1]


def start_gateway(
    plan: BatcherPlan, client: ControllerClient, address: tuple[str, int]
) -> GatewayHandle:
    """An actor that listens, and ends with this process; the token lies in the output folder."""
    config = plan.config
    engines = client.answer(deadlines.ANSWER_S, client.controller.members, GENERATION)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    # Ray starts it again at the same address; clients open their sessions again.
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
    url = client.cluster.wait(gateway.url.remote(), timeout_s=deadlines.ANSWER_S, who="the gateway")
    file = Path(config.recording.output_dir, ADDRESS_FILE)
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(f"OPENAI_BASE_URL={url}/v1\nOPENAI_API_KEY={token}\n")
    logger.info("the policy is served at %s/v1; the token lies in %s", url, file)
    return gateway
