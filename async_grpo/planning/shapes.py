"""The sizes of a model, from what its config.json says or from its published name. Pure.

A dense decoder: embedding [V, H], in each layer queries [H, Q], keys and values [H, K] each, output
[Q, H], a gated MLP of three [H, I], two norms; a last norm and, unless tied, a head [V, H].
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from async_grpo.devices.bill import ModelShape
from async_grpo.util.errors import UnfitModel

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
WITH_BIAS = ("qwen2",)  # model types whose queries, keys and values have one
WITH_HEAD_NORMS = ("qwen3", "gemma3_text", "olmo2")


def _config(  # as config.json of the published models has it
    kind: str, hidden: int, intermediate: int, layers: int, heads: int, key_heads: int,
    vocabulary: int, *, head: int = 0, tied: bool = False,
) -> Mapping[str, Any]:  # fmt: skip
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "vocab_size": vocabulary, "head_dim": head or None,
        "tie_word_embeddings": tied,
    }  # fmt: skip


PUBLISHED = {
    "smollm2-135m": _config("llama", 576, 1536, 30, 9, 3, 49152, tied=True),
    "qwen2.5-0.5b": _config("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _config("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _config("qwen2", 2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _config("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _config("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _config("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "deepseek-r1-distill-qwen-1.5b": _config("qwen2", 1536, 8960, 28, 12, 2, 151936),
    "deepseek-r1-distill-qwen-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen3-0.6b": _config("qwen3", 1024, 3072, 28, 16, 8, 151936, head=128, tied=True),
    "qwen3-1.7b": _config("qwen3", 2048, 6144, 28, 16, 8, 151936, head=128, tied=True),
    "qwen3-4b": _config("qwen3", 2560, 9728, 36, 32, 8, 151936, head=128, tied=True),
    "qwen3-8b": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, head=128),
    "qwen3-14b": _config("qwen3", 5120, 17408, 40, 40, 8, 151936, head=128),
    "qwen3-32b": _config("qwen3", 5120, 25600, 64, 64, 8, 151936, head=128),
    "llama-3.2-1b": _config("llama", 2048, 8192, 16, 32, 8, 128256, head=64, tied=True),
    "llama-3.2-3b": _config("llama", 3072, 8192, 28, 24, 8, 128256, head=128, tied=True),
    "llama-3.1-8b": _config("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.3-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256),
}
ENDINGS = ("-instruct", "-base", "-chat")


def shape_of_config(config: Mapping[str, Any], *, who: str, num_parameters: int = 0) -> ModelShape:
    """Of a decoder's config.json; `num_parameters` as its files count them, 0: by arithmetic.

    Raises `UnfitModel` for a config that does not say what is needed.
    """
    if missing := [name for name in NEEDED if not isinstance(config.get(name), int)]:
        raise UnfitModel(
            f"config.json of {who} must say {missing[0]}: name the folder of a text model, or one "
            "of the same sizes with --shape-of"
        )
    hidden, layers, heads, vocabulary = (int(config[name]) for name in NEEDED)
    head = config.get("head_dim") or hidden // heads
    query, key = heads * head, (config.get("num_key_value_heads") or heads) * head
    mlp = config.get("intermediate_size") or 4 * hidden
    kind = str(config.get("model_type"))
    norms_heads = kind in WITH_HEAD_NORMS
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * mlp + 2 * hidden
    layer += (query + 2 * key) * (kind in WITH_BIAS) + 2 * head * norms_heads
    root = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2) + hidden
    if num_parameters > root:
        layer = (num_parameters - root) // layers
    return ModelShape(
        num_parameters=num_parameters or layers * layer + root,
        layer_parameters=layer,
        root_parameters=root,
        num_layers=layers,
        hidden=hidden,
        intermediate=mlp,
        query_width=query,
        key_width=key,
        num_heads=heads,
        vocab_size=vocabulary,
        norms_heads=norms_heads,
    )


def published_config(name: str) -> Mapping[str, Any] | None:
    """The sizes that a model of this name was published with; None for a name unknown here.

    >>> published_config("Qwen/Qwen2.5-7B-Instruct")["num_hidden_layers"]
    28
    """
    plain = name.rpartition("/")[2].lower().replace("meta-", "")
    for ending in ENDINGS:
        plain = plain.replace(ending, "")
    return PUBLISHED.get(plain)


def unknown_model(name: str) -> UnfitModel:
    """What there is to say of a model whose sizes cannot be had."""
    plain = name.rpartition("/")[2].lower()
    [near] = difflib.get_close_matches(plain, PUBLISHED, n=1, cutoff=0.0)
    return UnfitModel(
        f"--model-name-or-path or --model-path {name} is no folder of this machine, nor a name "
        f"whose sizes are known here (the nearest is {near}): fetch it, or name a model of the "
        "same sizes with --shape-of"
    )


def multiplied(model: ModelShape) -> int:
    """Parameters that a token is multiplied by: with the head, without the embedding."""
    return model.num_layers * model.layer_parameters + model.vocab_size * model.hidden
