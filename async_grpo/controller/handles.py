"""What handles of actors offer: `handle.method.remote(...)` gives a reference to wait for.

Ray's own handles say nothing of the actor behind them. `tests/types/test_handles.py` holds these
protocols to the actors' classes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from async_grpo.algorithms.express import Meeting
    from async_grpo.algorithms.express_plan import ExpressRound
    from async_grpo.batching.records import BatcherPlan
    from async_grpo.types import (
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
        VerificationRequest,
        WeightsAck,
        WeightsSnapshot,
        WeightsVersion,
        WorkerInfo,
    )
    from async_grpo.types.requests import EpisodesRequest

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Remote(Protocol[P, R_co]):
    """A method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R_co]: ...


class WorkerHandle(Protocol):
    """A worker of any role: the first methods are every worker's, the others those of its role."""

    info: Remote[[], WorkerInfo]
    ping: Remote[[float], Pulse]
    abort_all: Remote[[], None]
    load_weights: Remote[[WeightsSnapshot], WeightsAck]  # of roles that follow the trainer's
    generate: Remote[[GenerationRequest], tuple[Turn, ...]]
    open_route: Remote[[dict[str, Any], float], None]  # of the device transport, as the next two
    expect_weights: Remote[[WeightsSnapshot], None]
    receive_weights: Remote[[WeightsSnapshot, dict[str, Any], float], None]
    logprobs: Remote[[LogprobRequest], Sequence[Any]]  # of references and teachers
    teach: Remote[[LogprobRequest], tuple[Any, ...]]  # of teachers, as the next three
    head: Remote[[HeadRequest], tuple[Any, ...]]
    join_express: Remote[[Meeting, int], None]
    serve_express: Remote[[ExpressRound], None]
    play: Remote[[EpisodesRequest], PlayedGroup]  # of environments
    judge: Remote[[JudgeRequest], JudgeAnswer]  # of judges
    verify: Remote[[GradingRequest], tuple[Verdict, ...]]  # of verifier pools, as all below
    try_out: Remote[[VerificationRequest], tuple[Verdict, ...]]
    take_share: Remote[[int], None]
    complaint: Remote[[], str]


class RecorderHandle(Protocol):
    """A `RunRecorder`."""

    write: Remote[[str, int, Sequence[bytes]], tuple[int, tuple[str, ...]]]


class WitnessHandle(Protocol):
    """A `Witness`."""

    until_death: Remote[[], None]


class GatewayHandle(Protocol):
    """The `Gateway` of a run."""

    url: Remote[[], str]


class ControllerHandle(Protocol):
    """A `Controller`, whose methods those of a run name it first."""

    hello: Remote[[str], None]
    register: Remote[[WorkerInfo, WorkerHandle], None]
    deregister: Remote[[str, str], None]
    drain: Remote[[str, str], None]
    standing: Remote[[Mapping[str, Sequence[str]]], dict[str, Standing]]
    roles: Remote[[], tuple[str, ...]]
    members: Remote[[str], tuple[WorkerInfo, ...]]
    receivers: Remote[[str], tuple[tuple[WorkerInfo, WorkerHandle], ...]]
    fenced: Remote[[str], dict[str, str]]
    begin_run: Remote[[BatcherPlan, WitnessHandle, RecorderHandle | None], int]
    end_run: Remote[[RunId], None]
    heard: Remote[[RunId], None]
    publish: Remote[[RunId, WeightsSnapshot, tuple[str, ...], float], dict[str, PublishReport]]
    published: Remote[[RunId, WeightsVersion], None]
    next_items: Remote[[RunId, int, int], StreamItems]
    hungry: Remote[[RunId, int], None]
    taught_again: Remote[[RunId, int, int, Sequence[RowKey]], Minibatch]
    teacher_head: Remote[[RunId, str], tuple[Any, ...]]
    evaluated: Remote[[RunId], tuple[EvaluationResult, ...]]
    status: Remote[[RunId], PipelineStatus]
    control: Remote[[str, Control], None]
    running: Remote[[str], RunStatus]
    abort: Remote[[RunId, str], None]
    ask: Remote[..., Any]  # the answer of a worker of any role
