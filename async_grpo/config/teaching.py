"""The options of learning from teachers, and the checks of their combinations.

design, section 15, has the formulas; `algorithms/distillation.py` computes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from async_grpo.config.option import POSITIVE, Change, Options, Several, flag, option

if TYPE_CHECKING:
    from async_grpo.config.data_files import DataOptions
    from async_grpo.config.objective import ObjectiveOptions

EVERY_TYPE = ""  # the key in `teacher_routes` of a teacher of all types
# {coefficient of a term: options that only this term reads}
OPTIONS_OF_TERM = {
    "opd_coefficient": ("opd_clip",),
    "gkd_coefficient": (
        "gkd_alpha", "gkd_temperature", "teacher_temperature", "gkd_square_temperature",
        "gkd_top_k", "gkd_lambda", "teacher_payload", "teacher_buffer_gib", "express",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Route:
    """The teacher of one dataset type."""

    type: str  # or `EVERY_TYPE`
    teacher: str
    text: str = field(compare=False)  # as --teacher-for has it

    @classmethod
    def parse(cls, text: str) -> Route:
        """
        >>> Route.parse("sums=a")
        Route(type='sums', teacher='a', text='sums=a')
        """
        kind, _, name = text.rpartition("=")
        return cls(kind.strip(), name.strip(), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingOptions(Options):
    """Teachers, and their terms in the loss."""

    teacher_for: tuple[Route, ...] = option(
        (),
        several=Several(",", Route.parse),
        group="What teachers add (grpo)",
        change=Change.FIXED,
    )
    """TYPE=NAME: workers of --mode teacher --name NAME teach the questions of that dataset_type;
    NAME alone: those of every other type; give it once for each type"""
    reward_coefficient: float = option(1.0)
    """weight of the advantages that rewards make; 0: learn from teachers alone"""
    opd_coefficient: float = option(0.0)
    """weight of a teacher's log-probability of each sampled token, less the policy's, in the
    token's advantage (on-policy distillation)"""
    opd_clip: float = option(0.0, none=0.0)
    """bound of that difference in nats, on both sides; 0: none"""
    gkd_coefficient: float = option(0.0)
    """weight of the divergence between a teacher's distribution and the policy's at each token"""
    gkd_alpha: float = option(0.5)
    """which divergence: 0 is KL(teacher, policy), 1 is KL(policy, teacher), between lies the
    generalised Jensen-Shannon divergence"""
    gkd_temperature: float = option(1.0, must=POSITIVE)
    """temperature of both distributions in the divergence"""
    teacher_temperature: float = option(0.0)
    """that of the teacher's alone, where it differs; 0: --gkd-temperature. Log-probabilities of
    sampled tokens (--opd-coefficient) are always at --temperature"""
    gkd_square_temperature: bool = option(False)
    """multiply the divergence by the square of --gkd-temperature, which keeps the size of its
    gradient"""
    gkd_top_k: int = option(64, must=POSITIVE)
    """tokens of a teacher's distribution that travel with --teacher-payload topk; all others are
    one more cell"""
    gkd_lambda: float = option(1.0, change=Change.FIXED)
    """share of the samples that the policy samples itself; the rest are pairs of --pairs-path"""
    pairs_path: str = option("", none="", change=Change.PLACE)
    """prompt and completion pairs for --gkd-lambda below 1, as --data-path of --algorithm sft"""
    teacher_payload: str = option("topk", choices=("topk", "hidden", "logits"))
    """what a teacher's distribution travels as: topk, or over the whole vocabulary hidden states
    or logits"""
    teacher_buffer_gib: float = option(0.0, change=Change.INCIDENTAL)
    """room for what teachers said and no rank has fetched, in GiB; 0: a quarter of the object
    store"""

    express: str = option("", none="")
    """DxT: of the teacher's workers, D times T send logits straight to the ranks while all of them
    live; D share the sequences and T the vocabulary. Empty: logits go by the object store. The
    ranks of workers with --scorer-ranks count each, and share the sequences"""

    @property
    def express_mesh(self) -> tuple[int, int] | None:
        """Data and tensor sizes of `--express`."""
        data, _, tensor = self.express.partition("x")
        return (int(data), int(tensor)) if self.express else None

    @property
    def routes(self) -> dict[str, str]:
        """{dataset_type: name of its teacher} of --teacher-for."""
        return {each.type: each.teacher for each in self.teacher_for}

    @property
    def has_teacher_terms(self) -> bool:
        return self.opd_coefficient > 0 or self.gkd_coefficient > 0


def check_distillation(
    teaching: TeachingOptions, objective: ObjectiveOptions, data: DataOptions
) -> None:
    """Raise `ConfigError` for options of teachers that contradict each other."""
    _check_routes(teaching, data)
    if teaching.has_teacher_terms and objective.algorithm == "sft":
        raise objective.refusal(
            "algorithm", "must be grpo to learn from teachers", "add --algorithm grpo"
        )
    if teaching.gkd_alpha > 1:
        raise teaching.refusal("gkd_alpha", "must be in [0, 1]", "0.5 is usual")
    if teaching.opd_coefficient and objective.ratio_level == "sequence":
        raise objective.refusal(
            "ratio_level",
            "must be token with --opd-coefficient, a teacher's advantage is each token's own",
            "add --ratio-level token, or take --gkd-coefficient instead",
        )
    _check_terms(teaching)
    _check_express(teaching, data)
    _check_pairs(teaching)
    if not teaching.reward_coefficient:
        _check_without_rewards(teaching, objective)


def check_vocabulary(teaching: TeachingOptions, vocab_size: int) -> None:
    """Raise `ConfigError` for a --gkd-top-k above the vocabulary."""
    is_cut = teaching.gkd_coefficient > 0 and teaching.teacher_payload == "topk"
    if is_cut and teaching.gkd_top_k > vocab_size:
        raise teaching.refusal(
            "gkd_top_k",
            f"must not exceed the {vocab_size} tokens of the vocabulary",
            "64 is usual, and --teacher-payload hidden takes all of them",
        )


def _check_routes(teaching: TeachingOptions, data: DataOptions) -> None:
    given = (*teaching.teacher_for, *data.file_teachers)
    if teaching.has_teacher_terms and not given:
        used = "opd_coefficient" if teaching.opd_coefficient else "gkd_coefficient"
        raise teaching.refusal(used, "needs a teacher", "add --teacher-for NAME, or TYPE=NAME")
    if given and not teaching.has_teacher_terms:
        part, name = (teaching, "teacher_for") if teaching.teacher_for else (data, "data")
        raise part.refusal(
            name,
            "names a teacher that nobody uses",
            "add --gkd-coefficient or --opd-coefficient, or drop it",
        )
    routes = teaching.routes | data.file_teachers
    if len(routes) < len(given):
        raise teaching.refusal(
            "teacher_for", "must name one teacher for each type", "give each type once"
        )
    if not all(routes.values()):
        raise teaching.refusal(
            "teacher_for", "must be NAME or TYPE=NAME", "put the teacher's name behind the ="
        )


def _check_terms(config: TeachingOptions) -> None:
    defaults = {each.name: each.default for each in fields(config)}
    for coefficient, names in OPTIONS_OF_TERM.items():
        given = [name for name in names if getattr(config, name) != defaults[name]]
        if given and not getattr(config, coefficient):
            raise config.refusal(
                given[0],
                f"changes nothing while {flag(coefficient)} is 0",
                f"add {flag(coefficient)} 1, or drop it",
            )


def _check_express(teaching: TeachingOptions, data: DataOptions) -> None:
    if not teaching.express:
        return
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", teaching.express):
        raise teaching.refusal("express", "must be DxT, two positive numbers", "1x1 is one worker")
    if teaching.teacher_payload != "logits":
        raise teaching.refusal("express", "needs --teacher-payload logits", "add it, or drop this")
    if len({*(teaching.routes | data.file_teachers).values()}) > 1:
        raise teaching.refusal(
            "express", "serves one teacher", "name one, or take --teacher-payload hidden"
        )


def _check_pairs(config: TeachingOptions) -> None:
    if config.gkd_lambda > 1:
        raise config.refusal("gkd_lambda", "must be in [0, 1]", "1 samples everything, 0.5 half")
    if config.gkd_lambda < 1 and not config.pairs_path:
        raise config.refusal(
            "gkd_lambda", "below 1 needs pairs", "add --pairs-path, or leave it at 1"
        )
    if config.gkd_lambda == 1 and config.pairs_path:
        raise config.refusal(
            "pairs_path",
            "is not read with --gkd-lambda 1: everything is sampled",
            "lower --gkd-lambda, 0.5 takes as many pairs as samples, or drop it",
        )


def _check_without_rewards(teaching: TeachingOptions, objective: ObjectiveOptions) -> None:
    if not teaching.has_teacher_terms:
        raise teaching.refusal(
            "reward_coefficient",
            "must be positive without a teacher: nothing would be learnt",
            "leave it at 1, or add --gkd-coefficient or --opd-coefficient",
        )
    inert = {
        "dynamic_sampling": objective.dynamic_sampling,
        "overlong_buffer_tokens": objective.overlong_buffer_tokens,
        "kl_coefficient": objective.kl_coefficient and not objective.kl_in_loss,
    }
    for name in (name for name, is_given in inert.items() if is_given):
        raise objective.refusal(
            name, "acts on rewards, which --reward-coefficient 0 leaves out", "drop one of the two"
        )
