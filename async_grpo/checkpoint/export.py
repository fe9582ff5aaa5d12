"""Exports: the policy as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.checkpoint.tensors import write_shards
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import iter_full_tensors
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep
from async_grpo.util.errors import CheckpointError
from async_grpo.util.files import sync

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
# Config, tokenizer, templates, licence.
COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
INDEX_NAME = "model.safetensors.index.json"


def export_hf(policy: PolicyModel, *, source_folder: str, target: str) -> str:
    """Write the folder `target`, whole or not at all; collective, and done on return on every rank.

    Weights get the dtype that the source's config.json names, else float32; a tied head is not
    repeated. Config, generation config and tokenizer are copied from the source. An older folder at
    `target` is replaced. Returns, on every rank, the disk's error in words; empty without one.
    """
    tensors = iter_full_tensors(policy)
    reason = [""]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            source = Path(source_folder)
            write_folder(tensors, source, Path(target), dtype=_stored_dtype(source))
        except (OSError, CheckpointError) as error:
            reason = [str(error)]
    for _ in tensors:  # gathering is collective: all ranks do it to the end, also after an error
        pass
    if dist.is_initialized():
        dist.broadcast_object_list(reason, src=0)
    return reason[0]


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    goal: Path,
    *,
    dtype: torch.dtype | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write the folder `goal`, whole or not at all: `tensors`, and the descriptions of `source`.

    `dtype` of the files, else each tensor's own; `texts`: files by name, in place of the source's.
    Raises `OSError` or `CheckpointError` when the disk fails.
    """
    temporary = goal.with_name(f".{goal.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _copy_descriptions(source, temporary)
        for name, text in (texts or {}).items():
            (temporary / name).write_text(text)
        _write_weights(tensors, temporary, dtype=dtype)
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
        shutil.rmtree(goal, ignore_errors=True)
        temporary.rename(goal)
        sync(goal.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # frees the disk for what is written next


def _stored_dtype(source: Path) -> torch.dtype:
    config = json.loads((source / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return getattr(torch, name)


def _copy_descriptions(source: Path, folder: Path) -> None:
    for file in sorted(source.iterdir()):
        is_index = file.name.endswith(".index.json")
        if file.is_file() and file.suffix in COPIED_SUFFIXES and not is_index:
            shutil.copyfile(file, folder / file.name)


def _write_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, *, dtype: torch.dtype | None
) -> None:
    """Write one safetensors file, or several with an index; at most one is in memory."""
    index: dict[str, str] = {}
    stored = ((name, tensor.to(dtype or tensor.dtype).contiguous()) for name, tensor in tensors)
    shards = list(write_shards(stored, folder, stem=".shard", max_bytes=SHARD_BYTES))
    total = len(shards)
    for number, (file, names) in enumerate(shards, 1):
        name = "model.safetensors" if total == 1 else f"model-{number:05}-of-{total:05}.safetensors"
        file.rename(folder / name)
        index |= dict.fromkeys(names, name)
    if total > 1:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))


class Exports:
    """Writes `hf_format/samples_N/` every `--min-samples-per-checkpoint` samples and at the end."""

    def __init__(self, learner: Learner, *, doing: Callable[[str], None]) -> None:
        """`doing` shows in the display what this rank does."""
        self._doing = doing
        self._recording = learner.config.recording
        self._learner = learner
        self._num_samples = 0
        self._last_export = -1
        self._refusal = ""  # the disk's error at the last one; empty: none

    def state(self) -> dict[str, int]:
        """The counters for a checkpoint: a resumed run exports when this one would have."""
        return {"samples": self._num_samples, "last_export": self._last_export}

    def restore(self, state: Mapping[str, int]) -> None:
        """Take the counters of a checkpoint's `state`."""
        self._num_samples, self._last_export = state["samples"], state["last_export"]

    def count(self, end: EndOfStep) -> None:
        """Count the samples of a finished gradient step."""
        self._num_samples += end.num_samples

    def export_if_due(self) -> None:
        """Export after a batch once enough samples were trained; collective."""
        interval = self._recording.min_samples_per_checkpoint
        if interval and self._num_samples - max(self._last_export, 0) >= interval:
            self.export()

    def export(self) -> None:
        """Write the current policy, unless it has been written already; collective.

        A disk that fails costs the export, not the run.
        """
        if self._last_export == self._num_samples and not self._refusal:
            return
        self._doing("exporting the model")
        target = str(export_folder(self._recording.output_dir, self._num_samples))
        source = self._learner.config.places.model_name_or_path
        self._refusal = export_hf(self._learner.policy, source_folder=source, target=target)
        self._last_export = self._num_samples
        if self._refusal:
            logger.warning("the export to %s FAILED, the run goes on: %s", target, self._refusal)
        else:
            logger.info("exported the model to %s", target)

    def check_last(self, *, is_saved: bool) -> None:
        """Check, at the end of a run, that the trained model was exported or `is_saved`.

        Raises `CheckpointError` when neither an export nor a checkpoint holds it.
        """
        if not self._refusal:
            return
        if not is_saved:
            raise CheckpointError(
                f"the disk of --output-dir {self._recording.output_dir} refused the trained model "
                f"({self._refusal}), and no checkpoint holds it: make room, and train again what "
                "comes after the last good checkpoint"
            )
        logger.error(
            "the last checkpoint alone holds the trained model: make room, and give the same "
            "command again to export it"
        )


def export_finished(
    output_dir: str, ranks: Ranks, state: Mapping[str, int], *, restored: Callable[[], Learner]
) -> None:
    """Export the model of a finished run, if that is missing; collective.

    `state` is that of its `Exports`. `restored` builds a learner from its last checkpoint.
    """
    if ranks.share(export_folder(output_dir, state["samples"]).exists):
        return
    exports = Exports(restored(), doing=logger.info)
    exports.restore({**state, "last_export": -1})
    exports.export()
    ranks.on_main(lambda: exports.check_last(is_saved=True))


def export_folder(output_dir: str, num_samples: int) -> Path:
    return Path(output_dir) / "hf_format" / f"samples_{num_samples}"
