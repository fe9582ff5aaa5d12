"""The text model in a folder of one that also takes images or sound: its config, its names.

The text model is trained, served and published alone; exports have the other tensors as they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OF_SEVERAL_INPUTS = "ForConditionalGeneration"  # the end of such a class's name in transformers
# How files name the text model's tensors, and how it names them itself.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}
OTHER_TOKENS = re.compile(r"(image|img|video|vision|audio|boi|eoi|boa|eoa)\w*_token_(id|index)$")


def text_name(stored: str) -> str:
    """The text model's own name of a tensor in the files; empty for a tensor of another part.

    >>> text_name("model.language_model.norm.weight")
    'model.norm.weight'
    """
    found = ((own, len(prefix)) for prefix, own in PREFIXES.items() if stored.startswith(prefix))
    return next((own + stored[length:] for own, length in found), "")


def is_tower(stated: Mapping[str, object]) -> bool:
    """Whether a config.json is of a model of several inputs whose text model has a class alone."""
    kinds, text = stated.get("architectures"), stated.get("text_config")
    several = isinstance(kinds, list) and any(
        str(kind).endswith(OF_SEVERAL_INPUTS) for kind in kinds
    )
    if not several or not isinstance(text, Mapping):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return text.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def stated_text(stated: Mapping[str, object]) -> Mapping[str, object]:
    """What a config.json says of its text model; of a model of text alone all of it."""
    text = stated.get("text_config")
    if not is_tower(stated) or not isinstance(text, Mapping):
        return stated
    return {**stated, "architectures": [], **text}


def other_tokens(stated: Mapping[str, object]) -> tuple[int, ...]:
    """Ids that stand for an image or a sound in a prompt, by a config.json."""
    found = (value for name, value in stated.items() if OTHER_TOKENS.fullmatch(name))
    return tuple(sorted({value for value in found if isinstance(value, int)}))


def text_model(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text model in one of several inputs; any other config as it is."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not is_tower(config.to_dict()):
        return config
    text = config.text_config
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]
    text.architectures = [causal]
    for name in ("tie_word_embeddings", "eos_token_id"):  # the whole one's, or its own
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    return text
