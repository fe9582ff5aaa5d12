"""Types of actors' handles, and how coroutines await their answers.

`handle.method.remote(...)` returns a reference to await; synchronous code calls `Cluster.wait`.

Ray's own handles are untyped. `tests/types/test_handles.py` holds these
protocols to the actors' classes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from async_grpo.cluster.batched_calls import BatchedCalls
from async_grpo.types import RunId
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    AsyncGrpoError,
    ClusterError,
    DeadlineError,
    ProcessLostError,
    WorkerError,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from async_grpo.cluster.cluster import Cluster
    from async_grpo.types import (
        Arrays,
        Control,
        EvaluationResult,
        GenerationRequest,
        GradingRequest,
        HeadRequest,
        JudgeAnswer,
        JudgeRequest,
        LogprobRequest,
        Minibatch,
        PipelineStatus,
        PlayedGroup,
        PublishReport,
        Pulse,
        RowKey,
        RunStatus,
        ServiceRequest,
        Standing,
        StreamItems,
        Turn,
        Verdict,
        WeightsAck,
        WeightsSnapshot,
        WeightsVersion,
        WorkerInfo,
    )
    from async_grpo.types.requests import EpisodesRequest

CONTROLLER = "controller"  # its name in a namespace
WHO = "the controller"
T = TypeVar("T")
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Method(Protocol[P, R_co]):
    """A method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R_co]: ...


class WorkerHandle(Protocol):
    """A worker of any role: all have the first three methods, each role some of the others."""

    info: Method[[], WorkerInfo]
    ping: Method[[float], Pulse]
    abort_all: Method[[], None]
    load_weights: Method[[WeightsSnapshot], WeightsAck]  # of roles that follow the trainer's
    generate: Method[[GenerationRequest], tuple[Turn, ...]]
    sleep: Method[[], None]  # of generation workers, until the next weights
    open_route: Method[[Mapping[str, object], float], None]  # device transport's, as the next two
    expect_weights: Method[[WeightsSnapshot], None]
    receive_weights: Method[[WeightsSnapshot, Mapping[str, object], float], None]
    logprobs: Method[[LogprobRequest], Sequence[NDArray[np.float32]]]  # of references and teachers
    teach: Method[[LogprobRequest], tuple[object, ...]]  # of teachers, as the next three
    head: Method[[HeadRequest], tuple[object, ...]]
    join_express: Method[[object, int], None]
    serve_express: Method[..., None]
    play: Method[[EpisodesRequest], PlayedGroup]  # of environments
    # Of judges, and of services of the user's own.
    answer: Method[[JudgeRequest | ServiceRequest], JudgeAnswer | bytes]
    verify: Method[[GradingRequest], tuple[Verdict, ...]]  # of verifier pools, as all below
    try_out: Method[[GradingRequest], tuple[Verdict, ...]]
    take_share: Method[[int], None]
    complaint: Method[[], str]


class RecorderHandle(Protocol):
    """A `RunRecorder`."""

    write: Method[[str, int, Sequence[bytes]], tuple[int, tuple[str, ...]]]


class WitnessHandle(Protocol):
    """A `Witness`."""

    until_death: Method[[], None]


class GatewayHandle(Protocol):
    """The `Gateway` of a run."""

    url: Method[[], str]


class ControllerHandle(Protocol):
    """A `Controller`, whose methods those of a run name it first."""

    hello: Method[[str], None]
    register: Method[[WorkerInfo, WorkerHandle], None]
    deregister: Method[[str, str], None]
    drain: Method[[str, str], None]
    standing: Method[[Mapping[str, Sequence[str]]], dict[str, Standing]]
    roles: Method[[], tuple[str, ...]]
    members: Method[[str], tuple[WorkerInfo, ...]]
    receivers: Method[[str], tuple[tuple[WorkerInfo, WorkerHandle], ...]]
    fenced: Method[[str], dict[str, str]]
    # The first argument is a `BatcherPlan`, which is defined in a higher layer.
    begin_run: Method[[object, WitnessHandle, RecorderHandle | None], int]
    end_run: Method[[RunId], None]
    heard: Method[[RunId], None]
    publish: Method[[RunId, WeightsSnapshot, tuple[str, ...], float], dict[str, PublishReport]]
    published: Method[[RunId, WeightsVersion], None]
    rest: Method[[RunId], None]
    next_items: Method[[RunId, int, int], StreamItems]
    hungry: Method[[RunId, int], None]
    taught_again: Method[[RunId, int, int, Sequence[RowKey]], Minibatch]
    teacher_head: Method[[RunId, str], tuple[Awaitable[Arrays], ...]]
    evaluated: Method[[RunId], tuple[EvaluationResult, ...]]
    status: Method[[RunId], PipelineStatus]
    control: Method[[str, Control], None]
    running: Method[[str], RunStatus]
    abort: Method[[RunId, str], None]
    ask: Method[..., Any]  # the answer of a worker of any role


@dataclass(frozen=True, slots=True, eq=False)
class ControllerClient:
    """The controller, and the cluster through which its answers are awaited."""

    cluster: Cluster
    controller: ControllerHandle

    def answer(
        self, timeout_s: float, method: Method[P, R_co], *args: P.args, **kwargs: P.kwargs
    ) -> R_co:
        """Call a method of the controller and return its answer; see `Cluster.wait`."""
        return self.wait(method.remote(*args, **kwargs), timeout_s=timeout_s)

    def wait(self, call: Awaitable[T], *, timeout_s: float) -> T:
        """Await a call of the controller that is under way."""
        return self.cluster.wait(call, timeout_s=timeout_s, who=WHO)

    def begin_run(
        self,
        plan: object,
        witness: WitnessHandle,
        recorder: RecorderHandle | None,
        *,
        incarnation: int,
    ) -> RunClient:
        """Begin the run of a `BatcherPlan` at the controller."""
        begin_run = self.controller.begin_run
        epoch = self.answer(deadlines.BEGIN_RUN_S, begin_run, plan, witness, recorder)
        return RunClient(self.cluster, self.controller, RunId(incarnation, epoch))


@dataclass(frozen=True, slots=True, eq=False)
class RunClient(ControllerClient):
    """The controller as one run calls it: `client.controller.status.remote(client.run)`.

    Calls raise `RunLost` when the run has ended there, or goes on under another epoch.
    """

    run: RunId


async def ask_controller(
    cluster: Cluster,
    played: EpisodesRequest,
    role: str,
    method: str,
    request: object,
    **options: object,
) -> object:
    """Ask a worker of `role` for episodes; the request ends with their lease."""
    answer = _controller_of(cluster, played.run).ask(
        "ask", played.run, role, method, request, owner=played.lease_id, **options
    )
    # The controller ends what stalls, and with it this call.
    return await work(answer, timeout_s=None, who=WHO)


@lru_cache(maxsize=1)
def _controller_of(cluster: Cluster, run: RunId) -> BatchedCalls:
    """Look up once an epoch, which ends with its controller: all episodes wait for a lookup."""
    controller: ControllerHandle | None = cluster.find_actor(CONTROLLER)
    if controller is None:
        raise ProcessLostError("the controller has ended: its run goes on with another one")
    return BatchedCalls(controller)


async def call(reference: Awaitable[T], *, timeout_s: float | None, who: str) -> T:
    """`Cluster.wait` for coroutines; no time limit: the caller bounds the call another way."""
    from ray.exceptions import RayError

    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except RayError as error:  # first: the other side's timeout is a TimeoutError too
        raise translated(error, who) from None
    except TimeoutError:
        raise DeadlineError(f"{who} did not answer within {timeout_s:g} s") from None


async def work(reference: Awaitable[T], *, timeout_s: float | None, who: str) -> T:
    """Like `call`, and cancels the work of the other side when the caller gives up."""
    import ray

    try:
        return await call(reference, timeout_s=timeout_s, who=who)
    except (asyncio.CancelledError, DeadlineError):
        if isinstance(reference, ray.ObjectRef):
            ray.cancel(reference)
        raise


def translated(error: Exception, who: str) -> Exception:
    """Turn an error of Ray into one of this package."""
    from ray.exceptions import (
        ActorUnavailableError,
        OutOfMemoryError,
        RayActorError,
        RayTaskError,
    )

    if isinstance(error, ActorUnavailableError):
        return ProcessLostError(
            f"{who} cannot be reached: its process, its node or the Ray cluster has ended"
        )
    if isinstance(error, OutOfMemoryError):  # Ray's account of its kill; its remedies follow
        return ProcessLostError(f"{who} died: {str(error).splitlines()[0]}")
    if isinstance(error, RayActorError):
        reason = _last_line(error).partition(" Some common causes")[0]  # for an essay on memory
        return ProcessLostError(f"{who} died: {reason}")
    if not isinstance(error, RayTaskError):
        return ClusterError(f"{who} cannot be reached: {_last_line(error)}")
    cause = error.cause
    if isinstance(cause, AsyncGrpoError):
        return cause
    return WorkerError(f"{who} failed: {type(cause or error).__name__}: {_last_line(error)}")


def _last_line(error: Exception) -> str:
    """The last line of a remote traceback, without the name of our own error class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    return re.sub(rf"^{re.escape(AsyncGrpoError.__module__)}\.\w+: ", "", last)
