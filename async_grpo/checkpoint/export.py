"""Exports: the policy as a Hugging Face folder that transformers and vLLM load.

One of random weights is written the same way, before a run from nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_grpo.checkpoint.tensors import write_shards
from async_grpo.model.model_folder import read_config
from async_grpo.model.policy import PolicyModel, as_stored
from async_grpo.training.fsdp import iter_full_tensors
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep
from async_grpo.util.errors import CheckpointError
from async_grpo.util.files import explained, sync

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
# Config, tokenizer, templates, licence.
COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
Named = Iterable[tuple[str, Tensor]]
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
            _write(policy.model, tensors, Path(source_folder), Path(target))
        except (OSError, CheckpointError) as error:
            reason = [str(error)]
    for _ in tensors:  # gathering is collective: all ranks do it to the end, also after an error
        pass
    if dist.is_initialized():
        dist.broadcast_object_list(reason, src=0)
    return reason[0]


def initial_folder(source: str, *, output_dir: str, seed: int) -> str:
    """Where a run from nothing has the model in `source` with weights drawn from `seed`.

    The name is a digest of the seed and of all that is copied from `source`: with another of them
    it is another model, which the hashes of a checkpoint refuse.
    """
    digest = hashlib.sha256(str(seed).encode())
    for file in _descriptions(Path(source)):
        digest.update(f"\0{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return str(Path(output_dir, "initial_model", digest.hexdigest()[:12]))


def write_initial(source: str, folder: str, *, seed: int) -> None:
    """Write the folder that `initial_folder` names, unless it is there.

    Weights are what transformers' initialiser draws for config.json. Raises `ConfigError` where the
    disk refuses.
    """
    goal = Path(folder)
    if goal.exists():
        return
    with torch.random.fork_rng(devices=[]), explained(goal):
        torch.manual_seed(seed)
        config = read_config(Path(source))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        drawn = ((name, parameter.detach()) for name, parameter in model.named_parameters())
        _write(model, drawn, Path(source), goal)
    logger.info("weights were drawn from the seed %d: %s", seed, goal)


def _write(model: PreTrainedModel, trained: Named, source: Path, goal: Path) -> None:
    temporary = goal.with_name(f".{goal.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for file in _descriptions(source):
            shutil.copyfile(file, temporary / file.name)
        dtype = _stored_dtype(source)
        tensors = chain(((name, each.to(dtype)) for name, each in trained), _untrained(model))
        stored = (pair for own in tensors for pair in as_stored(model, *own).items())
        _write_weights(stored, temporary)
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
        shutil.rmtree(goal, ignore_errors=True)
        temporary.rename(goal)
        sync(goal.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # frees the disk for what is written next


def _untrained(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint has, such as the corrections of a router's scores."""
    known = model.state_dict(keep_vars=True)
    return ((name, each.cpu()) for name, each in model.named_buffers() if name in known)


def _stored_dtype(source: Path) -> torch.dtype:
    config = json.loads((source / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return getattr(torch, name)


def _descriptions(source: Path) -> list[Path]:
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file.suffix in COPIED_SUFFIXES
        if not file.name.endswith(".index.json")
    ]


def _write_weights(tensors: Named, folder: Path) -> None:
    """Write one safetensors file, or several with an index; at most one is in memory."""
    index: dict[str, str] = {}
    stored = ((name, tensor.contiguous()) for name, tensor in tensors)
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
