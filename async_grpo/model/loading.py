"""Loading the policy out of a Hugging Face folder, after asking whether it can be trained."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from async_grpo.errors import ModelError
from async_grpo.model.attention import PACKED
from async_grpo.model.folder import check_files, read_config
from async_grpo.model.policy import PolicyModel
from async_grpo.model.probe import check_packing

logger = logging.getLogger(__name__)


def load_policy(path: str, *, attention: str, dtype: torch.dtype) -> PolicyModel:
    """The policy in `path` on the CPU, dropout off; `attention` is `choose_attention`'s answer.

    Raises ModelError when weights are missing or the model cannot be packed exactly.
    """
    folder = Path(path)
    check_files(folder)
    config = read_config(folder)
    _switch_off_dropout(config)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=PACKED,
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        raise ModelError(
            f"the weights in {path} must hold every parameter of its config, {len(missing)} are "
            f"missing or of another shape, first {missing[0]}: complete the folder"
        )
    policy = PolicyModel(model)
    check_packing(policy, path)
    model.set_attn_implementation(attention)
    return policy


def _switch_off_dropout(config: PreTrainedConfig) -> None:
    """Dropout would make the trainer's log-probabilities differ from the engine's."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float) and value > 0:
            logger.info("%s=%s of the model's config is switched off", name, value)
            setattr(config, name, 0.0)
