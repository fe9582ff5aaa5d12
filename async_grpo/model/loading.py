"""Loads the policy from a Hugging Face folder, whole or sharded, if it can be packed exactly.

How an architecture is packed is found by a test of a small random model of the same config, before
weights are read. Layers that carry a state along a row are told where its sequences begin; where
that changes nothing, such a layer is given each sequence apart. What is still wrong is refused:
windows that are known to masks alone, heads that do more than multiply, kernels that ignore an
argument.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import init_empty_weights
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from async_grpo.model.attention import HALF_TYPES, PACKED, drop_flash, flash_in_use
from async_grpo.model.collate import collate_pairs, to_device
from async_grpo.model.foreign_folders import config_file
from async_grpo.model.model_folder import check_files, read_config
from async_grpo.model.policy import PolicyModel
from async_grpo.model.text_towers import OTHER_TOKENS, is_tower, text_model, text_name
from async_grpo.model.weight_files import fill, materialise, misfit, outline, places_of
from async_grpo.util.errors import UnfitModel

if TYPE_CHECKING:
    from async_grpo.model.adapters import Adapter

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
LENGTHS = (4, 3, 2)  # a prompt, and outputs of two of its samples
VOCAB_SIZE = 64
SMALL = {
    "intermediate_size": 64, "vocab_size_per_layer_input": 64, "sliding_window": 3,
    "attention_chunk_size": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Ends of names of lists that hold numbers of layers.
INDICES = ("_indices", "_idxs", "layer_ids", "only_layers", "moe_layers")
TOLERANCE = 1e-3  # nats in float32, where wrong attention differs by tenths
HALF_TOLERANCE = 0.02  # nats in bf16 and fp16, if that is more than
TIMES_EAGER = 4  # times the error of plain attention in that type
SEED = 0
EAGER = "eager"  # transformers' plain attention
FOREIGN = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
Pair = tuple[NDArray[np.int32], NDArray[np.int32]]


def load_policy(
    path: str, *, attention: str, dtype: torch.dtype, device: torch.device = CPU
) -> PolicyModel:
    """The whole policy in `path`, dropout off; `attention` is the result of `choose_attention`.

    Raises UnfitModel when weights are missing or the model cannot be packed exactly.
    """
    alone = check_trainable(path, attention=attention, device=device, dtype=dtype)
    return load_sharded(
        path, attention=attention, dtype=dtype, device=device, shard=None, sequences_alone=alone
    )


def check_trainable(path: str, *, attention: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Raise UnfitModel for a folder without a model, or with one that cannot be packed exactly.

    Returns whether its layers that carry a state must see sequences alone. `device` and `dtype`:
    where and in what type it will compute. Called on rank 0 for all ranks, since the result depends
    on the config alone.
    """
    check_files(Path(path))
    if is_tower(config_file(Path(path))):
        _check_tower(path)
    return check_packing(_read_config(path), path, attention=attention, device=device, dtype=dtype)


def load_sharded(
    path: str,
    *,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    shard: Callable[[PolicyModel], object] | None,
    parameters_on: torch.device | None = None,
    sequences_alone: bool = False,
    adapter: Adapter | None = None,
    fuse: Callable[[PolicyModel], None] | None = None,
) -> PolicyModel:
    """The policy in `path`, dropout off; `shard` decides which part of it this process holds.

    `shard` works in place on a policy of meta parameters; None: it holds all. `parameters_on`: the
    device of its shards, if not `device`. `sequences_alone`: as `check_trainable` has found.
    `adapter` trains, and `dtype` is that of the frozen model. `fuse` gives it other kernels.
    Raises UnfitModel when weights are missing.
    """
    config = _read_config(path)
    policy = PolicyModel(outline(config, attention=PACKED, dtype=dtype))
    places = places_of(Path(path))
    if (reason := misfit(policy, places)) and (adapter or is_tower(config_file(Path(path)))):
        raise UnfitModel(
            "a model with an adapter, or a text model among others, must be in safetensors by the "
            f"names of save_pretrained, in {path} {reason}: write the folder with save_pretrained"
        )
    if reason and shard:
        num_bytes = sum(p.numel() for p in policy.parameters()) * dtype.itemsize
        logger.warning(
            "the files of %s cannot be read in slices (%s): each rank reads the whole model, "
            "%.1f GiB of this host's memory; save_pretrained writes a folder that can",
            path, reason, num_bytes / 2**30,
        )  # fmt: skip
    if reason:
        policy = _load_whole(path, config, dtype, CPU if shard else device)
    if fuse:
        fuse(policy)
    if adapter:
        adapter.inject(policy)
    if shard:
        shard(policy)
    if not reason:
        materialise(policy, device, parameters_on=parameters_on or device)
        if not shard:
            policy.model.tie_weights()
        fill(policy, places)
    if adapter:
        adapter.fill(policy, places)
    policy.model.set_attn_implementation(attention)
    if sequences_alone:
        policy.see_sequences_alone()
    return policy


def _load_whole(
    path: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PolicyModel:
    """The policy loaded by transformers, which also knows old names and other formats."""
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=PACKED,
        device_map=None if device == CPU else {"": device},  # read there, not through the host
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        raise UnfitModel(
            f"the weights in {path} must hold every parameter of its config, {len(missing)} are "
            f"missing or of another shape, first {missing[0]}: complete the folder"
        )
    return PolicyModel(model)


def _read_config(path: str) -> PreTrainedConfig:
    """The config without dropout, noise and a bound, which would make trainer and engine differ."""
    config = read_config(Path(path))
    if config.model_type == "nemotron_h":
        # Of its time steps transformers makes this initial range a lower bound, which vLLM and the
        # config's own time_step_limit have not. Its logarithm is taken.
        config.time_step_min = 1e-30
    for name, value in vars(config).items():
        is_random = "drop" in name or "jitter" in name
        if is_random and isinstance(value, float) and value > 0:
            logger.info("%s=%s of the model's config is switched off", name, value)
            setattr(config, name, 0.0)
    return config


@torch.no_grad()
def _check_tower(path: str) -> None:
    """Raise UnfitModel unless the whole model scores a text as its text model does.

    Some leave out a factor of the text model's logits. Parts for images and sound get no memory.
    """
    whole = AutoConfig.from_pretrained(path, local_files_only=True)
    text = small_model(text_model(whole))
    whole.text_config = text.config
    whole.text_config.pad_token_id = 0  # some look it up
    for name in filter(OTHER_TOKENS.fullmatch, list(vars(whole))):
        setattr(whole, name, -1)  # no token of the pairs
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForImageTextToText.from_config(whole, attn_implementation=EAGER)
        own = text.state_dict()
        named = {name: own[text_name(name)] for name in model.state_dict() if text_name(name)}
        model.load_state_dict(named, assign=True, strict=False)
        for part in model.modules():
            for name in [n for n, p in part.named_parameters(recurse=False) if p.is_meta]:
                delattr(part, name)  # or the model would be on that device
        pairs = probe_pairs(VOCAB_SIZE)
        off_by = (scores_alone(model.eval(), pairs) - scores_alone(text, pairs)).abs().max().item()
        found = "" if off_by <= TOLERANCE else f"is off by {off_by:.2g} nats"
    except (*FOREIGN, ImportError) as error:
        found = f"raises {error!r}"
    if found:
        raise UnfitModel(
            f"a model of several inputs must score a text as its text model alone does, that in "
            f"{path} ({whole.model_type}) {found}: use a text model of its family"
        )


@torch.no_grad()
def check_packing(
    config: PreTrainedConfig,
    path: str,
    *,
    attention: str = PACKED,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Raise UnfitModel unless a packed row scores as separate sequences do.

    The row is scored by `attention` on `device` in `dtype`, the sequences by transformers' plain
    attention, both by a small random model of the config's architecture. Returns whether it does so
    only if the layers that carry a state see one sequence at a time.
    """
    found = _fault(config, attention, device, dtype, alone=False)
    if found and (name := flash_in_use()):
        drop_flash()
        logger.warning(
            "a packed row of %s (%s) %s with attention by %s: torch's own kernel is used",
            path, config.model_type, found, name,
        )  # fmt: skip
        found = _fault(config, attention, device, dtype, alone=False)
    if found and not _fault(config, attention, device, dtype, alone=True):
        logger.info(
            "layers of %s (%s) carry a state: they are given each sequence apart", path,
            config.model_type,
        )  # fmt: skip
        return True
    if found:
        raise UnfitModel(
            f"a packed row must score as separate sequences do, but {attention} attention in "
            f"{path} ({config.model_type}) {found}: this cannot be trained, use "
            f"{'another model' if attention == PACKED else '--attention auto'}"
        )
    return False


def _fault(
    config: PreTrainedConfig,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    alone: bool,
) -> str:
    """What is wrong with a packed row, in words; empty if nothing is."""
    try:
        off_by, tolerance = _difference(config, attention, device, dtype, alone=alone)
        return "" if off_by <= tolerance else f"is off by {off_by:.2g} nats"
    except FOREIGN as error:  # of the code of any model
        return f"raises {error!r}"


def _difference(
    config: PreTrainedConfig,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    alone: bool,
) -> tuple[float, float]:
    """(difference of a packed row from separate sequences, its tolerance), in nats."""
    model = small_model(config).to(device)
    pairs = probe_pairs(VOCAB_SIZE)
    expected = scores_alone(model, pairs)
    tolerance = TOLERANCE
    if dtype in HALF_TYPES:
        model.to(dtype)
        off_by = (scores_alone(model, pairs) - expected).abs().max().item()
        tolerance = max(HALF_TOLERANCE, TIMES_EAGER * off_by)
    # Built as the loader builds it: some families know no attention but their own.
    packing = small_model(config, attention=PACKED).to(device, dtype)
    packing.set_attn_implementation(attention)
    policy = PolicyModel(packing)
    if alone and not policy.see_sequences_alone():
        return math.inf, tolerance
    row = to_device(collate_pairs(pairs, share_prompts=policy.shares_prompts), device)
    packed = policy(row, temperature=1.0, chunk_size=3).logprobs
    return (packed - expected).abs().max().item(), tolerance


def small_model(config: PreTrainedConfig, *, attention: str = EAGER) -> PreTrainedModel:
    """A random model of the config's architecture with a layer of each kind, in float32.

    It has small sizes, and windows shorter than a sequence. The state of torch's
    global random numbers is restored.
    """
    small = copy.deepcopy(config)
    kept = _layers_of_each_kind(config)
    for name, value in vars(config).items():
        if name in _lists_by_layer(config):
            setattr(small, name, [value[layer] for layer in kept])
        elif name.endswith(INDICES) and isinstance(value, list):
            setattr(small, name, [kept.index(layer) for layer in value if layer in kept])
        elif name in SMALL and isinstance(value, int):
            setattr(small, name, min(value, SMALL[name]))
    small.num_hidden_layers = len(kept)
    if shared := _sharing_layers(config):
        small.num_kv_shared_layers = sum(shared[layer] for layer in kept)
    if own := getattr(config, "_heterogeneity_spec", None):  # layers with sizes of their own
        overrides = own.per_layer_overrides
        small.per_layer_config = {
            kept.index(layer): overrides[layer] for layer in overrides if layer in kept
        }
    small.vocab_size = VOCAB_SIZE
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    least = 2 * max(chosen, getattr(config, "n_group", None) or 1)  # a choice, also of groups
    for name in EXPERTS:
        if isinstance(count := getattr(config, name, None), int):
            setattr(small, name, min(count, least))
    small.pad_token_id = None  # would be a row of the embedding
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation=attention
        )
        model.requires_grad_(False)
        for parameter in model.parameters():  # none stays zero, so that each has an effect
            spread = max(1, parameter.shape[-1]) ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return model.eval()


def _layers_of_each_kind(config: PreTrainedConfig) -> list[int]:
    """The first layer of each kind that the config's lists by layer tell apart, at least two."""
    lists = _lists_by_layer(config)
    if isinstance(types := getattr(config, "layer_types", None), list):  # it may be a property
        lists["layer_types"] = types
    if shared := _sharing_layers(config):
        lists["shared"] = shared
    kinds = list(zip(*lists.values(), strict=True)) if lists else []
    first = {repr(kind): layer for layer, kind in reversed(list(enumerate(kinds)))}
    return sorted({*range(min(2, config.num_hidden_layers)), *first.values()})


def _sharing_layers(config: PreTrainedConfig) -> list[bool]:
    """Whether each layer attends to the keys of an earlier one; empty if none does."""
    count, sharing = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", 0) or 0
    return [layer >= count - sharing for layer in range(count)] if sharing else []


def _lists_by_layer(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """The config's lists with an entry a layer, unless their entries are numbers of layers."""
    count = config.num_hidden_layers
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == count and not name.endswith(INDICES)
    }


def probe_pairs(vocab_size: int) -> list[Pair]:
    """Three fixed (prompt, output) pairs, of different ids if the vocabulary is large enough.

    The third one would show a leak from the sequences before it, the second one a wrong prompt.
    """
    ids = (np.arange(1, sum(LENGTHS) + 1) * 7919 % vocab_size).astype(np.int32)
    prompt, first, second = np.split(ids, np.cumsum(LENGTHS[:-1]))
    return [(prompt, first), (prompt, second), (second, prompt)]


def scores_alone(model: torch.nn.Module, pairs: list[Pair]) -> Tensor:
    """Log-probabilities of all outputs by the model's own forward, one pair at a time."""
    scores = []
    for prompt, output in pairs:
        ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
        ids = ids.to(next(model.parameters()).device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])
        scores.append(chosen.squeeze(-1))
    return torch.cat(scores)
