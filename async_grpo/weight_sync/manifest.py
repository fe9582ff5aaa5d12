"""Which parameters a worker's model must receive, and the check of what is sent against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from async_grpo.types import TensorMeta
from async_grpo.util.errors import WeightSyncError

PRECISION_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """The parameters of a worker's model, under the names that the trainer publishes."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: str  # of the worker's model

    @classmethod
    def read(cls, model_path: str, *, dtype: str) -> Self:
        """What the model in a folder expects: the trainer builds it by the same class."""
        with torch.device("meta"):  # shapes without memory
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return cls(shapes, dtype)

    def check(self, tensors: Iterable[TensorMeta]) -> None:
        """Raise `WeightSyncError` unless these are the model's parameters, each of them once."""
        missing = dict.fromkeys(self.shapes)
        for meta in tensors:
            self._check_one(meta)
            if meta.name not in missing:
                raise WeightSyncError(f"parameter {meta.name!r} must be sent once, got it twice")
            del missing[meta.name]
        if missing:
            first = next(iter(missing))
            raise WeightSyncError(
                f"weights must hold all {len(self.shapes)} parameters of the worker's model, "
                f"{len(missing)} are missing, the first is {first!r}: give worker and trainer the "
                "same model"
            )

    def _check_one(self, meta: TensorMeta) -> None:
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
        if PRECISION_BITS.get(meta.dtype, 0) < PRECISION_BITS.get(self.dtype, 0):
            raise WeightSyncError(
                f"parameter {meta.name!r} must be sent with at least the precision of the "
                f"worker's model ({self.dtype}), got {meta.dtype}: send {self.dtype}, or start "
                f"the worker with --dtype {meta.dtype}"
            )
