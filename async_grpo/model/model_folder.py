"""Reads a model's facts from its Hugging Face folder, and checks it, before weights are read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from async_grpo.model.foreign_folders import (
    check_full_precision,
    check_kind,
    config_file,
    stated_config,
    weights_in,
)
from async_grpo.model.text_towers import OF_SEVERAL_INPUTS, is_tower, other_tokens, text_model
from async_grpo.util.errors import UnfitModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers import PreTrainedTokenizerBase as Tokenizer

# Any of them holds a vocabulary; tokenizer_config.json alone makes an empty tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # names in configs
LONGROPE = ("longrope", "su")  # its name, and its name in older configs
ORIGINAL = "original_max_position_embeddings"
OF_SEQUENCES = "ForSequenceClassification"  # the end of a classifier's
# A text that differs by how a tokenizer treats cases, accents, digits, spaces, scripts and code.
PROBE = (
    "Use 2 9 8 to make 15:\n  8-2+9 = 15.\n\nThe   THE the\tcafé cafe\u0301 naïve ﬁ 12345 3.14 "
    "你好，世界 Привет こんにちは مرحبا 한국어 🙂👩\u200d🚀 \\boxed{x^2} <b>def f(x): return 1"
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model from its config and tokenizer."""

    path: str
    vocab_size: int  # rows of the embedding: every valid token id is below
    max_positions: int  # longest prompt + output, in tokens, on which engine and trainer agree
    stop_token_ids: tuple[int, ...]  # sorted; from tokenizer, config and generation config
    tokenizer_hash: str  # `encoding_hash`
    num_heads: int = 0  # of attention; 0: unknown, the config does not have it
    text_model: str = ""  # the kind of a text model in one that also takes images or sound
    other_tokens: tuple[int, ...] = ()  # ids that stand for them, which no prompt may hold


def check_model_folder(path: str, *, needs_weights: bool = True) -> ModelFacts:
    """Read config and tokenizer, in seconds; UnfitModel for a model that cannot be trained."""
    folder = Path(path)
    check_files(folder, needs_weights=needs_weights)
    check_tokenizer_files(folder)
    config, whole = read_config(folder), config_file(folder)
    tokenizer = _read_tokenizer(path)
    vocab_size = config.vocab_size
    max_positions = _positions(lambda name: getattr(config, name, None))
    if len(tokenizer) > vocab_size:
        raise UnfitModel(
            f"the tokenizer of {path} must not know more tokens than its config's vocab_size "
            f"({vocab_size}), got {len(tokenizer)}: give the model its own tokenizer"
        )
    if max_positions is None:
        raise UnfitModel(
            f"config.json of {path} must say the longest sequence, it has no "
            "max_position_embeddings: add it"
        )
    return ModelFacts(
        path=path,
        vocab_size=vocab_size,
        max_positions=max_positions,
        stop_token_ids=_stop_token_ids(folder, config, tokenizer, vocab_size),
        tokenizer_hash=encoding_hash(tokenizer),
        num_heads=getattr(config, "num_attention_heads", None) or 0,
        text_model=config.model_type if is_tower(whole) else "",
        other_tokens=other_tokens(whole),
    )


def stated_facts(
    path: str, *, needs_weights: bool = True, trains: bool = True
) -> ModelFacts | None:
    """The facts in config.json alone, without the tokenizer, which takes seconds to read.

    None if config.json leaves sizes to transformers' defaults. Raises `UnfitModel` for missing
    files, and for weights that are quantised unless an engine serves them as they are.
    """
    folder = Path(path)
    check_files(folder, needs_weights=needs_weights)
    check_tokenizer_files(folder)
    if trains:
        check_full_precision(folder)
    stated, positions = stated_config(folder), stated_positions(folder)
    vocab_size, num_heads = stated.get("vocab_size"), stated.get("num_attention_heads")
    if not isinstance(vocab_size, int) or positions is None:
        return None
    heads = num_heads if isinstance(num_heads, int) else 0
    return ModelFacts(path, vocab_size, positions, (), "", num_heads=heads)


def check_reward_model(path: str) -> ModelFacts | None:
    """`stated_facts` of a sequence classifier; UnfitModel for a folder that holds no such model."""
    found, stated = stated_facts(path, trains=False), stated_config(Path(path))
    labels = stated.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else 2  # transformers' default
    if not _is_classifier(stated) or num_labels != 1:
        raise UnfitModel(
            f"--mode reward must serve a sequence classifier of one label, {path} is a "
            f"{_kind(stated)} of {num_labels}: give a reward model "
            "(AutoModelForSequenceClassification, num_labels=1)"
        )
    return found


def _kind(stated: Mapping[str, object]) -> str:
    kinds = stated.get("architectures")
    return str(kinds[0]) if isinstance(kinds, list) and kinds else "none"


def _is_classifier(stated: Mapping[str, object]) -> bool:
    return _kind(stated).endswith(OF_SEQUENCES)


def check_files(folder: Path, *, needs_weights: bool = True) -> None:
    if not folder.is_dir():
        raise UnfitModel(
            "the model must be a Hugging Face folder on this machine, or the name of a model on a "
            f"hub (organisation/name), {str(folder)!r} is neither: correct it"
        )
    check_kind(folder)
    if not (folder / "config.json").is_file():
        raise UnfitModel(
            f"a model folder must hold config.json, {folder} does not: "
            "give the folder that save_pretrained wrote"
        )
    if not needs_weights:
        if is_tower(config_file(folder)):
            raise UnfitModel(
                f"--init random must draw a model of text alone, {folder} also takes images or "
                "sound: give a folder whose config.json is its text_config"
            )
        return
    if not weights_in(folder):
        raise UnfitModel(
            f"a model folder must hold weights (*.safetensors or pytorch_model*.bin), {folder} has "
            "none: finish the download, convert the weights with save_pretrained, or train from "
            "nothing with --init random"
        )
    for file in sorted(folder.glob("*.safetensors")):
        _check_length(file)


def _check_length(file: Path) -> None:
    """Raise UnfitModel for a truncated file: its header has the length."""
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise UnfitModel(
            f"{file} must be a whole safetensors file, but: {error}: fetch it again"
        ) from None


@dataclass(frozen=True, slots=True)
class WeightsSize:
    """The size of a folder's weights."""

    num_parameters: int
    size_bytes: int


def weights_size(path: str) -> WeightsSize | None:
    """The size of a folder's safetensors, from their headers; None if it has none."""
    num_parameters = size_bytes = 0
    for file in sorted(Path(path).glob("*.safetensors")):
        size_bytes += file.stat().st_size
        with safe_open(file, framework="numpy") as tensors:
            shapes = (tensors.get_slice(name).get_shape() for name in tensors.keys())  # noqa: SIM118
            num_parameters += sum(map(math.prod, shapes))
    return WeightsSize(num_parameters, size_bytes) if num_parameters else None


def check_tokenizer_files(folder: Path) -> None:
    if not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
        raise UnfitModel(
            "a model folder must hold its tokenizer (tokenizer.json, tokenizer.model, vocab.json "
            f"with merges.txt, vocab.txt or *.tiktoken), {folder} has none: copy its files there"
        )


def hash_model(path: str, *, config: str = "config.json") -> str:
    """sha256 over names and contents of the file `config` and of the files of weights."""
    folder = Path(path)
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    digest = hashlib.sha256()
    for file in (folder / config, *weights):
        with open(file, "rb") as content:
            own = hashlib.file_digest(content, "sha256").hexdigest()
        digest.update(f"{file.name}\0{own}\0".encode())
    return digest.hexdigest()


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of a text model that can be trained; UnfitModel for any other."""
    check_full_precision(folder)
    from transformers import AutoConfig  # here, because it takes seconds and `check_files` none

    try:
        config = text_model(AutoConfig.from_pretrained(folder, local_files_only=True))
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise UnfitModel(
            f"config.json of {folder} must be one that transformers reads, but: "
            f"{first_line(error)}: use a model that transformers supports without remote code"
        ) from error
    _check_architecture(config, folder)
    return config


def _read_tokenizer(path: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, ImportError) as error:
        raise UnfitModel(
            f"a model folder must hold its tokenizer, that of {path} cannot be read: "
            f"{first_line(error)}: copy the tokenizer's files into it"
        ) from error


def encoding_hash(tokenizer: Tokenizer) -> str:
    """Sha256 of how a tokenizer encodes: over vocabulary, model (merges, scores) and ids of a text.

    It does not depend on the format or the version of the library by which it was saved.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)  # none of one written in Python
    model = json.loads(backend.to_str())["model"] if backend else None
    parts = [tokenizer.get_vocab(), model, list(tokenizer(PROBE)["input_ids"])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def first_line(error: Exception) -> str:
    """The first line of a library's message, for an error message of one sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".: ")


def _check_architecture(config: PreTrainedConfig, path: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from async_grpo.model.lm_head import rescaling_of  # imports torch, as transformers does

    known = set(_flat(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    architectures = config.architectures or [
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "none")
    ]
    if several := [name for name in _flat(architectures) if name.endswith(OF_SEVERAL_INPUTS)]:
        raise UnfitModel(
            f"a model of images or sound must have a text model that transformers knows alone, "
            f"{path} is a {several[0]}: use a text model of its family"
        )
    if not known.intersection(_flat(architectures)):
        raise UnfitModel(
            f"the model must be a causal language model, got {architectures} in {path}: "
            "use a text generation model"
        )
    rescaling_of(config)


def _flat(names: Iterable[str | tuple[str, ...]]) -> list[str]:
    return [name for item in names for name in (item if isinstance(item, tuple) else (item,))]


def stated_positions(folder: Path) -> int | None:
    """`max_positions` by config.json alone, or None."""
    return _positions(stated_config(folder).get)


def engine_positions(folder: Path) -> int | None:
    """The most positions with which vLLM starts; None where positions are scaled."""
    stated = stated_config(folder)
    rope = stated.get("rope_parameters") or stated.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return None
    return next((each for each in map(stated.get, POSITIONS) if isinstance(each, int)), None)


def longrope_positions(folder: Path) -> int | None:
    """The positions up to which a model with LongRoPE uses its short factors; None without it."""
    return _before_longrope(stated_config(folder).get)


def _positions(look_up: Callable[[str], object]) -> int | None:
    values = [*map(look_up, POSITIONS)]
    stated = next((value for value in values if isinstance(value, int) and value > 0), None)
    limits = (stated, _before_longrope(look_up), _within_window(look_up))
    return min((limit for limit in limits if limit is not None), default=None)


def _before_longrope(look_up: Callable[[str], object]) -> int | None:
    """The length up to which LongRoPE does not change positions; None without it.

    Beyond it an engine rotates all its sequences by other angles, the trainer only longer ones.
    """
    rope = look_up("rope_parameters") or look_up("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in LONGROPE:
        return None
    original = rope.get(ORIGINAL) or look_up(ORIGINAL)
    return original if isinstance(original, int) else None


def _within_window(look_up: Callable[[str], object]) -> int | None:
    """The window of Cohere 2's sliding layers; None for other models.

    Beyond it vLLM's sliding layers attend to one token more than the trainer's.
    """
    window = look_up("sliding_window")
    return window if look_up("model_type") == "cohere2" and isinstance(window, int) else None


def _stop_token_ids(
    folder: Path, config: PreTrainedConfig, tokenizer: Tokenizer, vocab_size: int
) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    defaults = json.loads(generation.read_text()) if generation.is_file() else {}
    sources = (tokenizer.eos_token_id, config.eos_token_id, defaults.get("eos_token_id"))
    found = sorted({i for ids in sources for i in ([ids] if isinstance(ids, int) else ids or ())})
    if not found or found[-1] >= vocab_size or found[0] < 0:
        raise UnfitModel(
            f"a model needs end-of-sequence ids below its vocab_size ({vocab_size}), {folder} has "
            f"{found}: set eos_token_id in config.json and the tokenizer's eos_token"
        )
    return tuple(found)
