"""What a worker checks of an update: that it is sent its model's parameters, and has loaded them.

At a learning rate of 1e-6 a missed update moves log-probabilities by less than bfloat16 rounds, so
scores of fixed tokens cannot show it. The numbers themselves can: some rows of each parameter are
read back, or some columns where vLLM has packed it for a CPU and only products show what it holds.
`Readback` runs inside vLLM's engine core processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_grpo.model.model_folder import read_config
from async_grpo.types import TensorMeta
from async_grpo.util.errors import WeightSyncError

PRECISION_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
# Rows or columns of a matrix that are read, others at each update, and the fewest numbers in them:
# at a learning rate of 1e-6 an update changes at least 1 of 400 numbers in bfloat16.
NUM_READ = 16
LEAST_NUMBERS = 1 << 13
ROWS, COLUMNS = 0, 1
# vLLM's names of what a layer's experts have together, and transformers'.
OF_EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """The parameters that a worker's model needs, under the names that the trainer publishes."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: str  # of the worker's model
    model: PreTrainedModel | None = None  # with parameters that have no memory

    @classmethod
    def read(cls, model_path: str, *, dtype: str) -> Self:
        """The parameters of the model in a folder; the trainer builds it by the same class."""
        with torch.device("meta"):  # shapes without memory
            model = AutoModelForCausalLM.from_config(read_config(Path(model_path)))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return cls(shapes, dtype, model)

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


class Readback:
    """Checks one update: pass its weights `through`, load them, then call `differing`."""

    def __init__(self, model: Module, *, seed: int) -> None:
        """`seed` chooses the rows that are read; `model` must be in its serving form."""
        self._places = _places(model)
        self._seed = seed
        self._expected: list[tuple[str, _Place, Tensor]] = []
        self.unread: list[str] = []  # parameters that vLLM holds in another form than published

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` unchanged and remember some numbers of each."""
        for name, tensor in weights:
            places = self._places.get(name, [])
            shards = [shard for place in places if (shard := _shard(tensor, place)) is not None]
            if not shards or len(shards) < len(places):
                self.unread.append(name)
            else:
                for place, shard in zip(places, shards, strict=True):
                    some = self._some(shard, COLUMNS if place.is_packed else ROWS)
                    self._expected.append((name, place, some.clone()))
            yield name, tensor

    def differing(self) -> list[str]:
        """The names of parameters whose numbers in the live model are not those that were sent."""
        found = []
        for name, place, expected in self._expected:
            live = self._product(place) if place.is_packed else self._rows(place)
            expected = expected.to(live.device, live.dtype)
            # A kernel may round the smallest numbers to 0.
            if ((live - expected).abs() >= torch.finfo(live.dtype).tiny).any():
                found.append(name)
        return found

    def _rows(self, place: _Place) -> Tensor:
        held = getattr(place.module, place.attribute)
        return self._some(held[place.start : place.start + place.size], ROWS)

    def _product(self, place: _Place) -> Tensor:
        """Columns of a packed weight: its products with one-hot vectors, which are exact."""
        module = place.module
        width = getattr(module, "input_size_per_partition", None) or module.input_size
        ones = one_hot(self._chosen(width, place.size), width).to(module.weight.dtype)
        products = module.cpu_linear(ones, module.weight, None)
        return products[:, place.start : place.start + place.size].T

    def _some(self, tensor: Tensor, axis: int) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        tensor = tensor.flatten(0, -2)  # of all experts
        chosen = self._chosen(tensor.shape[axis], tensor.shape[1 - axis])
        return tensor.index_select(axis, chosen.to(tensor.device))

    def _chosen(self, num: int, size: int) -> Tensor:
        """The indices of some of `num` rows or columns with `size` numbers each."""
        generator = torch.Generator().manual_seed(self._seed)
        num_read = max(NUM_READ, LEAST_NUMBERS // max(size, 1))
        return torch.randperm(num, generator=generator)[:num_read]


class _Place(NamedTuple):
    """Rows [start, start + size) of a module's weight or bias are one published parameter."""

    module: Module
    attribute: str
    start: int
    size: int
    is_packed: bool  # the module multiplies by a packed copy


def _places(model: Module) -> dict[str, list[_Place]]:
    """The places of each published name in a live model; a tied weight has two."""
    merged = getattr(model, "packed_modules_mapping", {})
    places: dict[str, list[_Place]] = defaultdict(list)
    owners: dict[int, str] = {}  # {id of a weight: path of the first module that has it}
    for path, module in model.named_modules():
        for attribute, held in module._parameters.items():
            if held is None:
                continue
            owner = owners.setdefault(id(held), path)
            parent, _, last = owner.rpartition(".")
            is_packed = attribute == "weight" and "cpu_linear" in vars(module)
            sizes, start = _sizes(module, held), 0
            parts = merged.get(last, [last]) if len(sizes) > 1 else [last]
            if len(parts) != len(sizes):
                continue
            for part, size in zip(parts, sizes, strict=True):
                own = OF_EXPERTS.get(attribute)  # of a module within the experts'
                names = (parent, own) if own else (parent, part, attribute)
                name = ".".join(filter(None, names))
                places[name].append(_Place(module, attribute, start, size, is_packed))
                start += size
    return places


def _sizes(module: Module, held: Tensor) -> list[int]:
    """Rows in this process of each published parameter that `held` is made of."""
    if indices := getattr(module, "shard_indices", None):  # of a vocabulary, which is padded
        return [indices.num_org_elements]
    return list(getattr(module, "output_partition_sizes", held.shape[:1]))


def _shard(tensor: Tensor, place: _Place) -> Tensor | None:
    """The part of a published parameter at `place`; None where it is held in another form."""
    module, held = place.module, getattr(place.module, place.attribute)
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    if indices := getattr(module, "shard_indices", None):
        tensor = tensor[indices.org_vocab_start_index : indices.org_vocab_end_index]
    elif size > 1 and len(tensor) == size * place.size:
        tensor = tensor[rank * place.size : (rank + 1) * place.size]
    width = getattr(module, "input_size_per_partition", held.shape[-1])
    if tensor.ndim > 1 and size > 1 and tensor.shape[1] == size * width:
        tensor = tensor[:, rank * width : (rank + 1) * width]
    is_plain = held.is_floating_point() and held.dtype.itemsize > 1  # fp8 has scales beside it
    if tensor.ndim > 2:
        return tensor if is_plain and tensor.shape == held.shape else None
    return tensor if is_plain and tensor.shape == (place.size, width)[: tensor.ndim] else None
