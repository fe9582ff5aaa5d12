"""Folders that others call a model, and no run can train: told apart by their files in no time."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.config.training_options import AdapterOptions
from async_grpo.model.text_towers import stated_text
from async_grpo.util.errors import UnfitModel

ADAPTER_CONFIG = "adapter_config.json"  # of peft's format
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# What `async-grpo dequantize` reads, by quant_method; compressed-tensors by its format.
DEQUANTIZED = ("fp8", "mxfp8", "fbgemm_fp8", "mxfp4", "float-quantized")
DIFFERS = "differs"  # how `Family.serves` begins where an engine computes otherwise
BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?['\"]?([^\s'\"\[{]+)", re.M)  # of a model card


class Family(NamedTuple):
    """What a tiny random model of a family showed, with the versions that this release pins."""

    kind: str  # model_type of config.json
    architecture: str
    trains: str  # yes, no or untried
    serves: str  # yes; bf16: rounded to it alone; differs by ... nats; no: why; -: not asked
    how: str  # it is packed, or why it is not

    @property
    def in_words(self) -> str:
        return f"{self.kind}: trains: {self.trains} ({self.how}); engines serve it: {self.serves}"


def families() -> Iterator[Family]:
    """Those that transformers and vLLM both know, as tests/model/tiny_families.py found them."""
    table = Path(__file__).with_name("families.tsv").read_text(encoding="utf-8")
    return (Family(*line.split("\t")) for line in table.splitlines())


def family_of(folder: Path) -> Family | None:
    """The family of a model's folder, if the table has it."""
    kind = stated_config(folder).get("model_type")
    return next((each for each in families() if each.kind == kind), None)


def check_kind(folder: Path) -> None:
    """Raise UnfitModel for what other programs call a model: its name, and what to give instead."""
    weights = weights_in(folder)
    if (folder / "model_index.json").is_file():
        raise UnfitModel(
            f"the model must be a language model, {folder} is a pipeline of diffusers "
            "(model_index.json): give a text generation model"
        )
    if not weights and any(folder.glob("*.gguf")):
        raise UnfitModel(
            f"weights must be safetensors, {folder} holds GGUF, llama.cpp's format: "
            f"{_instead(folder)}"
        )
    if is_adapter(folder):
        base = _original(folder) or "the model of base_model_name_or_path"
        raise UnfitModel(
            f"a model folder must hold the whole model, {folder} holds an adapter of {base} alone: "
            f"give that model, and --adapter-path {folder} to train the adapter on"
        )


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in peft's format, and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and all(
        file.name.startswith("adapter_model") for file in weights_in(folder)
    )


def stated_adapter(options: AdapterOptions) -> Mapping[str, Any]:
    """peft's configuration of a run's adapter, of its options or of --adapter-path; empty: none.

    Raises UnfitModel for a folder without one.
    """
    if not options.adapter_path:
        return options.stated if options.lora_rank else {}
    file = Path(options.adapter_path) / "adapter_config.json"
    try:
        stated: Mapping[str, Any] = json.loads(file.read_text())
        return {**stated, "r": int(stated["r"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UnfitModel(
            f"--adapter-path must hold an adapter as peft saves it, {file} is none ({error!r}): "
            "name the folder of one"
        ) from error


def quantization_of(folder: Path) -> Mapping[str, object]:
    """The quantization_config of config.json, or of its text model; empty of full precision."""
    stated = stated_config(folder)
    found = stated.get("quantization_config") or stated.get("compression_config")
    return found if isinstance(found, Mapping) else {}


def can_dequantize(found: Mapping[str, object]) -> bool:
    """Whether `async-grpo dequantize` reads what a quantization_config names."""
    method = found.get("quant_method")
    return (found.get("format") if method == "compressed-tensors" else method) in DEQUANTIZED


def check_full_precision(folder: Path) -> None:
    """Raise UnfitModel for quantised weights, with the command or the download that helps."""
    if not (found := quantization_of(folder)):
        return
    kinds = (found.get("quant_method"), found.get("format"))
    kind = " ".join(str(each) for each in kinds if each) or "unknown"
    name = (hub_name(folder) or folder.absolute().name).rpartition("/")[2]
    command = f"async-grpo dequantize {shlex.quote(str(folder))} {shlex.quote(name)}-bf16"
    raise UnfitModel(
        f"weights must not be quantised for training, {folder} has quantization_config of "
        f"{kind}: " + (f"run `{command}` once, and give every role {name}-bf16"
                       if can_dequantize(found) else _instead(folder))
    )  # fmt: skip


def check_sampled(folder: Path) -> None:
    """Raise UnfitModel for families whose engine does not score as the trainer does."""
    family = family_of(folder)
    if family is not None and family.serves.startswith(DIFFERS):
        raise UnfitModel(
            f"an engine must score as the trainer does, vLLM {family.serves} from transformers in "
            f"models like {folder} ({family.kind}): sample from another"
        )


def hub_name(folder: Path) -> str:
    """The name on a hub of a snapshot's folder, which bears a commit's; empty for other folders.

    >>> hub_name(Path("/cache/models--Qwen--Qwen3-8B/snapshots/0123"))
    'Qwen/Qwen3-8B'
    """
    is_snapshot = folder.parent.name == "snapshots"
    name = folder.parent.parent.name.removeprefix("models--")
    return name.replace("--", "/") if is_snapshot else ""


def _instead(folder: Path) -> str:
    original = _original(folder)
    return f"use the full-precision model{f', {original}' if original else ' that it was made of'}"


def _original(folder: Path) -> str:
    """The model that a folder was made of, by its adapter, card or config; empty if none says."""
    with suppress(OSError, ValueError, AttributeError):
        adapter = json.loads((folder / ADAPTER_CONFIG).read_text())
        return str(adapter.get("base_model_name_or_path") or "")
    with suppress(OSError, UnicodeDecodeError):
        if named := BASE_MODEL.search((folder / "README.md").read_text()):
            return named[1]
    name = stated_config(folder).get("_name_or_path")
    return name if isinstance(name, str) and not os.path.isabs(name) else ""


def weights_in(folder: Path) -> list[Path]:
    return [file for name in WEIGHTS for file in folder.glob(name)]


def stated_config(folder: Path) -> Mapping[str, object]:
    """What config.json says of the text model."""
    return stated_text(config_file(folder))


def config_file(folder: Path) -> Mapping[str, object]:
    """config.json as it is; empty of one that cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # `read_config` reports it
        return {}
    return config if isinstance(config, dict) else {}
