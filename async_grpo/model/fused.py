"""Other kernels for the same numbers: Liger's, or those that torch compiles; probed before use.

Liger's, for norms, rotary embedding and activation, take the place of methods of one model, and of
names that transformers' module of its family has for the whole process. The loss stays ours.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import is_liger_kernel_available

from async_grpo.model.attention import HALF_TYPES, PACKED
from async_grpo.model.collate import collate_pairs, to_device
from async_grpo.model.loading import (
    FOREIGN,
    HALF_TOLERANCE,
    TIMES_EAGER,
    TOLERANCE,
    VOCAB_SIZE,
    probe_pairs,
    small_model,
)
from async_grpo.model.policy import PolicyModel

logger = logging.getLogger(__name__)
CHANGED = {"forward", "_compiled_call_impl"}  # of a module with other kernels than its class's
OURS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def fuse(policy: PolicyModel) -> None:
    """Have a policy, which may be of meta tensors, compute by Liger's kernels."""
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(policy.model, OURS)


def compile_parts(policy: PolicyModel) -> None:
    """Have a policy, which is not sharded yet, compile its layers and what it makes of logits."""
    policy.compile_logprobs = True
    for layer in policy.layers:
        layer.compile(dynamic=True)  # packed rows differ in length


def fuses(config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model of this config may compute by Liger's kernels; else the log says why not."""
    if not is_liger_kernel_available():
        reason = "are not installed (requirements/gpu-kernels.txt)"
    else:
        reason = fault(config, device=device, dtype=dtype, give=fuse)
    return _passes("--use-liger-kernel: Liger's kernels", reason)


def compiles(config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a policy of this config may be compiled; else the log says why not."""
    reason = fault(config, device=device, dtype=dtype, give=compile_parts)
    torch.compiler.reset()  # the code of a layer is compiled 8 times at most, for all models
    return _passes("--use-torch-compile: compiled kernels", reason)


def _passes(what: str, reason: str) -> bool:
    if reason:
        logger.warning("%s %s, the model's own are used instead", what, reason)
    return not reason


def fault(
    config: PreTrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    give: Callable[[PolicyModel], None],
) -> str:
    """What is wrong with the kernels that `give` gives to policies of this config; "": nothing.

    A small random model's packed scores and their gradient are compared, with it and without, with
    those in float32. Afterwards its family is as it was.
    """
    first, second, third = (PolicyModel(small_model(config, attention=PACKED)) for _ in range(3))
    module = vars(sys.modules[type(first.model).__module__])
    before = dict(module)
    try:
        exact = computed(first, device, torch.float32)
        plain = computed(second, device, dtype)
        give(third)
        if not any(CHANGED & vars(part).keys() for part in third.modules()):
            return f"know no {config.model_type}"
        fused = computed(third, device, dtype)
    except (*FOREIGN, ImportError, AssertionError) as error:  # of the code of kernels
        return f"raise {error!r}"
    finally:
        module.update(before)
    least = HALF_TOLERANCE if dtype in HALF_TYPES else TOLERANCE
    for what, own, others, right in zip(("scores", "gradients"), fused, plain, exact, strict=True):
        off_by, usual = ((each - right).norm() / right.norm() for each in (own, others))
        if not off_by <= max(least, TIMES_EAGER * usual):
            return f"are off by {off_by:.2g} of the {what}"
    return ""


def computed(
    policy: PolicyModel, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(scores [N] of a packed row, the gradient of their sum by all parameters), in float32."""
    policy.to(device, dtype).requires_grad_()
    pairs = probe_pairs(VOCAB_SIZE)
    row = to_device(collate_pairs(pairs, share_prompts=policy.shares_prompts), device)
    scores = policy(row, temperature=1.0, chunk_size=3).logprobs
    scores.sum().backward()
    held = (each.grad for each in policy.parameters())
    return scores.detach().float(), torch.cat([g.float().flatten() for g in held if g is not None])
