"""Which parameters a worker's model must receive, and the check of what is sent against it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from async_grpo.errors import ModelError, WeightSyncError
from async_grpo.types import TensorMeta

OUTPUT_HEAD = "lm_head.weight"
PRECISION_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
NOT_PARAMETERS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints still carry


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """The parameters of a worker's model, under their checkpoint names."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: str  # of the worker's model
    tied_head: bool  # the output head is the embedding, and is not sent apart

    def check(self, tensors: Iterable[TensorMeta]) -> None:
        """Raise `WeightSyncError` naming the first parameter that does not fit the model."""
        for meta in tensors:
            if self.tied_head and meta.name == OUTPUT_HEAD:
                continue
            if meta.name not in self.shapes:
                raise WeightSyncError(
                    f"weights must have the parameters of the worker's model, got {meta.name!r} "
                    "which it lacks: give worker and trainer the same model"
                )
            if meta.shape != self.shapes[meta.name]:
                raise WeightSyncError(
                    f"parameter {meta.name!r} must have the shape {self.shapes[meta.name]} of the "
                    f"worker's model, got {meta.shape}: give worker and trainer the same model"
                )
            self._check_precision(meta)

    def check_complete(self, names: Collection[str]) -> None:
        """Raise `WeightSyncError` unless every parameter is among `names`."""
        missing = [name for name in self.shapes if name not in names]
        if missing:
            raise WeightSyncError(
                f"weights must hold all {len(self.shapes)} parameters of the worker's model, "
                f"{len(missing)} are missing, the first is {missing[0]!r}: give worker and "
                "trainer the same model"
            )

    def _check_precision(self, meta: TensorMeta) -> None:
        sent, own = PRECISION_BITS.get(meta.dtype, 0), PRECISION_BITS.get(self.dtype, 0)
        if sent < own:
            raise WeightSyncError(
                f"parameter {meta.name!r} must be sent with at least the precision of the "
                f"worker's model ({self.dtype}), got {meta.dtype}: send {self.dtype}, or start "
                f"the worker with --dtype {meta.dtype}"
            )


def read_expected(model_path: str, *, dtype: str, tied_head: bool) -> ExpectedWeights:
    """What the model in a folder expects, read from the headers of its checkpoint.

    Raises:
        ModelError: the folder holds no weights.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(Path(model_path)):
        shapes.update(_safetensors_shapes(file) if file.suffix == ".safetensors" else _shapes(file))
    kept = {
        name: shape
        for name, shape in shapes.items()
        if not name.endswith(NOT_PARAMETERS) and not (tied_head and name == OUTPUT_HEAD)
    }
    return ExpectedWeights(shapes=kept, dtype=dtype, tied_head=tied_head)


def _weight_files(folder: Path) -> list[Path]:
    """The checkpoint's own files; a folder may hold copies in another layout beside them."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
            return sorted(folder / name for name in names)
        if (folder / stem).is_file():
            return [folder / stem]
    raise ModelError(
        f"a model folder must hold model.safetensors or pytorch_model.bin, or an index of their "
        f"parts, {str(folder)!r} does not: save the model there with save_pretrained"
    )


def _safetensors_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="numpy") as tensors:
        names = tensors.keys()
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    tensors = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
