"""The records that travel between rooms: frozen and slotted, `dataclasses.replace` adds fields.

A file a subject; everybody imports them from here.
"""

from async_grpo.types.audit import RowKey, Tally, digest_of, tally, token_weight
from async_grpo.types.canary import (
    CanaryRow,
    canary_complaint,
    canary_differences,
    canary_tokens,
)
from async_grpo.types.control import AT_ONCE, Control, ControlAction, RunStatus
from async_grpo.types.evaluation import EvaluationResult, QuestionOutcome
from async_grpo.types.requests import (
    EpisodesRequest,
    GenerationRequest,
    GradingRequest,
    HeadRequest,
    JudgeAnswer,
    JudgeRequest,
    LogprobRequest,
    OutageRequest,
    PlayedGroup,
    VerificationRequest,
)
from async_grpo.types.rewards import Rewards, share_out
from async_grpo.types.runs import RunId
from async_grpo.types.samples import (
    Episode,
    FailureCause,
    FinishReason,
    GivenPair,
    Group,
    Question,
    Row,
    Sample,
    SamplingContract,
    TrainingPair,
    Turn,
    Verdict,
    VerdictStatus,
    without_texts,
)
from async_grpo.types.teaching import Payload, PayloadKind, Ticket
from async_grpo.types.training import (
    EndOfStep,
    Minibatch,
    PackedMinibatch,
    ResumePoint,
    StreamItem,
    StreamItems,
)
from async_grpo.types.weights import (
    Piece,
    PublishReport,
    TensorMeta,
    VersionSpan,
    WeightsAck,
    WeightsBucket,
    WeightsDelta,
    WeightsSnapshot,
    WeightsVersion,
)
from async_grpo.types.workers import (
    PipelineStatus,
    Problem,
    Pulse,
    RequestPulse,
    Standing,
    WorkerInfo,
)
