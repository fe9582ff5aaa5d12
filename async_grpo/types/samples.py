"""From a question to a finished sample: token ids are the truth, text is for people and graders.

Legend: P prompt tokens, L output tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from async_grpo.types.weights import VersionSpan

FinishReason = Literal["stop", "length", "abort"]
VerdictStatus = Literal["scored", "unscorable", "error"]
FailureCause = Literal["", "exception", "connection", "overrun", "end", "lost"]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One line of the user's data, tokenised."""

    input_token_ids: NDArray[np.int32]  # [P]
    input: str
    answer: str | None
    columns: Mapping[str, Any]  # every column of the user's line, untouched


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPair:
    """One line of supervised data, tokenised; only the completion is trained."""

    prompt_token_ids: NDArray[np.int32]  # [P]
    completion_token_ids: NDArray[np.int32]  # [L], with the end token


@dataclass(frozen=True, slots=True)
class SamplingContract:
    """What decides log-probabilities; shared by engine, reference and trainer."""

    temperature: float
    stop_token_ids: tuple[int, ...]  # trained on, as the last token of a finished output
    max_tokens: int  # longest output, in tokens


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled output, as the engine reported it."""

    token_ids: NDArray[np.int32]  # [L]
    logprobs: NDArray[np.float32]  # [L] behaviour log-probability, at the sampling temperature
    weights_versions: tuple[VersionSpan, ...]  # covers [0, L)
    loss_mask: NDArray[np.bool_]  # [L] False: read by the model, not trained
    finish_reason: FinishReason
    text: str  # decoded for verifiers and people, without special tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifiers say of one output.

    `scored` and `unscorable` (no answer could be found: a bad answer) carry a reward; an `error`
    says that verification itself failed, and is never a reward of 0.

    What failed has a cause: the adapter raised an `exception`, which may be of a `connection` that
    it needs; it reached a limit (`overrun`: unscorable when that is the output's own doing); its
    process came to an `end`, or was `lost` to somebody else's kill.
    """

    status: VerdictStatus
    reward: float
    format_reward: float | None
    adapter: str  # whose reward counts
    reason: str  # empty when scored
    seconds: float
    cause: FailureCause = ""
    place: str = ""  # of an exception: its type and the user's line


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One output of one question with everything the loss needs."""

    ordinal: int
    index: int  # within its group
    question: Question
    completion: Completion
    verdict: Verdict
    advantage: float
    reference_logprobs: NDArray[np.float32] | None = None  # [L], None where nobody needs them
    overlong_penalty: float = 0.0  # taken from the reward: see batching/shaping.py
    kl_penalty: float = 0.0

    @property
    def shaped_reward(self) -> float:
        """What the advantage is made of; `verdict.reward` stays the verifier's."""
        return self.verdict.reward - self.overlong_penalty - self.kl_penalty

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens: what the sample costs of a token budget."""
        return len(self.question.input_token_ids) + len(self.completion.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Unmasked output tokens: the L_i of the loss."""
        return int(self.completion.loss_mask.sum())


def without_texts(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """What trainers need of the samples of one group: no text, and no column of the user's."""
    question = replace(samples[0].question, input="", answer=None, columns={})
    return tuple(
        replace(
            sample,
            question=question,
            completion=replace(sample.completion, text=""),
            verdict=replace(sample.verdict, reason="", place=""),
        )
        for sample in samples
    )


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All outputs of one question at one attempt."""

    ordinal: int
    attempt: int  # questions that the slot had drawn before this one
    samples: tuple[Sample, ...]
    is_replaced: bool = False  # its slot draws another question; these are not trained
