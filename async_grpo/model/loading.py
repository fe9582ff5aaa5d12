"""Loading the policy out of a Hugging Face folder, whole or sharded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from async_grpo.model.attention import PACKED
from async_grpo.model.folder import check_files, read_config
from async_grpo.model.policy import PolicyModel
from async_grpo.model.probe import CPU, check_packing
from async_grpo.model.slices import files_of, fill, materialise, misfit, outline
from async_grpo.util.errors import ModelError

logger = logging.getLogger(__name__)


def load_policy(
    path: str, *, attention: str, dtype: torch.dtype, device: torch.device = CPU
) -> PolicyModel:
    """The whole policy in `path`, dropout off; `attention` is `choose_attention`'s answer.

    Raises ModelError when weights are missing or the model cannot be packed exactly.
    """
    check_trainable(path, attention=attention, device=device, dtype=dtype)
    policy = _load_whole(path, _read_config(path), dtype, device)
    policy.model.set_attn_implementation(attention)
    return policy


def check_trainable(path: str, *, attention: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError for a folder without a model, or with one that cannot be packed exactly.

    `device` and `dtype`: where and in what it will compute. A trainer's rank 0 asks once for all
    ranks: the answer depends on the config alone.
    """
    check_files(Path(path))
    check_packing(_read_config(path), path, attention=attention, device=device, dtype=dtype)


def load_sharded(
    path: str,
    *,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    shard: Callable[[PolicyModel], object],
    parameters_on: torch.device | None = None,
) -> PolicyModel:
    """The policy in `path`, dropout off, of which this process holds what `shard` leaves it.

    `shard` works in place on a policy that has no memory yet; `parameters_on`: where its shards
    lie, if not on `device`. Raises ModelError when weights are missing.
    """
    config = _read_config(path)
    policy = PolicyModel(outline(config, attention=PACKED, dtype=dtype))
    files = files_of(Path(path))
    if reason := misfit(policy, files):
        num_bytes = sum(p.numel() for p in policy.parameters()) * dtype.itemsize
        logger.warning(
            "the files of %s cannot be read in slices (%s): each rank reads the whole model, "
            "%.1f GiB of this host's memory; save_pretrained writes a folder that can",
            path, reason, num_bytes / 2**30,
        )  # fmt: skip
        policy = _load_whole(path, config, dtype, CPU)
        shard(policy)
    else:
        shard(policy)
        materialise(policy, device, parameters_on=parameters_on or device)
        fill(policy, files)
    policy.model.set_attn_implementation(attention)
    return policy


def _load_whole(
    path: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PolicyModel:
    """As transformers loads it, which also knows names of older times and other formats."""
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=PACKED,
        device_map=None if device == CPU else {"": device},  # read to it, not by way of the host
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        raise ModelError(
            f"the weights in {path} must hold every parameter of its config, {len(missing)} are "
            f"missing or of another shape, first {missing[0]}: complete the folder"
        )
    return PolicyModel(model)


def _read_config(path: str) -> PreTrainedConfig:
    config = read_config(Path(path))
    _switch_off_dropout(config)
    return config


def _switch_off_dropout(config: PreTrainedConfig) -> None:
    """Dropout would make the trainer's log-probabilities differ from the engine's."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float) and value > 0:
            logger.info("%s=%s of the model's config is switched off", name, value)
            setattr(config, name, 0.0)
