"""The control process: a registry a role, and the batcher of the run.

consumes:     registrations, the calls of one run, its trainer's signs of life
produces:     registered workers, items for the ranks, results of asked work
waits for:    workers and ranks
unblocked by: a registration, an answer, a request of every rank
"""

from __future__ import annotations

from typing import Any

from async_grpo.batching.records import BatcherPlan, EvaluationResult
from async_grpo.types import (
    PipelineStatus,
    PublishReport,
    RegistryEvent,
    RegistryStatus,
    RunId,
    Standing,
    StreamItem,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)


class Controller:
    """One a namespace, see `find.find_or_make_controller`.

    Every call of a run names it with its epoch; one of another raises `RunLost` at once.
    """

    def __init__(self, code: str) -> None:
        """`code`: the hash of the package that this process runs."""
        self._code = code

    async def hello(self, code: str) -> None:
        """A dispatcher or a trainer of this `code` lives; this controller goes on for a while.

        Raises `ConfigError` when workers or a run of other code use it; unused, it ends itself.
        """
        raise NotImplementedError

    async def register(self, info: WorkerInfo, handle: Any) -> None:
        """Admit a worker once it serves the weights of its role, if there are any yet.

        Raises what the worker raised when it cannot load them, `WorkerError` when it is lost.
        """
        raise NotImplementedError

    async def deregister(self, role: str, worker_id: str) -> None:
        """Forget a worker; its leases are revoked."""
        raise NotImplementedError

    async def drain(self, role: str, worker_id: str, draining: bool = True) -> None:
        """Give a worker no new work, in this run and later ones, until it is told otherwise."""
        raise NotImplementedError

    async def standing(self, role: str, worker_ids: tuple[str, ...]) -> dict[str, Standing]:
        """How each of these workers is seen here; a sign of life too."""
        raise NotImplementedError

    async def roles(self) -> tuple[str, ...]:
        """The names of the roles that have had a worker."""
        raise NotImplementedError

    async def members(self, role: str) -> tuple[WorkerInfo, ...]:
        """Everyone admitted."""
        raise NotImplementedError

    async def receivers(self, role: str) -> tuple[tuple[WorkerInfo, Any], ...]:
        """Everyone admitted, with its handle: weights that come over devices go there directly."""
        raise NotImplementedError

    async def fenced(self, role: str) -> dict[str, str]:
        """The latest workers that were excluded, with the reason."""
        raise NotImplementedError

    async def registry_status(self, role: str) -> RegistryStatus:
        """What there is of a role, and how often what has happened."""
        raise NotImplementedError

    async def history(self, role: str) -> tuple[RegistryEvent, ...]:
        """The newest events of a role."""
        raise NotImplementedError

    async def begin_run(self, plan: BatcherPlan, recorder: Any) -> int:
        """The epoch of a run that begins, or goes on, with this plan.

        `recorder`: an actor that dies with the run's trainer. The same incarnation again takes the
        place of what is here. Raises `ConfigError` when another run lives, after a while in which
        it may end.
        """
        raise NotImplementedError

    async def end_run(self, run: RunId) -> None:
        """Forget the run and its weights, revoke its leases, end its requests."""
        raise NotImplementedError

    async def heard(self, run: RunId) -> None:
        """The trainer lives; said every second, from a thread."""
        raise NotImplementedError

    async def publish(
        self, run: RunId, snapshot: WeightsSnapshot, roles: tuple[str, ...], timeout_s: float
    ) -> dict[str, PublishReport]:
        """Have every member of these roles serve `snapshot`; reports by role."""
        raise NotImplementedError

    async def published(self, run: RunId, version: WeightsVersion) -> None:
        """Weights are out: the staleness window moves, and slots start."""
        raise NotImplementedError

    async def next_item(self, run: RunId, rank: int, index: int) -> StreamItem:
        """Item `index` of a rank's stream; asking for it again gives it again."""
        raise NotImplementedError

    async def hungry(self, run: RunId, rank: int, index: int) -> None:
        """The rank has nothing left to compute while it waits for item `index`."""
        raise NotImplementedError

    async def evaluate(self, run: RunId) -> EvaluationResult:
        """Sample and grade the held-out questions with the published weights."""
        raise NotImplementedError

    async def status(self, run: RunId) -> PipelineStatus:
        """What every stage is doing right now."""
        raise NotImplementedError

    async def abort(self, run: RunId, reason: str) -> None:
        """Every rank that waits for an item gets `reason` as its error."""
        raise NotImplementedError

    async def ask(
        self,
        run: RunId,
        role: str,
        method: str,
        request: Any,
        *,
        cost: float,
        version: WeightsVersion | None = None,
        prefer: str | None = None,
        owner: int | None = None,
    ) -> Any:
        """The answer of one worker of a role to `method(request)`, given under a valid lease.

        `prefer`: a worker's id, a hint. `owner`: the lease under which the asker works itself; the
        work ends with it. Raises `LeaseLost` when the worker was lost, or the asker's own lease.
        """
        raise NotImplementedError
