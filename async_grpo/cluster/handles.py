"""Types of actors' handles, and how coroutines await their answers.

`handle.method.remote(...)` returns a reference to await; synchronous code calls `Cluster.wait`.

A call of Ray costs either side half a millisecond of CPU, so that requests to one actor share calls
(`Calls`). A caller has at most two under way. One waits at the actor until any request of the
caller is answered; requests that come meanwhile go with the other, at which the first returns. What
is asked and answered while both are on their way travels together: a lone request goes at once, and
the more there are, the more share a call.

Ray's own handles are untyped. `tests/types/test_handles.py` holds these
protocols to the actors' classes.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import traceback
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

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
    from ray.actor import ActorHandle

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
NUM_UNDER_WAY = 2  # calls
# Its number, the method and its arguments; without a method, the request is given up.
Request = tuple[int, str, Sequence[object], Mapping[str, object]]
Answer = tuple[int, object, Exception | None]  # the request's number, its result or its error
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


@dataclass(slots=True, eq=False)
class _Desk:
    """The requests of one caller at the actor, and the answers that it has not taken yet."""

    answering: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)  # answered, or overtaken on their way
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, actor: object, request: Request) -> None:
        """Keep what the method returns, or the error that Ray would make of what it raises."""
        number, method, arguments, named = request
        result, error = None, None
        try:
            result = await getattr(actor, method)(*arguments, **named)
        except (Exception, asyncio.CancelledError) as raised:
            from ray.exceptions import RayTaskError

            # The caller may not know the classes of other errors.
            is_known = isinstance(raised, AsyncGrpoError) or type(raised).__module__ == "builtins"
            cause = raised if is_known else None
            error = RayTaskError("exchange", traceback.format_exc(), cause)
        if self.answering.pop(number, None):  # it has not been given up
            self.answers.append((number, result, error))
            self.changed.set()


class BatchedActor:
    """Base of actors that take `Calls`."""

    @cached_property
    def _desks(self) -> defaultdict[str, _Desk]:
        return defaultdict(_Desk)  # by caller

    async def exchange(self, caller: str, requests: Sequence[Request]) -> list[Answer]:
        """Begin requests, or cancel them, and wait for an answer to any of the caller's."""
        desk = self._desks[caller]
        for request in requests:
            number, method, *_ = request
            if number in desk.answering:
                desk.answering.pop(number).cancel()
            elif not method:
                desk.given_up.add(number)
            elif number not in desk.given_up:
                work = desk.answer(self, request)
                desk.answering[number] = asyncio.create_task(work, name=method)
        desk.changed.set()  # a call that waits returns
        desk.changed = changed = asyncio.Event()
        if desk.answering and not desk.answers:
            await changed.wait()
        answers, desk.answers = desk.answers, []
        if not (desk.answering or desk.given_up) and self._desks.get(caller) is desk:
            del self._desks[caller]
        return answers


class Calls:
    """The requests of one event loop to one actor, which need not be a `BatchedActor`."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        self._caller = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._unsent: list[Request] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_due = False  # a call begins in the loop's next turn

    def ask(self, method: str, *arguments: object, **named: object) -> Awaitable[object]:
        """The answer of a method; to cancel it gives the request up."""
        if not hasattr(self.handle, "exchange"):
            answer: Awaitable[object] = getattr(self.handle, method).remote(*arguments, **named)
            return answer
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        future.add_done_callback(partial(self._done, number))
        self._send((number, method, arguments, named))
        return future

    def _done(self, number: int, _: asyncio.Future[object]) -> None:
        if self._waiting.pop(number, None):  # it has not been answered
            self._send((number, "", (), {}))

    def _send(self, *requests: Request) -> None:
        """Begin a call if one has something to bring, or has to wait for answers."""
        self._unsent += requests
        most = NUM_UNDER_WAY if self._unsent else bool(self._waiting)
        if not self._is_due and len(self._under_way) < most:
            self._is_due = True
            self._under_way.add(asyncio.create_task(self._call(), name="exchange"))

    async def _call(self) -> None:
        self._is_due = False
        requests, self._unsent = self._unsent, []
        answers: list[Answer]
        try:
            answers = await self.handle.exchange.remote(self._caller, requests)
        except Exception as error:  # with the call, the answers to all that was sent are lost
            unsent = {number for number, *_ in self._unsent}
            answers = [(number, None, error) for number in self._waiting if number not in unsent]
        for number, result, failure in answers:
            future = self._waiting.pop(number, None)
            if future and not future.done():
                future.set_exception(failure) if failure else future.set_result(result)
        self._under_way -= {asyncio.current_task()}
        self._send()


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
def _controller_of(cluster: Cluster, run: RunId) -> Calls:
    """Look up once an epoch, which ends with its controller: all episodes wait for a lookup."""
    controller: ControllerHandle | None = cluster.find_actor(CONTROLLER)
    if controller is None:
        raise ProcessLostError("the controller has ended: its run goes on with another one")
    return Calls(controller)


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
