"""What some models do to the output of their head: a factor, then a soft cap.

By model type, for two families may write one name and mean a factor and its inverse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from async_grpo.util.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig


class Rescaling(NamedTuple):
    """logits = softcap * tanh(factor * head(hidden) / softcap); without a softcap only the factor.

    A named tuple, because compiled functions take it as an argument.
    """

    factor: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Rescale what the head put out, in place."""
        if self.factor != 1.0:
            logits.mul_(self.factor)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the rescaled `logits` by what the head put out; a fresh tensor."""
        if self.softcap is None:
            return self.factor
        # d tanh = 1 - tanh^2
        return logits.div(self.softcap).square_().neg_().add_(1.0).mul_(self.factor)


UNCHANGED = Rescaling()


def _capped(config: Any) -> Rescaling:
    return Rescaling(softcap=config.final_logit_softcapping or None)


def _multiplied(config: Any) -> Rescaling:
    return Rescaling(factor=config.logit_scale)


def _divided(config: Any) -> Rescaling:
    return Rescaling(factor=1 / config.logits_scaling)


BY_MODEL_TYPE: dict[str, Callable[[Any], Rescaling]] = {
    "cohere": _multiplied,
    "cohere2": _multiplied,
    "gemma2": _capped,
    "gemma3_text": _capped,
    "granite": _divided,
}
NEUTRAL = {  # such options of a config, and the values that change nothing
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
}


def rescaling_of(config: PreTrainedConfig) -> Rescaling:
    """How a model's logits follow from its head; ModelError for what is not known here."""
    if config.model_type in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[config.model_type](config)
    for name, neutral in NEUTRAL.items():
        if (value := getattr(config, name, None)) not in neutral:
            raise ModelError(
                "a model's logits must be its head's output, or rescaled as those of "
                f"{', '.join(BY_MODEL_TYPE)}, but {config.name_or_path} ({config.model_type}) sets "
                f"{name}={value}: use a model without it"
            )
    return UNCHANGED
