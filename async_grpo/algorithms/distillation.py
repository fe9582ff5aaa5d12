"""GRPO that also learns from teachers, by those of its terms whose coefficient is not 0.

    A_it    = κ A_i + η clip(tea - sg(lp), ±c)              Gu et al., MiniLLM, arXiv 2306.08543
    loss_it = GRPO's of A_it + γ divergence_it              Agarwal et al., GKD, arXiv 2306.13649

`lp` is the policy's log-probability of a sampled token, `tea` its teacher's, sg stop-gradient. The
divergence compares whole distributions: `algorithms/distillation_loss.py`. All terms share one D.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from async_grpo.algorithms.base import LossSums, ScoreNeed, Teacher
from async_grpo.algorithms.grpo import Grpo
from async_grpo.config.roles import TEACHER
from async_grpo.config.teaching import EVERY_TYPE, TeachingOptions, check_distillation
from async_grpo.types import Payload, PayloadKind, Sample
from async_grpo.types.metrics import Metric

if TYPE_CHECKING:
    from async_grpo.model.logprobs import HeadTerm, TokenLogprobs
    from async_grpo.types import PackedMinibatch

GAP = Metric(
    "teacher_gap", "teacher_gap_sum", "sampled_tokens", "nats", "Teacher's gap",
    "log-probability of a sampled token under its teacher less that under the policy",
)  # fmt: skip
DIVERGENCE = Metric(
    "gkd_divergence", "gkd_divergence_sum", "trained_tokens", "nats", "Divergence from the teacher",
    "divergence of --gkd-alpha between a token's distributions under its teacher and the policy",
)  # fmt: skip
TAIL = Metric(
    "teacher_tail", "teacher_tail_sum", "trained_tokens", "fraction", "Teacher's tail",
    "probability that a teacher gives to tokens beyond its --gkd-top-k likeliest",
)  # fmt: skip

TOKENS = Metric(
    "teacher_tokens", "teacher_tokens", "", "tokens", "Tokens taught",
    "tokens that teachers have scored",
)  # fmt: skip
BYTES = Metric(
    "teacher_bytes_per_token", "teacher_bytes", "teacher_tokens", "bytes", "Payload of a token",
    "what a teacher sends of its distribution over a token, by the object store or by express",
)  # fmt: skip
WAIT = Metric(
    "teacher_buffer_seconds", "teacher_buffer_seconds", "", "seconds", "Waiting for room",
    "seconds that groups have waited until --teacher-buffer-gib had room, all together",
)  # fmt: skip
LOST = Metric(
    "lost_payloads", "lost_payloads", "", "samples", "Payloads lost",
    "samples whose payload was lost with a node before its rank had it, and made again",
)  # fmt: skip


class Distillation(Grpo):
    """GRPO with teachers: `--algorithm grpo` with a coefficient of a teacher's term."""

    def prepare(self) -> None:
        """See `Algorithm`."""
        config = self.config
        check_distillation(config.teaching, config.objective, config.data)
        super().prepare()
        self._payload = payload_of(config.teaching)
        need, self.metrics = ScoreNeed(TEACHER), (GAP, TOKENS)
        if self._payload:
            fetches_heads = self._payload.kind == "hidden"
            need = ScoreNeed(
                TEACHER, of_given=True, payload=self._payload, fetches_heads=fetches_heads
            )
            self.metrics += (DIVERGENCE, BYTES, WAIT, LOST)
            self.metrics += (TAIL,) if self._payload.kind == "topk" else ()
        self.needs = (*self.needs, need)

    def teacher_terms(self, teachers: Sequence[Teacher]) -> tuple[HeadTerm, ...]:
        """The divergence, if teachers send a payload for it."""
        if self._payload is None:
            return ()
        from async_grpo.algorithms.distillation_loss import head_term  # with torch

        teaching, temperature = self.config.teaching, self.config.sampling.temperature
        term = head_term(
            self._payload, teachers, alpha=teaching.gkd_alpha, policy_temperature=temperature,
            temperature=teaching.gkd_temperature,
        )  # fmt: skip
        return (term,)

    def contributes(self, sample: Sample) -> bool:
        """A teacher's terms have a gradient without an advantage of the sample."""
        return sample.num_trained_tokens > 0

    def loss(self, scored: TokenLogprobs, packed: PackedMinibatch) -> LossSums:
        """See distillation_loss.py."""
        from async_grpo.algorithms.distillation_loss import distillation_loss  # with torch

        return distillation_loss(scored, packed, self.config.teaching, grpo=super().loss)

    def in_words(self) -> tuple[str, ...]:
        words = teachers_in_words(self.config.teaching, self.config.teacher_routes)
        return (*super().in_words(), words)


def payload_of(teaching: TeachingOptions) -> Payload | None:
    """The payload that teachers send besides log-probabilities, or None."""
    if not teaching.gkd_coefficient:
        return None
    top_k = teaching.gkd_top_k if teaching.teacher_payload == "topk" else 0
    temperature = teaching.teacher_temperature or teaching.gkd_temperature
    return Payload(cast(PayloadKind, teaching.teacher_payload), top_k, temperature)


def teachers_in_words(teaching: TeachingOptions, routes: Mapping[str, str]) -> str:
    """One sentence: which questions each teacher scores, and the terms of the loss."""
    rest = "all others" if len(routes) > 1 else "all"
    taught = ", ".join(
        f"{name} for {rest if kind == EVERY_TYPE else kind}" for kind, name in routes.items()
    )
    parts = [f"teachers: {taught}", f"rewards weigh {teaching.reward_coefficient:g}"]
    if teaching.opd_coefficient:
        bound = f", within ±{teaching.opd_clip:g} nats," if teaching.opd_clip else ""
        parts.append(
            f"{teaching.opd_coefficient:g} * (teacher - policy){bound} in each token's advantage"
        )
    if teaching.gkd_coefficient:
        parts.append(f"{teaching.gkd_coefficient:g} * {_divergence(teaching)}")
    return "; ".join(parts)


def _divergence(teaching: TeachingOptions) -> str:
    names = {0.0: "KL(teacher, policy)", 1.0: "KL(policy, teacher)"}
    name = names.get(teaching.gkd_alpha, f"JSD of alpha {teaching.gkd_alpha:g}")
    square = ", times its square," if teaching.gkd_square_temperature else ""
    over = "the whole vocabulary"
    if teaching.teacher_payload == "topk":
        over = f"the teacher's {teaching.gkd_top_k} likeliest tokens and the rest as one"
    given = 1 - teaching.gkd_lambda
    pairs = f", {given:.0%} of the samples given pairs" if given else ""
    own = teaching.teacher_temperature
    of_teacher = f" (the teacher's {own:g})" if own else ""
    at = f"at temperature {teaching.gkd_temperature:g}{of_teacher}{square}"
    return f"{name} {at} over {over}{pairs}"
