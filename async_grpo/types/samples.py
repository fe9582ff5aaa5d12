"""From a question to a finished sample: token ids are trained, text is for users and graders.

Legend: P prompt tokens, L output tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from async_grpo.types.message import Message
from async_grpo.types.snapshots import Experts, VersionSpan

# length: at the run's longest output; max_tokens: at a shorter one that an environment asked for;
# unfinished: of a part, more follows.
FinishReason = Literal["stop", "length", "max_tokens", "abort", "unfinished"]
VerdictStatus = Literal["scored", "unscorable", "error"]
Arrays = Mapping[str, NDArray[np.generic]]  # [L, ...] of one row; bfloat16 as its bits
FailureCause = Literal["", "exception", "connection", "overrun", "end", "lost"]
RowKey = tuple[int, int, int, int]  # of a sequence: ordinal, attempt, index in its group, row


@dataclass(frozen=True, slots=True, eq=False)
class Question(Message):
    """One line of the user's data, tokenised."""

    input_token_ids: NDArray[np.int32]  # [P] as the model reads it, with its chat template
    input: str  # the prompt's text; of `messages` the content of the last one
    answer: str | None  # the expected one; None where the line has none
    columns: Mapping[str, Any]  # every column of the user's line, untouched
    dataset_type: str = ""  # of its file or line; chooses environment, rewards and teacher
    # [L] a demonstrated answer with its end token; None without --use-ref-answers.
    reference_token_ids: NDArray[np.int32] | None = None
    reference: str = ""  # text of that answer


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPair:
    """One line of supervised data, tokenised; the loss is over the completion alone."""

    prompt_token_ids: NDArray[np.int32]  # [P]
    completion_token_ids: NDArray[np.int32]  # [L], with the end token


@dataclass(frozen=True, slots=True, eq=False)
class GivenPair:
    """A pair that is trained beside sampled outputs, with a teacher's scores."""

    question: Question  # without an answer: given completions are not graded
    completion_token_ids: NDArray[np.int32]  # [L], with the end token
    completion: str  # for users

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens, all of which a teacher reads."""
        return len(self.question.input_token_ids) + len(self.completion_token_ids)


@dataclass(frozen=True, slots=True)
class SamplingContract(Message):
    """What log-probabilities depend on; the same for engine, reference and trainer."""

    temperature: float
    stop_token_ids: tuple[int, ...]  # trained on, as the last token of a finished output
    max_tokens: int  # longest output, in tokens
    top_p: float = 1.0  # of evaluations: training samples from the whole distribution
    grammar: str = ""  # vLLM's structured outputs as JSON; what it forces upon the model is masked
    with_experts: bool = False  # engines that can tell which experts were chosen do so


@dataclass(frozen=True, slots=True, eq=False)
class Turn(Message):
    """One sampled output, as the engine reported it."""

    token_ids: NDArray[np.int32]  # [L] as sampled, with the token that ended it
    logprobs: NDArray[np.float32]  # [L] behaviour log-probability, at the sampling temperature
    # Which weights sampled which tokens: spans of `version`, `start`, `stop` that cover [0, L).
    weights_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason  # max_tokens: at a shorter longest output than the run's
    text: str  # decoded for verifiers and users, without special tokens
    worker_id: str = ""  # of the worker that has its prefix cached
    is_constrained: bool = False  # sampled under a grammar: not the policy's own, never trained
    # [P+L-1, layers * chosen] experts of the prompt's and the output's tokens; the last one's are
    # never computed. None: of a dense model, or unknown.
    experts: Experts | None = None

    def experts_before(self, length: int) -> Experts | None:
        """`experts` of a turn that ends after `length` tokens of its output."""
        if self.experts is None:
            return None
        return self.experts[: len(self.experts) - len(self.token_ids) + length]

    def stopped(self, length: int, *, text: str) -> Turn:
        """The turn cut to its first `length` tokens, whose text is `text`, as if it ended there."""
        spans = (span._replace(stop=min(span.stop, length)) for span in self.weights_versions)
        return replace(
            self,
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            weights_versions=tuple(span for span in spans if span.start < span.stop),
            experts=self.experts_before(length),
            finish_reason="stop",
            text=text,
        )

    @property
    def is_finished(self) -> bool:
        """Whether it has ended; else it is a part."""
        return self.finish_reason != "unfinished"


def joined(parts: Sequence[Turn]) -> Turn:
    """The output whose tokens arrived in parts; all but those of tokens is as in the last one.

    >>> from async_grpo.types import WeightsVersion
    >>> ids, spans = np.array([7, 8], np.int32), (VersionSpan(WeightsVersion(0, 3), 0, 2),)
    >>> part = Turn(ids, -ids.astype(np.float32), spans, "stop", "")
    >>> whole = joined([part, part.stopped(1, text="")])
    >>> whole.token_ids.tolist(), [(span.start, span.stop) for span in whole.weights_versions]
    ([7, 8, 7], [(0, 2), (2, 3)])
    """
    ends = accumulate((len(part.token_ids) for part in parts), initial=0)
    spans = (
        VersionSpan(span.version, begin + span.start, begin + span.stop)
        for begin, part in zip(ends, parts, strict=False)
        for span in part.weights_versions
    )
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        weights_versions=tuple(spans),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Row(Message):
    """One sequence to train: a prompt, then tokens of which some were sampled."""

    prompt_token_ids: NDArray[np.int32]  # [P]
    token_ids: NDArray[np.int32]  # [L] all that follows: sampled, or read between turns
    logprobs: NDArray[np.float32] | None  # [L] behaviour, 0 where read; None: all were given
    loss_mask: NDArray[np.bool_]  # [L] False: not trained, as what the model only read
    weights_versions: tuple[VersionSpan, ...]  # of tokens first sampled in this row, in [0, L)
    experts: Experts | None = None  # see `Turn`; up to the last turn

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, which count against a token budget."""
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
    """The turns and rows of one answer to a question: one row unless its history was rewritten."""

    rows: tuple[Row, ...]  # sequences to train: one, unless the history was rewritten
    turns: tuple[Turn, ...] = ()  # in order; empty where the output was given
    is_cut: bool = False  # it ended because another turn would not have fit
    given_text: str = ""  # of an output that was given, for users
    # (index of its row, where it begins in the row's output) of each turn; empty: one turn.
    places: tuple[tuple[int, int], ...] = ()
    verdict: Verdict | None = None  # of the environment that played it; None: it gives none

    @classmethod
    def of_turn(cls, prompt_token_ids: NDArray[np.int32], turn: Turn) -> Episode:
        """The episode of a prompt and one output, all of whose tokens are trained."""
        mask = np.ones(len(turn.token_ids), dtype=np.bool_)
        row = Row(
            prompt_token_ids,
            turn.token_ids,
            turn.logprobs,
            mask,
            turn.weights_versions,
            turn.experts,
        )
        return cls((row,), (turn,))

    @classmethod
    def of_pair(cls, pair: TrainingPair, *, text: str = "") -> Episode:
        """The episode of a given completion, all of whose tokens are trained."""
        completion = pair.completion_token_ids
        mask = np.ones(len(completion), dtype=np.bool_)
        row = Row(pair.prompt_token_ids, completion, None, mask, ())
        return cls((row,), given_text=text)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the last turn ended; "length" if there was no room for another."""
        if self.is_cut:
            return "length"
        return self.turns[-1].finish_reason if self.turns else "stop"

    @property
    def text(self) -> str:
        """The text of the last turn, which verifiers grade, or of the given output."""
        return self.turns[-1].text if self.turns else self.given_text

    @property
    def is_given(self) -> bool:
        """Whether none of its tokens was sampled."""
        return all(row.logprobs is None for row in self.rows)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all turns."""
        return sum(row.num_sampled_tokens for row in self.rows)

    @property
    def num_constrained_tokens(self) -> int:
        """Of these, the tokens of turns under a grammar."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.is_constrained)

    @property
    def is_forced(self) -> bool:
        """Whether every turn was sampled under a grammar."""
        return bool(self.turns) and all(turn.is_constrained for turn in self.turns)

    @property
    def longest_turn(self) -> int:
        """Tokens of the longest turn."""
        return max((len(turn.token_ids) for turn in self.turns), default=0)

    def untrained(self) -> Episode:
        """A copy with every token masked."""
        rows = (replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in self.rows)
        return replace(self, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class Verdict(Message):
    """The grade of one output.

    `scored` and `unscorable` (no answer was found in the output) carry a reward; an `error` says
    that verification itself failed, and never counts as a reward of 0.

    Causes: the adapter raised an `exception`, perhaps from a `connection` that it needs; it reached
    a limit (`overrun`: unscorable when the output caused it); its process came to an `end` by
    itself, or was `lost` to a kill from outside.
    """

    status: VerdictStatus  # unscorable: a bad answer; error: nobody could grade, its group goes
    reward: float  # a finite number
    format_reward: float | None  # for the metric of that name; None: there is none
    adapter: str  # whose reward counts, a name for people
    reason: str  # empty when scored
    seconds: float  # that grading took; 0: not measured
    cause: FailureCause = ""  # of an error or an overrun
    place: str = ""  # of an exception: its type and the user's line

    @classmethod
    def scored(cls, reward: float, *, adapter: str = "") -> Verdict:
        """The verdict of an output that earns `reward`; `adapter` names who graded, for people.

        >>> Verdict.scored(1).status, Verdict.scored(1).reward
        ('scored', 1.0)
        """
        return cls("scored", float(reward), None, adapter, "", 0.0)

    def without_texts(self) -> Verdict:
        """A copy without the texts for users."""
        return replace(self, reason="", place="") if self.reason or self.place else self


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Message):
    """A reference to the payload of one row, which lies in an object store while tickets exist.

    The controller owns the payload, so that it survives the teacher's process, but not its node.
    """

    reference: tuple[Awaitable[Arrays]]  # in a tuple, because Ray would resolve a bare argument
    teacher: str  # its role's name
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample(Message):
    """One episode of one question with everything that the loss needs.

    Arrays of [L] follow the output tokens of all its rows, end to end.
    """

    ordinal: int  # of its slot in the run
    index: int  # within its group
    question: Question  # see above
    episode: Episode  # see above
    verdict: Verdict  # see above
    advantage: float | NDArray[np.float32]  # of all its tokens, or of each [L]
    # Scores of its tokens by other models, {role: [L] or [L, K]}.
    scores: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    tickets: tuple[Ticket, ...] = ()  # one a row: payloads that the training rank fetches
    overlong_penalty: float = 0.0  # taken from the reward by `finish_group`
    kl_penalty: float = 0.0  # likewise
    attempt: int = 0  # questions that its slot had drawn before this one
    contributes: bool = True  # False: its gradient is exactly 0; it is counted and not trained
    row: int = 0  # index of the first row that is here: see `parts`
    num_trained_elsewhere: int = 0  # unmasked tokens of rows that are not here

    @property
    def shaped_reward(self) -> float:
        """The reward less penalties, from which advantages are computed."""
        return self.verdict.reward - self.overlong_penalty - self.kl_penalty

    @property
    def has_advantage(self) -> bool:
        """Whether the advantage of any of its tokens is not 0."""
        # Not by numpy for a float, which would take as long as for thousands of numbers.
        found = self.advantage.any() if isinstance(self.advantage, np.ndarray) else self.advantage
        return bool(found)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows with their prompts, which count against a token budget."""
        return sum(row.num_tokens for row in self.episode.rows)

    @property
    def key(self) -> RowKey:
        """The identity by which a step's audit counts it."""
        return self.ordinal, self.attempt, self.index, self.row

    @property
    def num_trained_tokens(self) -> int:
        """Unmasked tokens of all rows, L_i of the loss."""
        here = sum(row.num_trained_tokens for row in self.episode.rows)
        return here + self.num_trained_elsewhere

    def parts(self) -> tuple[Sample, ...]:
        """A sample for each row, the unit of packing; each keeps the L_i of the whole sample."""
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
    """The samples of one group as trainers need them: without texts and the user's columns."""
    # Sampled outputs share one question, which must be sent once.
    questions = {
        id(own): Question(own.input_token_ids, "", None, {}, own.dataset_type)
        for own in (sample.question for sample in samples)
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

    ordinal: int  # of its slot in the run
    attempt: int  # questions that the slot had drawn before this one
    samples: tuple[Sample, ...]  # of one question, or given pairs
    is_replaced: bool = False  # its slot draws another question; these are not trained
    left_out: tuple[Sample, ...] = ()  # sampled, but no members (--length-limit-policy invalidate)
    # Members of its statistics that are no samples of the run (--ref-answer-coefficient 0).
    references: tuple[Sample, ...] = ()

    @property
    def sampled(self) -> tuple[Sample, ...]:
        """The members that are no reference answer, and no given pair."""
        return tuple(sample for sample in self.samples if not sample.episode.is_given)

    @property
    def is_given(self) -> bool:
        """Whether none of it was sampled: then it is not graded, and has no advantages."""
        return all(sample.episode.is_given for sample in self.samples)
