"""Published objectives as names for options, as one would type them: no code asks for a preset.

The KL coefficient is left to the user everywhere: the papers differ in it by the task.

- grpo: DeepSeekMath, arXiv 2402.03300
- dr_grpo: "Understanding R1-Zero-Like Training", arXiv 2503.20783
- dapo: arXiv 2503.14476, with the soft punishment of long outputs, not the filter that the paper
  had before it
- gspo: arXiv 2507.18071, with its bounds
- cispo: MiniMax-M1, arXiv 2506.13585: no lower bound; the upper one is ScaleRL's (2510.13786)
- rloo: "Back to Basics", arXiv 2402.14740: whole-output REINFORCE, the KL in the reward
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from async_grpo.config.objective import ObjectiveConfig

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
    """What a preset stands for.

    >>> typed_out("dr_grpo", max_generation_tokens=64)
    '--advantage dr --aggregation constant --constant-length-samples 64'
    """
    return PRESETS[name].format(longest=max_generation_tokens, fifth=max_generation_tokens // 5)


def preset_options(name: str, *, max_generation_tokens: int) -> dict[str, Any]:
    """The options that a preset stands for; what it does not name keeps its default."""
    if not name:
        return {}
    kinds: dict[str, Any] = {each.name: type(each.default) for each in fields(ObjectiveConfig)}
    typed = typed_out(name, max_generation_tokens=max_generation_tokens)
    pairs = (option.split() for option in typed.removeprefix("--").split(" --"))
    options = {option.replace("-", "_"): value for option, value in pairs}
    return {option: kinds[option](value) for option, value in options.items()}


def with_preset(given: Mapping[str, Any], *, max_generation_tokens: int) -> dict[str, Any]:
    """The options given, and under them those of the preset that they name.

    >>> with_preset({"preset": "gspo", "clip_low": 0.1}, max_generation_tokens=64)["clip_low"]
    0.1
    """
    named = preset_options(given.get("preset", ""), max_generation_tokens=max_generation_tokens)
    if given.get("aggregation", "constant") != "constant":
        named.pop("constant_length_samples", None)
    return {**named, **given}
