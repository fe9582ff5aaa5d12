"""Low-rank adapters: peft puts them into the policy; here they get values, and are merged by rows.

A layer computes x W' + s x A' B' with a frozen W [out, in], and A [r, in] and B [out, r] that train
(LoRA, arXiv 2106.09685). Engines and exports get W + s B A, or A and B as peft saves them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, ModulesToSaveWrapper
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_grpo.config.training_options import ALTERS_BASE, AdapterOptions
from async_grpo.model.foreign_folders import stated_config
from async_grpo.model.loading import (
    CPU,
    EAGER,
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
    local_part,
    materialise,
    outline,
    own_rows,
    read_into,
    slices_of,
)
from async_grpo.util.errors import UnfitModel

logger = logging.getLogger(__name__)
NAME = "default"  # peft's, of a model's only adapter
IN_FILE = "base_model.model."  # begins the names of tensors in an adapter's file
SAVED = f".modules_to_save.{NAME}."
# What may differ from peft's own defaults in the adapter_config.json of an adapter to go on with.
KNOWN = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "use_dora",
    "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
    "fan_in_fan_out", "lora_dropout", "init_lora_weights", "base_model_name_or_path", "revision",
    "task_type", "inference_mode", "auto_mapping", "peft_version", "peft_type",
}  # fmt: skip
Make = Callable[[], Tensor]


class Served(NamedTuple):
    """A tensor that leaves the trainer."""

    shape: tuple[int, ...]  # of the whole
    make: Make  # returns it, sharded by rows as its parameter is; valid until the next step


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a run, from its options; see `load_sharded` for when each method is called."""

    config: LoraConfig
    seed: int
    folder: Path | None  # that it goes on from

    @classmethod
    def of(cls, options: AdapterOptions, *, model: str, seed: int) -> Adapter:
        """Raises `UnfitModel` for a folder that holds no adapter that can go on."""
        if options.adapter_path:
            folder = Path(options.adapter_path)
            return cls(read_adapter_config(folder), seed, folder)
        stated = dict(options.stated, base_model_name_or_path=model, task_type="CAUSAL_LM")
        return cls(LoraConfig(**stated), seed, None)

    def inject(self, policy: PolicyModel) -> None:
        """Put the adapter into an outlined policy, which is frozen otherwise.

        Raises `UnfitModel` for targets that the model does not have, or that cannot be merged.
        """
        config = LoraConfig(**self.config.to_dict())  # peft writes into what it is given
        try:
            inject_adapter_in_model(config, policy.model, adapter_name=NAME, low_cpu_mem_usage=True)
        except (ValueError, TypeError, re.error) as error:
            raise UnfitModel(
                f"an adapter must have layers of the model to change, {self.config.target_modules} "
                f"names none that it can: give other --lora-targets ({error})"
            ) from error
        policy.adapter = config
        ties = policy.model.all_tied_weights_keys
        tied = {name.rpartition(".")[0] for name in (*ties, *ties.values())}
        for path, module in policy.model.named_modules():
            is_saved = isinstance(module, ModulesToSaveWrapper)
            fits = isinstance(module, Linear) or (is_saved and path not in tied)
            if (is_saved or isinstance(module, LoraLayer)) and not fits:
                raise UnfitModel(
                    "an adapter must be of linear layers, or of modules that share no weights with "
                    f"others, got {path} ({type(module).__name__}): leave it out"
                )
        if self.folder is None:
            self._draw(policy)

    def _draw(self, policy: PolicyModel) -> None:
        """Give both factors the values that peft draws, on the host and whole on each rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for _, layer in _layers(policy):
                for factor in (layer.lora_A, layer.lora_B):
                    factor.to_empty(device="cpu")
                layer.reset_lora_parameters(NAME, self.config.init_lora_weights)

    @torch.no_grad()
    def fill(self, policy: PolicyModel) -> None:
        """Set what depends on the model's own weights, or is in a folder; `policy` has its shards.

        Raises `UnfitModel` for an adapter of another model.
        """
        trained = {in_file(name): each for name, each in trained_parameters(policy)}
        if self.folder is not None:
            self.check_file(policy)
            file = self.folder / SAFETENSORS_WEIGHTS_NAME
            for name, parameter in trained.items():
                read_into(local_part(parameter), parameter, (file, name))
            return
        own = dict(hf_named_parameters(policy))
        for name, parameter in trained_parameters(policy):
            if SAVED in name:
                local_part(parameter).copy_(local_part(own[name.replace(SAVED, ".")]))
        for path, layer in _layers(policy):
            if layer.use_dora[NAME]:  # B is 0
                norms = local_part(own[f"{path}.weight"]).float().norm(dim=1)
                local_part(layer.lora_magnitude_vector[NAME].weight).copy_(norms)

    def check_file(self, policy: PolicyModel) -> None:
        """Raise `UnfitModel` unless a folder's tensors are those of the adapter in `policy`."""
        if self.folder is None:
            return
        wanted = {in_file(name): [*each.shape] for name, each in trained_parameters(policy)}
        file = self.folder / SAFETENSORS_WEIGHTS_NAME
        with safe_open(file, framework="pt") as content:
            names = {*content.keys()}
            found = {name: content.get_slice(name).get_shape() for name in names}
        if odd := sorted(n for n in names | wanted.keys() if found.get(n) != wanted.get(n)):
            raise UnfitModel(
                f"{file} must hold the tensors of its {CONFIG_NAME} for this model and no "
                f"others, {len(odd)} differ, first {odd[0]}: give the model of that adapter"
            )


def read_adapter_config(folder: Path) -> LoraConfig:
    """The configuration of an adapter in peft's format, without dropout.

    Raises `UnfitModel` for a folder without one, or for kinds of adapters that are not LoRA or DoRA
    on a model that stays as it is.
    """
    try:
        stated = json.loads((folder / CONFIG_NAME).read_text())
        config = LoraConfig(**stated)
    except (OSError, ValueError, TypeError) as error:
        raise UnfitModel(
            f"an adapter's folder must hold peft's {CONFIG_NAME} and {SAFETENSORS_WEIGHTS_NAME}, "
            f"{folder} does not: {error}"
        ) from error
    usual, found = vars(LoraConfig(peft_type="LORA")), vars(config)
    odd = sorted(n for n in found.keys() & stated.keys() - KNOWN if found[n] != usual[n])
    if (kind := str(stated.get("peft_type", "LORA"))) != "LORA":  # which LoraConfig overlooks
        odd, found = ["peft_type"], {"peft_type": kind}
    if str(config.init_lora_weights).lower().startswith(ALTERS_BASE):
        odd = ["init_lora_weights"]
    if odd:
        raise UnfitModel(
            "an adapter to go on with must be LoRA or DoRA beside a model that stays as it is, "
            f"{folder / CONFIG_NAME} has {odd[0]} {found[odd[0]]!r}: train another"
        )
    if not (folder / SAFETENSORS_WEIGHTS_NAME).is_file():
        raise UnfitModel(f"{folder} must hold {SAFETENSORS_WEIGHTS_NAME}: save it with peft")
    if config.lora_dropout:  # a trained token's ratio would not be 1 on policy
        logger.info("lora_dropout=%s of %s is switched off", config.lora_dropout, folder)
        config.lora_dropout = 0.0
    config.inference_mode = False  # which peft saves, and nothing would train
    return config


def base_dtype(path: str, compute: torch.dtype) -> torch.dtype:
    """The type of a frozen model: bf16 where it is computed in, and loses nothing; else float32."""
    stated = stated_config(Path(path))
    is_half = "bfloat16" in (stated.get("dtype"), stated.get("torch_dtype"))
    return compute if is_half and compute == torch.bfloat16 else torch.float32


@torch.no_grad()
def check_adapter(path: str, adapter: Adapter) -> None:
    """Raise `UnfitModel` unless a model with the adapter computes what a merged one does.

    A small random model of the config's architecture is asked: some read a layer's weight without
    calling the layer, where an adapter would train without effect.
    """
    config = read_config(Path(path))
    policy = PolicyModel(outline(config, attention=EAGER, dtype=torch.float32))
    adapter.inject(policy)
    adapter.check_file(policy)
    targets = sorted({name.rpartition(".")[2] for name, _ in _layers(policy)})
    tried = LoraConfig(r=4, target_modules=targets, use_dora=adapter.config.use_dora)
    pairs, probe = probe_pairs(VOCAB_SIZE), Adapter(tried, adapter.seed, None)
    try:
        small = PolicyModel(small_model(config))
        probe.inject(small)
        materialise(small, CPU, parameters_on=CPU)
        probe.fill(small)
        for _, layer in _layers(small):
            layer.lora_B[NAME].weight.normal_()
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
            "a model with an adapter must compute what one with merged weights does, with adapters "
            f"of {', '.join(targets)} in {path} ({config.model_type}) {found}: give --lora-targets "
            "without the layer that it computes otherwise"
        )


def in_file(name: str) -> str:
    """The name that peft's file has of a trained parameter.

    >>> in_file("model.layers.0.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.q_proj.lora_A.weight'
    >>> in_file("model.norm.modules_to_save.default.weight")
    'base_model.model.model.norm.weight'
    >>> in_file("q_proj.lora_magnitude_vector.default.weight")
    'base_model.model.q_proj.lora_magnitude_vector'
    """
    name = name.replace(f"magnitude_vector.{NAME}.weight", "magnitude_vector")
    return IN_FILE + name.replace(SAVED, ".").replace(f".{NAME}.", ".")


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
    for path, layer in _layers(policy):
        whole = _Factors.of(layer)
        weight = layer.base_layer.weight
        found[f"{path}.weight"] = Served(tuple(weight.shape), partial(whole.merged, weight, cut))
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
    """What a layer's adapter adds to its weight, whole on every rank."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r], scaled
    magnitude: Tensor | None  # [out], of DoRA
    is_transposed: bool  # the weight is [in, out]

    @classmethod
    def of(cls, layer: Linear) -> _Factors:
        """Collective."""
        a, b = (_whole(each[NAME].weight).double() for each in (layer.lora_A, layer.lora_B))
        vector = layer.lora_magnitude_vector
        magnitude = _whole(vector[NAME].weight).double() if NAME in vector else None
        return cls(a, b * layer.scaling[NAME], magnitude, layer.fan_in_fan_out)

    @torch.no_grad()
    def merged(self, weight: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
        """The weight with the adapter: a float32 sum of a product in float64.

        So it is the same, but for one number in 1e8, however the rows are cut.
        """
        part = cut(weight.detach())
        held, rows = local_part(part), slices_of(part)[0]
        left, right = (self.a.T, self.b.T) if self.is_transposed else (self.b, self.a)
        change = left[rows].to(held.device) @ right.to(held.device)
        wide = torch.promote_types(held.dtype, torch.float32)
        found = held.to(wide) + change.to(wide)
        if self.magnitude is not None:
            norms = found.double().norm(dim=1, keepdim=True)
            found = (found * (self.magnitude[rows, None].to(held.device) / norms)).to(wide)
        return _like(found, part)


def _layers(policy: PolicyModel) -> Iterator[tuple[str, Linear]]:
    return (pair for pair in policy.model.named_modules() if isinstance(pair[1], Linear))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _detached(parameter: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    return cut(parameter.detach())


def _whole(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(local: Tensor, part: Tensor) -> Tensor:
    """`local` as this rank's shard of a tensor that is sharded as `part` is."""
    if not isinstance(part, DTensor):
        return local
    return DTensor.from_local(
        local, part.device_mesh, part.placements, run_check=False, shape=part.shape,
        stride=part.stride(),
    )  # fmt: skip
