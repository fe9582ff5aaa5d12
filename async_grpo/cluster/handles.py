"""What handles of actors offer: `handle.method.remote(...)` gives a reference to wait for.

Ray's own handles say nothing of the actor behind them. `tests/types/test_handles.py` holds these
protocols to the actors' classes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
        RunId,
        RunStatus,
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

WHO = "the controller"
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Method(Protocol[P, R_co]):
    """A method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R_co]: ...


class WorkerHandle(Protocol):
    """A worker of any role: the first methods are every worker's, the others those of its role."""

    info: Method[[], WorkerInfo]
    ping: Method[[float], Pulse]
    abort_all: Method[[], None]
    load_weights: Method[[WeightsSnapshot], WeightsAck]  # of roles that follow the trainer's
    generate: Method[[GenerationRequest], tuple[Turn, ...]]
    open_route: Method[[Mapping[str, object], float], None]  # device transport's, as the next two
    expect_weights: Method[[WeightsSnapshot], None]
    receive_weights: Method[[WeightsSnapshot, Mapping[str, object], float], None]
    logprobs: Method[[LogprobRequest], Sequence[NDArray[np.float32]]]  # of references and teachers
    teach: Method[[LogprobRequest], tuple[object, ...]]  # of teachers, as the next three
    head: Method[[HeadRequest], tuple[object, ...]]
    join_express: Method[[object, int], None]
    serve_express: Method[[object], None]
    play: Method[[EpisodesRequest], PlayedGroup]  # of environments
    judge: Method[[JudgeRequest], JudgeAnswer]  # of judges
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
    # The first argument is a `BatcherPlan`, of a room above.
    begin_run: Method[[object, WitnessHandle, RecorderHandle | None], int]
    end_run: Method[[RunId], None]
    heard: Method[[RunId], None]
    publish: Method[[RunId, WeightsSnapshot, tuple[str, ...], float], dict[str, PublishReport]]
    published: Method[[RunId, WeightsVersion], None]
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
class RunClient:
    """The controller as one run calls it: each call names the run, and returns a reference.

    Whoever calls waits with `cluster.wait` and a deadline. `RunLost` says that the run has ended
    there, or goes on under another epoch.
    """

    controller: ControllerHandle
    run: RunId

    def next_items(self, rank: int, index: int) -> Awaitable[StreamItems]:
        return self.controller.next_items.remote(self.run, rank, index)

    def taught_again(self, rank: int, index: int, keys: Sequence[RowKey]) -> Awaitable[Minibatch]:
        return self.controller.taught_again.remote(self.run, rank, index, keys)

    def teacher_head(self, role: str) -> Awaitable[tuple[Awaitable[Arrays], ...]]:
        return self.controller.teacher_head.remote(self.run, role)

    def hungry(self, index: int) -> Awaitable[None]:
        return self.controller.hungry.remote(self.run, index)

    def status(self) -> Awaitable[PipelineStatus]:
        return self.controller.status.remote(self.run)

    def evaluated(self) -> Awaitable[tuple[EvaluationResult, ...]]:
        return self.controller.evaluated.remote(self.run)

    def publish(
        self, snapshot: WeightsSnapshot, roles: tuple[str, ...], timeout_s: float
    ) -> Awaitable[dict[str, PublishReport]]:
        return self.controller.publish.remote(self.run, snapshot, roles, timeout_s)

    def published(self, version: WeightsVersion) -> Awaitable[None]:
        return self.controller.published.remote(self.run, version)

    def receivers(self, role: str) -> Awaitable[tuple[tuple[WorkerInfo, WorkerHandle], ...]]:
        return self.controller.receivers.remote(role)

    def heard(self) -> Awaitable[None]:
        return self.controller.heard.remote(self.run)

    def abort(self, reason: str) -> Awaitable[None]:
        return self.controller.abort.remote(self.run, reason)

    def end_run(self) -> Awaitable[None]:
        return self.controller.end_run.remote(self.run)
