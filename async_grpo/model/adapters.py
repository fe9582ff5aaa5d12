"""Low-rank adapters: peft puts them into the policy; here they get their values and are checked.

A layer computes x W' + s x A' B' with a frozen W [out, in], and A [r, in] and B [out, r] that train
(LoRA, arXiv 2106.09685). Engines and exports get W + s B A, or A and B as peft saves them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from async_grpo.config.training_options import ALTERS_BASE, AdapterOptions
from async_grpo.model.foreign_folders import ADAPTER_CONFIG, hub_name, stated_config
from async_grpo.model.model_folder import read_config
from async_grpo.model.packed_linear import PackedLinear, packed_layers
from async_grpo.model.policy import (
    PolicyModel,
    as_stored,
    hf_named_parameters,
    trained_parameters,
)
from async_grpo.model.weight_files import (
    Place,
    as_shard_of,
    local_part,
    outline,
    read_into,
    read_whole,
    slices_of,
)
from async_grpo.util.errors import UnfitModel

if TYPE_CHECKING:  # its import takes 1.2 s, in every rank of runs without adapters too
    from peft import LoraConfig
    from peft.tuners.lora import Linear, ParamWrapper

logger = logging.getLogger(__name__)
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # of peft's format
NAME = "default"  # peft's, of a model's only adapter
IN_FILE = "base_model.model."  # begins the names of tensors in an adapter's file
SAVED = f".modules_to_save.{NAME}."
# What may differ from peft's own defaults in the adapter_config.json of an adapter to go on with.
KNOWN = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "use_dora",
    "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
    "fan_in_fan_out", "lora_dropout", "init_lora_weights", "base_model_name_or_path", "revision",
    "task_type", "inference_mode", "auto_mapping", "peft_version", "peft_type",
    "target_parameters",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a run, from its options; see `load_sharded` for when each method is called."""

    config: LoraConfig
    seed: int
    folder: Path | None  # that it goes on from
    packs: str = "none"  # how the frozen weights of its layers are packed

    @classmethod
    def of(cls, options: AdapterOptions, *, model: str, seed: int) -> Adapter:
        """Raises `UnfitModel` for a folder that holds no adapter that can go on."""
        from peft import LoraConfig

        if options.adapter_path:
            folder = Path(options.adapter_path)
            return cls(read_adapter_config(folder), seed, folder, options.base_quantization)
        stated = dict(options.stated, base_model_name_or_path=model, task_type="CAUSAL_LM")
        return cls(LoraConfig(**stated), seed, None, options.base_quantization)

    def outlined(self, path: str) -> PolicyModel:
        """The policy in `path` with this adapter, without memory; raises as `inject` does."""
        config = read_config(Path(path))
        policy = PolicyModel(outline(config, attention="eager", dtype=torch.float32))
        self.inject(policy)
        return policy

    def inject(self, policy: PolicyModel) -> None:
        """Put the adapter into an outlined policy, which is frozen otherwise.

        Raises `UnfitModel` for targets that the model does not have, or that cannot be merged.
        """
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
        from peft.utils import ModulesToSaveWrapper

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
            fits = isinstance(module, Linear | ParamWrapper) or (is_saved and path not in tied)
            # The trainer multiplies by the weight of the head without calling it.
            fits = fits and (is_saved or module is not policy.model.get_output_embeddings())
            if (is_saved or isinstance(module, LoraLayer)) and not fits:
                raise UnfitModel(
                    "an adapter must be of linear layers but for the head, of experts, or of "
                    f"modules that share no weights with others, got {path} "
                    f"({type(module).__name__}): leave it out"
                )
        if self.packs != "none":
            self._pack(policy)
        if self.folder is None:
            self._draw(policy)
        else:
            self._check_file(self.folder / ADAPTER_WEIGHTS, policy)

    def _pack(self, policy: PolicyModel) -> None:
        """Put packed layers, without values, in the place of the frozen linear ones."""
        from peft.tuners.lora import Linear

        of_linear = [each for _, each in adapted_layers(policy) if isinstance(each, Linear)]
        for layer in of_linear:
            if not isinstance(layer.base_layer, nn.Linear) or layer.use_dora[NAME]:
                raise UnfitModel(
                    "--base-quantization is of linear layers with LoRA, got "
                    f"{type(layer.base_layer).__name__}"
                    f"{' with DoRA' if layer.use_dora[NAME] else ''}: leave it out"
                )
            layer.base_layer = PackedLinear(layer.base_layer, self.packs)

    def _check_file(self, file: Path, policy: PolicyModel) -> None:
        """Raise `UnfitModel` for an adapter of another model, before any weights are read."""
        with safe_open(file, framework="pt") as content:
            found = {n: tuple(content.get_slice(n).get_shape()) for n in content.keys()}  # noqa: SIM118
        trained = {in_file(name): tuple(each.shape) for name, each in trained_parameters(policy)}
        if odd := sorted({name for name, _ in found.items() ^ trained.items()}):
            raise UnfitModel(
                f"{file} must hold the tensors of its {ADAPTER_CONFIG} for this model and no "
                f"others, {len(odd)} differ, first {odd[0]}: give the model of that adapter"
            )

    def _draw(self, policy: PolicyModel) -> None:
        """Give both factors the values that peft draws, on the host and whole on each rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for _, layer in adapted_layers(policy):
                for factor in (layer.lora_A, layer.lora_B):
                    factor.to_empty(device="cpu")
                layer.reset_lora_parameters(NAME, self.config.init_lora_weights)

    @torch.no_grad()
    def fill(self, policy: PolicyModel, places: Mapping[str, Place]) -> None:
        """Set what depends on the model's own weights, or is in a file; `policy` has its shards.

        `places`: of the model's tensors, for weights that are packed, of which each rank reads all.
        """
        for path, packed in packed_layers(policy.model):
            name = f"{path.replace('.base_layer', '')}.weight"
            [stored] = as_stored(policy.model, name, packed.outline)
            packed.fill(read_whole(places[stored], packed.outline).to(packed.codes.device), name)
        if self.folder is not None:
            file = self.folder / ADAPTER_WEIGHTS
            for name, parameter in trained_parameters(policy):
                read_into(local_part(parameter), parameter, (file, in_file(name)))
            return
        own = dict(hf_named_parameters(policy))
        for name, parameter in trained_parameters(policy):
            if SAVED in name:
                local_part(parameter).copy_(local_part(own[name.replace(SAVED, ".")]))
        for _, layer in adapted_layers(policy):
            if layer.use_dora[NAME]:  # B is 0
                norms = local_part(base_weight(layer)).float().norm(dim=1)
                local_part(layer.lora_magnitude_vector[NAME].weight).copy_(norms)


def read_adapter_config(folder: Path) -> LoraConfig:
    """The configuration of an adapter in peft's format, without dropout.

    Raises `UnfitModel` for a folder without one, or for kinds of adapters that are not LoRA or DoRA
    on a model that stays as it is.
    """
    from peft import LoraConfig

    try:
        stated = json.loads((folder / ADAPTER_CONFIG).read_text())
        config = LoraConfig(**stated)
    except (OSError, ValueError, TypeError) as error:
        raise UnfitModel(
            f"an adapter's folder must hold peft's {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, "
            f"{folder} does not: {error}"
        ) from error
    usual, found = vars(LoraConfig()), dict(vars(config))
    odd = sorted(n for n in found.keys() & stated.keys() - KNOWN if found[n] != usual[n])
    found["peft_type"] = stated.get("peft_type", "LORA")
    if found["peft_type"] != "LORA":
        odd = ["peft_type"]
    if str(config.init_lora_weights).lower().startswith(ALTERS_BASE):
        odd = ["init_lora_weights"]
    if odd:
        raise UnfitModel(
            "an adapter to go on with must be LoRA or DoRA beside a model that stays as it is, "
            f"{folder / ADAPTER_CONFIG} has {odd[0]} {found[odd[0]]!r}: train another"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UnfitModel(f"{folder} must hold {ADAPTER_WEIGHTS}: save it with peft")
    if config.lora_dropout:  # a trained token's ratio would not be 1 on policy
        logger.info("lora_dropout=%s of %s is switched off", config.lora_dropout, folder)
        config.lora_dropout = 0.0
    config.inference_mode = False  # as peft saves it: it would freeze the adapter too
    return config


def base_dtype(path: str, compute: torch.dtype) -> torch.dtype:
    """The type of a frozen model: bf16 where it is computed in, and loses nothing; else float32."""
    stated = stated_config(Path(path))
    is_half = "bfloat16" in (stated.get("dtype"), stated.get("torch_dtype"))
    return compute if is_half and compute == torch.bfloat16 else torch.float32


def adapter_text(policy: PolicyModel, *, model: Path | None = None) -> str:
    """The adapter_config.json of a policy's adapter, as stock peft and vLLM read it.

    `model`: the folder that it is named to belong to, a snapshot of a hub by its name there.
    """
    assert policy.adapter is not None
    found = policy.adapter.to_dict() | {"inference_mode": True}
    if model:
        name = hub_name(model)
        found["base_model_name_or_path"] = name or str(model.absolute())
        found["revision"] = model.name if name else None
    kept = {name: found[name] for name in sorted(KNOWN & found.keys())}
    ordered = (sorted(v) if isinstance(v, set) else v for v in kept.values())
    return json.dumps(dict(zip(kept, ordered, strict=True)), indent=2)


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


def adapted_layers(policy: PolicyModel) -> Iterator[tuple[str, Linear | ParamWrapper]]:
    """(name of a parameter that an adapter changes, its layer)."""
    if policy.adapter is None:
        return
    from peft.tuners.lora import Linear, ParamWrapper

    for path, layer in policy.model.named_modules():
        own = path.replace(".base_layer", "")
        if isinstance(layer, Linear):
            yield f"{own}.weight", layer
        elif isinstance(layer, ParamWrapper):  # of experts, or of a router
            yield f"{own}.{layer.parameter_name}", layer


def base_weight(layer: Linear | ParamWrapper) -> Tensor:
    """The parameter that an adapter changes, or of packed weights a tensor like it, made anew."""
    from peft.tuners.lora import ParamWrapper

    if isinstance(layer, ParamWrapper):
        return layer.get_param()
    weight = layer.base_layer.weight
    if not isinstance(layer.base_layer, PackedLinear):
        return weight
    b = layer.lora_B[NAME].weight  # [out, r], of which a rank has the same rows
    return as_shard_of(weight[slices_of(b)[0]], b, shape=weight.shape)
