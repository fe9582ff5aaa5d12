"""What episodes ask of the controller: each call leases a worker there, and brings its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_grpo import cluster
from async_grpo.errors import ProcessLostError
from async_grpo.roles import GENERATION, VERIFIER
from async_grpo.types import (
    Episode,
    EpisodesRequest,
    GenerationRequest,
    GradingRequest,
    Question,
    SamplingContract,
    Turn,
    Verdict,
    VerificationRequest,
)


class ControllerServices:
    """The services of one group; whatever it asks for ends with its lease."""

    def __init__(self, request: EpisodesRequest) -> None:
        self._request = request

    async def generate(
        self, request: EpisodesRequest, history: Any, sampling: SamplingContract, prefer: str
    ) -> Turn:
        """See `TurnServices`."""
        asked = GenerationRequest(request.ordinal, request.attempt, history, 1, sampling)
        (turn,) = await self._ask(
            GENERATION, "generate", asked, cost=1.0, version=request.oldest, prefer=prefer or None
        )
        return turn

    async def verify(self, question: Question, episodes: Sequence[Episode]) -> tuple[Verdict, ...]:
        """See `Services`."""
        outputs = tuple(
            VerificationRequest(self._request.ordinal, index, question, episode.turns[-1])
            for index, episode in enumerate(episodes)
        )
        verdicts: tuple[Verdict, ...] = await self._ask(
            VERIFIER, "verify", GradingRequest(outputs), cost=float(len(outputs))
        )
        return verdicts

    async def ask(self, role: str, method: str, request: Any, *, cost: float = 1.0) -> Any:
        """See `Services`."""
        return await self._ask(role, method, request, cost=cost)

    async def _ask(self, role: str, method: str, request: Any, **options: Any) -> Any:
        controller = cluster.find_actor(cluster.CONTROLLER)
        if controller is None:
            raise ProcessLostError("the controller has ended: its run goes on with another one")
        answer = controller.ask.remote(
            self._request.run, role, method, request, owner=self._request.lease_id, **options
        )
        # The controller ends what stalls, and with it this call.
        return await cluster.work(answer, timeout_s=None, who="the controller")
