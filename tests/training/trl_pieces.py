"""The smallest pieces of TRL that can be called without a trainer, a model or a device."""

import ast
import functools
import importlib
import inspect
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from padded import leaves, with_gradients


def import_trl():
    """TRL's trainer modules. They would import a vLLM that they do not support yet."""
    import_utils = importlib.import_module("trl.import_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        from trl.trainer import grpo_trainer, rloo_trainer
    return SimpleNamespace(grpo=grpo_trainer, rloo=rloo_trainer)


def make_trainer(logprobs, entropies, *, loss_type, **changes):
    """What `_compute_loss` reads of a trainer on one device that steps after every micro-batch."""
    options = {
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.3,
        "beta": 0.0,
        "delta": None,
        "use_bias_correction_kl": False,
        "entropy_coef": 0.0,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": 9,
        "accumulation": 1,
    } | changes
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda value: value,
        reduce=lambda value, reduction: value,
    )
    return SimpleNamespace(
        **options,
        loss_type=loss_type,
        args=SimpleNamespace(**options, steps_per_generation=options["accumulation"]),
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        current_gradient_accumulation_steps=options["accumulation"],
        use_vllm=options["vllm_importance_sampling_correction"],
        _entropy_bonus_enabled=options["entropy_coef"] != 0,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
    )


def theirs(trl, batch, *, old=None, rows=slice(None), correction=None, **options):
    """Loss, and its gradient by log-probability and by entropy, each [B, T]."""
    logprobs, entropies = leaves(batch)
    trainer = make_trainer(logprobs[rows], entropies[rows], **options)
    inputs = {
        "prompt_ids": torch.ones(len(batch.advantages), 1, dtype=torch.int64)[rows],
        "prompt_mask": torch.ones(len(batch.advantages), 1, dtype=torch.int64)[rows],
        "completion_ids": torch.ones_like(batch.is_output)[rows],
        "completion_mask": batch.is_output[rows],
        "tool_mask": batch.is_own[rows],
        "advantages": batch.advantages[rows],
        "ref_per_token_logps": batch.reference[rows],
        "num_items_in_batch": batch.num_tokens,
        "old_per_token_logps": None if old is None else old[rows],
        "importance_sampling_ratio": correction,
    }
    loss = trl.grpo.GRPOTrainer._compute_loss(trainer, None, inputs)
    return with_gradients(loss, logprobs, entropies)


def lifted(function, *, assigns, **names):
    """Run the outermost `if` of TRL's function that assigns a name; what it leaves behind.

    In float64: TRL's integer quotients, such as n / (n - 1), take torch's default type.
    """
    scope = {**inspect.getmodule(function).__dict__, **names}
    torch.set_default_dtype(torch.float64)
    try:
        exec(_block(function, assigns), scope)
    finally:
        torch.set_default_dtype(torch.float32)
    return scope


@functools.cache
def _block(function, assigns):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    [block, *_] = [node for node in blocks if assigns in map(_target, node.body)]
    return compile(ast.Module([block], []), "<TRL>", "exec")


def _target(node):
    return ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None
