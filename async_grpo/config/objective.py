"""The options that define the update, and the combinations that cannot be meant.

design, section 4, has the formulas; `algorithms/` computes them. Presets are published objectives
as names for options, as one would type them: no code asks for a preset. The KL coefficient is left
to the user everywhere: the papers differ in it by the task.

- grpo: DeepSeekMath, arXiv 2402.03300
- dr_grpo: "Understanding R1-Zero-Like Training", arXiv 2503.20783
- dapo: arXiv 2503.14476, with the soft punishment of long outputs, not the filter that the paper
  had before it
- gspo: arXiv 2507.18071, with its bounds
- cispo: MiniMax-M1, arXiv 2506.13585: no lower bound; the upper one is ScaleRL's (2510.13786)
- rloo: "Back to Basics", arXiv 2402.14740: whole-output REINFORCE, the KL in the reward
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from async_grpo.config.option import Change, Options, option

MASK_MARGIN = 0.01  # of the ratio: bfloat16 was seen to move it by up to 1 %
PRESET_NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOptions(Options):
    """The algorithm, and what the GRPO family reads: ratio, clipping, corrections, penalties."""

    algorithm: str = option(
        "grpo", aliases=("objective",), change=Change.FIXED, group="The run and its data"
    )
    """grpo, sft on prompt and completion pairs or on plain text, or your own: package.module:Name,
    path/to/file.py:Name, file.py:Name(size=4)"""

    preset: str = option("", choices=("", *PRESET_NAMES), group="What is optimised (grpo)")
    """a published objective; options given beside it win"""
    advantage: str = option("grpo", choices=("grpo", "dr", "rloo"))
    """baseline of a group"""
    aggregation: str = option("sample-mean", choices=("sample-mean", "token-mean", "constant"))
    """weight of a token in the loss"""
    constant_length_samples: int = option(0, none=0)
    """divisor in tokens of --aggregation constant (Dr. GRPO)"""

    ratio_mode: str = option("auto", choices=("auto", "on_policy", "behaviour", "decoupled"))
    """what the policy ratio compares with: the policy itself, what the engine recorded, or the
    policy at the start of the batch; auto: on_policy with --max-staleness 0 and one step a batch,
    decoupled with several --num-passes, else behaviour"""
    ratio_level: str = option("token", choices=("token", "sequence"))
    """a ratio for each token, or one a sample (GSPO)"""
    policy_loss: str = option("clip", choices=("clip", "cispo"))
    """PPO's clipped surrogate, or CISPO's clipped weight"""
    clip_low: float = option(0.2)
    """the ratio is clipped below at 1 - this"""
    clip_high: float = option(0.2)
    """the ratio is clipped above at 1 + this"""
    dual_clip: float = option(0.0, none=0.0, aliases=("clip_ratio_c",))
    """bound of the ratio where the advantage is negative, above 1; 0: none"""

    importance_correction: str = option("none", choices=("none", "truncate", "mask"))
    """weight of the policy loss by trainer/engine probability: truncated above, or 0 outside
    bounds"""
    correction_level: str = option("token", choices=("token", "sequence"))
    """a correction for each token, or one a sample"""
    correction_low: float = option(0.5)
    """smallest weight that mask keeps"""
    correction_high: float = option(2.0)
    """largest weight that mask keeps, cap of truncate"""

    kl_coefficient: float = option(0.0)
    """weight of the KL penalty to the reference model"""
    kl_estimator: str = option("k3", choices=("k2", "k3", "k3_iw", "k1"))
    """estimator of the KL penalty; k3_iw: weighted by the policy ratio; k1: in the reward"""
    entropy_coefficient: float = option(0.0)
    """weight of the entropy bonus"""
    balance_coefficient: float = option(0.0)
    """weight of the loss that balances the experts of a mixture; all samples are sent then"""

    overlong_buffer_tokens: int = option(0)
    """outputs longer than --max-generation-tokens less this lose reward (DAPO); 0: off"""
    overlong_penalty: float = option(1.0)
    """reward that an output of the full length loses"""
    mask_truncated_samples: bool = option(False)
    """outputs cut at --max-generation-tokens serve the baseline, and are not trained"""
    dynamic_sampling: int = option(0)
    """questions drawn to replace one whose samples all have the same reward; 0: none"""
    use_ref_answers: bool = option(False, change=Change.FIXED)
    """the completion of a question's line is graded too, as one more member of its group: a bias"""
    ref_answer_coefficient: float = option(0.0, change=Change.FIXED)
    """weight of the cross-entropy of such a completion; 0: it counts in the group's statistics
    alone"""

    def check(self) -> None:
        """See `Options`."""
        coefficient = self.ref_answer_coefficient
        if not math.isfinite(coefficient):
            raise self.refusal("ref_answer_coefficient", "must be finite", "0.1 is usual")
        if coefficient and not self.use_ref_answers:
            rule, remedy = "goes with --use-ref-answers alone", "give both, or neither"
            raise self.refusal("ref_answer_coefficient", rule, remedy)

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coefficient > 0 and self.kl_estimator != "k1"

    @property
    def correction_in_words(self) -> str:
        """For example `truncate(trainer/engine, 2) a token`."""
        low = f"{self.correction_low:g}, " if self.importance_correction == "mask" else ""
        return (
            f"{self.importance_correction}(trainer/engine, {low}{self.correction_high:g}) "
            f"a {self.correction_level}"
        )


def check_objective(config: ObjectiveOptions, *, mode: str, max_generation_tokens: int) -> None:
    """Raise `ConfigError` for options that contradict each other; `mode`: `TrainConfig.mode`."""
    if (config.aggregation == "constant") != (config.constant_length_samples > 0):
        raise config.refusal(
            "constant_length_samples",
            "goes with --aggregation constant, and only with it",
            "set both, for example to --max-generation-tokens, or neither",
        )
    _check_ratio(config)
    if config.importance_correction != "none":
        _check_correction(config, mode)
    if config.overlong_buffer_tokens > max_generation_tokens:
        raise config.refusal(
            "overlong_buffer_tokens",
            f"must not exceed --max-generation-tokens ({max_generation_tokens})",
            "a fifth of it is usual",
        )


def _check_ratio(config: ObjectiveOptions) -> None:
    is_plain = config.aggregation == "sample-mean" and config.policy_loss == "clip"
    if config.ratio_level == "sequence" and not is_plain:
        raise config.refusal(
            "ratio_level",
            "must be token unless --aggregation is sample-mean and --policy-loss is clip "
            f"(they are {config.aggregation} and {config.policy_loss})",
            "GSPO is defined for one clipped ratio a sample: change the one or the other",
        )
    if config.clip_low > 1:
        raise config.refusal(
            "clip_low", "must be at most 1, which is no bound below", "0.2 is usual"
        )
    if 0 < config.dual_clip <= 1:
        raise config.refusal("dual_clip", "must be 0 (off) or above 1", "3 is usual")
    if config.dual_clip and config.policy_loss != "clip":
        raise config.refusal(
            "dual_clip",
            "belongs to --policy-loss clip: cispo bounds the weight itself",
            "drop one of the two",
        )


def _check_correction(config: ObjectiveOptions, mode: str) -> None:
    if mode == "behaviour":
        raise config.refusal(
            "importance_correction",
            "must be none where the ratio already compares with the engine (--ratio-mode "
            "behaviour): it would correct twice",
            "add --ratio-mode decoupled, or drop it",
        )
    if not 1 <= config.correction_high < math.inf:
        raise config.refusal("correction_high", "must be at least 1 and finite", "2 is usual")
    if config.correction_low > 1:
        raise config.refusal("correction_low", "must be in [0, 1]", "0.5 is usual")
    if config.importance_correction != "mask":
        return
    for name, usual in (("correction_low", 0.5), ("correction_high", 2.0)):
        if abs(getattr(config, name) - 1) < MASK_MARGIN:
            raise config.refusal(
                name,
                f"must be at least {MASK_MARGIN} away from 1 with --importance-correction mask, or "
                "rounding alone decides which tokens are trained",
                f"{usual:g} is usual, or use truncate",
            )


# `longest` and `fifth`: of --max-generation-tokens. DAPO's paper has 4096 of 20480.
PRESETS = {
    "grpo": "--advantage grpo --aggregation sample-mean",
    "dr_grpo": "--advantage dr --aggregation constant --constant-length-samples {longest}",
    "dapo": "--advantage grpo --aggregation token-mean --clip-low 0.2 --clip-high 0.28 "
    "--overlong-buffer-tokens {fifth} --overlong-penalty 1.0 --dynamic-sampling 8",
    "gspo": "--advantage grpo --aggregation sample-mean --ratio-level sequence "
    "--clip-low 0.0003 --clip-high 0.0004",
    "cispo": "--advantage grpo --aggregation token-mean --policy-loss cispo "
    "--clip-low 1.0 --clip-high 4.0",
    "rloo": "--advantage rloo --aggregation constant --constant-length-samples 1 --kl-estimator k1",
}


def typed_out(name: str, *, max_generation_tokens: int) -> str:
    """The options of a preset, as typed on a command line.

    >>> typed_out("dr_grpo", max_generation_tokens=64)
    '--advantage dr --aggregation constant --constant-length-samples 64'
    """
    return PRESETS[name].format(longest=max_generation_tokens, fifth=max_generation_tokens // 5)


def preset_options(name: str, *, max_generation_tokens: int) -> dict[str, object]:
    """{option: value} of a preset; options that it does not name keep their defaults."""
    if not name:
        return {}
    kinds: dict[str, type] = {each.name: type(each.default) for each in fields(ObjectiveOptions)}
    typed = typed_out(name, max_generation_tokens=max_generation_tokens)
    pairs = (option.split() for option in typed.removeprefix("--").split(" --"))
    options = {option.replace("-", "_"): value for option, value in pairs}
    return {option: kinds[option](value) for option, value in options.items()}


def with_preset(given: Mapping[str, Any], *, max_generation_tokens: int) -> dict[str, Any]:
    """The given options, completed by those of the preset that they name.

    >>> with_preset({"preset": "gspo", "clip_low": 0.1}, max_generation_tokens=64)["clip_low"]
    0.1
    """
    named = preset_options(given.get("preset", ""), max_generation_tokens=max_generation_tokens)
    if given.get("aggregation", "constant") != "constant":
        named.pop("constant_length_samples", None)
    return {**named, **given}
