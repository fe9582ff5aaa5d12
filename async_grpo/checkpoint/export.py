"""The policy as a Hugging Face folder that transformers and vLLM load, and when it is written."""

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
    """Write `target`, whole or not at all; collective, and complete on return on every rank.

    Weights take the type that the source's config.json names, float32 where it names none; a tied
    head is not repeated. Config, generation config and tokenizer are the source's files. An older
    folder at `target` is replaced. Returns on every rank why a disk refused, empty if none did.
    """
    tensors = iter_full_tensors(policy)
    reason = [""]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            _write(tensors, Path(source_folder), Path(target))
        except (OSError, CheckpointError) as error:
            reason = [str(error)]
    for _ in tensors:  # gathered by all ranks, to the last, whatever has become of the writer
        pass
    if dist.is_initialized():
        dist.broadcast_object_list(reason, src=0)
    return reason[0]


def _write(tensors: Iterable[tuple[str, Tensor]], source: Path, goal: Path) -> None:
    temporary = goal.with_name(f".{goal.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _copy_descriptions(source, temporary)
        _write_weights(tensors, temporary, dtype=_stored_dtype(source))
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
        shutil.rmtree(goal, ignore_errors=True)
        temporary.rename(goal)
        sync(goal.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # the next file may need its room


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
    tensors: Iterable[tuple[str, Tensor]], folder: Path, *, dtype: torch.dtype
) -> None:
    """One safetensors file, or several with an index, never more than one of them in memory."""
    index: dict[str, str] = {}
    stored = ((name, tensor.to(dtype).contiguous()) for name, tensor in tensors)
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
        """`doing` is told what takes time."""
        self._doing = doing
        self._recording = learner.config.recording
        self._source = learner.config.places.model_name_or_path
        self._learner = learner
        self._num_samples = 0
        self._last_export = -1
        self._refusal = ""  # why the disk did not take the last one

    def state(self) -> dict[str, int]:
        """What a resumed run needs to export when this one would have."""
        return {"samples": self._num_samples, "last_export": self._last_export}

    def restore(self, state: Mapping[str, int]) -> None:
        """The inverse of `state`."""
        self._num_samples, self._last_export = state["samples"], state["last_export"]

    def count(self, end: EndOfStep) -> None:
        """A gradient step was finished."""
        self._num_samples += end.num_samples

    def export_if_due(self) -> None:
        """Collective, after a batch."""
        interval = self._recording.min_samples_per_checkpoint
        if interval and self._num_samples - max(self._last_export, 0) >= interval:
            self.export()

    def export(self) -> None:
        """Collective: write the policy as it is, unless it has been written already.

        A disk that refuses costs the export, not the run.
        """
        if self._last_export == self._num_samples and not self._refusal:
            return
        self._doing("exporting the model")
        target = str(export_folder(self._recording.output_dir, self._num_samples))
        self._refusal = export_hf(self._learner.policy, source_folder=self._source, target=target)
        self._last_export = self._num_samples
        if self._refusal:
            logger.warning("the export to %s FAILED, the run goes on: %s", target, self._refusal)
        else:
            logger.info("exported the model to %s", target)

    def check_last(self, *, is_saved: bool) -> None:
        """At the end of a run whose last batch `is_saved` in a checkpoint, or not.

        Raises `CheckpointError` when the trained model is nowhere.
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
    """Collective: the last export of a run that is trained, if it is not there.

    `state`: of its exports. `restored` gives a learner with what it has come to.
    """
    if ranks.share(export_folder(output_dir, state["samples"]).exists):
        return
    exports = Exports(restored(), doing=logger.info)
    exports.restore({**state, "last_export": -1})
    exports.export()
    ranks.on_main(lambda: exports.check_last(is_saved=True))


def export_folder(output_dir: str, num_samples: int) -> Path:
    return Path(output_dir) / "hf_format" / f"samples_{num_samples}"
