"""What a run optimises, in words: printed once, so that nobody has to guess from option names."""

from __future__ import annotations

from async_grpo.config.option import flag
from async_grpo.config.presets import preset_options, typed_out
from async_grpo.config.train import TrainConfig

DENOMINATORS = {
    "sample-mean": "a mean over each sample's tokens, then over the samples of the step",
    "token-mean": "a mean over all tokens of the step",
}
OLD_POLICY = {
    "on_policy": "the policy itself",
    "behaviour": "what the engine recorded",
    "decoupled": "the policy at the start of the batch",
}


def objective_in_words(config: TrainConfig) -> tuple[str, ...]:
    """One sentence each: preset, denominator, ratio and clip, correction, penalties, sampling."""
    sentences = (
        _preset(config),
        f"loss: {_denominator(config)}; advantage {config.advantage}",
        f"ratio: a {config.ratio_level}, against {OLD_POLICY[config.mode]}; {_clip(config)}",
        f"engine/trainer correction: {_correction(config)}",
        _penalties(config),
        _rewards(config),
    )
    return tuple(sentence for sentence in sentences if sentence)


def clip_is_inert(config: TrainConfig) -> bool:
    """The ratio is exactly 1 wherever it is computed, so that no bound can cut anything."""
    one_step = config.steps_per_batch == 1
    return config.mode == "on_policy" or (config.mode == "decoupled" and one_step)


def _preset(config: TrainConfig) -> str:
    if not config.preset:
        return ""
    longest = config.max_generation_tokens
    typed = typed_out(config.preset, max_generation_tokens=longest)
    sentence = f"--preset {config.preset} stands for {typed}"
    named = preset_options(config.preset, max_generation_tokens=longest)
    changed = [
        f"{flag(name)} {getattr(config, name)}"
        for name, value in named.items()
        if getattr(config, name) != value
    ]
    return f"{sentence}; changed by you: {' '.join(changed)}" if changed else sentence


def _denominator(config: TrainConfig) -> str:
    if config.aggregation == "constant":
        return (
            f"each sample's token sum by {config.constant_length_samples} tokens, then a mean over "
            "the samples of the step"
        )
    return DENOMINATORS[config.aggregation]


def _clip(config: TrainConfig) -> str:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.policy_loss == "cispo":
        bounds = f"its value as a weight kept within [{max(low, 0):g}, {high:g}] (cispo)"
    else:
        bounds = f"clipped to [{low:g}, {high:g}]"
        if config.dual_clip:
            bounds += f", below {config.dual_clip:g} where the advantage is negative"
    return f"{bounds}, which is inert: the ratio is always 1" if clip_is_inert(config) else bounds


def _correction(config: TrainConfig) -> str:
    if config.importance_correction != "none":
        return config.correction_in_words
    if config.mode == "behaviour":
        return "none needed, the ratio contains it"
    if config.max_staleness:
        lag = config.max_staleness
        return f"none, though samples may be of weights {lag} versions old: the gradient is biased"
    return "none"


def _penalties(config: TrainConfig) -> str:
    parts = []
    if config.kl_coefficient:
        where = "loss" if config.kl_in_loss else "reward"
        parts.append(f"{config.kl_coefficient:g} * KL ({config.kl_estimator}) in the {where}")
    if config.entropy_coefficient:
        parts.append(f"an entropy bonus of {config.entropy_coefficient:g}")
    return f"penalties: {', '.join(parts)}" if parts else ""


def _rewards(config: TrainConfig) -> str:
    parts = []
    if config.overlong_buffer_tokens:
        parts.append(
            f"the last {config.overlong_buffer_tokens} of {config.max_generation_tokens} tokens "
            f"cost up to {config.overlong_penalty:g} of the reward"
        )
    if config.mask_truncated_samples:
        parts.append("truncated outputs are not trained")
    if config.dynamic_sampling:
        parts.append(
            f"a question without variance is replaced up to {config.dynamic_sampling} times"
        )
    return f"samples: {'; '.join(parts)}" if parts else ""
