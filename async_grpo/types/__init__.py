"""The records that travel between packages: frozen and slotted; `dataclasses.replace` adds fields.

Each file has one subject. Import the records from here.
"""

from async_grpo.types.requests import (
    EpisodesRequest,
    EvaluationTerms,
    GenerationRequest,
    GradingRequest,
    HeadRequest,
    Hold,
    JudgeAnswer,
    JudgeRequest,
    LogprobRequest,
    OutageRequest,
    Payload,
    PayloadKind,
    PlayedGroup,
    ServiceRequest,
    VerificationRequest,
)
from async_grpo.types.runs import (
    AT_ONCE,
    Control,
    ControlAction,
    PipelineStatus,
    Problem,
    RunId,
    RunStatus,
)
from async_grpo.types.samples import (
    Arrays,
    Episode,
    FailureCause,
    FinishReason,
    GivenPair,
    Group,
    Question,
    Row,
    RowKey,
    Sample,
    SamplingContract,
    Ticket,
    TrainingPair,
    Turn,
    Verdict,
    VerdictStatus,
    without_texts,
)
from async_grpo.types.snapshots import (
    CanaryRow,
    Experts,
    Piece,
    PublishReport,
    Stored,
    TensorMeta,
    VersionSpan,
    WeightsAck,
    WeightSample,
    WeightsBucket,
    WeightsDelta,
    WeightsSnapshot,
    WeightsVersion,
    canary_tokens,
)
from async_grpo.types.training import (
    EndOfStep,
    EvaluationResult,
    Minibatch,
    PackedMinibatch,
    QuestionOutcome,
    ResumePoint,
    StreamItem,
    StreamItems,
    Tally,
    digest_of,
    tally,
    token_weight,
)
from async_grpo.types.worker_info import (
    Cut,
    Pulse,
    RequestPulse,
    Rewards,
    Standing,
    WorkerInfo,
    share_out,
)
