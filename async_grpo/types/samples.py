"""From a question to a finished sample: token ids are the truth, text is for people and graders.

Legend: P prompt tokens, L output tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from async_grpo.types.message import Message
from async_grpo.types.snapshots import VersionSpan

# length: at the run's longest output; max_tokens: at a shorter one that an environment asked for.
FinishReason = Literal["stop", "length", "max_tokens", "abort"]
VerdictStatus = Literal["scored", "unscorable", "error"]
Arrays = Mapping[str, NDArray[np.generic]]  # [L, ...] of one row; bfloat16 as its bits
FailureCause = Literal["", "exception", "connection", "overrun", "end", "lost"]
RowKey = tuple[int, int, int, int]  # of a sequence: ordinal, attempt, index in its group, row


@dataclass(frozen=True, slots=True, eq=False)
class Question(Message):
    """One line of the user's data, tokenised."""

    input_token_ids: NDArray[np.int32]  # [P]
    input: str
    answer: str | None
    columns: Mapping[str, Any]  # every column of the user's line, untouched
    dataset_type: str = ""  # chooses environment, rewards and teacher


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPair:
    """One line of supervised data, tokenised; only the completion is trained."""

    prompt_token_ids: NDArray[np.int32]  # [P]
    completion_token_ids: NDArray[np.int32]  # [L], with the end token


@dataclass(frozen=True, slots=True, eq=False)
class GivenPair:
    """A pair that is trained beside questions, with a teacher's scores."""

    question: Question  # without an answer: nobody grades what is given
    completion_token_ids: NDArray[np.int32]  # [L], with the end token
    completion: str  # for people

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens: what a teacher reads."""
        return len(self.question.input_token_ids) + len(self.completion_token_ids)


@dataclass(frozen=True, slots=True)
class SamplingContract(Message):
    """What decides log-probabilities; shared by engine, reference and trainer."""

    temperature: float
    stop_token_ids: tuple[int, ...]  # trained on, as the last token of a finished output
    max_tokens: int  # longest output, in tokens
    top_p: float = 1.0  # of evaluations: training samples from the whole distribution


@dataclass(frozen=True, slots=True, eq=False)
class Turn(Message):
    """One sampled output, as the engine reported it."""

    token_ids: NDArray[np.int32]  # [L]
    logprobs: NDArray[np.float32]  # [L] behaviour log-probability, at the sampling temperature
    weights_versions: tuple[VersionSpan, ...]  # covers [0, L)
    finish_reason: FinishReason
    text: str  # decoded for verifiers and people, without special tokens
    worker_id: str = ""  # of whom holds its prefix

    def stopped(self, length: int, *, text: str) -> Turn:
        """Its first tokens, and their text: the turn of an engine that was told to stop there."""
        spans = (span._replace(stop=min(span.stop, length)) for span in self.weights_versions)
        return replace(
            self,
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            weights_versions=tuple(span for span in spans if span.start < span.stop),
            finish_reason="stop",
            text=text,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Row(Message):
    """What is trained as one sequence: a prompt, then tokens of which some were sampled."""

    prompt_token_ids: NDArray[np.int32]  # [P]
    token_ids: NDArray[np.int32]  # [L]
    logprobs: NDArray[np.float32] | None  # [L] behaviour; None: nothing was sampled, but given
    loss_mask: NDArray[np.bool_]  # [L] False: read by the model, not trained
    weights_versions: tuple[VersionSpan, ...]  # of what was first sampled here, in [0, L)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens: what the row costs of a token budget."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that were first sampled in this row."""
        return sum(span.stop - span.start for span in self.weights_versions)

    @property
    def num_trained_tokens(self) -> int:
        """Unmasked tokens."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, eq=False)
class Episode(Message):
    """What became of one question: one row, unless its history was rewritten on the way."""

    rows: tuple[Row, ...]
    turns: tuple[Turn, ...] = ()  # in order; none where the output was given
    is_cut: bool = False  # there was no room for another turn
    given_text: str = ""  # of an output that was given, for people
    # Of each turn: the number of its row, and where in its output it begins; none: only one turn.
    places: tuple[tuple[int, int], ...] = ()
    verdict: Verdict | None = None  # what played it says of it; None: nothing

    @classmethod
    def of_turn(cls, prompt_token_ids: NDArray[np.int32], turn: Turn) -> Episode:
        """The prompt and one answer, all of which is trained."""
        mask = np.ones(len(turn.token_ids), dtype=np.bool_)
        row = Row(prompt_token_ids, turn.token_ids, turn.logprobs, mask, turn.weights_versions)
        return cls((row,), (turn,))

    @classmethod
    def of_pair(cls, pair: TrainingPair, *, text: str = "") -> Episode:
        """A given completion, all of which is trained; nobody sampled it, with whatever weights."""
        completion = pair.completion_token_ids
        mask = np.ones(len(completion), dtype=np.bool_)
        row = Row(pair.prompt_token_ids, completion, None, mask, ())
        return cls((row,), given_text=text)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the last turn ended, or the episode before the next one."""
        if self.is_cut:
            return "length"
        return self.turns[-1].finish_reason if self.turns else "stop"

    @property
    def text(self) -> str:
        """The last turn's, which verifiers grade, or what was given."""
        return self.turns[-1].text if self.turns else self.given_text

    @property
    def is_given(self) -> bool:
        """Whether nobody sampled any of it."""
        return all(row.logprobs is None for row in self.rows)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all turns."""
        return sum(row.num_sampled_tokens for row in self.rows)

    @property
    def longest_turn(self) -> int:
        """Tokens of the longest turn, each of which may have as many as an output."""
        return max((len(turn.token_ids) for turn in self.turns), default=0)

    def untrained(self) -> Episode:
        """The same with every token masked."""
        rows = (replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in self.rows)
        return replace(self, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class Verdict(Message):
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

    def without_texts(self) -> Verdict:
        """The same without the words for people."""
        return replace(self, reason="", place="") if self.reason or self.place else self


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Message):
    """Where the payload of one row lies: in an object store, until the last ticket is dropped.

    The controller owns it, so that it survives the teacher's process, though not its node.
    """

    reference: tuple[Awaitable[Arrays]]  # Ray resolves one on its way, unless something holds it
    teacher: str  # its role's name
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample(Message):
    """One episode of one question with everything the loss needs.

    Arrays of [L] follow the tokens of all its rows, laid end to end.
    """

    ordinal: int
    index: int  # within its group
    question: Question
    episode: Episode
    verdict: Verdict
    advantage: float | NDArray[np.float32]  # of all its tokens, or of each [L]
    # What other models say of its tokens, by role: [L], or [L, K].
    scores: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    tickets: tuple[Ticket, ...] = ()  # one a row: scores that the rank that trains it fetches
    overlong_penalty: float = 0.0  # taken from the reward: see algorithms/grpo.py
    kl_penalty: float = 0.0
    attempt: int = 0  # questions that its slot had drawn before this one
    contributes: bool = True  # False: its gradient is exactly zero, it is counted and not trained
    row: int = 0  # number of the first row that is here: see `parts`
    num_trained_elsewhere: int = 0  # unmasked tokens of rows that are not here

    @property
    def shaped_reward(self) -> float:
        """What the advantage is made of; `verdict.reward` stays the verifier's."""
        return self.verdict.reward - self.overlong_penalty - self.kl_penalty

    @property
    def has_advantage(self) -> bool:
        """Whether the advantage of any of its tokens is not 0."""
        # numpy takes as long for one number as for thousands.
        found = self.advantage.any() if isinstance(self.advantage, np.ndarray) else self.advantage
        return bool(found)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, each with its prompt: what the sample costs of a token budget."""
        return sum(row.num_tokens for row in self.episode.rows)

    @property
    def key(self) -> RowKey:
        """Return the identity that the audit of a step counts."""
        return self.ordinal, self.attempt, self.index, self.row

    @property
    def num_trained_tokens(self) -> int:
        """Unmasked tokens of all rows: the L_i of the loss."""
        here = sum(row.num_trained_tokens for row in self.episode.rows)
        return here + self.num_trained_elsewhere

    def parts(self) -> tuple[Sample, ...]:
        """The sample cut into one a row, the unit of packing; each carries L_i of the whole."""
        if len(self.episode.rows) == 1:
            return (self,)
        total, start, advantage = self.num_trained_tokens, 0, self.advantage
        parts = []
        for number, row in enumerate(self.episode.rows):
            own = slice(start, start + len(row.token_ids))
            start = own.stop
            part = replace(
                self,
                episode=Episode((row,)),
                advantage=advantage[own] if isinstance(advantage, np.ndarray) else advantage,
                scores={name: values[own] for name, values in self.scores.items()},
                tickets=self.tickets[number : number + 1],
                row=number,
                num_trained_elsewhere=total - row.num_trained_tokens,
            )
            parts.append(part)
        return tuple(parts)


def without_texts(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """What trainers need of the samples of one group: no text, and no column of the user's."""
    # Sampled ones have the same question, which is to be carried once.
    questions = {
        id(sample.question): replace(sample.question, input="", answer=None, columns={})
        for sample in samples
    }
    return tuple(
        replace(
            sample,
            question=questions[id(sample.question)],
            episode=Episode(sample.episode.rows, is_cut=sample.episode.is_cut),
            verdict=sample.verdict.without_texts(),
        )
        for sample in samples
    )


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All outputs of one question at one attempt; or of as many given pairs."""

    ordinal: int
    attempt: int  # questions that the slot had drawn before this one
    samples: tuple[Sample, ...]
    is_replaced: bool = False  # its slot draws another question; these are not trained

    @property
    def is_given(self) -> bool:
        """Whether nobody sampled any of it: it was not graded, and has no advantages."""
        return all(sample.episode.is_given for sample in self.samples)
