"""A check at load time that packing is exact for this architecture.

Options of a config can be listed, architectures cannot: a model whose layers carry state across
sequences, or whose head does more than multiply, is found by asking it.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from async_grpo.errors import ModelError
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.policy import PolicyModel

LENGTHS = (4, 3, 2)  # a prompt, and outputs of two of its samples
TOLERANCE = 1e-3  # nats, in float32
VOCAB_SIZE = 64
Pair = tuple[NDArray[np.int32], NDArray[np.int32]]


@torch.no_grad()
def check_packing(config: PreTrainedConfig, path: str) -> None:
    """Raise ModelError unless a packed row scores as the model's own separate forwards do.

    Asked of a small model of that architecture with random weights, in float32 on the CPU.
    """
    policy = PolicyModel(small_model(config))
    pairs = _pairs(VOCAB_SIZE)
    row = collate_pairs(pairs, share_prompts=policy.shares_prompts)
    packed = policy(row, temperature=1.0, chunk_size=3).logprobs
    alone = torch.cat([_score_alone(policy, *pair) for pair in pairs])
    difference = (packed - alone).abs().max().item()
    if not difference <= TOLERANCE:
        raise ModelError(
            f"a packed row must score as separate sequences do, {path} "
            f"({type(policy.model).__name__}) is off by {difference:.2g} nats: this architecture "
            "cannot be trained here, use another model"
        )


@torch.no_grad()
def small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Of the config's architecture: a layer of each of its kinds, a small vocabulary."""
    small = copy.deepcopy(config)
    kept = _layers_of_each_kind(config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(small, name, [value[layer] for layer in kept])
    small.num_hidden_layers = len(kept)
    small.vocab_size = VOCAB_SIZE
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation=PACKED
        )
        for parameter in model.parameters():  # none is zero, so that each has its effect
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return model.eval()


def _layers_of_each_kind(config: PreTrainedConfig) -> list[int]:
    """The first layer of each kind that the config's lists by layer tell apart, at least two."""
    count = config.num_hidden_layers
    lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == count]
    kinds = list(zip(*lists, strict=True)) if lists else []
    first = {repr(kind): layer for layer, kind in reversed(list(enumerate(kinds)))}
    return sorted({*range(min(2, count)), *first.values()})


def _pairs(vocab_size: int) -> list[Pair]:
    """Fixed ids that differ from each other where the vocabulary allows.

    The third sequence sees a leak from those before it, the second one a prompt that is not its.
    """
    ids = (np.arange(1, sum(LENGTHS) + 1) * 7919 % vocab_size).astype(np.int32)
    prompt, first, second = np.split(ids, np.cumsum(LENGTHS[:-1]))
    return [(prompt, first), (prompt, second), (second, prompt)]


def _score_alone(
    policy: PolicyModel, prompt: NDArray[np.int32], output: NDArray[np.int32]
) -> Tensor:
    """What the model's own forward, head included, says of one output."""
    ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None]).squeeze(-1)
