"""Published objectives as names for combinations of options: no code path asks for a preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_grpo.config.option import flag

DAPO_BUFFER_SHARE = 5  # of the longest output: 4096 of 20480 tokens in the paper


def preset_options(name: str, *, max_generation_tokens: int) -> dict[str, Any]:
    """The options that a preset stands for; what it does not name keeps its default.

    The KL coefficient is left to the user everywhere: the papers differ in it by the task.

    - grpo: DeepSeekMath, arXiv 2402.03300
    - dr_grpo: "Understanding R1-Zero-Like Training", arXiv 2503.20783
    - dapo: arXiv 2503.14476, with the soft punishment of long outputs, not the filter that the
      paper had before it
    - gspo: arXiv 2507.18071, with its bounds
    - cispo: MiniMax-M1, arXiv 2506.13585: no lower bound; the upper one is ScaleRL's (2510.13786)
    - rloo: "Back to Basics", arXiv 2402.14740: whole-output REINFORCE, the KL in the reward
    """
    options: dict[str, dict[str, Any]] = {
        "grpo": {"advantage": "grpo", "aggregation": "sample-mean"},
        "dr_grpo": {
            "advantage": "dr",
            "aggregation": "constant",
            "constant_length_samples": max_generation_tokens,
        },
        "dapo": {
            "advantage": "grpo",
            "aggregation": "token-mean",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "overlong_buffer_tokens": max_generation_tokens // DAPO_BUFFER_SHARE,
            "overlong_penalty": 1.0,
            "dynamic_sampling": 8,
        },
        "gspo": {
            "advantage": "grpo",
            "aggregation": "sample-mean",
            "ratio_level": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        "cispo": {
            "advantage": "grpo",
            "aggregation": "token-mean",
            "policy_loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
        },
        "rloo": {
            "advantage": "rloo",
            "aggregation": "constant",
            "constant_length_samples": 1,
            "kl_estimator": "k1",
        },
    }
    return options[name] if name else {}


def with_preset(given: Mapping[str, Any], *, max_generation_tokens: int) -> dict[str, Any]:
    """The options given, and under them those of the preset that they name.

    >>> with_preset({"preset": "gspo", "clip_low": 0.1}, max_generation_tokens=64)["clip_low"]
    0.1
    """
    named = preset_options(given.get("preset", ""), max_generation_tokens=max_generation_tokens)
    if given.get("aggregation", "constant") != "constant":
        named.pop("constant_length_samples", None)
    return {**named, **given}


def preset_in_words(name: str, *, max_generation_tokens: int) -> str:
    """What a preset stands for, as one would type it.

    >>> preset_in_words("grpo", max_generation_tokens=64)
    '--preset grpo stands for --advantage grpo --aggregation sample-mean'
    """
    options = preset_options(name, max_generation_tokens=max_generation_tokens)
    typed = " ".join(f"{flag(option)} {value}" for option, value in options.items())
    return f"--preset {name} stands for {typed}"
