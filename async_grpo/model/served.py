"""What leaves the trainer of a policy: its parameters, an adapter merged into them, or it alone.

Besides, what shows that it arrives: samples of the weights that the policy computes with, taken
apart from what is sent, and an adapter that changes every output, for the start of a run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_grpo.model.adapters import (
    NAME,
    SAVED,
    Adapter,
    adapted_layers,
    base_weight,
    in_file,
)
from async_grpo.model.loading import (
    CPU,
    FOREIGN,
    TOLERANCE,
    VOCAB_SIZE,
    probe_pairs,
    scores_alone,
    small_model,
)
from async_grpo.model.model_folder import read_config
from async_grpo.model.policy import PolicyModel, hf_named_parameters, trained_parameters
from async_grpo.model.weight_files import (
    as_shard_of,
    local_part,
    materialise,
    own_rows,
    slices_of,
)
from async_grpo.types import WeightSample
from async_grpo.util.errors import UnfitModel

if TYPE_CHECKING:  # see `adapters`
    from peft.tuners.lora import Linear, ParamWrapper

Make = Callable[[], Tensor]
# Of a sample, over all ranks: in bf16 a small update changes 1 of 400 numbers.
NUM_ROWS, NUM_COLUMNS = 64, 128
PROBE_SHARE = 0.5  # of the norm of a weight, which the probe changes it by


class Served(NamedTuple):
    """A tensor that leaves the trainer."""

    shape: tuple[int, ...]  # of the whole
    make: Make  # returns it, sharded by rows as its parameter is; valid until the next step


def served(policy: PolicyModel, *, divided: bool = False) -> dict[str, Served]:
    """Every parameter as a checkpoint of the model names it, an adapter merged into it; collective.

    `divided`: where each rank holds all of the model, its own rows only.
    """
    cut = own_rows if divided else _itself
    found = {
        name: Served(tuple(each.shape), partial(_detached, each, cut))
        for name, each in hf_named_parameters(policy)
    }
    return found | changed(policy, divided=divided) if policy.adapter else found


def changed(policy: PolicyModel, *, divided: bool = False) -> dict[str, Served]:
    """As `served`, of parameters that an adapter changes alone; collective."""
    cut = own_rows if divided else _itself
    found: dict[str, Served] = {}
    for name, layer in adapted_layers(policy):
        whole, shape = _Factors.of(layer), tuple(base_weight(layer).shape)
        found[name] = Served(shape, partial(whole.merged, layer, cut))
    for name, each in trained_parameters(policy):
        if SAVED in name:
            own = name.replace(SAVED, ".")
            found[own] = Served(tuple(each.shape), partial(_detached, each, cut))
    return found


def adapter_alone(policy: PolicyModel, *, divided: bool = False) -> dict[str, Served]:
    """The trained parameters as peft's file names them."""
    cut = own_rows if divided else _itself
    return {
        in_file(name): Served(tuple(each.shape), partial(_detached, each, cut))
        for name, each in trained_parameters(policy)
    }


class FlatShards(Sequence[Tensor]):
    """This rank's part of each tensor, flat; made when it is asked for, the last one is kept."""

    def __init__(self, tensors: dict[str, Served]) -> None:
        self._makes = [each.make for each in tensors.values()]
        self._last = -1, torch.empty(0)

    def __len__(self) -> int:
        return len(self._makes)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        if self._last[0] != index:
            self._last = index, local_part(self._makes[index]()).reshape(-1)
        return self._last[1]


class _Factors(NamedTuple):
    """What an adapter adds to a parameter, left @ right, whole on every rank, in float64."""

    left: Tensor  # [out, r], scaled; of experts [E, out, r]
    right: Tensor  # [r, in]; of experts [E, r, in]
    magnitude: Tensor | None  # [out], of DoRA

    @classmethod
    def of(cls, layer: Linear | ParamWrapper) -> _Factors:
        """Collective."""
        a, b = (_whole(each[NAME].weight).double() for each in (layer.lora_A, layer.lora_B))
        b = b * layer.scaling[NAME]
        if (experts := getattr(layer, "num_experts", 1)) > 1:  # as peft cuts them
            a = a.reshape(experts, -1, a.shape[-1])
            b = b.reshape(len(b), -1, experts).permute(2, 0, 1)
        is_turned = layer.fan_in_fan_out or (a.ndim > 2 and not layer._did_swap_in_out_features)
        vector = layer.lora_magnitude_vector
        magnitude = _whole(vector[NAME].weight).double() if NAME in vector else None
        return cls(*((a.mT, b.mT) if is_turned else (b, a)), magnitude)

    @torch.no_grad()
    def merged(self, layer: Linear | ParamWrapper, cut: Callable[[Tensor], Tensor]) -> Tensor:
        """The weight with the adapter: a float32 sum of a product in float64.

        So it is the same, but for one number in 1e8, however the rows are cut.
        """
        part = cut(base_weight(layer).detach())
        held, rows = local_part(part), slices_of(part)[0]
        right = self.right[rows] if self.right.ndim > 2 else self.right
        change = self.left[rows].to(held.device) @ right.to(held.device)
        wide = torch.promote_types(held.dtype, torch.float32)
        found = held.to(wide) + change.to(wide)
        if self.magnitude is not None:
            norms = found.double().norm(dim=1, keepdim=True)
            found = (found * (self.magnitude[rows, None].to(held.device) / norms)).to(wide)
        return as_shard_of(found, part)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _detached(parameter: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    return cut(parameter.detach())


def _whole(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # it may lie in the host's


def samples(
    policy: PolicyModel,
    *,
    alone: bool,
    dtype: torch.dtype,
    served: torch.dtype,
    seed: int,
    num_ranks: int = 1,
) -> tuple[list[WeightSample], float, float]:
    """(this rank's samples of what an adapter changes, Σ lost², Σ ΔW²); collective.

    They are taken of the live parameters, apart from `changed` and `adapter_alone`, so that a
    mistake there, or on the way, is found; of linear layers by peft's own product. `alone`: of the
    adapter's own tensors, B scaled; lost is 0 then. Else lost is what rounding to `served`, the
    engines' type, takes of the change of the sampled weights, which are sent in `dtype`.
    """
    found, lost, total = [], 0.0, 0.0
    for name, part, value in _alone(policy, dtype) if alone else _merged(policy):
        rows, columns = _chosen(name, part, seed, num_rows=-(-NUM_ROWS // num_ranks))
        exact, change = value(rows, columns)
        sent = exact.to(dtype)
        arrives = exact.to(served).double() - (exact - change).to(served).double()
        lost += float((arrives - change.double()).square().sum()) if change.any() else 0.0
        total += float(change.double().square().sum())
        arrays = (each.numpy() for each in (rows, columns, sent.float().cpu()))
        found.append(WeightSample(name, *arrays))
    return found, lost, total


Value = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (numbers at rows x columns, ΔW there)


def _merged(policy: PolicyModel) -> Iterator[tuple[str, Tensor, Value]]:
    for name, layer in adapted_layers(policy):
        part = own_rows(base_weight(layer).detach())
        yield name, part, partial(_of, layer, part)
    for name, each in trained_parameters(policy):
        if SAVED in name:
            part = own_rows(each.detach())
            yield name.replace(SAVED, "."), part, partial(_plain, part, torch.float32, 1.0)


def _alone(policy: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Value]]:
    scales = {
        id(layer.lora_B[NAME].weight): layer.scaling[NAME] for _, layer in adapted_layers(policy)
    }
    for name, each in trained_parameters(policy):
        part = own_rows(each.detach())
        yield in_file(name), part, partial(_plain, part, dtype, scales.get(id(each), 1.0))


def _of(
    layer: Linear | ParamWrapper, part: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """W + s B A at rows and columns, and s B A there; of DoRA the rows have their magnitudes."""
    from peft.tuners.lora import Linear

    whole, held = _Factors.of(layer), local_part(part)
    left, right = whole.left.flatten(0, -2)[rows], whole.right
    if right.ndim > 2:  # of each row its own expert's
        each = rows // part.shape[1]
        change = torch.einsum("kr,krn->kn", left, right[each])
    elif isinstance(layer, Linear):
        change = _by_peft(layer, rows)
    else:
        change = left @ right
    own = held.flatten(0, -2)[rows - _first_row(part)]
    exact = own.to(torch.promote_types(own.dtype, torch.float32))
    exact = exact + change.to(exact.device, exact.dtype)
    if whole.magnitude is not None:
        norms = exact.double().norm(dim=1, keepdim=True)
        exact = (exact * (whole.magnitude[rows, None].to(norms.device) / norms)).to(exact.dtype)
    return exact[:, columns], (exact - own)[:, columns]


def _by_peft(layer: Linear, rows: Tensor) -> Tensor:
    """s B A at rows by peft's own formula: a mistake in `_Factors` must not be in samples, too."""
    from peft.tuners.lora import Linear

    a, b = (_whole(each[NAME].weight).double() for each in (layer.lora_A, layer.lora_B))
    turned = layer.fan_in_fan_out
    factors = {"lora_A": a[:, rows] if turned else a, "lora_B": b if turned else b[rows]}
    alike = {name: {NAME: SimpleNamespace(weight=each)} for name, each in factors.items()}
    stand_in = SimpleNamespace(scaling=layer.scaling, fan_in_fan_out=turned, **alike)
    change: Tensor = Linear.get_delta_weight(stand_in, NAME)
    return change


def _first_row(part: Tensor) -> int:
    """The first row that this rank has of a tensor; of experts, rows of all count."""
    return int(slices_of(part)[0].start * math.prod(part.shape[1:-1]))


def _plain(
    part: Tensor, dtype: torch.dtype, scale: float, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    held = local_part(part)[rows - _first_row(part)].to(dtype).float() * scale
    held = held[:, columns] if held.ndim > 1 else held
    return held, torch.zeros_like(held)


def _chosen(name: str, part: Tensor, seed: int, *, num_rows: int) -> tuple[Tensor, Tensor]:
    """Some of this rank's rows of a tensor, and of its columns; other ones for each seed."""
    of_one, own = math.prod(part.shape[1:-1]), slices_of(part)[0]
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))

    def some(start: int, stop: int, number: int) -> Tensor:
        drawn = generator.permutation(np.arange(start, stop))[:number]
        return torch.from_numpy(np.sort(drawn))

    columns = some(0, part.shape[-1], NUM_COLUMNS) if part.ndim > 1 else some(0, 0, 0)
    return some(own.start * of_one, own.stop * of_one, num_rows), columns


@contextmanager
def probing(policy: PolicyModel) -> Iterator[None]:
    """Within, B of each layer is random, so that the adapter adds half of a weight's norm to it.

    An adapter starts with B = 0: then no output would show whether an engine has it.
    """
    kept = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _, layer in adapted_layers(policy):
            b = layer.lora_B[NAME].weight.detach()
            kept.append((local_part(b), local_part(b).clone()))
            a = layer.lora_A[NAME].weight
            sizes = [_whole(each.detach().float().norm()) for each in (base_weight(layer), a)]
            # |B A| is about |A| times the root of the rows of B, for B of unit variance.
            size = PROBE_SHARE * sizes[0] / (layer.scaling[NAME] * len(b) ** 0.5 * sizes[1])
            drawn = torch.randn(b.shape)[slices_of(b)]
            local_part(b).copy_(size * drawn.to(size.device))
    try:
        yield
    finally:
        for held, before in kept:
            held.copy_(before)


@torch.no_grad()
def check_adapter(path: str, adapter: Adapter) -> None:
    """Raise `UnfitModel` unless a model with the adapter computes what a merged one does.

    A small random model of the config's architecture is asked: some read a layer's weight without
    calling the layer, where an adapter would train without effect.
    """
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    config, policy = read_config(Path(path)), adapter.outlined(path)
    assert policy.adapter is not None
    linear = [name for name, layer in adapted_layers(policy) if isinstance(layer, Linear)]
    tried = LoraConfig(
        r=4,
        target_modules=sorted({name.split(".")[-2] for name in linear}),
        target_parameters=sorted(policy.adapter.target_parameters or ()),
        use_dora=adapter.config.use_dora,
    )
    pairs, probe = probe_pairs(VOCAB_SIZE), Adapter(tried, adapter.seed, None)
    try:
        small = PolicyModel(small_model(config))
        probe.inject(small)
        materialise(small, CPU, parameters_on=CPU)
        probe.fill(small, {})
        for _, layer in adapted_layers(small):
            layer.lora_B[NAME].weight.normal_(std=PROBE_SHARE)
        merged = small_model(config)
        held = dict(merged.named_parameters())
        for name, each in changed(small).items():
            held[name].copy_(each.make())
        off_by = (scores_alone(small.model, pairs) - scores_alone(merged, pairs)).abs().max().item()
        found = "" if off_by <= TOLERANCE else f"it is off by {off_by:.2g} nats"
    except FOREIGN as error:  # of the code of any model
        found = f"it raises {error!r}"
    if found:
        raise UnfitModel(
            "a model with an adapter must compute what one with merged weights does, with "
            f"adapters of {', '.join(sorted(tried.target_modules))} in {path} "
            f"({config.model_type}) {found}: give --lora-targets without such a layer"
        )
