"""What a worker checks of an update: that it is sent its model's parameters, and has loaded them.

At a learning rate of 1e-6 a missed update moves log-probabilities by less than bfloat16 rounds, so
scores of fixed tokens cannot show it. The numbers themselves can: some rows of each parameter are
read back, or some columns where vLLM has packed it for a CPU and only products show what it holds.
`Readback` runs inside vLLM's engine core processes. It compares the live model with what was sent,
and with samples that the trainer took of its own parameters, past all that collects and sends them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_grpo.model.model_folder import read_config
from async_grpo.model.policy import as_stored
from async_grpo.model.weight_files import places_of
from async_grpo.types import TensorMeta, WeightSample
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

    def check(self, tensors: Iterable[TensorMeta], *, rest_of: Path | None = None) -> None:
        """Raise `WeightSyncError` unless these are the model's parameters, each of them once.

        Those that are missing are to be in the folder `rest_of`, if one is given.
        """
        missing = dict.fromkeys(self.shapes)
        for meta in tensors:
            self._check_one(meta)
            if meta.name not in missing:
                raise WeightSyncError(f"parameter {meta.name!r} must be sent once, got it twice")
            del missing[meta.name]
        if rest_of is not None:
            self._check_rest(missing, rest_of)
        elif missing:
            first = next(iter(missing))
            raise WeightSyncError(
                f"weights must hold all {len(self.shapes)} parameters of the worker's model, "
                f"{len(missing)} are missing, the first is {first!r}: give worker and trainer the "
                "same model"
            )

    def stored_names(self, names: Collection[str]) -> set[str]:
        """The names of parameters in the files of a model."""
        assert self.model is not None
        own = [(name, each) for name, each in self.model.named_parameters() if name in names]
        return {stored for name, each in own for stored in as_stored(self.model, name, each)}

    def _check_rest(self, missing: Collection[str], folder: Path) -> None:
        if absent := self.stored_names(missing) - places_of(folder).keys():
            raise WeightSyncError(
                f"parameters that are not sent must be in the worker's folder, {folder} lacks "
                f"{len(absent)} by name, such as {min(absent)!r}: write it with save_pretrained"
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
        self.sent: set[str] = set()

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` unchanged and remember some numbers of each."""
        for name, tensor in weights:
            self.sent.add(name)
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
            if _unequal(live, expected).any():
                found.append(name)
        return found

    def differing_samples(
        self, samples: Iterable[WeightSample], shapes: Mapping[str, tuple[int, ...]]
    ) -> Counter[str]:
        """How many of each parameter's samples the live model lacks; `shapes`: of published ones.

        Rows and columns of other processes are left out, and what is held in another form.
        """
        found: Counter[str] = Counter()
        for sample in samples:
            if sample.name not in shapes:
                found[sample.name] += sample.values.size
            for place in self._places.get(sample.name, []):
                if (held := _indices(shapes[sample.name], place)) is not None:
                    found[sample.name] += _num_differing(place, sample, *held)
        return +found

    def _rows(self, place: _Place) -> Tensor:
        held = getattr(place.module, place.attribute)
        return self._some(held[place.start : place.start + place.size], ROWS)

    def _product(self, place: _Place) -> Tensor:
        module = place.module
        width = getattr(module, "input_size_per_partition", None) or module.input_size
        return _columns(place, self._chosen(width, place.size), width)

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


Packed = tuple[str, bytes, bytes, bytes]  # a sample as vLLM's messages can carry it


def pack_samples(samples: Iterable[WeightSample]) -> list[Packed]:
    """The inverse of `unpack_samples`."""
    return [(name, *(each.tobytes() for each in arrays)) for name, *arrays in samples]


def unpack_samples(packed: Iterable[Packed]) -> list[WeightSample]:
    """Samples out of their bytes."""
    samples = []
    for name, *parts in packed:
        rows, columns = (np.frombuffer(part, np.int64) for part in parts[:2])
        values = np.frombuffer(bytearray(parts[2]), np.float32)
        shape = (len(rows), len(columns)) if len(columns) else (len(rows),)
        samples.append(WeightSample(name, rows, columns, values.reshape(shape)))
    return samples


def check_samples(differing: Mapping[str, int]) -> None:
    """Raise `WeightSyncError` if samples of any parameter, {name: how many}, differ."""
    if differing:
        name = min(differing)
        raise WeightSyncError(
            "an engine must compute with the weights that the trainer computes with, "
            f"{sum(differing.values())} samples of {len(differing)} tensors differ, "
            f"{differing[name]} of {name!r}: start the worker again, and report it if they differ "
            "again"
        )


class _Place(NamedTuple):
    """Rows [start, start + size) of a module's weight or bias are one published parameter."""

    module: Module
    attribute: str
    start: int
    size: int
    is_packed: bool  # the module multiplies by a packed copy


def _columns(place: _Place, chosen: Tensor, width: int) -> Tensor:
    """Columns of a packed weight: its products with one-hot vectors, which are exact."""
    module = place.module
    ones = one_hot(chosen, width).to(module.weight.dtype)
    products = module.cpu_linear(ones, module.weight, None)
    return products[:, place.start : place.start + place.size].T


def _num_differing(place: _Place, sample: WeightSample, rows: Tensor, columns: Tensor) -> int:
    """Samples that differ at a place, which holds `rows` and `columns` of the parameter."""
    expected, (at, of) = torch.from_numpy(sample.values), common(rows, sample.rows)
    expected = expected[of]
    held = getattr(place.module, place.attribute)
    if expected.ndim < 2:
        live = held[place.start : place.start + place.size][at]
    else:
        across, of_columns = common(columns, sample.columns)
        expected = expected[:, of_columns]
        if place.is_packed:
            live = _columns(place, across, len(columns))[at]
        else:
            live = held[place.start : place.start + place.size].flatten(0, -2)[at][:, across]
    return int(_unequal(live, expected).sum())


def _unequal(live: Tensor, expected: Tensor) -> Tensor:
    # A kernel may round the smallest numbers to 0.
    expected = expected.to(live.device, live.dtype)
    return (live - expected).abs().nan_to_num(torch.inf) >= torch.finfo(live.dtype).tiny


def common(held: Tensor, wanted: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Where the indices that both have lie in each of the two.

    >>> [at.tolist() for at in common(torch.tensor([4, 5, 6]), np.array([6, 2, 4]))]
    [[0, 2], [2, 0]]
    """
    _, at, of = np.intersect1d(held.numpy(), wanted, return_indices=True)
    return torch.from_numpy(at), torch.from_numpy(of)


def _indices(shape: tuple[int, ...], place: _Place) -> tuple[Tensor, Tensor] | None:
    """The rows and columns of a published parameter that `place` holds, as `_shard` has them."""
    if len(shape) < 2:
        rows = _shard(torch.arange(shape[0]), place)
        return None if rows is None else (rows, rows[:0])
    each = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1)  # row, of all experts
    rows = _shard(each.expand(shape), place)  # without memory of their own
    columns = _shard(torch.arange(shape[-1]).expand(shape), place)
    if rows is None or columns is None:
        return None
    return rows[..., 0].flatten(), columns[(0,) * (len(shape) - 1)]


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
